"""Stores of fewer bytes against the same in float32: decode, prefill, and rows in and out."""

import numpy as np
import pytest
from common import N_KV_HEADS, N_Q_HEADS, filled, in_turn, queries, rows

import pagedkv

pytestmark = pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])


@pytest.mark.parametrize(("batch", "context"), [(1, 512), (1, 4096), (8, 4096), (1, 32768)])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_decode(against, n_threads, dtype, batch, context, group):
    """Tokens a second, of those from a float32 store. Beyond 512 the caches hold neither."""
    n_sequences = 1 if context == 512 else max(batch, 6 * group * 4096 // context)
    q = queries(batch)
    calls = []
    for each in (dtype, "float32"):
        store, caches = filled([context] * n_sequences, dtype=each, n_kv_heads=N_Q_HEADS // group)
        calls.append(decode_of(store, caches, q, batch))
    against(*calls, "speed", rounds=12)


def decode_of(store, caches, q, batch):
    next_batch = in_turn([caches[i:i + batch] for i in range(0, len(caches) - batch + 1, batch)])
    return lambda: pagedkv.paged_attention(q, store, next_batch())


def test_prefill(against, n_threads, dtype):
    """512 new positions over 4096 cached ones: bound by arithmetic, which is the same."""
    q = queries(512)
    calls = []
    for each in (dtype, "float32"):
        store, caches = filled([4608], dtype=each)
        calls.append(lambda store=store, caches=caches: pagedkv.paged_attention(q, store, caches, query_lens=512))
    against(*calls, "speed", rounds=5)


def test_to_contiguous(against, n_threads, dtype):
    calls = []
    for each in (dtype, "float32"):
        store, caches = filled([4096] * 16, dtype=each)
        out = pagedkv.KvCache.with_capacity(N_KV_HEADS, store.head_dim, 4096)
        next_cache = in_turn(caches)
        calls.append(lambda store=store, take=next_cache, out=out: take().to_contiguous(store, out=out))
    against(*calls, "speed")


def test_append_contiguous(against, n_threads, dtype):
    k, v = rows(np.random.default_rng(0), 2, 4096, 1024)
    calls, emptied = [], []
    for each in (dtype, "float32"):
        store, caches = filled([4096] * 16, dtype=each)
        take, current = in_turn(caches), {}
        emptied.append(lambda store=store, take=take, current=current: empty_one(store, take, current))
        calls.append(lambda store=store, current=current: current["cache"].append_contiguous(store, k, v, 4096))

    def empty_both():
        for empty in emptied:
            empty()

    empty_both()
    against(*calls, "speed", setup=empty_both)


def empty_one(store, take, current):
    current["cache"] = take()
    current["cache"].release(store)
