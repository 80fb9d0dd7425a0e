"""Everything that moves whole rows, on every dtype: forks, prefixes, cuts, windows, steps, large writes."""

import numpy as np
import pytest
from dtype_reference import DTYPES, KINDS, RAW, SCALED, assert_same, encode
from dtype_support import assert_reads, filled, make, normal
from helpers import WAYS, block_views, by_append, refused, stored, undone

import pagedkv

pytestmark = pytest.mark.parametrize("dtype", DTYPES)


def more(store, n, seed=7):
    k = normal(seed, store.n_layers, n, store.n_kv_heads, store.head_dim)
    v = normal(seed + 1, store.n_layers, n, store.n_kv_heads, store.v_head_dim)
    return k, v


def joined(*parts):
    return np.concatenate(parts, axis=1)


def is_nan(store, block, layer=0):
    """Whether each row of a block reads as NaN through and through, K and V."""
    rows = []
    for side in "kv":
        if store.dtype in SCALED:
            rows.append(np.isnan(getattr(store, f"{side}_scales")(block, layer)).all(axis=(1, 2)))
        else:
            values = getattr(store, f"{side}_block")(block, layer)
            rows.append(np.isnan(KINDS[store.dtype].decode(values)).all(axis=1))
    return np.logical_and(*rows)


def test_a_fork_copies_the_tail_before_it_writes(dtype):
    store, cache, k, v = filled(dtype, 6, n_layers=2)
    fork = cache.clone()
    k_new, v_new = more(store, 3)
    fork.append_contiguous(store, k_new, v_new, 3)
    assert fork.block_table[0] == cache.block_table[0]
    assert fork.block_table[1] != cache.block_table[1]
    assert_reads(store, cache, k, v)
    assert_reads(store, fork, joined(k, k_new), joined(v, v_new))
    cache.append_contiguous(store, k_new, v_new, 3)
    assert_reads(store, cache, joined(k, k_new), joined(v, v_new))
    store.check([cache, fork])


def test_a_step_copies_the_tail_before_it_writes(dtype):
    store, cache, k, v = filled(dtype, 6, n_layers=2)
    fork = cache.clone()
    k_new, v_new = more(store, 5)
    with pagedkv.Step(store, [fork, cache], [2, 3]) as step:
        for layer in (1, 0):
            step.write(layer, k_new[layer], v_new[layer])
    assert_reads(store, fork, joined(k, k_new[:, :2]), joined(v, v_new[:, :2]))
    assert_reads(store, cache, joined(k, k_new[:, 2:]), joined(v, v_new[:, 2:]))


def test_a_step_that_fails_leaves_nothing(dtype):
    store, cache, _, _ = filled(dtype, 6, n_layers=2)
    k_new, v_new = more(store, 5)
    with undone(store, cache):
        with pagedkv.Step(store, cache, 5) as step:
            step.write(0, k_new[0], v_new[0])
            step.rollback()
        with pytest.raises(RuntimeError, match="layer"), pagedkv.Step(store, cache, 5) as step:
            step.write(1, k_new[0], v_new[0])


def test_a_layer_may_be_written_twice(dtype):
    store, cache, k, v = filled(dtype, 3)
    first, second = more(store, 6, seed=20), more(store, 6)
    with pagedkv.Step(store, cache, 6) as step:
        step.write(0, first[0][0], first[1][0])
        step.write(0, second[0][0], second[1][0])
    assert_reads(store, cache, joined(k, second[0]), joined(v, second[1]))


def test_an_adopted_prefix(dtype):
    store, cache, k, v = filled(dtype, 11, n_layers=2)
    store.retain(cache.block_table[:2])
    other = pagedkv.PagedKvCache()
    other.adopt_blocks(cache.block_table[:2], 8, 4, store=store)
    k_new, v_new = more(store, 3)
    other.append_contiguous(store, k_new, v_new, 3)
    cache.release(store)
    assert_reads(store, other, joined(k[:, :8], k_new), joined(v[:, :8], v_new))


@pytest.mark.parametrize("new_len", [0, 1, 4, 5, 10, 11])
def test_truncation(dtype, new_len):
    store, cache, k, v = filled(dtype, 11, n_layers=2)
    cache.truncate(store, new_len)
    assert_reads(store, cache, k[:, :new_len], v[:, :new_len])
    k_new, v_new = more(store, 6)
    cache.append_contiguous(store, k_new, v_new, 6)
    assert_reads(store, cache, joined(k[:, :new_len], k_new), joined(v[:, :new_len], v_new))


def test_dropped_positions_leave_the_others(dtype):
    store, cache, k, _ = filled(dtype, 11)
    cache.drop_before(store, 9)
    assert cache.first_position == 8
    assert_same_positions(store, cache, encode(dtype, k[0])[8:])
    with refused(ValueError, "dropped", store, cache):
        cache.to_contiguous(store)


def assert_same_positions(store, cache, want):
    for i in range(cache.seq_len - cache.first_position):
        row = store.k_row(int(cache.block_table[2]), i)
        assert row.tobytes() == want[i].values.tobytes()


def test_copy_block(dtype):
    store, cache, _, _ = filled(dtype, 4, n_layers=2)
    [target] = store.acquire()
    source = int(cache.block_table[0])
    store.copy_block(source, target)
    for layer in (0, 1):
        for view in block_views(store):
            assert view(target, layer).tobytes() == view(source, layer).tobytes()
            assert not np.shares_memory(view(target, layer), view(source, layer))


def test_debug_fills_what_is_free_with_nan(dtype):
    """Fresh blocks, and those that were written and given back."""
    store = make(dtype, debug=True, n_layers=2)
    ids = store.acquire(16)
    assert all(is_nan(store, block, layer).all() for block in ids for layer in (0, 1))
    store.release(ids)
    cache = pagedkv.PagedKvCache()
    k, v = more(store, 6)
    cache.append_contiguous(store, k, v, 6)
    block = int(cache.block_table[1])
    assert is_nan(store, block, 1).tolist() == [False, False, True, True]
    cache.release(store)
    assert is_nan(store, store.acquire(16)[0], 1).all()


def test_attention_over_unwritten_rows_of_debug_is_seen(dtype):
    """Reserved and adopted as if it were written: NaN comes out."""
    store = make(dtype, debug=True)
    cache = pagedkv.PagedKvCache()
    cache.adopt_blocks(store.acquire(1), 4, 4, store=store)
    assert np.isnan(pagedkv.paged_attention(np.ones((1, 2, 3), np.float32), store, cache)).all()
    assert np.isnan(cache.to_contiguous(store).k).all()


def test_exhaustion_changes_nothing(dtype):
    store, cache, k, v = filled(dtype, 11, total_blocks=4)
    k_new, v_new = more(store, 6)
    with refused(pagedkv.PagedStoreExhausted, "", store, cache):
        cache.append_contiguous(store, k_new, v_new, 6)
    assert_reads(store, cache, k, v)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_an_output_that_is_reused(dtype, layer):
    store, cache, k, v = filled(dtype, 11, n_layers=3, v_head_dim=5)
    out = pagedkv.KvCache(2, 3, v_head_dim=5)
    for _ in range(2):
        assert cache.to_contiguous(store, layer=layer, out=out) is out
        assert_same(out.k, encode(dtype, k[layer]).decode().reshape(11, 6))
        assert_same(out.v, encode(dtype, v[layer]).decode().reshape(11, 10))


@pytest.mark.parametrize("block_size", [1, 3, 16, 1024])
@pytest.mark.parametrize("write", WAYS)
def test_block_sizes(dtype, block_size, write):
    store, cache = make(dtype, block_size=block_size, total_blocks=200, head_dim=9, debug=True), pagedkv.PagedKvCache()
    k, v = more(store, 50)
    write(store, cache, k[0, :30], v[0, :30])
    write(store, cache, k[0, 30:], v[0, 30:])
    assert_reads(store, cache, k, v)


@pytest.mark.parametrize(("n_kv_heads", "head_dim", "v_head_dim"), [(8, 128, 128), (1, 576, 512), (3, 85, 101)])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_writes_beyond_what_caches_hold(dtype, n_kv_heads, head_dim, v_head_dim, n_threads):
    """Copies of megabytes go other ways: past the caches, and on several threads."""
    n = 3 * (8 << 20) // (4 * n_kv_heads * head_dim) // 2 + 5
    before = pagedkv.get_num_threads()
    pagedkv.set_num_threads(n_threads)
    try:
        store = make(dtype, 16, n // 16 + 2, n_kv_heads, head_dim, v_head_dim=v_head_dim)
        k, v = more(store, n)
        raw = [encode(dtype, rows[0]) for rows in (k, v)]
        for given in ([k[0], v[0]], [rows.values for rows in raw] if dtype in RAW else None):
            if given is not None:
                cache = pagedkv.PagedKvCache()
                by_append(store, cache, *given)
                flat = cache.to_contiguous(store)
                for side, want in zip("kv", raw, strict=True):
                    assert_same(getattr(flat, side), want.decode().reshape(n, -1))
                    assert stored(store, cache, side)[0].tobytes() == want.values.tobytes()
                cache.release(store)
    finally:
        pagedkv.set_num_threads(before)


def test_stores_of_each_dtype_beyond_2_to_the_31_elements(dtype):
    """Offsets of 32 bits would wrap. Memory that is never written costs nothing."""
    store = make(dtype, 1024, (1 << 22) // 1024 + 1, 1, 1024)
    ids = store.acquire(store.total_blocks)
    store.release([ids[0], ids[-1]])
    cache = pagedkv.PagedKvCache()
    k, v = more(store, 1500)
    cache.append_contiguous(store, k, v, 1500)
    assert set(cache.block_table.tolist()) == {ids[0], ids[-1]}
    assert_same(cache.to_contiguous(store).v, encode(dtype, v[0]).decode().reshape(1500, -1))


def test_a_sequence_of_another_dtypes_store_is_refused(dtype):
    store, cache, _, _ = filled(dtype, 5)
    other = make(DTYPES[DTYPES.index(dtype) - 1])
    for use in (lambda: cache.to_contiguous(other), lambda: cache.reserve(other, 1), lambda: cache.release(other),
                lambda: pagedkv.paged_attention(np.ones((1, 2, 3), np.float32), other, cache)):
        with refused(ValueError, "store", store, cache):
            use()
