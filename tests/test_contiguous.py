"""KvCache and KvBlockPool, and the copies between contiguous rows and blocks."""

import copy
import gc
import pickle

import numpy as np
import pytest
import reference
from helpers import append, assert_same_bits, contiguous_state, refused, rows, unchanged
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
    view = cache.k
    cache.extend(rows(10, 6), rows(10, 2))
    assert cache.allocated_bytes == 10 * 2 * (3 + 1) * 4
    assert cache.is_within_planned_capacity
    assert view.base is cache.k.base or view.size == 0
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
    with pytest.raises(ValueError, match="k_step"):
        cache.push(rows(1), rows(1))
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


# --- between blocks and contiguous rows ---

SHAPES = [  # block size, heads, head_dim, v_head_dim
    (16, 2, 8, 8),
    (1, 1, 1, 1),
    (3, 1, 5, 2),
    (4, 3, 1, 7),
    (32, 8, 128, 64),
    (5, 1, 512, 576),
]


def shuffled(store, n_positions):
    """Take blocks so that the next sequence's table is in no order, with a few runs of neighbours."""
    ids = store.acquire(store.total_blocks)
    order = np.random.default_rng(7).permutation(len(ids))
    order[: len(order) // 2].sort()
    for block in order[: -(-n_positions // store.block_size)]:
        store.release([int(block)])
    return ids


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [0, 1, 3, 16, 17, 100])
@pytest.mark.parametrize("n_layers", [1, 2])
def test_what_was_appended_is_gathered(shape, n, n_layers):
    block_size, n_heads, head_dim, v_head_dim = shape
    store = pagedkv.PagedKvStore(block_size, 200, n_heads, head_dim, v_head_dim=v_head_dim, n_layers=n_layers)
    shuffled(store, n)
    cache = pagedkv.PagedKvCache()
    k, v = append(store, cache, n)
    for layer in range(n_layers):
        contiguous = cache.to_contiguous(store, layer=layer)
        assert isinstance(contiguous, pagedkv.KvCache)
        assert (contiguous.n_kv_heads, contiguous.head_dim, contiguous.v_head_dim) == (n_heads, head_dim, v_head_dim)
        assert_same_bits(contiguous.k, k[layer])
        assert_same_bits(contiguous.v, v[layer])


@pytest.mark.parametrize("start", [0, 1, 15, 16, 30])
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 33])
def test_an_append_starts_anywhere_in_a_block(start, n):
    store = pagedkv.PagedKvStore(16, 8, 1, 3, debug=True)
    shuffled(store, start + n)
    cache = pagedkv.PagedKvCache()
    first = append(store, cache, start)
    second = append(store, cache, n)
    got = cache.to_contiguous(store)
    assert_same_bits(got.k, np.concatenate([first[0], second[0]], 1)[0])
    assert_same_bits(got.v, np.concatenate([first[1], second[1]], 1)[0])


@pytest.mark.parametrize("n_threads", [1, 2, 5])
@pytest.mark.parametrize("width", [1, 7, 1024])
@pytest.mark.parametrize("n_bytes", [(2 << 20) - 4, 2 << 20, (2 << 20) + 4, 9_000_000])
def test_large_copies_in_any_number_of_threads(n_threads, width, n_bytes):
    """Amounts about which a copy may be split or streamed, at lengths that end inside a block and a cache line."""
    n = n_bytes // (4 * width) + 1
    store = pagedkv.PagedKvStore(13, n // 13 + 20, 1, width, v_head_dim=3)
    shuffled(store, n + 5)
    cache = pagedkv.PagedKvCache()
    k = np.arange(n * width, dtype=np.uint32).view(np.float32).reshape(n, width)
    v = np.arange(n * 3, dtype=np.uint32).view(np.float32).reshape(n, 3)
    before = pagedkv.get_num_threads()
    try:
        pagedkv.set_num_threads(n_threads)
        head = append(store, cache, 5)
        cache.append_contiguous(store, k, v, n)
        got = cache.to_contiguous(store)
    finally:
        pagedkv.set_num_threads(before)
    assert_same_bits(got.k, np.concatenate([head[0][0], k]))
    assert_same_bits(got.v, np.concatenate([head[1][0], v]))


@pytest.mark.parametrize("n_out", [0, 3, 6, 50])
def test_out_is_overwritten_and_returned(store, cache, n_out):
    k, v = append(store, cache, 6)
    out = pagedkv.KvCache(2, 3, v_head_dim=2)
    out.extend(rows(n_out, 6), rows(n_out, 4))
    allocated = out.allocated_bytes
    assert cache.to_contiguous(store, out=out) is out
    assert_same_bits(out.k, k[0])
    assert_same_bits(out.v, v[0])
    assert out.allocated_bytes == (allocated if n_out >= 6 else 6 * 10 * 4)
    cache.truncate(store, 2)
    cache.to_contiguous(store, out=out)
    assert_same_bits(out.k, k[0, :2])


def test_a_copy_is_private(store, cache):
    k, v = append(store, cache, 6)
    copied = cache.to_contiguous(store)
    copied.push(rows(6), rows(4))
    cache.truncate(store, 2)
    append(store, cache, 4)
    assert_same_bits(copied.k[:6], k[0])
    assert_same_bits(copied.v[:6], v[0])


def test_an_empty_sequence_makes_an_empty_cache(store, cache):
    with unchanged(store, cache):
        assert cache.to_contiguous(store).k.shape == (0, 6)
    cache.reserve(store, 3)
    with unchanged(store, cache):
        assert cache.to_contiguous(store).v.shape == (0, 4)


@pytest.mark.parametrize("sizes", [(2, 3, 3), (3, 2, 2), (1, 6, 4), (2, 4, 2)])
def test_an_out_of_other_heads_is_refused(store, cache, sizes):
    append(store, cache, 6)
    n_heads, head_dim, v_head_dim = sizes
    out = pagedkv.KvCache(n_heads, head_dim, v_head_dim=v_head_dim)
    before = contiguous_state(out)
    with refused(ValueError, "out", store, cache):
        cache.to_contiguous(store, out=out)
    assert contiguous_state(out) == before


@pytest.mark.parametrize("out", [5, "out", np.zeros((6, 6), np.float32), pagedkv.PagedKvCache])
def test_an_out_that_is_no_kv_cache_is_refused(store, cache, out):
    append(store, cache, 6)
    with refused(TypeError, "out", store, cache):
        cache.to_contiguous(store, out=out)


def test_an_out_that_cannot_grow_is_left_as_it_was(store, cache):
    append(store, cache, 9)
    pool = pagedkv.KvBlockPool(4, 2)
    out = pagedkv.KvCache.with_pool(2, 3, pool, 4, v_head_dim=2)
    out.push(rows(6), rows(4))
    before = contiguous_state(out)
    with unchanged(store, cache), pytest.raises(pagedkv.KvPoolExhausted):
        cache.to_contiguous(store, out=out)
    assert contiguous_state(out) == before
    assert pool.free_blocks == 1


def test_rows_of_the_store_itself_can_be_appended(store, cache):
    """A view of a block as the source, even where copy on write gives that block away."""
    k, v = append(store, cache, 6)
    clone = cache.clone()
    a, b = cache.block_table.tolist()
    clone.append_contiguous(store, store.k_block(b)[:2], store.v_block(b)[:2], 2)
    clone.append_contiguous(store, store.k_block(a), store.v_block(a), 4)
    got = clone.to_contiguous(store)
    assert_same_bits(got.k, np.concatenate([k[0], k[0, 4:6], k[0, :4]]))
    assert_same_bits(got.v, np.concatenate([v[0], v[0, 4:6], v[0, :4]]))


def test_a_round_trip_through_contiguous_rows(any_store, cache):
    """What the batched prefill path does: copy out, compute, append the new rows."""
    k, v = append(any_store, cache, 6)
    copied = [cache.to_contiguous(any_store, layer=layer) for layer in range(any_store.n_layers)]
    other = pagedkv.PagedKvCache()
    other.append_contiguous(any_store, np.stack([c.k for c in copied]), np.stack([c.v for c in copied]), 6)
    for layer in range(any_store.n_layers):
        assert_same_bits(other.to_contiguous(any_store, layer=layer).k, k[layer])
        assert_same_bits(other.to_contiguous(any_store, layer=layer).v, v[layer])
