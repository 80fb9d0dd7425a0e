"""PagedKvCache: adopted blocks, clones, and copy on write."""

import copy
import pickle

import numpy as np
import pytest
from helpers import append, assert_rows, cache_state, refused, rows, step_of, unchanged

import pagedkv

# --- adopt_blocks ---


def full_blocks(store, n_blocks):
    """Retained ids of a sequence's first blocks, and its rows. The sequence itself is gone."""
    cache = pagedkv.PagedKvCache()
    k, v = append(store, cache, n_blocks * store.block_size)
    store.retain(cache.block_table)
    return cache.block_table.tolist(), k, v


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("spell", [list, tuple, lambda ids: np.array(ids, np.uint16), np.array])
def test_adopted_blocks_are_the_start_of_a_sequence(any_store, cache, bound, spell):
    ids, k, v = full_blocks(any_store, 2)
    cache.adopt_blocks(spell(ids), 8, 4, store=any_store if bound else None)
    assert (cache.seq_len, cache.capacity, cache.block_table.tolist()) == (8, 8, ids)
    assert cache.store is (any_store if bound else None)
    k_more, v_more = append(any_store, cache, 3)
    assert cache.store is any_store
    assert_rows(any_store, cache, np.concatenate([k, k_more], 1), np.concatenate([v, v_more], 1))


def test_adopting_takes_over_one_reference_a_block(store, cache):
    ids, _, _ = full_blocks(store, 3)
    store.retain(ids[:1])
    with unchanged(store):
        cache.adopt_blocks(ids, 12, 4, store=store)
    cache.release(store)
    assert [store.refcount(block) for block in ids] == [1, 0, 0]


def test_an_adopted_prefix_is_never_written(store, cache):
    ids, k, v = full_blocks(store, 2)
    store.retain(ids)
    cache.adopt_blocks(ids, 8, 4)
    other = pagedkv.PagedKvCache()
    other.adopt_blocks(ids, 8, 4)
    append(store, cache, 3)
    assert np.array_equal(store.k_block(ids[1]), k[0, 4:])
    assert_rows(store, other, k, v)
    assert store.stats().copies_on_write == 0


def test_adopted_blocks_past_the_length_are_reserved(store, cache):
    ids, k, v = full_blocks(store, 1)
    cache.adopt_blocks(ids + store.acquire(2), 4, 4, store=store)
    assert (cache.seq_len, cache.capacity) == (4, 12)
    assert cache.blocks_needed_for(store, 8) == 0
    k_more, v_more = append(store, cache, 8)
    assert_rows(store, cache, np.concatenate([k, k_more], 1), np.concatenate([v, v_more], 1))


def test_a_shared_reserved_block_is_copied_before_it_is_written(store, cache):
    ids, _, _ = full_blocks(store, 1)
    [spare] = store.acquire()
    store.retain([spare])
    cache.adopt_blocks([*ids, spare], 4, 4, store=store)
    assert cache.blocks_needed_for(store, 1) == 1
    append(store, cache, 2)
    assert cache.block_table[1] != spare
    assert store.refcount(spare) == 1
    assert np.isnan(store.k_block(spare)).all(), "never written"


def test_adopting_nothing_is_a_new_sequence(store, cache):
    cache.adopt_blocks([], 0, 7, store=None)
    assert cache_state(cache) == (0, 0, 0, [], None)
    k, v = append(store, cache, 5)
    assert_rows(store, cache, k, v)


@pytest.mark.parametrize(
    ("n_ids", "seq_len", "argument"),
    [(2, 7, "seq_len"), (2, 1, "seq_len"), (2, 12, "block_table"), (0, 4, "block_table"), (1, 8, "block_table")],
)
@pytest.mark.parametrize("bound", [False, True])
def test_a_ragged_length_or_a_short_table_is_refused(store, cache, n_ids, seq_len, argument, bound):
    ids = store.acquire(2)
    with refused(ValueError, argument, store, cache):
        cache.adopt_blocks(ids[:n_ids], seq_len, 4, store=store if bound else None)


@pytest.mark.parametrize("block_size", [1, 2, 8])
def test_another_block_size_than_the_stores_is_refused(store, cache, block_size):
    ids = store.acquire(2)
    with refused(ValueError, "block_size", store, cache):
        cache.adopt_blocks(ids, 0, block_size, store=store)


def test_adopting_over_held_blocks_is_refused(store, cache):
    append(store, cache, 3)
    ids = store.acquire(2)
    with refused(ValueError, "block_table", store, cache):
        cache.adopt_blocks(ids, 8, 4, store=store)
    with refused(ValueError, "block_table", store, cache):
        cache.adopt_blocks([], 0, 4)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [([0, 5], ValueError), ([0, 16], IndexError), ([0, -1], IndexError), ([0, 2**31 - 1], IndexError)],
)
def test_ids_that_nobody_holds_are_refused_at_once_with_a_store(store, cache, wrong, error):
    store.acquire(2)
    with refused(error, "block_table", store, cache):
        cache.adopt_blocks(wrong, 8, 4, store=store)


@pytest.mark.parametrize(("wrong", "error"), [([0, 5], ValueError), ([0, 16], IndexError)])
@pytest.mark.parametrize("use", ["push", "append_contiguous", "reserve", "blocks_needed_for", "release", "truncate"])
def test_and_at_the_first_use_without_one(store, cache, wrong, error, use):
    store.acquire(2)
    cache.adopt_blocks(wrong, 8, 4)
    arguments = {
        "push": step_of(store),
        "append_contiguous": (rows(1, 6), rows(1, 4), 1),
        "release": (),
    }.get(use, (1,))
    with refused(error, "block_table", store, cache):
        getattr(cache, use)(store, *arguments)


def test_one_reference_cannot_be_adopted_twice(store, cache):
    """Two places of a table in one block would be two positions in one row."""
    [block] = store.acquire()
    with refused(ValueError, "block_table", store, cache):
        cache.adopt_blocks([block, block], 0, 4, store=store)
    store.retain([block])
    cache.adopt_blocks([block, block], 0, 4, store=store)
    k, v = append(store, cache, 8)
    assert_rows(store, cache, k, v)
    cache.release(store)
    assert store.free_block_count == 16


def test_an_unbound_sequence_cannot_be_cloned(store, cache):
    ids, k, v = full_blocks(store, 1)
    cache.adopt_blocks(ids, 4, 4)
    for attempt in (cache.clone, lambda: copy.copy(cache), lambda: pagedkv.PagedKvCache().clone_from(cache)):
        with refused(RuntimeError, "store", store, cache):
            attempt()
    assert cache.blocks_needed_for(store, 1) == 1  # now it knows
    assert_rows(store, cache.clone(), k, v)


# --- clone ---


@pytest.mark.parametrize("make", [lambda cache: cache.clone(), copy.copy, copy.deepcopy])
@pytest.mark.parametrize("n", [0, 3, 4, 6])
def test_a_clone_shares_everything_and_costs_nothing(any_store, cache, make, n):
    k, v = append(any_store, cache, n)
    free = any_store.free_block_count
    clone = make(cache)
    assert type(clone) is pagedkv.PagedKvCache
    assert any_store.free_block_count == free
    assert cache_state(clone) == cache_state(cache)
    assert all(any_store.refcount(block) == 2 for block in cache.block_table)
    assert_rows(any_store, clone, k, v)


@pytest.mark.parametrize("writer", ["original", "clone"])
@pytest.mark.parametrize("n", [3, 4, 6])
def test_whoever_writes_first_copies_a_shared_tail(any_store, cache, writer, n):
    k, v = append(any_store, cache, n)
    clone = cache.clone()
    writes, stays = (cache, clone) if writer == "original" else (clone, cache)
    table = stays.block_table.tolist()
    needed = writes.blocks_needed_for(any_store, 1)
    free = any_store.free_block_count
    k_more, v_more = append(any_store, writes, 1)
    assert needed == free - any_store.free_block_count == 1
    assert stays.block_table.tolist() == table
    assert writes.block_table.tolist()[: n // 4] == table[: n // 4], "full blocks stay shared"
    assert_rows(any_store, stays, k, v)
    assert_rows(any_store, writes, np.concatenate([k, k_more], 1), np.concatenate([v, v_more], 1))
    # The other has its tail alone now.
    assert stays.blocks_needed_for(any_store, 1) == (1 if n == 4 else 0)


def test_a_copy_is_counted_beside_the_blocks_that_are_missing(store, cache):
    append(store, cache, 6)
    clone = cache.clone()
    assert [clone.blocks_needed_for(store, n) for n in (0, 1, 2, 3, 6, 7)] == [0, 1, 1, 2, 2, 3]


def test_reserved_blocks_are_not_shared(store, cache):
    append(store, cache, 6)
    cache.reserve(store, 20)
    clone = cache.clone()
    assert clone.capacity == 8
    assert cache.capacity == 28
    assert [store.refcount(block) for block in cache.block_table] == [2, 2, 1, 1, 1, 1, 1]


def test_many_clones_diverge(any_store, cache):
    k, v = append(any_store, cache, 6)
    clones = [cache.clone() for _ in range(4)]
    more = [append(any_store, clone, 3) for clone in clones]
    for clone, (k_more, v_more) in zip(clones, more, strict=True):
        assert_rows(any_store, clone, np.concatenate([k, k_more], 1), np.concatenate([v, v_more], 1))
    assert_rows(any_store, cache, k, v)


def test_a_clone_that_cannot_be_written_for_lack_of_blocks_changes_nothing(cache):
    store = pagedkv.PagedKvStore(4, 2, 1, 1, debug=True)
    append(store, cache, 6)
    clone = cache.clone()
    with refused(pagedkv.PagedStoreExhausted, "1 blocks needed", store, cache, clone):
        append(store, clone, 1)
    with refused(pagedkv.PagedStoreExhausted, "1 blocks needed", store, cache, clone):
        clone.reserve(store, 1)


def test_clone_from_gives_back_its_own_and_shares_the_others(store, cache):
    append(store, cache, 9)
    source = pagedkv.PagedKvCache()
    k, v = append(store, source, 6)
    cache.clone_from(source)
    assert store.free_block_count == 14
    assert cache_state(cache) == cache_state(source)
    assert_rows(store, cache, k, v)


def test_clone_from_crosses_stores(store, layered, cache):
    append(store, cache, 9)
    source = pagedkv.PagedKvCache()
    k, v = append(layered, source, 6)
    cache.clone_from(source)
    assert cache.store is layered
    assert store.free_block_count == 16
    assert_rows(layered, cache, k, v)


def test_clone_from_an_empty_sequence_and_from_itself(store, cache):
    append(store, cache, 9)
    with unchanged(store, cache):
        cache.clone_from(cache)
    cache.clone_from(pagedkv.PagedKvCache())
    assert cache_state(cache) == (0, 0, 0, [], None)
    assert store.free_block_count == 16


def test_clone_from_a_relative_that_shares_all(store, cache):
    k, v = append(store, cache, 6)
    clone = cache.clone()
    clone.clone_from(cache)
    assert [store.refcount(block) for block in cache.block_table] == [2, 2]
    assert_rows(store, clone, k, v)


def test_a_sequence_cannot_be_pickled(cache):
    with pytest.raises(TypeError, match="PagedKvCache"):
        pickle.dumps(cache)
