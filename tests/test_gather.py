"""append_contiguous and to_contiguous: the copies between contiguous rows and blocks."""

import numpy as np
import pytest
from helpers import append, assert_same_bits, contiguous_state, refused, rows, unchanged

import pagedkv

SHAPES = [  # block size, heads, head_dim, v_head_dim
    (16, 2, 8, 8),
    (1, 1, 1, 1),
    (3, 1, 5, 2),
    (4, 3, 1, 7),
    (32, 8, 128, 64),
    (5, 1, 512, 576),
]


def shuffled(store, n_positions):
    """Take blocks so that the next sequence's table is in no order, with a few runs of neighbours."""
    ids = store.acquire(store.total_blocks)
    order = np.random.default_rng(7).permutation(len(ids))
    order[: len(order) // 2].sort()
    for block in order[: -(-n_positions // store.block_size)]:
        store.release([int(block)])
    return ids


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [0, 1, 3, 16, 17, 100])
@pytest.mark.parametrize("n_layers", [1, 2])
def test_what_was_appended_is_gathered(shape, n, n_layers):
    block_size, n_heads, head_dim, v_head_dim = shape
    store = pagedkv.PagedKvStore(block_size, 200, n_heads, head_dim, v_head_dim=v_head_dim, n_layers=n_layers)
    shuffled(store, n)
    cache = pagedkv.PagedKvCache()
    k, v = append(store, cache, n)
    for layer in range(n_layers):
        contiguous = cache.to_contiguous(store, layer=layer)
        assert isinstance(contiguous, pagedkv.KvCache)
        assert (contiguous.n_kv_heads, contiguous.head_dim, contiguous.v_head_dim) == (n_heads, head_dim, v_head_dim)
        assert_same_bits(contiguous.k, k[layer])
        assert_same_bits(contiguous.v, v[layer])


@pytest.mark.parametrize("start", [0, 1, 15, 16, 30])
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 33])
def test_an_append_starts_anywhere_in_a_block(start, n):
    store = pagedkv.PagedKvStore(16, 8, 1, 3, debug=True)
    shuffled(store, start + n)
    cache = pagedkv.PagedKvCache()
    first = append(store, cache, start)
    second = append(store, cache, n)
    got = cache.to_contiguous(store)
    assert_same_bits(got.k, np.concatenate([first[0], second[0]], 1)[0])
    assert_same_bits(got.v, np.concatenate([first[1], second[1]], 1)[0])


@pytest.mark.parametrize("n_threads", [1, 2, 5])
@pytest.mark.parametrize("width", [1, 7, 1024])
@pytest.mark.parametrize("n_bytes", [(2 << 20) - 4, 2 << 20, (2 << 20) + 4, 9_000_000])
def test_large_copies_in_any_number_of_threads(n_threads, width, n_bytes):
    """Amounts about which a copy may be split or streamed, at lengths that end inside a block and a cache line."""
    n = n_bytes // (4 * width) + 1
    store = pagedkv.PagedKvStore(13, n // 13 + 20, 1, width, v_head_dim=3)
    shuffled(store, n + 5)
    cache = pagedkv.PagedKvCache()
    k = np.arange(n * width, dtype=np.uint32).view(np.float32).reshape(n, width)
    v = np.arange(n * 3, dtype=np.uint32).view(np.float32).reshape(n, 3)
    before = pagedkv.get_num_threads()
    try:
        pagedkv.set_num_threads(n_threads)
        head = append(store, cache, 5)
        cache.append_contiguous(store, k, v, n)
        got = cache.to_contiguous(store)
    finally:
        pagedkv.set_num_threads(before)
    assert_same_bits(got.k, np.concatenate([head[0][0], k]))
    assert_same_bits(got.v, np.concatenate([head[1][0], v]))


@pytest.mark.parametrize("n_out", [0, 3, 6, 50])
def test_out_is_overwritten_and_returned(store, cache, n_out):
    k, v = append(store, cache, 6)
    out = pagedkv.KvCache(2, 3, v_head_dim=2)
    out.extend(rows(n_out, 6), rows(n_out, 4))
    allocated = out.allocated_bytes
    assert cache.to_contiguous(store, out=out) is out
    assert_same_bits(out.k, k[0])
    assert_same_bits(out.v, v[0])
    assert out.allocated_bytes == (allocated if n_out >= 6 else 6 * 10 * 4)
    cache.truncate(store, 2)
    cache.to_contiguous(store, out=out)
    assert_same_bits(out.k, k[0, :2])


def test_a_copy_is_private(store, cache):
    k, v = append(store, cache, 6)
    copied = cache.to_contiguous(store)
    copied.push(rows(6), rows(4))
    cache.truncate(store, 2)
    append(store, cache, 4)
    assert_same_bits(copied.k[:6], k[0])
    assert_same_bits(copied.v[:6], v[0])


def test_an_empty_sequence_makes_an_empty_cache(store, cache):
    with unchanged(store, cache):
        assert cache.to_contiguous(store).k.shape == (0, 6)
    cache.reserve(store, 3)
    with unchanged(store, cache):
        assert cache.to_contiguous(store).v.shape == (0, 4)


@pytest.mark.parametrize("sizes", [(2, 3, 3), (3, 2, 2), (1, 6, 4), (2, 4, 2)])
def test_an_out_of_other_heads_is_refused(store, cache, sizes):
    append(store, cache, 6)
    n_heads, head_dim, v_head_dim = sizes
    out = pagedkv.KvCache(n_heads, head_dim, v_head_dim=v_head_dim)
    before = contiguous_state(out)
    with refused(ValueError, "out", store, cache):
        cache.to_contiguous(store, out=out)
    assert contiguous_state(out) == before


@pytest.mark.parametrize("out", [5, "out", np.zeros((6, 6), np.float32), pagedkv.PagedKvCache])
def test_an_out_that_is_no_kv_cache_is_refused(store, cache, out):
    append(store, cache, 6)
    with refused(TypeError, "out", store, cache):
        cache.to_contiguous(store, out=out)


def test_an_out_that_cannot_grow_is_left_as_it_was(store, cache):
    append(store, cache, 9)
    pool = pagedkv.KvBlockPool(4, 2)
    out = pagedkv.KvCache.with_pool(2, 3, pool, 4, v_head_dim=2)
    out.push(rows(6), rows(4))
    before = contiguous_state(out)
    with unchanged(store, cache), pytest.raises(pagedkv.KvPoolExhausted):
        cache.to_contiguous(store, out=out)
    assert contiguous_state(out) == before
    assert pool.free_blocks == 1


def test_rows_of_the_store_itself_can_be_appended(store, cache):
    """A view of a block as the source, even where copy on write gives that block away."""
    k, v = append(store, cache, 6)
    clone = cache.clone()
    a, b = cache.block_table.tolist()
    clone.append_contiguous(store, store.k_block(b)[:2], store.v_block(b)[:2], 2)
    clone.append_contiguous(store, store.k_block(a), store.v_block(a), 4)
    got = clone.to_contiguous(store)
    assert_same_bits(got.k, np.concatenate([k[0], k[0, 4:6], k[0, :4]]))
    assert_same_bits(got.v, np.concatenate([v[0], v[0, 4:6], v[0, :4]]))


def test_a_round_trip_through_contiguous_rows(any_store, cache):
    """What the batched prefill path does: copy out, compute, append the new rows."""
    k, v = append(any_store, cache, 6)
    copied = [cache.to_contiguous(any_store, layer=layer) for layer in range(any_store.n_layers)]
    other = pagedkv.PagedKvCache()
    other.append_contiguous(any_store, np.stack([c.k for c in copied]), np.stack([c.v for c in copied]), 6)
    for layer in range(any_store.n_layers):
        assert_same_bits(other.to_contiguous(any_store, layer=layer).k, k[layer])
        assert_same_bits(other.to_contiguous(any_store, layer=layer).v, v[layer])
