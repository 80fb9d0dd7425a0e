"""Admission: how much room there is, and who may start; compared with what the store really does."""

import contextlib
import math
import random

import numpy as np
import pytest
from helpers import append, refused, unchanged
from hypothesis import given
from hypothesis import strategies as st
from prefix_support import attach, remember

import pagedkv
from pagedkv import (
    PagedKvCache,
    PagedKvStore,
    PagedStoreExhausted,
    PendingRequest,
    PrefixCache,
    plan_admission,
    room_for,
)


def verdicts(plan):
    return [admission.verdict for admission in plan]


def fits(store, cache, n):
    """Whether the store takes so many positions now; undoes it."""
    before = cache.seq_len
    try:
        append(store, cache, n)
    except PagedStoreExhausted:
        return False
    cache.truncate(store, before)
    return True


# --- room ---------------------------------------------------------------------------------------------


def test_room_of_a_new_sequence(store, prefixes):
    assert room_for(store) == room_for(store, prefix=prefixes) == (64, 64, 64)
    remember(prefixes, range(12))
    assert room_for(store) == (52, 52, 64)
    assert room_for(store, prefix=prefixes) == (52, 64, 64)
    holder, _ = attach(prefixes, range(9))
    assert holder.seq_len == 8
    assert room_for(store, prefix=prefixes) == (52, 56, 64)
    assert room_for(store, holder, prefix=prefixes) == (52, 56, 56)


def test_room_counts_the_tail_the_reserve_and_the_copy(store):
    cache = PagedKvCache()
    append(store, cache, 6)
    assert room_for(store, cache) == (58, 58, 58)
    fork = cache.clone()
    assert room_for(store, fork) == (54, 54, 58)
    fork.reserve(store, 10)
    assert store.free_block_count == 11
    assert room_for(store, fork) == (54, 54, 58)
    taken = store.acquire(11)
    assert room_for(store, cache) == (2, 2, 58)
    assert room_for(store, fork) == (10, 10, 58)
    fork.release(store)
    assert room_for(store, cache) == (14, 14, 58)
    store.release(taken)


def test_room_after_a_window_moved_on(store):
    cache = PagedKvCache()
    append(store, cache, 10)
    cache.drop_before(store, 9)
    assert room_for(store, cache) == (62, 62, 62)
    assert fits(store, cache, 62)
    assert not fits(store, cache, 63)


def test_a_full_store_has_no_room_for_a_shared_tail(store):
    cache = PagedKvCache()
    append(store, cache, 62)
    fork = cache.clone()
    assert room_for(store, fork) == (0, 0, 2)
    with pytest.raises(PagedStoreExhausted):
        append(store, fork, 1)


@given(st.data())
def test_room_is_what_the_store_takes(data):
    size, total = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 10))
    store = PagedKvStore(size, total, 1, 1, debug=True)
    prefixes = PrefixCache(store)
    caches = []
    for _ in range(data.draw(st.integers(0, 4))):
        tokens = data.draw(st.lists(st.integers(0, 1), max_size=8))
        if data.draw(st.booleans()) or not caches:
            cache = PagedKvCache()
            n = prefixes.attach(cache, tokens)
        else:
            cache, n = caches[-1].clone(), len(tokens)
        if fits(store, cache, len(tokens) - n):
            append(store, cache, len(tokens) - n)
            prefixes.insert(tokens, cache)
        if data.draw(st.booleans()):
            caches.append(cache)
    cache = caches[data.draw(st.integers(0, len(caches) - 1))] if caches else None
    now, with_eviction, ever = room_for(store, cache, prefix=prefixes)
    sequence = cache or PagedKvCache()
    assert now <= with_eviction <= ever
    stats = prefixes.stats()
    assert fits(store, sequence, now)
    assert prefixes.stats().blocks_evicted == stats.blocks_evicted
    assert with_eviction == now or fits(store, sequence, with_eviction)
    assert not fits(store, sequence, with_eviction + 1)
    prefixes.clear()
    caches = [sequence]
    del cache
    assert fits(store, sequence, ever)
    with pytest.raises(PagedStoreExhausted) as full:
        append(store, sequence, ever + 1)
    assert not full.value.can_ever_fit


def test_room_refuses(store, prefixes):
    other = PagedKvStore(4, 4, 2, 3)
    stranger = PagedKvCache()
    append(other, stranger, 1)
    for arguments, options, error, name in [
        ((None,), {}, TypeError, "store"),
        ((store, 3), {}, TypeError, "cache"),
        ((store,), {"prefix": store}, TypeError, "prefix"),
        ((other,), {"prefix": prefixes}, ValueError, "prefix"),
        ((store, stranger), {}, ValueError, "store"),
    ]:
        with refused(error, name, store):
            room_for(*arguments, **options)
    busy = PagedKvCache()
    with pagedkv.Step(store, [busy], 0), refused(RuntimeError, "cache", store, busy):
        room_for(store, busy)


# --- who may start ------------------------------------------------------------------------------------


def test_in_turn(store):
    queue = [PendingRequest(range(n)) for n in (40, 24, 1, 65)]
    with unchanged(store):
        assert plan_admission(store, queue) == [("now", 10, 0), ("now", 6, 0), ("wait", 1, 0), ("never", 17, 0)]
    held = store.acquire(1)
    assert verdicts(plan_admission(store, queue)) == ["now", "wait", "wait", "never"]
    assert verdicts(plan_admission(store, queue, overtake=True)) == ["now", "wait", "now", "never"]
    assert verdicts(plan_admission(store, queue[2:], keep_free=14)) == ["now", "never"]
    assert verdicts(plan_admission(store, queue[2:], keep_free=15)) == ["wait", "never"]
    store.release(held)
    assert plan_admission(store, []) == []
    assert [admission.can_start for admission in plan_admission(store, queue)] == [True, True, False, False]


def test_never_looks_at_the_most_it_will_have(store):
    assert verdicts(plan_admission(store, [PendingRequest(range(8), n_most=64)])) == ["now"]
    assert verdicts(plan_admission(store, [PendingRequest(range(8), n_most=65)])) == ["never"]
    assert plan_admission(store, [PendingRequest(range(80), n_positions=8)]) == [("never", 2, 0)]
    assert plan_admission(store, [PendingRequest(range(30), n_positions=8)]) == [("now", 2, 0)]
    assert plan_admission(store, [PendingRequest(n_positions=9)]) == [("now", 3, 0)]


def test_what_is_known_is_not_taken(store, prefixes):
    holder, _ = attach(prefixes, [])
    append(store, holder, 16)
    prefixes.insert(range(16), holder, namespace=b"a")
    taken = store.acquire(10)
    prompt = [*range(14), 99, 98, 97]  # 17 tokens: 5 blocks, 3 of them known, and a copy of part of the fourth
    assert plan_admission(store, [PendingRequest(prompt)], prefix=prefixes) == [("wait", 5, 0)]
    assert plan_admission(store, [PendingRequest(prompt, namespace=b"a")]) == [("wait", 5, 0)]
    assert plan_admission(store, [PendingRequest(prompt, namespace=b"a")], prefix=prefixes) == [("now", 2, 14)]
    store.release(taken)


def test_what_is_found_cannot_be_evicted_for_the_next(store, prefixes):
    remember(prefixes, range(16))
    remember(prefixes, [7] * 16)
    store.acquire(8)
    hit, big = PendingRequest([*range(16), 5]), PendingRequest([9] * 16)
    assert plan_admission(store, [hit, big], prefix=prefixes) == [("evict", 1, 16), ("wait", 4, 0)]
    assert plan_admission(store, [big, hit], prefix=prefixes) == [("evict", 4, 0), ("wait", 1, 16)]
    # The second finds the same blocks: they are counted once.
    assert plan_admission(store, [hit, hit, hit], prefix=prefixes) == [("evict", 1, 16)] * 3
    assert verdicts(plan_admission(store, [hit] * 5, prefix=prefixes)) == ["evict"] * 4 + ["wait"]
    assert verdicts(plan_admission(store, [hit], prefix=prefixes, keep_free=4)) == ["wait"]
    assert verdicts(plan_admission(store, [hit], prefix=prefixes, keep_free=3)) == ["evict"]


def test_a_protected_hit_costs_nobody(store, prefixes):
    remember(prefixes, range(16), ttl=5)
    store.acquire(11)
    assert plan_admission(store, [PendingRequest([*range(16), 5])], prefix=prefixes) == [("now", 1, 16)]


def test_forks_need_their_copies(store):
    cache = PagedKvCache()
    append(store, cache, 6)
    fork = cache.clone()
    store.acquire(13)
    assert plan_admission(store, [PendingRequest(n_positions=8, cache=fork)]) == [("now", 1, 6)]
    assert plan_admission(store, [PendingRequest(n_positions=9, cache=fork)]) == [("wait", 2, 6)]
    assert plan_admission(store, [PendingRequest(n_positions=3, cache=fork, n_most=64)]) == [("now", 0, 6)]
    assert plan_admission(store, [PendingRequest(cache=fork, n_most=65)]) == [("never", 0, 6)]
    assert plan_admission(store, [PendingRequest(range(4), cache=PagedKvCache())]) == [("now", 1, 0)]


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=9), st.booleans()), max_size=5),
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=5),
    st.booleans(),
)
def test_what_may_start_can(known, prompts, overtake):
    """All are attached, then each computes its rest: nobody runs short, and one more position would be one too many."""
    store = PagedKvStore(2, 12, 1, 1, debug=True)
    prefixes = PrefixCache(store)
    running = []
    for tokens, stays in known:
        cache = PagedKvCache()
        append(store, cache, len(tokens)) if fits(store, cache, len(tokens)) else None
        prefixes.insert(tokens, cache)
        running += [cache] * stays
    cache = None
    plan = plan_admission(store, map(PendingRequest, prompts), prefix=prefixes, overtake=overtake)
    starting = [prompt for prompt, admission in zip(prompts, plan, strict=True) if admission.can_start]
    free = store.free_block_count
    assert sum(a.n_blocks for a in plan if a.verdict == "now") <= free
    caches = [PagedKvCache() for _ in starting]
    for cache, prompt in zip(caches, starting, strict=True):
        size = store.block_size
        whole = prefixes.match(prompt) // size * size
        assert prefixes.attach(cache, [*prompt[:whole], 9]) == whole
    for cache, prompt in zip(caches, starting, strict=True):
        append(store, cache, len(prompt) - cache.seq_len)
    store.check([*caches, *running])


def test_plan_refuses(store, prefixes):
    for queue, options, error, name in [
        ([None], {}, TypeError, "pending[0]"),
        ([PendingRequest(), [1, 2]], {}, TypeError, "pending[1]"),
        ([PendingRequest([1.5])], {}, ValueError, "pending[0]: tokens"),
        ([PendingRequest([1], n_positions=-1)], {}, ValueError, "pending[0]: n_positions"),
        ([PendingRequest([1], n_most=1.0)], {}, TypeError, "pending[0]: n_most"),
        ([PendingRequest([1], cache=3)], {}, TypeError, "pending[0]: cache"),
        ([PendingRequest([1], namespace="a")], {"prefix": prefixes}, TypeError, "pending[0]: namespace"),
        ([], {"keep_free": -1}, ValueError, "keep_free"),
        ([], {"prefix": 1}, TypeError, "prefix"),
    ]:
        with refused(error, name, store):
            plan_admission(store, queue, **options)
    assert np.array_equal(prefixes.match_blocks([1]), [])


def test_evictable_blocks_are_named(store, prefixes):
    holder = PagedKvCache()
    append(store, holder, 4)
    prefixes.insert(range(4), holder)
    block = int(holder.block_table[0])
    assert not prefixes.is_evictable(block)
    holder.release(store)
    assert prefixes.is_evictable(block)
    assert not prefixes.is_evictable(block + 1)
    with pytest.raises(IndexError):
        prefixes.is_evictable(16)
    with pytest.raises(TypeError):
        prefixes.is_evictable(1.0)


# --- what is promised, and what is so -------------------------------------------------------------------


def a_world(seed):
    """A store, its prefix cache and one sequence of several that share, have reserved and were cut; always the same."""
    draw = random.Random(seed)
    store = pagedkv.PagedKvStore(draw.randrange(1, 5), draw.randrange(3, 16), 1, 1)
    prefixes = pagedkv.PrefixCache(store)
    caches = []
    for _ in range(draw.randrange(2, 10)):
        cache = draw.choice(caches).clone() if caches and draw.random() < 0.4 else pagedkv.PagedKvCache()
        caches.append(cache)
        tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 16))]
        with contextlib.suppress(pagedkv.PagedStoreExhausted):
            if cache.capacity == 0 and draw.random() < 0.6:
                prefixes.attach(cache, tokens)
            append(store, cache, draw.randrange(6))
            prefixes.insert(tokens, cache, ttl=draw.choice([None, None, math.inf]))
            if draw.random() < 0.3:
                cache.reserve(store, draw.randrange(1, 6))
            if draw.random() < 0.5:
                cache.truncate(store, draw.randrange(cache.first_position, cache.seq_len + 1))
        if draw.random() < 0.4:
            caches.remove(cache)
            cache.release(store)
    return store, prefixes, draw.choice(caches) if caches else pagedkv.PagedKvCache()


@pytest.mark.parametrize("with_eviction", [False, True])
def test_room_is_what_can_be_pushed(with_eviction):
    """Counted by pushing, in the same world made again; what the prefix cache has is taken out of reach for `now`."""
    for seed in range(400):
        store, prefixes, cache = a_world(seed)
        room = pagedkv.room_for(store, cache, prefix=prefixes)
        if not with_eviction:
            ids = [block for block in range(store.total_blocks) if prefixes.is_evictable(block)]
            store.retain(ids)
            # What the copy of a shared tail leaves to the prefix cache is not free either.
            store.retain([block for block in cache.block_table.tolist() if block >= 0 and store.refcount(block) == 2])
        n = 0
        with contextlib.suppress(pagedkv.PagedStoreExhausted):
            while True:
                cache.push(store, *np.zeros((2, 1), np.float32))
                n += 1
        assert n == (room.with_eviction if with_eviction else room.now), seed
