"""Integers and block ids: what is taken for one, and what is said of those that are not."""

import decimal

import numpy as np
import pytest
from helpers import refused, unchanged
from hostile import Indexed, Liar, Unwilling, refuse

import pagedkv

# --- integers -------------------------------------------------------------------------------------

NOT_INTEGERS = [
    None,
    True,
    False,
    np.True_,
    2.5,
    2.0,
    np.float32(2),
    "2",
    b"2",
    [2],
    (2,),
    2j,
    decimal.Decimal(2),
    np.array([2]),
    np.array(2.0),
    np.array(True),
    object(),
    int,
]
TOO_SMALL = [-1, -(2**31), -(2**63), -(2**64), -(10**5000)]
TOO_LARGE = [2**63 - 1, 2**63, 2**64, 2**64 + 1, 10**5000]


SIZES = {
    "block_size": lambda w, n: pagedkv.PagedKvStore(n, 1, 1, 1),
    "total_blocks": lambda w, n: pagedkv.PagedKvStore(1, n, 1, 1),
    "n_kv_heads": lambda w, n: pagedkv.PagedKvStore(1, 1, n, 1),
    "head_dim": lambda w, n: pagedkv.PagedKvStore(1, 1, 1, n),
    "n_layers": lambda w, n: pagedkv.PagedKvStore(1, 1, 1, 1, n_layers=n),
    "v_head_dim": lambda w, n: pagedkv.PagedKvStore(1, 1, 1, 1, v_head_dim=n),
    "budget_bytes": lambda w, n: pagedkv.PagedKvStore.from_bytes(n, 1, 1, 1),
    "block_size of from_bytes": lambda w, n: pagedkv.PagedKvStore.from_bytes(100, n, 1, 1),
    "head_dim of from_bytes": lambda w, n: pagedkv.PagedKvStore.from_bytes(100, 1, 1, n),
    "n_layers of from_bytes": lambda w, n: pagedkv.PagedKvStore.from_bytes(100, 1, 1, 1, n_layers=n),
    "n_kv_heads of KvCache": lambda w, n: pagedkv.KvCache(n, 1),
    "head_dim of KvCache": lambda w, n: pagedkv.KvCache(1, n),
    "v_head_dim of KvCache": lambda w, n: pagedkv.KvCache(1, 1, v_head_dim=n),
    "block_size of KvBlockPool": lambda w, n: pagedkv.KvBlockPool(n, 1),
    "total_blocks of KvBlockPool": lambda w, n: pagedkv.KvBlockPool(1, n),
    "total_blocks of resize": lambda w, n: w.pool.resize(n),
    "block_size of adopt_blocks": lambda w, n: pagedkv.PagedKvCache().adopt_blocks([0], 0, n, store=w.store),
    "n of set_num_threads": lambda w, n: pagedkv.set_num_threads(n),
}
COUNTS = {
    "n of acquire": lambda w, n: w.store.acquire(n),
    "count": lambda w, n: w.cache.append_contiguous(w.store, w.k(1), w.v(1), n),
    "n_new of blocks_needed_for": lambda w, n: w.cache.blocks_needed_for(w.store, n),
    "n_new of reserve": lambda w, n: w.cache.reserve(w.store, n),
    "seq_len": lambda w, n: pagedkv.PagedKvCache().adopt_blocks([0], n, 4, store=w.store),
    "new_len": lambda w, n: w.cache.truncate(w.store, n),
    "new_len of can_truncate_to": lambda w, n: w.cache.can_truncate_to(n),
    "position": lambda w, n: w.cache.drop_before(w.store, n),
    "max_seq_len of with_capacity": lambda w, n: pagedkv.KvCache.with_capacity(1, 1, n),
    "max_seq_len of with_pool": lambda w, n: pagedkv.KvCache.with_pool(1, 1, w.pool, n),
    "n of KvCache.truncate": lambda w, n: w.contiguous.truncate(n),
    "query_lens": lambda w, n: pagedkv.Step(w.store, [w.cache], n),
    "query_lens of a list": lambda w, n: pagedkv.Step(w.store, [w.cache], [n]),
}
INDICES = {
    "id of k_row": lambda w, n: w.store.k_row(n, 0),
    "id of v_block": lambda w, n: w.store.v_block(n),
    "id of refcount": lambda w, n: w.store.refcount(n),
    "offset of k_row": lambda w, n: w.store.k_row(0, n),
    "offset of v_row": lambda w, n: w.store.v_row(0, n),
    "layer of k_row": lambda w, n: w.store.k_row(0, 0, n),
    "layer of v_block": lambda w, n: w.store.v_block(0, n),
    "layer of to_contiguous": lambda w, n: w.cache.to_contiguous(w.store, layer=n),
    "src": lambda w, n: w.store.copy_block(n, 0),
    "dst": lambda w, n: w.store.copy_block(0, n),
    "ids of retain": lambda w, n: w.store.retain([n]),
    "ids of release": lambda w, n: w.store.release([0, n]),
    "block_table": lambda w, n: pagedkv.PagedKvCache().adopt_blocks([0, n], 0, 4),
}
ALL = {**SIZES, **COUNTS, **INDICES}
# What these allow beyond the others: a head width that goes unsaid, lengths for each sequence, all layers, and budgets
# without an end.
ALLOWED = {
    "v_head_dim": [None],
    "v_head_dim of KvCache": [None],
    "query_lens": [[2], (2,), np.array([2])],
    "layer of to_contiguous": [None],
    "budget_bytes": [2**63 - 1],
    "block_size of KvBlockPool": [2**63 - 1],
    "total_blocks of KvBlockPool": [2**63 - 1],
    "block_table": [8],  # without a store any id of 31 bits may be right
}


def wrong(name, values):
    """The values without those that this argument takes."""

    def is_allowed(value):
        return any(type(value) is type(other) and np.array_equal(value, other) for other in ALLOWED.get(name, []))

    return [value for value in values if not is_allowed(value)]


@pytest.mark.parametrize("name", ALL)
def test_what_is_no_integer(world, name):
    for value in wrong(name, NOT_INTEGERS):
        with refused(TypeError, name.split()[0], world.store, world.cache):
            ALL[name](world, value)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_are_too_small(world, name):
    for value in [0, *TOO_SMALL]:
        with refused(ValueError, name.split()[0], world.store, world.cache):
            SIZES[name](world, value)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_are_too_large(world, name):
    """Beyond what can be counted, or beyond what memory can hold."""
    for value in wrong(name, TOO_LARGE):
        with unchanged(world.store, world.cache), pytest.raises((ValueError, MemoryError)) as caught:
            SIZES[name](world, value)
        said = str(caught.value)
        assert type(caught.value) is MemoryError or name.split()[0] in said or "budget_bytes" in said


@pytest.mark.parametrize("name", COUNTS)
def test_counts_below_zero(world, name):
    for value in TOO_SMALL:
        with refused(ValueError, name.split()[0], world.store, world.cache):
            COUNTS[name](world, value)


@pytest.mark.parametrize("name", COUNTS)
def test_counts_beyond_all_bounds(world, name):
    for value in TOO_LARGE:
        can_be_asked_for = name == "n of acquire" and value < 2**63
        error, said = (pagedkv.PagedStoreExhausted, "needed") if can_be_asked_for else (ValueError, name.split()[0])
        with refused(error, said, world.store, world.cache):
            COUNTS[name](world, value)


@pytest.mark.parametrize("name", INDICES)
def test_indices_out_of_range(world, name):
    for value in wrong(name, [*TOO_SMALL, *TOO_LARGE, 8, 2**31, 2**32]):
        with refused(IndexError, name.split()[0], world.store, world.cache):
            INDICES[name](world, value)


def test_anything_with_an_index_is_an_integer(world):
    for two in (Indexed(2), np.int8(2), np.uint64(2), np.array(2)):
        assert pagedkv.PagedKvStore(two, two, two, two, n_layers=two, v_head_dim=two).nbytes == 256
        assert world.cache.can_truncate_to(two)
        assert world.store.refcount(two) == 0
    assert world.store.acquire(Indexed(2)) == [2, 3]
    world.store.release([Indexed(2), np.int64(3)])


@pytest.mark.parametrize("value", ["two", 2.0, None, np.float64(1)], ids=repr)
def test_an_index_that_is_no_integer(world, value):
    for name, call in ALL.items():
        with refused(TypeError, name.split()[0], world.store, world.cache):
            call(world, Indexed(value))


def test_an_index_that_raises(world):
    for call in ALL.values():
        with unchanged(world.store, world.cache), pytest.raises(Unwilling):
            call(world, Indexed(0, refuse))


# --- ids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids",
    [
        None,
        0,
        "01",
        b"01",
        {0, 1},
        {0: 1},
        iter([0, 1]),
        [0, 1.0],
        [0, None],
        [True],
        ["0"],
        [[0]],
        np.array([0.0, 1.0]),
        np.array([0, 1], np.float32),
        np.array([True]),
        np.array([0, 1], object),
        np.array(["0"]),
        np.array([[0, 1]]),
        np.array(0),
        np.array([0, 1], "m8[s]"),
        np.array([], np.float64),
    ],
    ids=repr,
)
def test_what_is_no_list_of_ids(world, ids):
    for call, name in [
        (world.store.retain, "ids"),
        (world.store.release, "ids"),
        (lambda ids: pagedkv.PagedKvCache().adopt_blocks(ids, 0, 4), "block_table"),
        (lambda ids: pagedkv.PagedKvCache().adopt_blocks(ids, 0, 4, store=world.store), "block_table"),
    ]:
        with refused(TypeError, name, world.store, world.cache):
            call(ids)


@pytest.mark.parametrize(
    "disguise",
    [
        lambda ids: np.ma.masked_array(ids, mask=[False, True]),
        lambda ids: ids.view(Liar),
        lambda ids: ids.astype(np.uint64).view(Liar),
    ],
)
def test_an_id_out_of_range_behind_an_array_that_hides_it(world, disguise):
    ids = disguise(np.array([0, 2**30]))
    for call, name in [(world.store.retain, "ids"), (world.store.release, "ids")]:
        with refused(IndexError, name, world.store, world.cache):
            call(ids)
    with refused(IndexError, "block_table", world.store):
        pagedkv.PagedKvCache().adopt_blocks(ids, 8, 4, store=world.store)
