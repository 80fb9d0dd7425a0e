"""What the tests of attention share: batches in stores that are NaN wherever nothing was written, and the reference."""

from contextlib import contextmanager

import numpy as np
from dense_reference import dense_attention
from dtype_reference import round_trip
from hypothesis import strategies as st

import pagedkv
from pagedkv._kernels import simd as kernels

SETS = kernels.list_simd()


@contextmanager
def forced(simd):
    """Compute with that instruction set."""
    before = kernels.get_simd()
    kernels.set_simd(simd)
    try:
        yield
    finally:
        kernels.set_simd(before)


def rows(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def shuffled_store(rng, n_blocks, n_kv_heads, head_dim, *, block_size=4, **options):
    """A store with a shuffled free list and NaN in every unwritten row."""
    store = pagedkv.PagedKvStore(block_size, n_blocks, n_kv_heads, head_dim, debug=True, **options)
    store.release(rng.permutation(store.acquire(n_blocks)))
    return store


def paged(rng, lengths, n_kv_heads, head_dim, v_head_dim=None, block_size=4, n_layers=1, dtype="float32"):
    """A store, caches of these lengths in it, and the dense K and V that they read as."""
    n_blocks = sum(-(-n // block_size) for n in lengths) + 3
    v_head_dim = v_head_dim or head_dim
    store = shuffled_store(rng, n_blocks, n_kv_heads, head_dim, block_size=block_size, v_head_dim=v_head_dim,
                           n_layers=n_layers, dtype=dtype)
    caches, dense = [], []
    for n in lengths:
        k = rows(rng, n_layers, n, n_kv_heads, head_dim)
        v = rows(rng, n_layers, n, n_kv_heads, v_head_dim)
        cache = pagedkv.PagedKvCache()
        if n:
            cache.append_contiguous(store, k, v, n)
        caches.append(cache)
        dense.append((round_trip(dtype, k), round_trip(dtype, v)))
    return store, caches, dense


def expected(q, dense, query_lens, layer=0, **options):
    """The reference over a ragged batch."""
    outs, lses, row = [], [], 0
    for (k, v), n in zip(dense, query_lens, strict=True):
        out, lse = dense_attention(q[row:row + n], k[layer], v[layer], **options)
        outs.append(out)
        lses.append(lse)
        row += n
    return np.concatenate(outs), np.concatenate(lses)


def assert_close(got, want, tolerance=3e-6):
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance)


def check(rng, lengths, query_lens, n_kv_heads, group, head_dim, v_head_dim=None, block_size=4, dtype="float32",
          **options):
    store, caches, dense = paged(rng, lengths, n_kv_heads, head_dim, v_head_dim, block_size, dtype=dtype)
    q = rows(rng, sum(query_lens), n_kv_heads * group, head_dim)
    got = pagedkv.paged_attention(q, store, caches, query_lens=query_lens, return_lse=True, **options)
    assert_close(got, expected(q, dense, query_lens, **options))
    assert got[0].dtype == got[1].dtype == np.float32


@st.composite
def options(draw, n_q_heads):
    """Some of the options of attention, and `causal`."""
    chosen = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        chosen["window"] = draw(st.integers(1, 100))
    if draw(st.booleans()):
        chosen["softcap"] = draw(st.floats(0.5, 50))
    if draw(st.booleans()):
        chosen["sinks"] = np.linspace(-5, 5, n_q_heads, dtype=np.float32)
    if draw(st.booleans()):
        chosen["alibi_slopes"] = np.linspace(0, 1, n_q_heads, dtype=np.float32)
    return chosen
