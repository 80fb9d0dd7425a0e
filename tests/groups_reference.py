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


# --- who may start ---


class Knowledge:
    """What a prefix cache of the groups knows: of each the blocks, by all tokens up to their end."""

    def __init__(self, groups):
        self.groups = groups
        self.blocks = [{} for _ in range(groups.n)]

    def insert(self, tokens, sequence):
        size = self.groups.block_size
        for known, table in zip(self.blocks, sequence.tables, strict=True):
            for place in range(min(len(tokens), sequence.seq_len) // size):
                key = tuple(tokens[: (place + 1) * size])
                if table[place] is not None and key not in known:
                    known[key] = table[place]
                    table[place].holders += 1

    def match(self, tokens):
        """The longest beginning but for the last token of which all groups have what its next query sees."""
        for n in range(len(tokens) - 1, -1, -1):
            if all(self.serves(g, tokens[:n]) for g in range(self.groups.n)):
                return n
        return 0

    def serves(self, g, tokens):
        size, n, known = self.groups.block_size, len(tokens), self.blocks[g]
        places = range(self.first(g, n), n // size)
        whole = all(tuple(tokens[: (place + 1) * size]) in known for place in places)
        part = n % size == 0 or any(key[:n] == tuple(tokens) for key in known if len(key) == (n // size + 1) * size)
        return whole and part

    def first(self, g, n):
        window = self.groups.windows[g]
        return 0 if window is None else max(0, n + 1 - window) // self.groups.block_size

    def shared(self, g, tokens):
        size, n = self.groups.block_size, len(tokens)
        return {self.blocks[g][tuple(tokens[: (place + 1) * size])] for place in range(self.first(g, n), n // size)}

    def idle(self, g):
        return {block for block in self.blocks[g].values() if block.holders == 1}


def most_blocks(groups, g, n_gone, n_positions, chunk):
    """Blocks held at most by who begins with block `n_gone`, and drops what is behind after each of its chunks."""
    size, window = groups.block_size, groups.windows[g]
    n = n_positions - n_gone * size
    if chunk is not None and window is not None:
        n = min(n, window - 1 + chunk + size - 1)  # seen, new, and what lies before in the first block
    return max(0, ceil(n / size))


def plan(groups, known, requests, keep_free):
    """The verdicts, each with the blocks to take and the positions known, by doing it with sets of blocks.

    A request is its tokens, or a Sequence; how many positions it starts with, how many it will have, and its chunk.
    """
    idle = [known.idle(g) for g in range(groups.n)]
    held = [blocks - unheld for blocks, unheld in zip(groups.held, idle, strict=True)]

    def fit(sets, kept=0):
        counts = [len(blocks) + kept for blocks in sets]
        n_bytes = sum(n * size for n, size in zip(counts, groups.block_bytes, strict=True))
        return n_bytes <= groups.limit and all(n <= total for n, total in zip(counts, groups.totals, strict=True))

    answers, waits = [], False
    for what, n_start, n_most, chunk in requests:
        if isinstance(what, Sequence):
            n, shared = what.seq_len, [set() for _ in range(groups.n)]
            gone = [what.first_position(g) // groups.block_size for g in range(groups.n)]
            if chunk is not None:
                gone = [max(n_gone, known.first(g, n)) for g, n_gone in enumerate(gone)]
        else:
            n = known.match(what)
            gone = [known.first(g, n) for g in range(groups.n)]
            shared = [known.shared(g, what[:n]) for g in range(groups.n)]
        at_start = [n_gone + most_blocks(groups, g, n_gone, max(n, n_start), chunk) for g, n_gone in enumerate(gone)]
        if isinstance(what, Sequence):
            # In positions: the table may be longer, and shared blocks are copied.
            new = max(0, n_start - n)
            held_now = [n - known.first(g, n) * groups.block_size for g in range(groups.n)]
            if chunk is not None:
                limits = [None if w is None else w - 1 + chunk + groups.block_size - 1 for w in groups.windows]
                news = [new if most is None else max(0, min(new, most - has))
                        for most, has in zip(limits, held_now, strict=True)]
            else:
                news = [new] * groups.n
            fresh = [what.needed(g, each) for g, each in enumerate(news)]
        else:
            fresh = [count - n // groups.block_size for count in at_start]
        most = [most_blocks(groups, g, n_gone, max(n, n_start, n_most), chunk) for g, n_gone in enumerate(gone)]
        after = [old | mine | {Block() for _ in range(count)}
                 for old, mine, count in zip(held, shared, fresh, strict=True)]
        if not fit([range(count) for count in most]):
            verdict = "never"
        elif waits or not fit(after, keep_free):
            verdict, waits = "wait", True
        else:
            verdict = "now" if fit([some | other for some, other in zip(after, idle, strict=True)]) else "evict"
            held = after
        answers.append((verdict, sum(fresh), n))
    return answers
