"""Sequences over shared prefixes, against the same sequences with private copies of everything."""

import numpy as np
import pytest
from common import BLOCK_SIZE, filled, queries, rows, shuffled_store

import pagedkv

N_SEQUENCES, PREFIX, OWN = 32, 4096, 64


def grow(store, cache, n):
    rng = np.random.default_rng(n)
    cache.append_contiguous(store, rows(rng, n, store.k_width), rows(rng, n, store.v_width), n)
    return cache


def one_prefix(**options):
    """All over one prefix."""
    store = shuffled_store((PREFIX + (N_SEQUENCES + 1) * OWN) // BLOCK_SIZE, **options)
    root = grow(store, pagedkv.PagedKvCache(), PREFIX)
    return store, [grow(store, root.clone(), OWN) for _ in range(N_SEQUENCES)]


def tree(**options):
    """Four conversations over one system prompt, of half the length each; eight sequences over each of them."""
    store = shuffled_store((PREFIX // 2 * 5 + (N_SEQUENCES + 1) * OWN) // BLOCK_SIZE, **options)
    root = grow(store, pagedkv.PagedKvCache(), PREFIX // 2)
    branches = [grow(store, root.clone(), PREFIX // 2) for _ in range(4)]
    return store, [grow(store, branch.clone(), OWN) for branch in branches for _ in range(N_SEQUENCES // 4)]


@pytest.mark.parametrize(("shape", "dtype"), [
    (one_prefix, "float32"), (one_prefix, "bfloat16"), (one_prefix, "int8"), (tree, "float32"),
])
@pytest.mark.parametrize("n_kv_heads", [8, 32], ids=["GQA-4", "MHA"])
def test_decode(against, n_threads, shape, dtype, n_kv_heads):
    store, caches = shape(n_kv_heads=n_kv_heads, dtype=dtype)
    lone_store, lone = filled([PREFIX + OWN] * N_SEQUENCES, n_kv_heads=n_kv_heads, dtype=dtype)
    q = queries(N_SEQUENCES)
    against(lambda: pagedkv.paged_attention(q, store, caches), lambda: pagedkv.paged_attention(q, lone_store, lone),
            "speed", rounds=6)


@pytest.mark.parametrize("prefix", [64, 256, 1024])
def test_short_prefixes(against, n_threads, prefix):
    """What is hardly worth sharing must not cost more than reading it again and again."""
    store = shuffled_store((prefix + 9 * OWN) // BLOCK_SIZE)
    root = grow(store, pagedkv.PagedKvCache(), prefix)
    caches = [grow(store, root.clone(), OWN) for _ in range(8)]
    lone_store, lone = filled([prefix + OWN] * 8)
    q = queries(8)
    against(lambda: pagedkv.paged_attention(q, store, caches), lambda: pagedkv.paged_attention(q, lone_store, lone),
            "speed", rounds=50)


def test_looking_for_what_is_not_there(against):
    """32 short sequences that share nothing, in one call against one call each: the search must be lost in the rest."""
    store, caches = filled([96] * 32)
    q = queries(32)

    def one_by_one():
        for i, cache in enumerate(caches):
            pagedkv.paged_attention(q[i:i + 1], store, cache, n_threads=1)

    against(lambda: pagedkv.paged_attention(q, store, caches, n_threads=1), one_by_one, "speed", rounds=100)
