"""What the benchmarks share: the usual layer shape, stores with shuffled tables, and the ceilings.

A ceiling is taken in the same process, on memory of the same kind (NumPy's large arrays, on huge
pages where the system grants them), alternating with what is measured.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

import pagedkv

# One layer of a model with grouped-query attention: 32 query heads on 8 K/V heads of 128 values.
N_Q_HEADS, N_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
WIDTH = N_KV_HEADS * HEAD_DIM
# Far beyond any last-level cache.
STREAM_BYTES = 512 << 20


def rows(rng, *shape):
    """Normal float32 values."""
    return rng.standard_normal(shape, dtype=np.float32)


def shuffled_store(total_blocks, *, n_kv_heads=N_KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK_SIZE, **options):
    """A store whose free blocks come in random order, as after hours of serving."""
    store = pagedkv.PagedKvStore(block_size, total_blocks, n_kv_heads, head_dim, prefault=True, **options)
    store.release(np.random.default_rng(0).permutation(store.acquire(total_blocks)))
    return store


def filled(lengths, **options):
    """A shuffled store, and sequences of these lengths in it."""
    store = shuffled_store(sum(-(-n // options.get("block_size", BLOCK_SIZE)) for n in lengths), **options)
    rng = np.random.default_rng(0)
    k, v = (rows(rng, max(lengths), width) for width in (store.k_width, store.v_width))
    caches = [pagedkv.PagedKvCache() for _ in lengths]
    for cache, n in zip(caches, lengths, strict=True):
        cache.append_contiguous(store, k[:n], v[:n], n)
    return store, caches


def position_bytes(store):
    """Bytes of K and V of one position in one layer, scales included."""
    return store.nbytes / (store.n_layers * store.total_blocks * store.block_size)


def queries(n, n_q_heads=N_Q_HEADS, head_dim=HEAD_DIM):
    return rows(np.random.default_rng(1), n, n_q_heads, head_dim)


def visible(n_new, n_total):
    """Pairs of a query and a position that it sees."""
    return n_new * (n_total - n_new) + n_new * (n_new + 1) // 2


def in_turn(items):
    """A function that hands out the items one after the other, again and again."""
    state = {"next": 0}

    def take():
        item = items[state["next"] % len(items)]
        state["next"] += 1
        return item

    return take


class Memcpy:
    """Copies n_bytes from one part of a large buffer to another, by memcpy on one thread; next time elsewhere."""

    def __init__(self, n_bytes):
        n = STREAM_BYTES // 4
        self.source, self.target = np.ones(n, np.float32), np.zeros(n, np.float32)
        self.n, self.start = n_bytes // 4, 0

    def __call__(self):
        start = self.start
        np.copyto(self.target[start:start + self.n], self.source[start:start + self.n])
        self.start = (start + self.n) % (len(self.source) - self.n)


class Read:
    """Reads 512 MiB of float32 once, on n_threads threads, each its own part."""

    n_bytes = STREAM_BYTES

    def __init__(self, n_threads=1):
        self.parts = np.array_split(np.ones(STREAM_BYTES // 4, np.float32), n_threads)
        self.pool = ThreadPoolExecutor(n_threads)

    def __call__(self):
        # NumPy's maximum is a plain vector loop over one stream, and releases the GIL.
        list(self.pool.map(np.max, self.parts))
