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


def shuffled_store(total_blocks, *, n_kv_heads=N_KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK_SIZE, seed=0):
    """A store whose free blocks come in random order, as after hours of serving."""
    store = pagedkv.PagedKvStore(block_size, total_blocks, n_kv_heads, head_dim, prefault=True)
    store.release(np.random.default_rng(seed).permutation(store.acquire(total_blocks)))
    return store


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
