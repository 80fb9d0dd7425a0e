"""The books of a forward pass: opening, committing and closing a step; reserving and releasing blocks."""

import numpy as np
import pytest
from common import rows

import pagedkv


@pytest.mark.parametrize("batch", [1, 32])
def test_open_and_close_a_decode_step(benchmark, batch):
    """Bookkeeping alone: one new position for each sequence, no layer's rows but the smallest."""
    rng = np.random.default_rng(0)
    store = pagedkv.PagedKvStore(16, 1 << 14, 1, 1)
    caches = [pagedkv.PagedKvCache() for _ in range(batch)]
    k, v = rows(rng, 2, 1000, 1)
    for cache in caches:
        cache.append_contiguous(store, k, v, 1000)
    row = rows(rng, batch, 1)

    def decode():
        with pagedkv.Step(store, caches) as step:
            step.write(0, row, row)

    benchmark.pedantic(decode, rounds=3000, warmup_rounds=100)


@pytest.mark.parametrize("n_blocks", [16, 4096, 1 << 18])
def test_reserve_and_release(benchmark, n_blocks):
    """Nanoseconds a block are in extra_info: the cost must grow with the blocks taken, not with the store."""
    store = pagedkv.PagedKvStore(1, 1 << 20, 1, 1)
    cache = pagedkv.PagedKvCache()

    def reserve_and_release():
        cache.reserve(store, n_blocks)
        cache.release(store)

    benchmark.pedantic(reserve_and_release, rounds=100, warmup_rounds=3)
    if not benchmark.disabled:
        benchmark.extra_info["ns_per_block"] = round(benchmark.stats.stats.min * 1e9 / n_blocks, 2)
