"""KvCache and KvBlockPool: private contiguous rows, and the budget that they may share."""

import copy
import gc
import pickle

import numpy as np
import pytest
import reference
from helpers import append, assert_same_bits, contiguous_state, rows
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pairs import both, compare_contiguous

import pagedkv

# --- KvCache alone ---


def test_a_new_cache_is_empty():
    cache = pagedkv.KvCache(2, 3, v_head_dim=5)
    assert (cache.seq_len, cache.n_kv_heads, cache.head_dim, cache.v_head_dim) == (0, 2, 3, 5)
    assert cache.k.shape == (0, 6)
    assert cache.v.shape == (0, 10)
    assert (cache.allocated_bytes, cache.is_within_planned_capacity) == (0, False)
    assert pagedkv.KvCache(2, 3).v_head_dim == 3


@pytest.mark.parametrize("split", [False, True])
def test_push_appends_a_position(split):
    cache = pagedkv.KvCache(2, 3, v_head_dim=2)
    k, v = rows(20, 6), rows(20, 4)
    for i in range(20):
        cache.push(*((k[i].reshape(2, 3), v[i].reshape(2, 2)) if split else (k[i], v[i])))
        assert cache.seq_len == i + 1
    assert_same_bits(cache.k, k)
    assert_same_bits(cache.v, v)


@pytest.mark.parametrize("split", [False, True])
def test_extend_appends_many(split):
    cache = pagedkv.KvCache(2, 3, v_head_dim=2)
    k, v = rows(20, 6), rows(20, 4)
    for part in (slice(0, 0), slice(0, 1), slice(1, 13), slice(13, 20)):
        cache.extend(*((k[part].reshape(-1, 2, 3), v[part].reshape(-1, 2, 2)) if split else (k[part], v[part])))
    assert_same_bits(cache.k, k)
    assert_same_bits(cache.v, v)


def test_a_cache_can_extend_itself():
    cache = pagedkv.KvCache(1, 2)
    k, v = rows(3, 2), rows(3, 2)
    cache.extend(k, v)
    cache.extend(cache.k, cache.v)
    cache.push(cache.k[1], cache.v[1])
    assert_same_bits(cache.k, np.concatenate([k, k, k[1:2]]))
    assert_same_bits(cache.v, np.concatenate([v, v, v[1:2]]))


def test_growth_moves_rows_rarely():
    cache = pagedkv.KvCache(1, 1)
    sizes = set()
    for _ in range(1000):
        cache.push(rows(1), rows(1))
        sizes.add(cache.allocated_bytes)
        assert cache.allocated_bytes >= cache.seq_len * 8
    assert len(sizes) <= 12
    assert cache.allocated_bytes <= 2 * 1000 * 8


def test_views_are_read_only_and_keep_their_rows():
    cache = pagedkv.KvCache(1, 2)
    k, v = rows(1, 2), rows(1, 2)
    cache.push(k[0], v[0])
    seen = cache.k, cache.v
    for view in seen:
        with pytest.raises(ValueError, match="read-only"):
            view[:] = 0
    cache.extend(rows(100, 2), rows(100, 2))
    del cache
    assert_same_bits(seen[0], k)
    assert_same_bits(seen[1], v)


def test_truncate_and_clear():
    cache = pagedkv.KvCache(1, 2)
    k, v = rows(5, 2), rows(5, 2)
    cache.extend(k, v)
    allocated = cache.allocated_bytes
    cache.truncate(3)
    assert_same_bits(cache.k, k[:3])
    cache.truncate(3)
    for n in (4, 5, 2**40):
        with pytest.raises(ValueError, match="n: expected"):
            cache.truncate(n)
    assert cache.seq_len == 3
    cache.clear()
    assert (cache.seq_len, cache.allocated_bytes) == (0, allocated)


def test_a_planned_capacity():
    cache = pagedkv.KvCache.with_capacity(2, 3, 10, v_head_dim=1)
    assert cache.allocated_bytes == 10 * 2 * (3 + 1) * 4
    assert cache.is_within_planned_capacity
    cache.extend(rows(10, 6), rows(10, 2))
    assert cache.allocated_bytes == 10 * 2 * (3 + 1) * 4
    assert cache.is_within_planned_capacity
    cache.push(rows(6), rows(2))
    assert not cache.is_within_planned_capacity
    cache.truncate(1)
    assert not cache.is_within_planned_capacity, "it outgrew the plan once"


def test_a_plan_of_nothing_is_outgrown_at_once():
    cache = pagedkv.KvCache.with_capacity(1, 1, 0)
    assert cache.is_within_planned_capacity
    cache.push(rows(1), rows(1))
    assert not cache.is_within_planned_capacity


def test_repr():
    assert repr(pagedkv.KvCache(2, 3, v_head_dim=1)) == "KvCache(seq_len=0, n_kv_heads=2, head_dim=3, v_head_dim=1)"


def test_contiguous_things_cannot_be_copied_or_pickled():
    pool = pagedkv.KvBlockPool(4, 8)
    for thing in (pagedkv.KvCache(1, 1), pagedkv.KvCache.with_pool(1, 1, pool, 4), pool):
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError):
                attempt(thing)


def test_init_runs_once():
    cache = pagedkv.KvCache(2, 3)
    with pytest.raises(RuntimeError, match="__init__"):
        cache.__init__(4, 4)
    assert (cache.n_kv_heads, cache.head_dim) == (2, 3)


def test_a_cache_without_init_holds_nothing():
    cache = pagedkv.KvCache.__new__(pagedkv.KvCache)
    assert (cache.seq_len, cache.k.size, cache.v.size) == (0, 0, 0)
    for write in (cache.push, cache.extend):
        for empty in (rows(1), np.empty(0, np.float32), np.empty((5, 0), np.float32)):
            with pytest.raises(RuntimeError, match="__init__ has not run"):
                write(empty, empty)
    cache.release_to_pool()


# --- with a pool ---


@pytest.mark.parametrize(("max_seq_len", "n_blocks"), [(0, 1), (1, 1), (4, 1), (5, 2), (32, 8)])
def test_with_pool_takes_the_plan_at_once(max_seq_len, n_blocks):
    pool = pagedkv.KvBlockPool(4, 8)
    cache = pagedkv.KvCache.with_pool(1, 2, pool, max_seq_len)
    assert pool.free_blocks == 8 - n_blocks
    assert cache.is_within_planned_capacity
    cache.extend(rows(max_seq_len, 2), rows(max_seq_len, 2))
    assert pool.free_blocks == 8 - n_blocks
    assert cache.is_within_planned_capacity


def test_a_pool_that_is_short_refuses_and_keeps_its_budget():
    pool = pagedkv.KvBlockPool(4, 8)
    kept = pagedkv.KvCache.with_pool(1, 2, pool, 20)
    with pytest.raises(pagedkv.KvPoolExhausted, match="4 blocks needed, 3 of 8 free") as caught:
        pagedkv.KvCache.with_pool(1, 2, pool, 13)
    assert (caught.value.needed, caught.value.free, caught.value.total) == (4, 3, 8)
    assert isinstance(caught.value, pagedkv.PagedKvError)
    assert pool.free_blocks == 3
    assert kept.seq_len == 0


def test_pushes_past_the_plan_take_one_block_each_time():
    pool = pagedkv.KvBlockPool(4, 3)
    cache = pagedkv.KvCache.with_pool(1, 2, pool, 4)
    free = []
    for _ in range(12):
        cache.push(rows(2), rows(2))
        free.append(pool.free_blocks)
    assert free == [2] * 4 + [1] * 4 + [0] * 4
    before = contiguous_state(cache)
    with pytest.raises(pagedkv.KvPoolExhausted):
        cache.push(rows(2), rows(2))
    assert contiguous_state(cache) == before
    cache.truncate(11)
    cache.push(rows(2), rows(2))


def test_extend_past_the_budget_takes_nothing():
    pool = pagedkv.KvBlockPool(4, 3)
    cache = pagedkv.KvCache.with_pool(1, 2, pool, 4)
    cache.push(rows(2), rows(2))
    before = contiguous_state(cache)
    with pytest.raises(pagedkv.KvPoolExhausted, match="3 blocks needed, 2 of 3 free"):
        cache.extend(rows(12, 2), rows(12, 2))
    assert contiguous_state(cache) == before
    assert pool.free_blocks == 2
    cache.extend(rows(11, 2), rows(11, 2))
    assert pool.free_blocks == 0


def test_the_budget_returns_on_release_and_only_once():
    pool = pagedkv.KvBlockPool(4, 8)
    cache = pagedkv.KvCache.with_pool(1, 2, pool, 20)
    cache.push(rows(2), rows(2))
    cache.release_to_pool()
    assert (pool.free_blocks, cache.seq_len, cache.allocated_bytes) == (8, 0, 0)
    cache.release_to_pool()
    assert pool.free_blocks == 8
    cache.push(rows(2), rows(2))
    assert (pool.free_blocks, cache.seq_len) == (7, 1)


def test_the_budget_returns_with_the_garbage():
    pool = pagedkv.KvBlockPool(4, 8)
    cache = pagedkv.KvCache.with_pool(1, 2, pool, 20)
    del cache
    assert pool.free_blocks == 8
    cycle = [pool, pagedkv.KvCache.with_pool(1, 2, pool, 20)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pool.free_blocks == 8


def test_truncate_and_clear_keep_the_budget():
    pool = pagedkv.KvBlockPool(4, 8)
    cache = pagedkv.KvCache.with_pool(1, 2, pool, 20)
    cache.extend(rows(20, 2), rows(20, 2))
    cache.truncate(1)
    cache.clear()
    assert pool.free_blocks == 3


def test_a_pool_can_be_resized_down_to_what_is_held():
    pool = pagedkv.KvBlockPool(4, 8)
    cache = pagedkv.KvCache.with_pool(1, 2, pool, 20)
    with pytest.raises(ValueError, match="total_blocks: expected at least 5"):
        pool.resize(4)
    assert (pool.total_blocks, pool.free_blocks) == (8, 3)
    pool.resize(5)
    assert (pool.total_blocks, pool.free_blocks) == (5, 0)
    pool.resize(100)
    assert pool.free_blocks == 95
    cache.release_to_pool()
    assert repr(pool) == "KvBlockPool(block_size=4, total_blocks=100, free_blocks=100)"


def test_memory_that_cannot_be_had_leaves_the_budget():
    pool = pagedkv.KvBlockPool(1 << 50, 8)
    with pytest.raises(MemoryError):
        pagedkv.KvCache.with_pool(1024, 1024, pool, 1 << 50)
    gc.collect()
    assert pool.free_blocks == 8
    with pytest.raises(MemoryError):
        pagedkv.KvCache.with_capacity(1024, 1024, 1 << 50)


class ContiguousMachine(RuleBasedStateMachine):
    """KvCaches, some of which share a pool, against their twins."""

    pick = st.integers(0, 11)
    small = st.integers(0, 12)

    @initialize(total=st.integers(1, 12))
    def start(self, total):
        self.pools = pagedkv.KvBlockPool(3, total), reference.Pool(3, total)
        self.caches = []

    def cache(self, which):
        if not self.caches:
            self.caches.append((pagedkv.KvCache(1, 2, v_head_dim=1), reference.Contiguous()))
        return self.caches[which % len(self.caches)]

    @rule(planned=small)
    def with_capacity(self, planned):
        self.caches.append((pagedkv.KvCache.with_capacity(1, 2, planned, v_head_dim=1), reference.Contiguous(planned)))

    @rule(planned=small)
    def with_pool(self, planned):
        real_pool, pool = self.pools
        made = both(
            lambda: pagedkv.KvCache.with_pool(1, 2, real_pool, planned, v_head_dim=1),
            lambda: reference.Contiguous(planned, pool),
        )
        if made:
            self.caches.append(made)

    @rule(which=pick)
    def push(self, which):
        real, twin = self.cache(which)
        k, v = rows(1, 2), rows(1, 1)
        both(lambda: real.push(k[0], v[0]), lambda: twin.extend([(k, v)]))

    @rule(which=pick, n=small)
    def extend(self, which, n):
        real, twin = self.cache(which)
        k, v = rows(n, 2), rows(n, 1)
        both(lambda: real.extend(k, v), lambda: twin.extend([(k[i : i + 1], v[i : i + 1]) for i in range(n)]))

    @rule(which=pick, n=small)
    def gather(self, which, n):
        """to_contiguous into a cache that is there already."""
        real, twin = self.cache(which)
        store, sequence = pagedkv.PagedKvStore(4, 3, 1, 2, v_head_dim=1), pagedkv.PagedKvCache()
        k, v = append(store, sequence, n)
        both(
            lambda: sequence.to_contiguous(store, out=real),
            lambda: twin.replace([(k[:, i], v[:, i]) for i in range(n)]),
        )

    @rule(which=pick, n=small)
    def truncate(self, which, n):
        real, twin = self.cache(which)
        both(lambda: real.truncate(n), lambda: twin.truncate(n))

    @rule(which=pick)
    def release_to_pool(self, which):
        real, twin = self.cache(which)
        real.release_to_pool()
        twin.release_to_pool()

    @rule(which=pick)
    def forget(self, which):
        real, twin = self.cache(which)
        self.caches.remove((real, twin))
        twin.release_to_pool()

    @rule(total=small)
    def resize(self, total):
        if total:
            real, twin = self.pools
            both(lambda: real.resize(total), lambda: twin.resize(total))

    @invariant()
    def same(self):
        real_pool, pool = self.pools
        assert (real_pool.total_blocks, real_pool.free_blocks) == (pool.total_blocks, pool.free_blocks)
        for real, twin in self.caches:
            compare_contiguous(real, twin.rows)
            assert real.is_within_planned_capacity == twin.is_within_planned_capacity
            assert real.allocated_bytes >= len(twin.rows) * 12


TestContiguousModel = ContiguousMachine.TestCase
