"""The books of a forward pass, against the plainest of Python: opening and committing a decode step, reserving and
releasing blocks."""

import numpy as np
import pytest
from common import rows

import pagedkv


@pytest.mark.parametrize("batch", [1, 32])
def test_open_and_commit_a_decode_step(against, batch):
    """Bookkeeping alone, rows of one value: against assigning the same rows to NumPy arrays and counting up."""
    rng = np.random.default_rng(0)
    store = pagedkv.PagedKvStore(16, 1 << 16, 1, 1)
    caches = [pagedkv.PagedKvCache() for _ in range(batch)]
    row = rows(rng, batch, 1)
    keys, values = np.zeros((2, batch, 1 << 14, 1), np.float32)
    lengths = [0] * batch

    def decode():
        with pagedkv.Step(store, caches) as step:
            step.write(0, row, row)

    def assign():
        for i in range(batch):
            keys[i, lengths[i]] = row[i]
            values[i, lengths[i]] = row[i]
            lengths[i] += 1

    against(decode, assign, "cost", rounds=3000)


@pytest.mark.parametrize("n_blocks", [16, 4096, 1 << 18])
def test_reserve_and_release(against, n_blocks):
    """Against a list of free ids: the cost of a block must not grow with the store, nor with how many are taken."""
    store = pagedkv.PagedKvStore(1, 1 << 20, 1, 1)
    cache = pagedkv.PagedKvCache()
    free = list(range(1 << 20))

    def reserve_and_release():
        cache.reserve(store, n_blocks)
        cache.release(store)

    def slice_and_extend():
        taken = free[-n_blocks:]
        del free[-n_blocks:]
        free.extend(taken)

    against(reserve_and_release, slice_and_extend, "cost", rounds=100)
