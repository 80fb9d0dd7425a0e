"""PagedKvStore: who holds which block."""

import numpy as np
import pytest
from helpers import append, refused, unchanged

import pagedkv


def test_fresh_blocks_come_in_ascending_order(store):
    assert store.acquire(3) == [0, 1, 2]
    assert store.acquire() == [3]
    assert store.acquire(0) == []


def test_the_block_given_back_last_comes_first(store):
    store.acquire(6)
    store.release([1])
    store.release([4])
    assert store.acquire(3) == [4, 1, 6]


def test_a_list_that_came_back_is_handed_out_in_its_own_order(store):
    """So that runs of neighbours stay runs, which are copied as one."""
    store.acquire(8)
    store.release([2, 3, 4, 5])
    assert store.acquire(4) == [2, 3, 4, 5]


def test_ids_are_plain_integers(store):
    assert [type(block) for block in store.acquire(2)] == [int, int]


def test_free_and_held_make_the_total(store):
    ids = store.acquire(5)
    assert store.free_block_count == 11
    store.retain(ids[:2])
    store.release(ids)
    assert store.free_block_count == 14
    store.release(ids[:2])
    assert store.free_block_count == 16


def test_a_block_is_free_when_its_last_holder_lets_go(store):
    [block] = store.acquire()
    for count in (2, 3):
        store.retain([block])
        assert store.refcount(block) == count
    for count in (2, 1, 0):
        store.release([block])
        assert store.refcount(block) == count
    assert store.free_block_count == 16


def test_a_repeated_id_counts_as_often_as_it_occurs(store):
    a, b = store.acquire(2)
    store.retain([a, b, a])
    assert (store.refcount(a), store.refcount(b)) == (3, 2)
    store.release((a, a, b, a))
    assert (store.refcount(a), store.refcount(b)) == (0, 1)


@pytest.mark.parametrize(
    "spell",
    [
        list,
        tuple,
        lambda ids: range(ids[0], ids[-1] + 1),
        lambda ids: np.array(ids, np.int32),
        lambda ids: np.array(ids, np.int64),
        lambda ids: np.array(ids, np.uint8),
        lambda ids: np.array(ids, np.uint64),
        lambda ids: np.array(ids, ">i8"),
        lambda ids: np.array(ids[::-1])[::-1],
        lambda ids: np.repeat(ids, 2)[::2],
        lambda ids: [np.int64(block) for block in ids],
        lambda ids: [np.array(block) for block in ids],
    ],
)
def test_every_spelling_of_ids(store, spell):
    ids = store.acquire(3)
    store.retain(spell(ids))
    assert [store.refcount(block) for block in ids] == [2, 2, 2]
    store.release(spell(ids))
    store.release(spell(ids))
    assert store.free_block_count == 16


@pytest.mark.parametrize("none", [[], (), range(0), np.array([], np.int64)])
def test_no_ids_are_no_change(store, none):
    with unchanged(store):
        store.retain(none)
        store.release(none)


def test_the_block_table_of_a_cache_is_a_list_of_ids(store, cache):
    append(store, cache, 6)
    store.retain(cache.block_table)
    cache.release(store)
    assert store.free_block_count == 14


def test_more_than_is_free_is_refused_whole(store):
    store.acquire(10)
    with refused(pagedkv.PagedStoreExhausted, "7 blocks needed, 6 of 16 free", store) as caught:
        store.acquire(7)
    assert (caught.value.needed, caught.value.free, caught.value.total) == (7, 6, 16)
    assert caught.value.can_ever_fit


@pytest.mark.parametrize("n", [17, 2**31, 2**40, 2**62])
def test_more_than_there_is_can_never_fit(store, n):
    with refused(pagedkv.PagedStoreExhausted, f"{n} blocks needed", store) as caught:
        store.acquire(n)
    assert not caught.value.can_ever_fit


@pytest.mark.parametrize("change", ["retain", "release"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_list_with_a_free_block_is_refused_whole(store, change, place):
    ids = store.acquire(3)
    store.release([ids[1]])
    wrong = [ids[0], ids[2]]
    wrong.insert(place, ids[1])
    with refused(ValueError, "ids", store):
        getattr(store, change)(wrong)


@pytest.mark.parametrize("debug", [False, True])
def test_a_list_with_one_reference_too_many_is_refused_whole(debug):
    store = pagedkv.PagedKvStore(4, 8, 1, 1, debug=debug)
    a, b, c = store.acquire(3)
    store.retain([b])
    for wrong in ([a, b, b, b, c], [a, a], [b, c, c]):
        with refused(ValueError, "ids", store):
            store.release(wrong)


def test_releasing_twice_is_an_error(store):
    ids = store.acquire(2)
    store.release(ids)
    with refused(ValueError, "ids", store):
        store.release(ids)


@pytest.mark.parametrize("change", ["retain", "release"])
@pytest.mark.parametrize("wrong", [-1, 16, 2**31, 2**32, 2**63, 2**64, -(2**63), -(2**64)])
def test_ids_out_of_range_are_refused_whole(store, change, wrong):
    """2**32 would be block 0 if it were cut to 32 bits."""
    ids = store.acquire(3)
    with refused(IndexError, "ids", store):
        getattr(store, change)([*ids, wrong])


@pytest.mark.parametrize(
    "wrong", [np.array([0, 2**32]), np.array([0, 2**63 + 1], np.uint64), np.array([0, -1], np.int8)]
)
def test_ids_out_of_range_in_an_array(store, wrong):
    store.acquire(2)
    with refused(IndexError, "ids", store):
        store.release(wrong)
