"""reorder: forks of a whole batch at once."""

from collections import Counter

import numpy as np
import pytest
from helpers import append, assert_rows, batch, refused, step_of, unchanged
from hypothesis import given
from hypothesis import strategies as st

import pagedkv
from pagedkv import PagedKvCache, PagedKvStore


def owners(store, caches):
    """Each block has as many holders as tables name it."""
    named = Counter(block for cache in caches for block in cache.block_table.tolist() if block >= 0)
    assert [store.refcount(block) for block in range(store.total_blocks)] == [
        named[block] for block in range(store.total_blocks)
    ]


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda p: np.array(p, np.uint8), iter])
def test_beams_go_on_from_their_parents(any_store, kind):
    beams, kv = batch(any_store, 5, 6, 9)
    parents = [2, 0, 2]
    free = any_store.free_block_count
    pagedkv.reorder(any_store, beams, kind(parents))
    for beam, parent in zip(beams, parents, strict=True):
        assert_rows(any_store, beam, *kv[parent])
    assert any_store.free_block_count == free + 2  # of the second; nobody goes on from it
    assert any_store.stats().copies_on_write == 0
    owners(any_store, beams)


def test_forks_part_when_they_grow(store):
    beams, kv = batch(store, 6, 6)
    pagedkv.reorder(store, beams, [0, 0])
    new = [append(store, beam, 1) for beam in beams]
    for beam, rows in zip(beams, new, strict=True):
        assert_rows(store, beam, *(np.concatenate(both, 1) for both in zip(kv[0], rows, strict=True)))
    assert store.stats().copies_on_write == 1
    owners(store, beams)


def test_a_full_store_can_reorder(store):
    beams, kv = batch(store, 32, 32)
    assert store.free_block_count == 0
    pagedkv.reorder(store, beams, [1, 0])
    assert_rows(store, beams[0], *kv[1])
    assert_rows(store, beams[1], *kv[0])
    pagedkv.reorder(store, beams, [0, 0])
    assert store.free_block_count == 8


def test_its_own_parent_keeps_its_reserve(store):
    beams, _ = batch(store, 5, 5)
    for beam in beams:
        beam.reserve(store, 10)
    pagedkv.reorder(store, beams, [0, 0])
    assert [beam.capacity for beam in beams] == [16, 8]
    owners(store, beams)


def test_windows_and_empty_sequences(store):
    beams, kv = batch(store, 10, 0, 5)
    beams[0].drop_before(store, 9)
    pagedkv.reorder(store, beams, [1, 0, 0])
    assert [beam.seq_len for beam in beams] == [0, 10, 10]
    assert [beam.first_position for beam in beams] == [0, 8, 8]
    assert beams[0].store is None
    assert_rows(store, beams[1], *(side[:, 8:] for side in kv[0]))
    owners(store, beams)
    pagedkv.reorder(store, [], [])
    pagedkv.reorder(store, beams[0], [0])


def test_wrong_calls(store):
    beams, _ = batch(store, 5, 6)
    other = PagedKvStore(4, 4, 2, 3, v_head_dim=2)
    stranger = PagedKvCache()
    append(other, stranger, 2)
    busy = PagedKvCache()
    for caches, parents, error, name in [
        (beams, [0], ValueError, "parents"),
        (beams, [0, 0, 0], ValueError, "parents"),
        (beams, [0, 2], IndexError, "parents"),
        (beams, [0, -1], IndexError, "parents"),
        (beams, [0, 1.0], TypeError, "parents"),
        (beams, [0, True], TypeError, "parents"),
        (beams, np.array([0.0, 1.0]), TypeError, "parents"),
        (beams, None, TypeError, "parents"),
        (beams, 1, TypeError, "parents"),
        (beams, np.array(0), TypeError, "parents"),
        (beams, np.array([[0], [1]]), TypeError, "parents"),
        ([beams[0], beams[0]], [0, 0], ValueError, "caches"),
        ([beams[0], None], [0, 0], TypeError, "caches"),
        (None, [0], TypeError, "caches"),
        ([beams[0], stranger], [0, 0], ValueError, "store"),
        ([beams[0], stranger], [1, 1], ValueError, "store"),
    ]:
        with refused(error, name, store, *beams):
            pagedkv.reorder(store, caches, parents)
    with pagedkv.Step(store, [busy], 0), refused(RuntimeError, "cache", store, *beams):
        pagedkv.reorder(store, [*beams, busy], [1, 0, 0])
    with pytest.raises(TypeError):
        pagedkv.reorder(None, beams, [0, 1])
    beams[0].push(store, *step_of(store))  # nobody is left locked
    beams[1].push(store, *step_of(store))


def test_a_table_that_lies_changes_nothing():
    """Someone gave back a block that was not theirs: it is found out before anything moves."""
    store = PagedKvStore(4, 16, 2, 3, v_head_dim=2)
    beams, _ = batch(store, 5, 6)
    store.release(beams[1].block_table[:1])
    counts = [store.refcount(block) for block in range(16)]
    tables = [beam.block_table.tolist() for beam in beams]
    with pytest.raises(pagedkv.PagedKvError):
        pagedkv.reorder(store, beams, [0, 0])
    assert [store.refcount(block) for block in range(16)] == counts
    assert [beam.block_table.tolist() for beam in beams] == tables
    store.retain([0])
    with pytest.raises(ValueError, match="free"):
        store.retain(beams[1].block_table[:1])


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5),
    st.lists(st.lists(st.integers(0, 4), min_size=5, max_size=5), max_size=6),
    st.lists(st.integers(0, 3), min_size=30, max_size=30),
)
def test_any_order_of_reordering_and_growing(lengths, orders, growths):
    store = PagedKvStore(3, 64, 1, 2, n_layers=2, debug=True)
    beams, kv = batch(store, *(n for n, _ in lengths))
    growth = iter(growths)
    for beam, (n, dropped) in zip(beams, lengths, strict=True):
        beam.drop_before(store, min(n, dropped))
    for order in orders:
        parents = [p % len(beams) for p in order[: len(beams)]]
        pagedkv.reorder(store, beams, parents)
        kv = [kv[p] for p in parents]
        for i, beam in enumerate(beams):
            assert beam.seq_len == kv[i][0].shape[1]
            new = append(store, beam, next(growth))
            kv[i] = tuple(np.concatenate(both, 1) for both in zip(kv[i], new, strict=True))
        owners(store, beams)
        for beam, rows in zip(beams, kv, strict=True):
            assert_rows(store, beam, *(side[:, beam.first_position :] for side in rows))
    with unchanged(store, *beams):
        pagedkv.reorder(store, beams, range(len(beams)))
