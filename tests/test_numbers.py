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
MAY_BE_NONE = {"v_head_dim", "v_head_dim of KvCache"}


@pytest.mark.parametrize("value", NOT_INTEGERS, ids=repr)
@pytest.mark.parametrize("name", [*SIZES, *COUNTS, *INDICES])
def test_what_is_no_integer(world, name, value):
    if value is None and name in MAY_BE_NONE:
        pytest.skip("None stands for head_dim")
    call = {**SIZES, **COUNTS, **INDICES}[name]
    if name == "query_lens" and isinstance(value, (list, tuple, np.ndarray)) and np.ndim(value):
        pytest.skip("one for each cache")
    with refused(TypeError, name.split()[0], world.store, world.cache):
        call(world, value)


@pytest.mark.parametrize(
    "value", [*TOO_SMALL, 0, 2**62], ids=lambda value: f"{value:.3g}" if abs(value) < 2**70 else "huge"
)
@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_are_too_small(world, name, value):
    if value > 0:
        pytest.skip("sizes that are too large are another test")
    with refused(ValueError, name.split()[0], world.store, world.cache):
        SIZES[name](world, value)


@pytest.mark.parametrize("value", TOO_LARGE, ids=["2**63-1", "2**63", "2**64", "2**64+1", "10**5000"])
@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_are_too_large(world, name, value):
    """Beyond what can be counted, or what memory can hold; a budget may be any number that is one."""
    if value == 2**63 - 1 and name in ("budget_bytes", "block_size of KvBlockPool", "total_blocks of KvBlockPool"):
        pytest.skip("may be allowed: nothing is allocated, or no more than there is")
    with unchanged(world.store, world.cache):
        with pytest.raises((ValueError, MemoryError)) as caught:
            SIZES[name](world, value)
    assert type(caught.value) in (ValueError, MemoryError)
    if type(caught.value) is ValueError:
        assert name.split()[0] in str(caught.value) or "budget_bytes" in str(caught.value)


@pytest.mark.parametrize("value", TOO_SMALL, ids=["-1", "-2**31", "-2**63", "-2**64", "-10**5000"])
@pytest.mark.parametrize("name", COUNTS)
def test_counts_below_zero(world, name, value):
    with refused(ValueError, name.split()[0], world.store, world.cache):
        COUNTS[name](world, value)


@pytest.mark.parametrize("value", TOO_LARGE, ids=["2**63-1", "2**63", "2**64", "2**64+1", "10**5000"])
@pytest.mark.parametrize("name", COUNTS)
def test_counts_beyond_all_bounds(world, name, value):
    if value == 2**63 - 1 and name == "n of acquire":
        with refused(pagedkv.PagedStoreExhausted, "needed", world.store):
            COUNTS[name](world, value)
        return
    with refused(ValueError, name.split()[0], world.store, world.cache):
        COUNTS[name](world, value)


@pytest.mark.parametrize(
    "value", [*TOO_SMALL, *TOO_LARGE, 8, 2**31, 2**32], ids=lambda v: str(v) if abs(v) < 2**70 else "huge"
)
@pytest.mark.parametrize("name", INDICES)
def test_indices_out_of_range(world, name, value):
    if name == "block_table" and value == 8:
        pytest.skip("without a store any id of 31 bits may be right")
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
    for name, call in {**SIZES, **COUNTS, **INDICES}.items():
        with refused(TypeError, name.split()[0], world.store, world.cache):
            call(world, Indexed(value))


def test_an_index_that_raises(world):
    for call in {**SIZES, **COUNTS, **INDICES}.values():
        with unchanged(world.store, world.cache), pytest.raises(Unwilling):
            call(world, Indexed(0, refuse))


# --- ids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
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
def test_what_is_no_list_of_ids(world, wrong):
    for call, name in [
        (world.store.retain, "ids"),
        (world.store.release, "ids"),
        (lambda ids: pagedkv.PagedKvCache().adopt_blocks(ids, 0, 4), "block_table"),
        (lambda ids: pagedkv.PagedKvCache().adopt_blocks(ids, 0, 4, store=world.store), "block_table"),
    ]:
        with refused(TypeError, name, world.store, world.cache):
            call(wrong)


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
