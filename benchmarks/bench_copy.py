"""Whole sequences in and out of the store: against memcpy on one thread, of the same bytes."""

import numpy as np
from common import HEAD_DIM, N_KV_HEADS, WIDTH, Memcpy, in_turn, rows, shuffled_store

import pagedkv

N_POSITIONS = 4096
N_SEQUENCES = 32  # 1 GiB of K and V: each round meets one that no cache holds
BYTES = 2 * N_POSITIONS * WIDTH * 4


def filled_caches(store):
    rng = np.random.default_rng(0)
    k, v = rows(rng, 2, N_POSITIONS, WIDTH)
    caches = [pagedkv.PagedKvCache() for _ in range(N_SEQUENCES)]
    for cache in caches:
        cache.append_contiguous(store, k, v, N_POSITIONS)
    return caches


def test_to_contiguous(against, n_threads):
    store = shuffled_store(N_SEQUENCES * N_POSITIONS // 16)
    next_cache = in_turn(filled_caches(store))
    outs = [pagedkv.KvCache.with_capacity(N_KV_HEADS, HEAD_DIM, N_POSITIONS) for _ in range(8)]
    for out in outs:
        next_cache().to_contiguous(store, out=out)  # touch its pages
    next_out = in_turn(outs)
    against(lambda: next_cache().to_contiguous(store, out=next_out()), Memcpy(BYTES), "speed")


def test_append_contiguous(against, n_threads):
    store = shuffled_store(N_SEQUENCES * N_POSITIONS // 16)
    next_cache = in_turn(filled_caches(store))
    next_source = in_turn(np.ones((8, 2, N_POSITIONS, WIDTH), np.float32))
    current = {}

    def append():
        current["cache"].append_contiguous(store, *current["source"], N_POSITIONS)

    def empty_one():
        current.update(cache=next_cache(), source=next_source())
        current["cache"].release(store)

    empty_one()
    against(append, Memcpy(BYTES), "speed", setup=empty_one)
