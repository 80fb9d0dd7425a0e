"""Stores of a dtype with rows in them, and what must be read of those."""

import numpy as np
from dtype_reference import SCALED, assert_same, assert_same_rows, encode

import pagedkv


def make(dtype, block_size=4, total_blocks=16, n_kv_heads=2, head_dim=3, **options):
    return pagedkv.PagedKvStore(block_size, total_blocks, n_kv_heads, head_dim, dtype=dtype, **options)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def filled(dtype, n, seed=0, **options):
    """A store, a sequence of n positions in it, and the rows that were written, ``[n_layers, n, heads, dim]``."""
    store = make(dtype, debug=True, **options)
    k = normal(seed, store.n_layers, n, store.n_kv_heads, store.head_dim)
    v = normal(seed + 1, store.n_layers, n, store.n_kv_heads, store.v_head_dim)
    cache = pagedkv.PagedKvCache()
    cache.append_contiguous(store, k, v, n)
    return store, cache, k, v


def assert_reads(store, cache, k, v):
    """The sequence is these float32 ``[n_layers, n, heads, dim]``, in every layer and by every way of reading."""
    for layer in range(store.n_layers):
        flat = cache.to_contiguous(store, layer=layer)
        for side, rows in (("k", k[layer]), ("v", v[layer])):
            want = encode(store.dtype, rows)
            assert_same(getattr(flat, side), want.decode().reshape(-1, store.k_width if side == "k" else store.v_width))
            row, scales = getattr(store, f"{side}_row"), None
            for p, block in enumerate(cache.block_table.repeat(store.block_size)[:cache.seq_len].tolist()):
                offset = p % store.block_size
                if store.dtype in SCALED:
                    scales = getattr(store, f"{side}_scales")(block, layer)[offset]
                assert_same_rows(row(block, offset, layer), scales, want[p])
