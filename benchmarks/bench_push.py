"""Pushing one position: against ``K[i] = k; V[i] = v`` in NumPy."""

import numpy as np
import pytest
from common import rows

import pagedkv

N_POSITIONS = 2048


@pytest.mark.parametrize("width", [128, 1024])
def test_push_one_row(against, width):
    rng = np.random.default_rng(0)
    store = pagedkv.PagedKvStore(16, N_POSITIONS // 16, width // 128, 128, prefault=True)
    keys, values = np.zeros((2, N_POSITIONS, width), np.float32)
    k, v = rows(rng, 2, width)
    cache = pagedkv.PagedKvCache()

    def push_all():
        push = cache.push
        for _ in range(N_POSITIONS):
            push(store, k, v)

    def assign_all():
        for i in range(N_POSITIONS):
            keys[i] = k
            values[i] = v

    against(push_all, assign_all, "cost", setup=lambda: cache.release(store), rounds=100)


@pytest.mark.parametrize("batch", [8, 32])
def test_push_one_row_for_each_sequence(against, batch):
    """A decode step's write: one row of 1024 values for each sequence of a batch, per layer."""
    rng = np.random.default_rng(0)
    n_layers = 16
    store = pagedkv.PagedKvStore(16, 4 * batch, 8, 128, n_layers=n_layers, prefault=True)
    caches = [pagedkv.PagedKvCache() for _ in range(batch)]
    keys, values = np.zeros((2, n_layers, batch, 1024), np.float32)
    k, v = rows(rng, 2, batch, 1024)
    step = pagedkv.Step(store, caches)

    def write_all():
        for layer in range(n_layers):
            step.write(layer, k, v)

    def assign_all():
        for layer in range(n_layers):
            for i in range(batch):
                keys[layer, i] = k[i]
                values[layer, i] = v[i]

    with step:
        against(write_all, assign_all, "cost", rounds=200)
