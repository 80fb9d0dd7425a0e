"""to_contiguous of a part and of all layers, and sequences that start where a beginning was dropped."""

import numpy as np
import pytest
from dtype_reference import DTYPES
from helpers import append, assert_rows, refused

import pagedkv
from pagedkv import KvBlockPool, KvCache, KvPoolExhausted, PagedKvCache, PagedKvStore


@pytest.fixture
def store(layered):
    return layered


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_part_of_every_layer(dtype):
    store, cache = PagedKvStore(4, 8, 2, 3, n_layers=3, v_head_dim=2, dtype=dtype, debug=True), PagedKvCache()
    append(store, cache, 13)
    for layer in range(3):
        whole = cache.to_contiguous(store, layer=layer)
        for start in range(14):
            for stop in (*range(start, 14), None):
                part = cache.to_contiguous(store, layer=layer, start=start, stop=stop)
                assert part.seq_len == (13 if stop is None else stop) - start
                assert np.array_equal(part.k, whole.k[start:stop])
                assert np.array_equal(part.v, whole.v[start:stop])


def test_all_layers_at_once(store):
    cache = PagedKvCache()
    k, v = append(store, cache, 10)
    layers = cache.to_contiguous(store, layer=None)
    assert [np.array_equal(layer.k, rows) for layer, rows in zip(layers, k, strict=True)] == [True] * 3
    again = cache.to_contiguous(store, layer=None, start=3, stop=9, out=layers)
    assert [one is other for one, other in zip(again, layers, strict=True)] == [True] * 3
    assert all(np.array_equal(layer.v, rows[3:9]) for layer, rows in zip(layers, v, strict=True))


def test_all_layers_or_none(store):
    """The last one has no room for it."""
    cache, pool = PagedKvCache(), KvBlockPool(4, 1)
    append(store, cache, 10)
    out = [KvCache(2, 3, v_head_dim=2), KvCache(2, 3, v_head_dim=2), KvCache.with_pool(2, 3, pool, 4, v_head_dim=2)]
    with refused(KvPoolExhausted, "", store, cache):
        cache.to_contiguous(store, layer=None, out=out)
    assert [target.seq_len for target in out] == [0, 0, 0]
    pool.resize(3)
    assert [target.seq_len for target in cache.to_contiguous(store, layer=None, out=out)] == [10] * 3


def test_what_a_window_has_left_is_a_part(store):
    cache = PagedKvCache()
    k, _ = append(store, cache, 14)
    cache.drop_before(store, 9)
    assert np.array_equal(cache.to_contiguous(store, layer=1, start=8).k, k[1, 8:])
    with refused(ValueError, "dropped", store, cache):
        cache.to_contiguous(store, start=7)


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"start": -1}, ValueError, "start"),
        ({"start": 11}, ValueError, "start"),
        ({"start": 1.0}, TypeError, "start"),
        ({"stop": 11}, ValueError, "stop"),
        ({"start": 5, "stop": 4}, ValueError, "stop"),
        ({"stop": "1"}, TypeError, "stop"),
        ({"layer": 3}, IndexError, "layer"),
        ({"layer": None, "out": KvCache(2, 3, v_head_dim=2)}, TypeError, "out"),
        ({"layer": None, "out": [KvCache(2, 3, v_head_dim=2)] * 3}, ValueError, "out"),
        ({"layer": None, "out": [KvCache(2, 3, v_head_dim=2)]}, ValueError, "out"),
        ({"layer": None, "out": [1, 2, 3]}, TypeError, "out"),
        ({"out": [KvCache(2, 3, v_head_dim=2)]}, TypeError, "out"),
    ],
)
def test_parts_that_are_none(store, options, error, name):
    cache = PagedKvCache()
    append(store, cache, 10)
    with refused(error, name, store, cache):
        cache.to_contiguous(store, **options)


# --- a dropped beginning --------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("spell", [list, tuple, np.array])
def test_adopting_what_a_window_has_left(store, named, spell):
    first, second = PagedKvCache(), PagedKvCache()
    kv = append(store, first, 16)
    first.drop_before(store, 9)
    table = first.block_table
    store.retain(table[2:])
    second.adopt_blocks(spell(table.tolist()), 16, 4, store=store if named else None, first_position=8)
    assert (second.seq_len, second.first_position) == (16, 8)
    assert second.block_table.tolist() == table.tolist()
    more = append(store, second, 3)
    got = second.to_contiguous(store, layer=2, start=8)
    assert np.array_equal(got.k, np.concatenate([kv[0][2, 8:], more[0][2]]))
    q = np.ones((1, 2, 3), np.float32)
    assert np.array_equal(
        pagedkv.paged_attention(q, store, first, window=8, layer=1),
        pagedkv.paged_attention(q, store, _cut(store, second, 16), window=8, layer=1),
    )
    store.check([first, second])
    first.release(store)
    second.release(store)
    assert store.free_block_count == 16


def _cut(store, cache, n):
    cache.truncate(store, n)
    return cache


def test_a_fork_of_it(store):
    first, second = PagedKvCache(), PagedKvCache()
    kv = append(store, first, 12)
    first.drop_before(store, 4)
    store.retain(first.block_table[1:])
    second.adopt_blocks(first.block_table, 12, 4, store=store, first_position=4)
    fork = second.clone()
    assert_rows(store, fork, *(side[:, 4:] for side in kv))
    with refused(ValueError, "new_len", store, fork):
        fork.truncate(store, 3)


@pytest.mark.parametrize(
    ("table", "seq_len", "first_position", "error", "name"),
    [
        ([-1, 0], 8, 0, IndexError, "block_table"),
        ([0, 1], 8, 4, ValueError, "block_table"),
        ([-1, -1], 8, 4, IndexError, "block_table"),
        ([-1, 0], 8, 3, ValueError, "first_position"),
        ([-1, 0], 8, 12, ValueError, "first_position"),
        ([-1, 0], 8, -4, ValueError, "first_position"),
        ([-1, 0], 8, 4.0, TypeError, "first_position"),
        ([-1], 8, 4, ValueError, "block_table"),
        ([], 8, 4, ValueError, "block_table"),
        ([], 8, 8, ValueError, "block_table"),
        ([0], 8, 8, ValueError, "block_table"),
        ([-1, 15], 8, 4, ValueError, "block_table"),
        (iter([-1, 0]), 8, 4, TypeError, "block_table"),
    ],
)
def test_beginnings_that_are_refused(store, table, seq_len, first_position, error, name):
    store.acquire(2)
    cache = PagedKvCache()
    with refused(error, name, store, cache):
        cache.adopt_blocks(table, seq_len, 4, store=store, first_position=first_position)
