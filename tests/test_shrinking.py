"""PagedKvCache: truncation, dropped windows, and what garbage collection gives back."""

import gc
import weakref

import numpy as np
import pytest
from helpers import append, assert_rows, refused, rows, run_python, unchanged

import pagedkv

# --- truncate and drop_before ---


@pytest.mark.parametrize("new_len", range(10))
def test_truncate_cuts_and_gives_back_what_lies_past(any_store, cache, new_len):
    k, v = append(any_store, cache, 9)
    cache.reserve(any_store, 10)
    assert cache.can_truncate_to(new_len)
    cache.truncate(any_store, new_len)
    assert cache.seq_len == new_len
    assert len(cache.block_table) == -(-new_len // 4)
    assert any_store.free_block_count == 16 - -(-new_len // 4)
    assert_rows(any_store, cache, k[:, :new_len], v[:, :new_len])
    k_more, v_more = append(any_store, cache, 6)
    assert_rows(
        any_store, cache, np.concatenate([k[:, :new_len], k_more], 1), np.concatenate([v[:, :new_len], v_more], 1)
    )


def test_a_cut_clone_copies_before_it_writes_over_what_the_other_still_reads(any_store, cache):
    k, v = append(any_store, cache, 8)
    clone = cache.clone()
    clone.truncate(any_store, 6)
    append(any_store, clone, 2)
    assert_rows(any_store, cache, k, v)


def test_truncate_up_is_refused(store, cache):
    append(store, cache, 5)
    cache.reserve(store, 10)
    assert not cache.can_truncate_to(6)
    with refused(ValueError, "new_len", store, cache):
        cache.truncate(store, 6)


@pytest.mark.parametrize("position", range(11))
def test_drop_before_gives_back_whole_blocks_only(any_store, cache, position):
    k, v = append(any_store, cache, 10)
    cache.drop_before(any_store, position)
    first = position // 4 * 4
    assert cache.first_position == first
    assert (cache.seq_len, cache.capacity) == (10, 12)
    assert cache.block_table.tolist()[: first // 4] == [-1] * (first // 4)
    assert (cache.block_table[first // 4 :] >= 0).all()
    assert any_store.free_block_count == 13 + first // 4
    assert_rows(any_store, cache, k[:, first:], v[:, first:])
    k_more, v_more = append(any_store, cache, 3)
    assert_rows(any_store, cache, np.concatenate([k[:, first:], k_more], 1), np.concatenate([v[:, first:], v_more], 1))


def test_dropping_never_goes_back(store, cache):
    append(store, cache, 10)
    cache.drop_before(store, 9)
    with unchanged(store, cache):
        cache.drop_before(store, 3)
        cache.drop_before(store, 0)
        cache.drop_before(store, 8)


def test_dropping_past_the_end_is_refused(store, cache):
    append(store, cache, 10)
    with refused(ValueError, "position", store, cache):
        cache.drop_before(store, 11)
    with refused(ValueError, "position", store, pagedkv.PagedKvCache()):
        pagedkv.PagedKvCache().drop_before(store, 1)


def test_dropping_all_keeps_the_length(store, cache):
    append(store, cache, 8)
    cache.drop_before(store, 8)
    assert (cache.seq_len, cache.first_position, store.free_block_count) == (8, 8, 16)
    assert cache.blocks_needed_for(store, 4) == 1
    k, v = append(store, cache, 3)
    assert_rows(store, cache, k, v)


def test_what_was_dropped_cannot_be_cut_to(store, cache):
    append(store, cache, 10)
    cache.drop_before(store, 6)
    assert [cache.can_truncate_to(n) for n in (0, 3, 4, 10, 11)] == [False, False, True, True, False]
    with refused(ValueError, "new_len", store, cache):
        cache.truncate(store, 3)
    cache.truncate(store, 4)
    k, v = append(store, cache, 2)
    assert_rows(store, cache, k, v)


def test_what_was_dropped_cannot_be_read(store, cache):
    append(store, cache, 10)
    cache.drop_before(store, 4)
    with refused(ValueError, "4", store, cache):
        cache.to_contiguous(store)


def test_dropping_leaves_what_others_hold(store, cache):
    k, v = append(store, cache, 10)
    clone = cache.clone()
    cache.drop_before(store, 8)
    assert store.free_block_count == 13
    assert_rows(store, clone, k, v)


def test_a_clone_of_a_dropped_sequence(store, cache):
    k, v = append(store, cache, 10)
    cache.drop_before(store, 5)
    clone = cache.clone()
    assert clone.first_position == 4
    cache.release(store)
    assert_rows(store, clone, k[:, 4:], v[:, 4:])
    clone.release(store)
    assert store.free_block_count == 16


# --- garbage ---


def test_a_collected_sequence_gives_its_blocks_back(store):
    cache = pagedkv.PagedKvCache()
    append(store, cache, 9)
    clone = cache.clone()
    del cache
    assert store.free_block_count == 13
    del clone
    assert store.free_block_count == 16


def test_and_so_does_one_in_a_cycle(store):
    class Sequence(pagedkv.PagedKvCache):
        pass

    cache = Sequence()
    cache.myself = cache
    append(store, cache, 9)
    del cache
    gc.collect()
    assert store.free_block_count == 16


def test_and_one_whose_use_was_refused(store):
    for _ in range(3):
        cache = pagedkv.PagedKvCache()
        append(store, cache, 9)
        with pytest.raises(pagedkv.PagedStoreExhausted):
            append(store, cache, 100)
        with pytest.raises(ValueError, match="k_step"):
            cache.push(store, rows(1), rows(1))
    del cache
    gc.collect()
    assert store.free_block_count == 16


@pytest.mark.parametrize("order", ["[store, cache]", "[cache, store]"])
def test_a_cycle_of_a_store_and_its_sequences_is_collected(order):
    """The collector may clear the store before the sequence: in a process of its own, since that could end it."""
    run_python(f"""
        import gc, weakref, pagedkv
        gc.disable()
        for _ in range(20):
            store, cache = pagedkv.PagedKvStore(4, 4, 1, 1, debug=True), pagedkv.PagedKvCache()
            cache.reserve(store, 5)
            seen = weakref.ref(store), weakref.ref(cache)
            cycle = {order}
            cycle.append(cycle)
            del store, cache, cycle
            gc.collect()
            assert [ref() for ref in seen] == [None, None]
    """)


def test_blocks_survive_until_the_interpreter_ends():
    run_python("""
        import pagedkv
        store = pagedkv.PagedKvStore(4, 4, 1, 1)
        cache = pagedkv.PagedKvCache()
        cache.reserve(store, 5)
        pagedkv.kept = [store, cache, pagedkv.PagedKvCache]
    """)


# --- subclasses ---


def test_a_subclass_is_cloned_as_itself(store):
    class Sequence(pagedkv.PagedKvCache):
        def __init__(self, name):
            super().__init__()
            self.name = name

    sequence = Sequence("a")
    k, v = append(store, sequence, 5)
    clone = sequence.clone()
    assert type(clone) is Sequence
    assert repr(clone).startswith("Sequence(seq_len=5")
    assert_rows(store, clone, k, v)
    reference = weakref.ref(clone)
    del clone
    assert reference() is None


def test_lengths_cannot_be_set(cache):
    for name in ("seq_len", "capacity", "first_position", "block_table", "store"):
        with pytest.raises(AttributeError):
            setattr(cache, name, 1)
