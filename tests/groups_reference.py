"""The twin of a model's stores and sequences: who holds which block of which group, in plain Python.

Imports nothing of pagedkv. A block is an object, so that who shares what is a question of identity; what a position
holds is a number.
"""

from collections import Counter
from math import ceil


class Short(Exception):
    """There are too few blocks, or bytes."""


class Block:
    def __init__(self):
        self.holders = 1


class Groups:
    """``bytes_of_a_block`` and ``windows`` of each group, and the bytes that all of them have."""

    def __init__(self, block_size, bytes_of_a_block, windows, limit, totals):
        self.block_size = block_size
        self.block_bytes = bytes_of_a_block
        self.windows = windows
        self.limit = limit
        self.totals = totals  # block ids of each group
        self.held = [set() for _ in windows]

    @property
    def n(self):
        return len(self.windows)

    @property
    def held_bytes(self):
        return sum(len(blocks) * size for blocks, size in zip(self.held, self.block_bytes, strict=True))

    def refuse_more_than_free(self, needed):
        if any(n > total - len(held) for n, total, held in zip(needed, self.totals, self.held, strict=True)):
            raise Short
        if sum(n * size for n, size in zip(needed, self.block_bytes, strict=True)) > self.limit - self.held_bytes:
            raise Short

    def take(self, g):
        block = Block()
        self.held[g].add(block)
        return block

    def drop(self, g, block):
        block.holders -= 1
        if block.holders == 0:
            self.held[g].remove(block)


class Sequence:
    def __init__(self, groups):
        self.groups = groups
        self.tables = [[] for _ in range(groups.n)]  # None where a block was dropped
        self.values = []

    @property
    def seq_len(self):
        return len(self.values)

    def first_position(self, g):
        return sum(block is None for block in self.tables[g]) * self.groups.block_size

    def shared(self, g, n_new):
        """Places in the table of blocks that others hold too and that new positions are written into."""
        size, table = self.groups.block_size, self.tables[g]
        places = range(self.seq_len // size, min(len(table), ceil((self.seq_len + n_new) / size)))
        return [place for place in places if table[place].holders > 1] if n_new else []

    def needed(self, g, n_new):
        n_missing = max(0, ceil((self.seq_len + n_new) / self.groups.block_size) - len(self.tables[g])) if n_new else 0
        return n_missing + len(self.shared(g, n_new))

    def cut(self, n):
        for g, table in enumerate(self.tables):
            keep = max(ceil(n / self.groups.block_size), self.first_position(g) // self.groups.block_size)
            for block in table[keep:]:
                self.groups.drop(g, block)
            del table[keep:]
        del self.values[n:]

    def truncate(self, n):
        if n < self.seq_len:
            if any(n < self.first_position(g) for g in range(self.groups.n)):
                raise ValueError("a window has left it behind")
            self.cut(n)

    def drop_unneeded(self):
        for g, window in enumerate(self.groups.windows):
            first = 0 if window is None else max(0, self.seq_len + 1 - window)
            table = self.tables[g]
            for place in range(min(first // self.groups.block_size, len(table))):
                if table[place] is not None:
                    self.groups.drop(g, table[place])
                    table[place] = None

    def release(self):
        for g, table in enumerate(self.tables):
            for block in table:
                if block is not None:
                    self.groups.drop(g, block)
            table.clear()
        self.values = []

    def fork(self):
        other = Sequence(self.groups)
        other.values = list(self.values)
        other.tables = [table[: ceil(self.seq_len / self.groups.block_size)] for table in self.tables]
        for table in other.tables:
            for block in table:
                if block is not None:
                    block.holders += 1
        return other


def grow(groups, sequences, lens):
    """The blocks for so many new positions of each, in all groups, or `Short` and no change."""
    needed = [sum(each.needed(g, n) for each, n in zip(sequences, lens, strict=True)) for g in range(groups.n)]
    groups.refuse_more_than_free(needed)
    for g in range(groups.n):
        shared = [each.shared(g, n) for each, n in zip(sequences, lens, strict=True)]
        left = []
        for each, n, places in zip(sequences, lens, shared, strict=True):
            table = each.tables[g]
            for place in places:
                left.append(table[place])
                table[place] = groups.take(g)
            n_blocks = ceil((each.seq_len + n) / groups.block_size) if n else 0
            table += [groups.take(g) for _ in range(n_blocks - len(table))]
        for block in left:
            groups.drop(g, block)


def reorder(sequences, parents):
    """``sequences[i]`` goes on from what ``sequences[parents[i]]`` was."""
    forks = {i: sequences[parent].fork() for i, parent in enumerate(parents) if parent != i}
    for i, fork in forks.items():
        sequences[i].release()
        sequences[i].values, sequences[i].tables = fork.values, fork.tables


def refcounts(groups, sequences):
    """Of every block that sequences hold, how many do; group by group."""
    tables = [[each.tables[g] for each in sequences] for g in range(groups.n)]
    return [Counter(block for table in each for block in table if block is not None) for each in tables]
