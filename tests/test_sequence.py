"""PagedKvCache: what it is, and how it grows."""

import numpy as np
import pytest
from helpers import append, assert_rows, cache_state, refused, rows, step_of, unchanged

import pagedkv

# --- new ---


def test_a_new_sequence_is_empty(cache):
    assert (cache.seq_len, cache.capacity, cache.first_position, cache.store) == (0, 0, 0, None)
    assert cache.block_table.tolist() == []


def test_it_takes_no_arguments_and_is_no_container(cache):
    with pytest.raises(TypeError):
        pagedkv.PagedKvCache(1)
    with pytest.raises(TypeError):
        pagedkv.PagedKvCache(store=None)
    with pytest.raises(TypeError):
        len(cache)
    assert bool(cache)
    assert cache != pagedkv.PagedKvCache()


def test_the_block_table_is_a_read_only_snapshot(store, cache):
    append(store, cache, 5)
    table = cache.block_table
    assert table.dtype == np.int32
    assert table.ndim == 1
    with pytest.raises(ValueError, match="read-only"):
        table[0] = 3
    append(store, cache, 5)
    assert table.tolist() == [0, 1]
    assert cache.block_table.tolist() == [0, 1, 2]


def test_repr_tells_length_capacity_and_blocks(store, cache):
    assert repr(cache) == "PagedKvCache(seq_len=0, capacity=0, blocks=[])"
    append(store, cache, 5)
    assert repr(cache) == "PagedKvCache(seq_len=5, capacity=8, blocks=[0, 1])"


def test_repr_of_a_long_sequence_is_short(cache):
    store = pagedkv.PagedKvStore(1, 10_000, 1, 1)
    append(store, cache, 10_000)
    assert len(repr(cache)) < 200


# --- push ---


def test_push_appends_one_position(any_store, cache):
    pushed = [step_of(any_store) for _ in range(6)]
    for n, (k, v) in enumerate(pushed):
        cache.push(any_store, k, v)
        assert cache.seq_len == n + 1
    k = np.stack([k.reshape(any_store.n_layers, -1) for k, _ in pushed], axis=1)
    v = np.stack([v.reshape(any_store.n_layers, -1) for _, v in pushed], axis=1)
    assert_rows(any_store, cache, k, v)


def test_push_takes_a_block_only_when_the_tail_is_full(store, cache):
    for n_held in [1, 1, 1, 1, 2, 2, 2, 2, 3]:
        cache.push(store, *step_of(store))
        assert len(cache.block_table) == n_held
        assert store.free_block_count == 16 - n_held
        assert cache.capacity == 4 * n_held
    assert cache.store is store


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("leading", [(), (1,)])
def test_push_takes_rows_flat_or_split_into_heads(store, cache, split, leading):
    k, v = step_of(store)
    k_shape, v_shape = ((2, 3), (2, 2)) if split else ((6,), (4,))
    cache.push(store, k.reshape(*leading, *k_shape), v.reshape(*leading, *v_shape))
    assert_rows(store, cache, k.reshape(1, 1, 6), v.reshape(1, 1, 4))


def test_push_to_several_layers_takes_a_row_for_each(layered, cache):
    k, v = step_of(layered)
    cache.push(layered, k, v)
    cache.push(layered, k.reshape(3, 2, 3), v.reshape(3, 2, 2))
    assert_rows(layered, cache, np.stack([k, k], axis=1), np.stack([v, v], axis=1))


def test_push_into_a_full_store_changes_nothing(cache):
    store = pagedkv.PagedKvStore(2, 3, 1, 1, debug=True)
    append(store, cache, 4)
    store.acquire(1)
    with refused(pagedkv.PagedStoreExhausted, "1 blocks needed, 0 of 3 free", store, cache) as caught:
        cache.push(store, rows(1), rows(1))
    assert caught.value.can_ever_fit


def test_sequences_grow_side_by_side(any_store):
    caches = [pagedkv.PagedKvCache() for _ in range(3)]
    written = [[], [], []]
    for turn in range(15):
        n = turn % 3
        written[n].append(append(any_store, caches[n], 1 + turn % 4))
    for cache, parts in zip(caches, written, strict=True):
        k, v = (np.concatenate([part[side] for part in parts], axis=1) for side in (0, 1))
        assert_rows(any_store, cache, k, v)


# --- release ---


def test_release_gives_every_block_back(store, cache):
    append(store, cache, 6)
    cache.reserve(store, 20)
    cache.release(store)
    assert store.free_block_count == 16
    assert cache_state(cache) == (0, 0, 0, [], None)


def test_release_twice_is_no_change(store, cache):
    append(store, cache, 6)
    cache.release(store)
    with unchanged(store, cache):
        cache.release(store)


def test_release_leaves_what_others_hold(store, cache):
    k, v = append(store, cache, 6)
    clone = cache.clone()
    cache.release(store)
    assert store.free_block_count == 14
    assert_rows(store, clone, k, v)


def test_a_released_sequence_starts_anew_in_any_store(store, layered, cache):
    append(store, cache, 6)
    cache.release(store)
    k, v = append(layered, cache, 5)
    assert cache.store is layered
    assert_rows(layered, cache, k, v)


# --- blocks_needed_for and reserve ---


def test_blocks_needed_for_is_what_appending_takes(any_store):
    for start in range(9):
        for n_new in range(10):
            cache = pagedkv.PagedKvCache()
            append(any_store, cache, start)
            needed = cache.blocks_needed_for(any_store, n_new)
            free = any_store.free_block_count
            append(any_store, cache, n_new)
            assert free - any_store.free_block_count == needed == -(-(start + n_new) // 4) - -(-start // 4)
            cache.release(any_store)


def test_positions_in_a_held_block_cost_nothing(store, cache):
    append(store, cache, 5)
    assert [cache.blocks_needed_for(store, n) for n in (0, 1, 2, 3, 4, 7, 8)] == [0, 0, 0, 0, 1, 1, 2]


def test_reserved_blocks_are_not_asked_for_twice(store, cache):
    append(store, cache, 5)
    cache.reserve(store, 10)
    assert cache.capacity == 16
    assert [cache.blocks_needed_for(store, n) for n in (1, 11, 12, 16)] == [0, 0, 1, 2]
    with unchanged(store, cache):
        cache.reserve(store, 11)


def test_reserve_does_not_advance(store, cache):
    cache.reserve(store, 9)
    assert (cache.seq_len, cache.capacity, store.free_block_count) == (0, 12, 13)
    assert cache.store is store
    assert cache.to_contiguous(store).seq_len == 0


def test_reserve_of_nothing_is_no_change(store, cache):
    with unchanged(store, cache):
        cache.reserve(store, 0)


def test_after_reserve_pushes_cannot_fail(cache):
    store = pagedkv.PagedKvStore(4, 5, 1, 1, debug=True)
    append(store, cache, 2)
    other = cache.clone()
    cache.reserve(store, 8)
    store.acquire(store.free_block_count)
    for _ in range(8):
        cache.push(store, rows(1), rows(1))
    assert cache.seq_len == 10
    assert other.seq_len == 2


def test_reserve_copies_a_shared_tail_at_once(store, cache):
    k, v = append(store, cache, 6)
    clone = cache.clone()
    clone.reserve(store, 1)
    assert store.refcount(cache.block_table[1]) == 1
    assert clone.block_table[0] == cache.block_table[0]
    assert clone.block_table[1] != cache.block_table[1]
    assert store.stats().copies_on_write == 1
    assert_rows(store, clone, k, v)


@pytest.mark.parametrize("grow", ["reserve", "append"])
def test_a_request_beyond_what_is_free_is_refused_whole(store, cache, grow):
    append(store, cache, 6)
    store.acquire(10)
    n = 19  # 2 in the tail, 16 in the four free blocks, 1 too many
    with refused(pagedkv.PagedStoreExhausted, "5 blocks needed, 4 of 16 free", store, cache) as caught:
        if grow == "reserve":
            cache.reserve(store, n)
        else:
            append(store, cache, n)
    assert (caught.value.needed, caught.value.free, caught.value.total) == (5, 4, 16)
    assert caught.value.can_ever_fit


def test_can_ever_fit_counts_what_the_sequence_holds(store, cache):
    append(store, cache, 8)
    store.acquire(8)
    for n, fits in [(56, True), (57, False)]:
        with refused(pagedkv.PagedStoreExhausted, "needed", store, cache) as caught:
            cache.reserve(store, n)
        assert caught.value.can_ever_fit is fits


def test_can_ever_fit_does_not_count_copies_that_others_cause(cache):
    store = pagedkv.PagedKvStore(4, 1, 1, 1)
    append(store, cache, 1)
    other = cache.clone()
    with refused(pagedkv.PagedStoreExhausted, "1 blocks needed", store, cache, other) as caught:
        append(store, cache, 1)
    assert caught.value.can_ever_fit
    other.release(store)
    append(store, cache, 1)


@pytest.mark.parametrize("n", [2**31, 2**40, 2**60])
def test_a_huge_reservation_can_never_fit(store, cache, n):
    append(store, cache, 3)
    with refused(pagedkv.PagedStoreExhausted, "needed", store, cache) as caught:
        cache.reserve(store, n)
    assert not caught.value.can_ever_fit
    assert cache.blocks_needed_for(store, n) == n // 4 + (0 if n % 4 <= 1 else 1)


# --- one store ---


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("push", (np.zeros(6, np.float32), np.zeros(4, np.float32))),
        ("append_contiguous", (np.zeros((1, 6), np.float32), np.zeros((1, 4), np.float32), 1)),
        ("to_contiguous", ()),
        ("blocks_needed_for", (1,)),
        ("reserve", (1,)),
        ("release", ()),
        ("truncate", (1,)),
        ("drop_before", (1,)),
    ],
)
def test_another_store_is_refused(store, cache, name, arguments):
    other = pagedkv.PagedKvStore(4, 16, 2, 3, v_head_dim=2)
    append(store, cache, 5)
    with unchanged(other):
        with refused(ValueError, "store", store, cache):
            getattr(cache, name)(other, *arguments)
        for wrong in (None, 5, cache, object()):
            with refused(TypeError, "store", store, cache):
                getattr(cache, name)(wrong, *arguments)


def test_a_full_sequence_of_another_store_is_refused_before_the_store_is_short(store, cache):
    other = pagedkv.PagedKvStore(4, 1, 2, 3, v_head_dim=2)
    append(store, cache, 5)
    with refused(ValueError, "store", store, cache):
        cache.reserve(other, 1000)
