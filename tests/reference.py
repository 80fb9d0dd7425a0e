"""The twin: what a store, its sequences and a step mean, in plain Python. Imports nothing of pagedkv.

Blocks have no ids here. A block is an object, so that who shares what is a question of identity, and
nothing depends on which free block a request is given. Nothing is fast, and nothing is clever.
"""

from collections import Counter
from math import ceil

import numpy as np
from dtype_reference import Rows, encode


class StoreShort(Exception):
    """A store has fewer free blocks than a request needs."""

    def __init__(self, needed, free, total, can_ever_fit):
        super().__init__(needed, free, total, can_ever_fit)
        self.needed = needed
        self.free = free
        self.total = total
        self.can_ever_fit = can_ever_fit


class PoolShort(Exception):
    """A pool has fewer free blocks than a contiguous cache needs."""

    def __init__(self, needed, free, total):
        super().__init__(needed, free, total)
        self.needed = needed
        self.free = free
        self.total = total


class Block:
    """K and V as they are stored, ``[n_layers, block_size, n_kv_heads, head_dim]``, and which rows were written."""

    def __init__(self, store):
        shape = (store.n_layers, store.block_size, store.n_kv_heads)
        self.k = Rows.zeros(store.dtype, *shape, store.k_width // store.n_kv_heads)
        self.v = Rows.zeros(store.dtype, *shape, store.v_width // store.n_kv_heads)
        self.written = np.zeros(store.block_size, bool)
        self.holders = 1

    def copy_first(self, n_rows, source):
        for mine, other in ((self.k, source.k), (self.v, source.v)):
            mine[:, :n_rows] = other[:, :n_rows]
        self.written[:n_rows] = source.written[:n_rows]

    def write(self, offset, k, v):
        """``k`` and ``v`` are Rows ``[n_layers, n_kv_heads, head_dim]``."""
        self.k[:, offset] = k
        self.v[:, offset] = v
        self.written[offset] = True

    def row(self, offset):
        """What is read: float32 ``[n_layers, width]`` of K and V."""
        assert self.written[offset], "a row that was never written is read"
        return tuple(rows[:, offset].decode().reshape(len(rows.values), -1) for rows in (self.k, self.v))


class Store:
    def __init__(self, block_size, total_blocks, k_width, v_width, n_layers=1, n_kv_heads=1, dtype="float32"):
        self.block_size = block_size
        self.total_blocks = total_blocks
        self.k_width = k_width
        self.v_width = v_width
        self.n_layers = n_layers
        self.n_kv_heads = n_kv_heads
        self.dtype = dtype
        self.held = set()

    def encode(self, rows, width):
        """float32 ``[n_layers, n, width]`` as they are stored."""
        shape = (*rows.shape[:2], self.n_kv_heads, width // self.n_kv_heads)
        return encode(self.dtype, rows.reshape(shape))

    @property
    def free_block_count(self):
        return self.total_blocks - len(self.held)

    def acquire(self, n=1):
        self.refuse_more_than_free(n, can_ever_fit=n <= self.total_blocks)
        blocks = [Block(self) for _ in range(n)]
        self.held.update(blocks)
        return blocks

    def refuse_more_than_free(self, needed, can_ever_fit):
        if needed > self.free_block_count:
            raise StoreShort(needed, self.free_block_count, self.total_blocks, can_ever_fit)

    def retain(self, blocks):
        if any(block not in self.held for block in blocks):
            raise ValueError("a block that nobody holds")
        for block in blocks:
            block.holders += 1

    def release(self, blocks):
        if any(block not in self.held or n > block.holders for block, n in Counter(blocks).items()):
            raise ValueError("a block that nobody holds")
        for block in blocks:
            block.holders -= 1
            if block.holders == 0:
                self.held.remove(block)

    def copy_block(self, source, target):
        if source not in self.held or target not in self.held:
            raise ValueError("a block that nobody holds")
        if source is target:
            return
        if target.holders > 1:
            raise ValueError("a shared block is never written")
        target.copy_first(self.block_size, source)


class Growth:
    """A sequence's table with room for new positions: ``taken`` are new in it, ``replaced`` were copied."""

    def __init__(self, cache, store, n_new):
        self.table = list(cache.table)
        self.taken = []
        self.replaced = []
        for index in cache.shared_indices(store, n_new):
            old = self.table[index]
            [self.table[index]] = store.acquire(1)
            n_rows = max(0, cache.seq_len - index * store.block_size)  # none where the block was only reserved
            self.table[index].copy_first(n_rows, old)
            self.taken.append(self.table[index])
            self.replaced.append(old)
        for _ in range(cache.n_missing(store, n_new)):
            self.table += store.acquire(1)
            self.taken.append(self.table[-1])


class Cache:
    """One sequence: a list of blocks (None where one was dropped) and a length."""

    def __init__(self):
        self.table = []
        self.seq_len = 0
        self.store = None
        self.block_size = None
        self.in_step = False

    @property
    def n_dropped(self):
        return self.table.count(None)

    @property
    def first_position(self):
        return self.n_dropped * self.block_size if self.table else 0

    @property
    def capacity(self):
        return len(self.table) * self.block_size if self.table else 0

    @property
    def held_blocks(self):
        return [block for block in self.table if block is not None]

    def rows(self):
        """The ``(k, v)`` of every position that can be read."""
        size = self.block_size
        return [self.table[p // size].row(p % size) for p in range(self.first_position, self.seq_len)]

    # --- growing ---

    def push(self, store, k_step, v_step):
        """``k_step`` and ``v_step`` are ``[n_layers, width]``."""
        self.append(store, k_step[:, None], v_step[:, None])

    def append(self, store, k, v):
        """``k`` and ``v`` are ``[n_layers, count, width]``."""
        self.use(store)
        n = k.shape[1]
        self.grow(store, n)
        k, v = store.encode(k, store.k_width), store.encode(v, store.v_width)
        for i in range(n):
            p = self.seq_len + i
            self.table[p // store.block_size].write(p % store.block_size, k[:, i], v[:, i])
        self.seq_len += n
        self.settle()

    def reserve(self, store, n_new):
        self.use(store)
        self.grow(store, n_new)
        self.settle()

    def blocks_needed_for(self, store, n_new):
        self.use(store)
        return self.n_missing(store, n_new) + len(self.shared_indices(store, n_new))

    def n_missing(self, store, n_new):
        return max(0, ceil((self.seq_len + n_new) / store.block_size) - len(self.table))

    def shared_indices(self, store, n_new):
        """Places in the table that the next ``n_new`` positions write, and whose blocks others hold too."""
        written = {p // store.block_size for p in range(self.seq_len, self.seq_len + n_new)}
        return [i for i in sorted(written) if i < len(self.table) and self.table[i].holders > 1]

    def grow(self, store, n_new):
        needed = self.blocks_needed_for(store, n_new)
        alone = len(set(self.held_blocks)) + self.n_missing(store, n_new)
        store.refuse_more_than_free(needed, can_ever_fit=alone <= store.total_blocks)
        self.install(store, Growth(self, store, n_new))

    def install(self, store, growth):
        self.table = growth.table
        store.release(growth.replaced)
        self.store = store
        self.block_size = store.block_size

    # --- sharing ---

    def adopt_blocks(self, blocks, seq_len, block_size, store=None):
        if seq_len % block_size or seq_len // block_size > len(blocks):
            raise ValueError("not a whole number of blocks, or too short a table")
        self.refuse_in_step()
        if self.table:
            raise ValueError("holds blocks already")
        if store is not None:
            check_adopted(store, blocks, block_size)
        self.table = list(blocks)
        self.seq_len = seq_len
        self.block_size = block_size
        self.store = store
        self.settle()

    def clone(self):
        other = Cache()
        other.clone_from(self)
        return other

    def clone_from(self, source):
        if source is self:
            return
        for cache in (source, self):
            if cache.table and cache.store is None:
                raise RuntimeError("the store is not known yet")
        source.refuse_in_step()
        self.refuse_in_step()
        table = source.table[: ceil(source.seq_len / source.block_size)] if source.table else []
        if source.store is not None:
            source.store.retain([block for block in table if block is not None])
        self.forget()
        self.table = table
        self.seq_len = source.seq_len
        self.store = source.store
        self.block_size = source.block_size
        self.settle()

    # --- shrinking ---

    def release(self, store):
        self.use(store)
        self.forget()

    def forget(self):
        """What garbage collection does: blocks of a store that was never named stay held."""
        if self.store is not None:
            self.store.release(self.held_blocks)
        self.table = []
        self.seq_len = 0
        self.store = None

    def can_truncate_to(self, new_len):
        return self.first_position <= new_len <= self.seq_len

    def truncate(self, store, new_len):
        self.use(store)
        if not self.can_truncate_to(new_len):
            raise ValueError("beyond the length, or before what was dropped")
        if self.table:
            keep = ceil(new_len / self.block_size)
            store.release(self.table[keep:])
            self.table = self.table[:keep]
        self.seq_len = new_len
        self.settle()

    def drop_before(self, store, position):
        self.use(store)
        if position > self.seq_len:
            raise ValueError("beyond the length")
        for i in range(self.n_dropped, position // store.block_size):
            store.release([self.table[i]])
            self.table[i] = None

    # --- whose it is ---

    def use(self, store):
        """Checks before any use; adopted blocks are tied to the first store they are used with."""
        self.refuse_in_step()
        if not self.table or self.store is store:
            return
        if self.store is not None:
            raise ValueError("another store")
        check_adopted(store, self.table, self.block_size)
        self.store = store

    def refuse_in_step(self):
        if self.in_step:
            raise RuntimeError("in use by a step")

    def settle(self):
        """A cache without blocks belongs to no store."""
        if not self.table:
            self.store = None


def check_adopted(store, blocks, block_size):
    if block_size != store.block_size:
        raise ValueError("another block size")
    if any(block not in store.held or n > block.holders for block, n in Counter(blocks).items()):
        raise ValueError("a block that nobody holds")


class Step:
    """Rows wait in ``written`` until the commit, and blocks in ``growths``."""

    def __init__(self, store, caches, query_lens):
        if len(set(map(id, caches))) != len(caches):
            raise ValueError("the same cache twice")
        self.store = store
        self.caches = caches
        self.query_lens = query_lens
        self.n_rows = sum(query_lens)
        self.written = {}
        self.growths = None
        self.is_open = False

    def enter(self):
        for cache in self.caches:
            cache.use(self.store)
        needed = sum(cache.blocks_needed_for(self.store, n) for cache, n in self.batch())
        self.store.refuse_more_than_free(needed, self.blocks_when_alone() <= self.store.total_blocks)
        self.growths = [Growth(cache, self.store, n) for cache, n in self.batch()]
        self.lock(True)
        for (cache, n), growth in zip(self.batch(), self.growths, strict=True):
            for p in range(cache.seq_len, cache.seq_len + n):  # cut rows that a step may overwrite are lost
                growth.table[p // self.store.block_size].written[p % self.store.block_size] = False

    def batch(self):
        return zip(self.caches, self.query_lens, strict=True)

    def blocks_when_alone(self):
        """Blocks that the batch would hold in the step if everybody else had let go of theirs."""
        holders = Counter(block for cache in self.caches for block in cache.held_blocks)
        copies = missing = 0
        for cache, n in self.batch():
            copies += sum(holders[cache.table[i]] > 1 for i in cache.shared_indices(self.store, n))
            missing += cache.n_missing(self.store, n)
        return len(holders) + copies + missing

    @property
    def positions(self):
        return [p for cache, n in self.batch() for p in range(cache.seq_len, cache.seq_len + n)]

    @property
    def new_blocks(self):
        return sum(len(growth.taken) for growth in self.growths)

    def write(self, layer, k, v):
        self.written[layer] = (k.copy(), v.copy())

    def commit(self):
        if self.n_rows and len(self.written) < self.store.n_layers:
            self.rollback()
            raise RuntimeError("layers were not written")
        self.lock(False)
        row = 0
        for (cache, n), growth in zip(self.batch(), self.growths, strict=True):
            k, v = (self.stacked(side)[:, row : row + n] for side in (0, 1))
            cache.install(self.store, growth)
            cache.append(self.store, k, v)
            row += n

    def stacked(self, side):
        """K (0) or V (1) of all layers: ``[n_layers, n_rows, width]``."""
        if not self.n_rows:
            return np.empty((self.store.n_layers, 0, 0), np.float32)
        return np.stack([self.written[layer][side] for layer in range(self.store.n_layers)])

    def rollback(self):
        self.lock(False)
        for growth in self.growths:
            self.store.release(growth.taken)

    def lock(self, locked):
        self.is_open = locked
        for cache in self.caches:
            cache.in_step = locked


class Pool:
    def __init__(self, block_size, total_blocks):
        self.block_size = block_size
        self.total_blocks = total_blocks
        self.held = 0

    @property
    def free_blocks(self):
        return self.total_blocks - self.held

    def take(self, n):
        if n > self.free_blocks:
            raise PoolShort(n, self.free_blocks, self.total_blocks)
        self.held += n

    def resize(self, total_blocks):
        if total_blocks < self.held:
            raise ValueError("fewer than are held")
        self.total_blocks = total_blocks


class Contiguous:
    """A private contiguous cache: a list of ``(k_row, v_row)``."""

    def __init__(self, planned=None, pool=None):
        self.rows = []
        self.planned = planned
        self.outgrown = False
        self.pool = pool
        self.pool_blocks = 0
        if pool is not None:
            n_blocks = max(1, ceil(planned / pool.block_size))
            pool.take(n_blocks)
            self.pool_blocks = n_blocks

    @property
    def is_within_planned_capacity(self):
        return self.planned is not None and not self.outgrown

    def extend(self, rows):
        self.make_room(len(self.rows) + len(rows))
        self.rows += rows

    def replace(self, rows):
        self.make_room(len(rows))
        self.rows = list(rows)

    def make_room(self, n):
        if self.pool is not None:
            n_blocks = max(0, ceil(n / self.pool.block_size) - self.pool_blocks)
            self.pool.take(n_blocks)
            self.pool_blocks += n_blocks
        if self.planned is not None and n > self.planned:
            self.outgrown = True

    def truncate(self, n):
        if n > len(self.rows):
            raise ValueError("beyond the length")
        del self.rows[n:]

    def release_to_pool(self):
        self.rows = []
        self.planned = None
        if self.pool is not None:
            self.pool.held -= self.pool_blocks
            self.pool_blocks = 0
