"""A million positions, and blocks of 1 to 1024, against the dense reference."""

import numpy as np
import pytest
from attention_support import rows
from dense_reference import dense_attention
from dtype_reference import round_trip

import pagedkv

N = 10**6
N_Q_HEADS, N_KV_HEADS, HEAD_DIM = 4, 2, 8


@pytest.mark.parametrize(("dtype", "block_size"), [("float32", 16), ("int8", 7), ("float16", 1024)])
def test_a_million_positions(dtype, block_size):
    """The sum over so many is of float32 partial sums, merged by log-sum-exp: it stays near float64's."""
    rng = np.random.default_rng(6)
    k, v = rows(rng, 2, N, N_KV_HEADS, HEAD_DIM)
    k[123_456, 0] = 5  # one position that stands out
    q = rows(rng, 2, N_Q_HEADS, HEAD_DIM)
    store = pagedkv.PagedKvStore(block_size, -(-N // block_size), N_KV_HEADS, HEAD_DIM, dtype=dtype)
    store.release(rng.permutation(store.acquire(store.total_blocks)))
    cache = pagedkv.PagedKvCache()
    cache.append_contiguous(store, k, v, N)
    k, v = (round_trip(dtype, x) for x in (k, v))
    for window in None, 300_000, 1:
        out, lse = pagedkv.paged_attention(q, store, cache, query_lens=2, window=window, return_lse=True)
        want, want_lse = dense_attention(q, k, v, window=window)
        np.testing.assert_allclose(out, want, rtol=0, atol=3e-6)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-6)
    one, two = (pagedkv.paged_attention(q, store, cache, query_lens=2, n_threads=n) for n in (1, 2))
    np.testing.assert_array_equal(one, two)
    flat = cache.to_contiguous(store)
    np.testing.assert_array_equal(flat.k, k.reshape(N, -1))
    np.testing.assert_array_equal(flat.v, v.reshape(N, -1))


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 100, 1000, 1024])
@pytest.mark.parametrize("length", [1, 999, 1024, 1025, 2500])
def test_block_sizes(block_size, length):
    rng = np.random.default_rng(block_size * length)
    k, v = rows(rng, 2, length, N_KV_HEADS, HEAD_DIM)
    q = rows(rng, 1, N_Q_HEADS, HEAD_DIM)
    store = pagedkv.PagedKvStore(block_size, -(-length // block_size) + 1, N_KV_HEADS, HEAD_DIM, debug=True)
    cache = pagedkv.PagedKvCache()
    cache.append_contiguous(store, k, v, length)
    np.testing.assert_allclose(
        pagedkv.paged_attention(q, store, cache), dense_attention(q, k, v)[0], rtol=0, atol=1e-6)
