"""Step: a batch and all its layers grow together. What it attends to is tested with the attention."""

import numpy as np
import pytest
from helpers import assert_rows, batch, grown, rows, unchanged, write_all

import pagedkv

# --- what it does ---


def test_every_sequence_grows_by_its_query_length(any_store):
    caches, old = batch(any_store, 0, 3, 4, 6)
    with pagedkv.Step(any_store, caches, [5, 1, 1, 0]) as step:
        new = write_all(step)
        assert [cache.seq_len for cache in caches] == [0, 3, 4, 6], "not visible yet"
    assert [cache.seq_len for cache in caches] == [5, 4, 5, 6]
    for cache, was, part in zip(caches, old, [slice(0, 5), slice(5, 6), slice(6, 7), slice(7, 7)], strict=True):
        assert_rows(any_store, cache, *grown(was, new, part))
        assert cache.store is any_store


def test_one_query_length_stands_for_all_and_is_one_by_default(store):
    caches, _ = batch(store, 0, 3)
    for arguments, lens in [((), (1, 1)), ((3,), (3, 3)), ((np.int64(2),), (2, 2)), ((np.array([1, 2]),), (1, 2))]:
        step = pagedkv.Step(store, caches, *arguments)
        assert step.query_lens == lens
        assert step.n_rows == sum(lens)


@pytest.mark.parametrize("wrap", [list, tuple, iter])
def test_any_sequence_of_caches_and_a_single_one(store, wrap):
    caches, _ = batch(store, 2, 3)
    with pagedkv.Step(store, wrap(caches)) as step:
        write_all(step)
    assert [cache.seq_len for cache in caches] == [3, 4]
    with pagedkv.Step(store, caches[0], 2) as step:
        write_all(step)
    assert caches[0].seq_len == 5


def test_what_a_forward_pass_asks(store):
    caches, _ = batch(store, 0, 3, 4, 6)
    step = pagedkv.Step(store, caches, [5, 1, 0, 2])
    assert step.store is store
    assert (step.query_lens, step.n_rows) == ((5, 1, 0, 2), 8)
    for name in ("positions", "seq_lens", "new_blocks"):
        with pytest.raises(RuntimeError, match="not entered"):
            getattr(step, name)
    with step:
        assert step.positions.dtype == np.int64
        assert step.positions.tolist() == [0, 1, 2, 3, 4, 3, 6, 7]
        assert step.seq_lens == (5, 4, 4, 8)
        assert step.new_blocks == 2
        assert store.free_block_count == 16 - 4 - 2
        write_all(step)
    assert step.seq_lens == (5, 4, 4, 8), "stays as it was"
    assert step.positions.tolist() == [0, 1, 2, 3, 4, 3, 6, 7]


@pytest.mark.parametrize("split", [False, True])
def test_rows_may_be_flat_or_split_into_heads(store, split):
    caches, _ = batch(store, 0, 0)
    k, v = rows(3, 6), rows(3, 4)
    with pagedkv.Step(store, caches, [1, 2]) as step:
        step.write(0, *((k.reshape(3, 2, 3), v.reshape(3, 2, 2)) if split else (k, v)))
    assert_rows(store, caches[1], k[None, 1:], v[None, 1:])


def test_rows_of_any_strides(layered):
    caches, _ = batch(layered, 1, 2)
    k, v = rows(3, 6), rows(3, 4)
    with pagedkv.Step(layered, caches, [2, 1]) as step:
        for layer in range(3):
            step.write(layer, np.asfortranarray(k), v[::-1].copy()[::-1])
    got = caches[0].to_contiguous(layered, layer=2)
    assert np.array_equal(got.k[1:], k[:2])
    assert np.array_equal(got.v[1:], v[:2])


def test_writing_a_layer_again_replaces_its_rows(layered):
    caches, old = batch(layered, 3, 5)
    with pagedkv.Step(layered, caches) as step:
        write_all(step)
        new = write_all(step)
    assert_rows(layered, caches[1], *grown(old[1], new, slice(1, 2)))


def test_layers_may_be_written_in_any_order(layered):
    caches, old = batch(layered, 3)
    k, v = rows(3, 1, 6), rows(3, 1, 4)
    with pagedkv.Step(layered, caches) as step:
        for layer in (2, 0, 1):
            step.write(layer, k[layer], v[layer])
    assert_rows(layered, caches[0], *grown(old[0], (k, v), slice(0, 1)))


def test_reserved_blocks_are_filled_first(store):
    caches, old = batch(store, 3)
    caches[0].reserve(store, 9)
    table = caches[0].block_table.tolist()
    with pagedkv.Step(store, caches, 9) as step:
        assert step.new_blocks == 0
        new = write_all(step)
    assert caches[0].block_table.tolist() == table
    assert_rows(store, caches[0], *grown(old[0], new, slice(0, 9)))


def test_adopted_blocks_are_bound_by_the_step(store):
    [source], _ = batch(store, 4)
    store.retain(source.block_table)
    cache = pagedkv.PagedKvCache()
    cache.adopt_blocks(source.block_table, 4, 4)
    with pagedkv.Step(store, cache) as step:
        write_all(step)
    assert cache.store is store
    assert cache.seq_len == 5


@pytest.mark.parametrize("n_dropped", [4, 8])
def test_a_window_that_was_dropped_stays_so(store, n_dropped):
    caches, old = batch(store, 8)
    caches[0].drop_before(store, n_dropped)
    with pagedkv.Step(store, caches, 2) as step:
        assert step.positions.tolist() == [8, 9]
        new = write_all(step)
    k, v = grown(old[0], new, slice(0, 2))
    assert caches[0].first_position == n_dropped
    assert_rows(store, caches[0], k[:, n_dropped:], v[:, n_dropped:])


@pytest.mark.parametrize("lens", [0, [0, 0]])
def test_a_batch_of_no_rows(layered, lens):
    caches, _ = batch(layered, 3, 0)
    with unchanged(layered, *caches):
        with pagedkv.Step(layered, caches, lens) as step:
            assert (step.n_rows, step.new_blocks) == (0, 0)
            assert step.positions.shape == (0,)
            with pytest.raises(RuntimeError, match="in use"):
                caches[0].release(layered)
        with pagedkv.Step(layered, caches, lens) as step:
            step.write(0, np.empty((0, 6), np.float32), np.empty((0, 4), np.float32))


def test_an_empty_batch(store):
    with unchanged(store):
        with pagedkv.Step(store, []) as step:
            assert (step.n_rows, step.query_lens, step.seq_lens) == (0, (), ())
        with pagedkv.Step(store, [], []):
            pass


def test_a_long_batch_of_everything(store):
    """Prefill and decode, fresh, shared, reserved and dropped, in one step of many rows."""
    large = pagedkv.PagedKvStore(16, 300, 2, 32, n_layers=2, debug=True)
    caches, old = batch(large, 0, 100, 31, 16, 200, 7)
    clone = caches[2].clone()
    caches[3].reserve(large, 40)
    caches[4].drop_before(large, 150)
    lens = [777, 1, 1, 33, 2, 0]
    starts = np.concatenate([[0], np.cumsum(lens)])
    with pagedkv.Step(large, caches, lens) as step:
        new = write_all(step)
    for i, cache in enumerate(caches):
        k, v = grown(old[i], new, slice(starts[i], starts[i + 1]))
        first = cache.first_position
        assert_rows(large, cache, k[:, first:], v[:, first:])
    assert_rows(large, clone, *old[2])


# --- copy on write ---


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_shared_tail_is_copied_when_the_step_commits(any_store, end):
    [cache], [old] = batch(any_store, 6)
    clone = cache.clone()
    shared = cache.block_table[1]
    step = pagedkv.Step(any_store, [cache])
    with step:
        assert step.new_blocks == 1
        new = write_all(step)
        assert cache.block_table[1] == shared, "the old table until the end"
        assert_rows(any_store, clone, *old)
        if end == "rollback":
            step.rollback()
    if end == "commit":
        assert cache.block_table[1] != shared
        assert any_store.refcount(shared) == 1
        assert any_store.stats().copies_on_write == 1
        assert_rows(any_store, cache, *grown(old, new, slice(0, 1)))
    else:
        assert cache.block_table[1] == shared
        assert any_store.refcount(shared) == 2
        assert any_store.stats().copies_on_write == 0
        assert_rows(any_store, cache, *old)
    assert_rows(any_store, clone, *old)


def test_relatives_in_one_step_part_ways(any_store):
    [cache], [old] = batch(any_store, 6)
    family = [cache, cache.clone(), cache.clone()]
    with pagedkv.Step(any_store, family, [1, 3, 0]) as step:
        new = write_all(step)
    assert_rows(any_store, family[0], *grown(old, new, slice(0, 1)))
    assert_rows(any_store, family[1], *grown(old, new, slice(1, 4)))
    assert_rows(any_store, family[2], *old)
    for member in family:
        member.release(any_store)
    assert any_store.free_block_count == 16


def test_all_relatives_writing_leaves_no_block_behind(store):
    [cache], [old] = batch(store, 6)
    family = [cache, cache.clone(), cache.clone()]
    with pagedkv.Step(store, family) as step:
        new = write_all(step)
    assert store.free_block_count == 16 - 1 - 3
    for i, member in enumerate(family):
        assert_rows(store, member, *grown(old, new, slice(i, i + 1)))


def test_a_relative_that_goes_while_the_step_runs(store):
    [cache], [old] = batch(store, 6)
    clone = cache.clone()
    with pagedkv.Step(store, [cache]) as step:
        clone.release(store)
        new = write_all(step)
    assert_rows(store, cache, *grown(old, new, slice(0, 1)))
    assert store.free_block_count == 14
