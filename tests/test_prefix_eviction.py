"""PrefixCache: what goes when, what a store that runs short does with it, and what happens when it goes itself."""

import copy
import gc
import math
import os
import pickle
import threading
import time
import weakref

import numpy as np
import pytest
from helpers import append, assert_rows, rows, run_python, step_of, unchanged, write_all
from prefix_support import attach, fill, remember, sequence

import pagedkv
from pagedkv import PagedKvCache, PagedKvStore, PagedStoreExhausted, PrefixCache


@pytest.fixture
def store(layered):
    return layered


# --- eviction -----------------------------------------------------------------------------------------


def matches(prefixes, *prompts):
    return [prefixes.match([*prompt, 10**6]) for prompt in prompts]


A, B, C = [1] * 8, [2] * 8, [3] * 8


def test_the_longest_unused_end_goes_first(prefixes):
    for prompt in (A, B, C):
        remember(prefixes, prompt)
    attach(prefixes, [*A, 9])[0].release(prefixes.store)
    seen = []
    for _ in range(6):
        assert prefixes.evict(1) == 1
        seen.append(matches(prefixes, A, B, C))
    assert seen == [[8, 4, 8], [8, 0, 8], [8, 0, 4], [8, 0, 0], [4, 0, 0], [0, 0, 0]]
    assert prefixes.evict(1) == 0


def test_match_is_no_use(prefixes):
    remember(prefixes, A)
    remember(prefixes, B)
    prefixes.match(A)
    prefixes.match_blocks(A)
    prefixes.evict(2)
    assert matches(prefixes, A, B) == [0, 8]


def test_what_was_reused_stays_and_what_came_after_goes(prefixes):
    remember(prefixes, [*range(16)])
    remember(prefixes, B)
    attach(prefixes, [*range(8), 99])[0].release(prefixes.store)
    prefixes.evict(4)
    assert matches(prefixes, range(16), B) == [8, 0]


def test_what_a_sequence_holds_stays(store, prefixes):
    remember(prefixes, A)
    remember(prefixes, B)
    cache, _ = attach(prefixes, [*A[:4], 99])
    assert prefixes.evictable_block_count == 3
    assert prefixes.evict(100) == 3
    assert matches(prefixes, A, B) == [4, 0]
    fork = cache.clone()
    cache.release(store)
    assert prefixes.evictable_block_count == 0
    del fork
    assert prefixes.evictable_block_count == 1


def test_what_lies_above_a_held_block_can_be_had(store, prefixes):
    """A window gives its first blocks back; without them the rest can no longer be found."""
    cache, kv = sequence(store, 12)
    prefixes.insert(range(12), cache)
    remember(prefixes, [0, 1, 2, 3, 50, 51, 52, 53])
    cache.drop_before(store, 8)
    assert prefixes.evictable_block_count == 3
    assert prefixes.evict(1) == 1
    assert matches(prefixes, [0, 1, 2, 3, 50, 51, 52, 53], range(12)) == [4, 12]
    assert prefixes.evict(1) == 1
    assert matches(prefixes, range(12)) == [4]
    prefixes.check()
    assert prefixes.evict(5) == 1
    assert prefixes.stats().blocks_held == 0
    assert_rows(store, cache, *(side[:, 8:] for side in kv))
    assert store.free_block_count == 15


def test_blocks_above_held_ones_are_taken_from_the_largest_namespace(store, prefixes):
    windows = []
    for space, n in ((b"small", 8), (b"large", 12), (b"medium", 8)):
        cache, _ = sequence(store, n)
        prefixes.insert(range(n), cache, namespace=space)
        cache.drop_before(store, n - 4)
        windows.append(cache)
    assert prefixes.evict(1) == 1
    assert [prefixes.match(range(20), namespace=space) for space in (b"small", b"large", b"medium")] == [8, 4, 8]


def test_a_higher_priority_goes_later(prefixes):
    remember(prefixes, A, priority=2)
    remember(prefixes, B)
    remember(prefixes, C, priority=-1)
    assert [(prefixes.evict(2), matches(prefixes, A, B, C))[1] for _ in range(3)] == [[8, 8, 0], [8, 0, 0], [0, 0, 0]]


def test_a_priority_is_raised_and_not_lowered(prefixes):
    remember(prefixes, A)
    remember(prefixes, B)
    remember(prefixes, A[:4], priority=1)
    remember(prefixes, A[:4])
    assert prefixes.evict(3) == 3
    assert matches(prefixes, A, B) == [4, 0]


def test_what_continues_a_high_priority_has_its_own(prefixes):
    remember(prefixes, A[:4], priority=1)
    remember(prefixes, A)
    remember(prefixes, B)
    assert [(prefixes.evict(1), matches(prefixes, A, B))[1] for _ in range(4)] == [[4, 8], [4, 4], [4, 0], [0, 0]]


def test_a_term_protects_until_it_ends(store, prefixes, clock):
    remember(prefixes, A, ttl=10)
    remember(prefixes, B)
    assert prefixes.evictable_block_count == 2
    assert prefixes.evict(4) == 2
    assert matches(prefixes, A, B) == [8, 0]
    clock.now += 9.5
    with pytest.raises(PagedStoreExhausted) as full:
        store.acquire(15)
    assert (full.value.evictable, full.value.can_ever_fit) == (0, True)
    clock.now += 0.5
    assert prefixes.evictable_block_count == 2
    assert len(store.acquire(15)) == 15


def test_terms_are_those_of_each_block(prefixes, clock):
    remember(prefixes, A, ttl=10)
    remember(prefixes, A[:4], ttl=30)
    remember(prefixes, [*A, *A], ttl=5)
    remember(prefixes, [*A[:4], *B])
    prefixes.check()
    left = []
    for _ in range(5):
        prefixes.evict(100)
        prefixes.check()
        left.append((clock.now - 1000, *matches(prefixes, [*A, *A], [*A[:4], *B])))
        clock.now += 5
    clock.now = 1030.0
    prefixes.evict(100)
    assert left == [(0, 16, 4), (5, 8, 4), (10, 4, 4), (15, 4, 4), (20, 4, 4)]
    assert prefixes.stats().blocks_held == 0


def test_a_term_that_ends_soon_after_another(prefixes, clock):
    remember(prefixes, A, ttl=10)
    remember(prefixes, A[:4], ttl=10.5)
    for now, evictable in [(1010.0, 1), (1010.25, 1), (1010.5, 2)]:
        clock.now = now
        assert prefixes.evictable_block_count == evictable


def test_an_endless_term_ends_with_clear(prefixes, clock):
    remember(prefixes, A, ttl=math.inf)
    clock.now = 1e12
    assert prefixes.evict(9) == 0
    assert prefixes.clear() == 2
    assert prefixes.stats().blocks_held == prefixes.evictable_block_count == 0
    remember(prefixes, A)
    assert prefixes.evict(9) == 2


def test_a_burst_takes_from_its_own_namespace(prefixes):
    remember(prefixes, A, namespace=b"quiet")
    for i in range(5):
        remember(prefixes, [10 + i] * 8, namespace=b"busy")
    remember(prefixes, B, namespace=b"quiet")
    held = []
    for _ in range(14):
        assert prefixes.evict(1) == 1
        prefixes.check()
        held.append(tuple(sum(matches_in(prefixes, space)) // 4 for space in (b"quiet", b"busy")))
    assert held[:6] == [(4, 9), (4, 8), (4, 7), (4, 6), (4, 5), (4, 4)]
    assert all(abs(quiet - busy) <= 1 for quiet, busy in held[6:])
    assert prefixes.stats().namespaces == 0


def test_shares_are_kept_within_one_eviction(prefixes):
    """The longest unused of all are in `few`, and in `many` they are one long run."""
    remember(prefixes, list(range(12)), namespace=b"few")
    remember(prefixes, list(range(16)), namespace=b"many")
    assert prefixes.evict(3) == 3
    assert [prefixes.match(range(20), namespace=space) for space in (b"few", b"many")] == [8, 8]


def matches_in(prefixes, namespace):
    prompts = (A, B, *([10 + i] * 8 for i in range(5)))
    return [prefixes.match([*prompt, 10**6], namespace=namespace) for prompt in prompts]


def test_clear_leaves_sequences_their_blocks(store, prefixes):
    kv = remember(prefixes, A)
    cache, _ = attach(prefixes, [*A, 9])
    assert prefixes.clear() == 2
    assert prefixes.match([*A, 9]) == 0
    assert_rows(store, cache, *kv)
    assert prefixes.stats().blocks_evicted == 0


@pytest.mark.parametrize("space", [None, b"", b"a"])
def test_clear_of_one_namespace(prefixes, clock, space):
    """With terms that have not ended and end later, and a namespace that is unknown."""
    for namespace in (None, b"", b"a"):
        remember(prefixes, A, namespace=namespace, ttl=math.inf)
        remember(prefixes, [*A, *B], namespace=namespace, ttl=5)
    assert prefixes.clear(namespace=b"unknown") == 0
    assert prefixes.clear(namespace=space) == 4
    assert prefixes.clear(namespace=space) == 0
    for namespace in (None, b"", b"a"):
        assert prefixes.match([*A, *B], namespace=namespace) == (0 if namespace == space else 15)
    clock.now += 10
    prefixes.check()
    assert prefixes.evict(100) == 4
    assert prefixes.clear() == 4
    with pytest.raises(TypeError, match="namespace"):
        prefixes.clear(namespace="a")


# --- a store that runs short --------------------------------------------------------------------------


def needs_blocks(store):
    """Everything that takes blocks: a call, and what undoes it."""
    cache, shared = PagedKvCache(), PagedKvCache()
    yield "acquire", lambda n: store.release(store.acquire(n))
    yield "reserve", lambda n: (cache.reserve(store, 4 * n), cache.release(store))
    yield "append", lambda n: (append(store, cache, 4 * n), cache.release(store))

    def step(n):
        with pagedkv.Step(store, [cache, shared], [4 * n - 4, 4]) as running:
            write_all(running)
        cache.release(store)
        shared.release(store)

    yield "step", step

    def push(n):
        for _ in range(4 * n):
            cache.push(store, *step_of(store))
        cache.release(store)

    yield "push", push


@pytest.mark.parametrize("way", range(5))
def test_a_short_store_evicts_what_it_needs(store, prefixes, way):
    for prompt in (A, B, C):
        remember(prefixes, prompt)
    name, take = list(needs_blocks(store))[way]
    take(10)
    assert prefixes.stats().blocks_held == 6
    take(12)
    assert matches(prefixes, A, B, C) == [0, 8, 8], name
    assert store.stats().exhaustions == 0
    holder, _ = attach(prefixes, [*B, 9])
    if name != "push":  # which asks for one block after the other
        with unchanged(store, holder):
            before = prefixes.stats()
            with pytest.raises(PagedStoreExhausted) as full:
                take(15)
            assert prefixes.stats() == before
        error = full.value
        assert (error.needed, error.free, error.evictable, error.can_ever_fit) == (15, 12, 2, True)
        assert "and 2 evictable (not now)" in str(error)
        assert pickle.loads(pickle.dumps(error)).evictable == 2
        with pytest.raises(PagedStoreExhausted, match="never") as full:
            take(17)
        assert not full.value.can_ever_fit
    take(14)
    assert matches(prefixes, A, B, C) == [0, 8, 0]


@pytest.mark.parametrize("n", [15, 17])
@pytest.mark.parametrize("way", range(4))
def test_a_refusal_counts_what_the_end_of_a_term_has_freed(store, prefixes, clock, way, n):
    """Whether the prefix cache was asked, or the request is more than the store has and nobody was."""
    remember(prefixes, A, ttl=10)
    remember(prefixes, B)
    holder, _ = attach(prefixes, [*B, 9])
    _, take = list(needs_blocks(store))[way]
    for seconds, evictable in [(9.5, 0), (0.5, 2)]:
        clock.now += seconds
        with pytest.raises(PagedStoreExhausted) as full:
            take(n)
        assert (full.value.free, full.value.evictable) == (12, evictable)
    assert holder.seq_len == 8


def test_a_copy_of_a_shared_block_evicts_too(store, prefixes):
    remember(prefixes, A)
    cache, _ = sequence(store, 6)
    fork = cache.clone()
    fill(store)
    fork.push(store, *step_of(store))
    assert prefixes.stats().blocks_held == 1
    store.check([cache, fork])


def test_a_store_has_one_prefix_cache(store, prefixes):
    with pytest.raises(ValueError, match="store"):
        PrefixCache(store)
    with pytest.raises(TypeError, match="store"):
        PrefixCache(None)
    with pytest.raises(TypeError, match="clock"):
        PrefixCache(PagedKvStore(4, 4, 1, 1), clock=3)


def test_it_gives_back_when_it_goes():
    store = PagedKvStore(4, 8, 2, 3, debug=True)
    prefixes = PrefixCache(store)
    remember(prefixes, A)
    cache, n = attach(prefixes, [*A, 1])
    assert (n, prefixes.store) == (8, store)
    del prefixes
    assert store.free_block_count == 6
    del cache
    assert store.free_block_count == 8
    append(store, PagedKvCache(), 32)
    remember(PrefixCache(store), A)


def test_store_and_prefix_cache_go_together():
    store = PagedKvStore(4, 8, 2, 3)
    store_gone = weakref.ref(store)
    prefixes = PrefixCache(store)
    remember(prefixes, A)
    loop = [store, prefixes]
    loop.append(loop)
    del store, prefixes, loop
    gc.collect()
    assert store_gone() is None


def test_it_is_no_value(prefixes):
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="PrefixCache"):
            make(prefixes)
    assert repr(prefixes).startswith("PrefixCache(blocks=0, evictable=0, store=PagedKvStore(")


def test_stats(store, prefixes):
    kept, _ = sequence(store, 8)
    prefixes.insert(A, kept, namespace=b"x")
    remember(prefixes, B)
    attach(prefixes, [*B[:6], 5, 5])[0].release(store)
    attach(prefixes, [5])[0].release(store)
    prefixes.evict(1)
    stats = prefixes.stats()
    assert stats == (3, 1, 2, 6, 3, 4, 1)
    assert stats._fields == (
        "blocks_held",
        "evictable_blocks",
        "namespaces",
        "hit_tokens",
        "missed_tokens",
        "blocks_inserted",
        "blocks_evicted",
    )


# --- threads and processes ----------------------------------------------------------------------------


def test_threads_share_one():
    """Each thread's sequences carry its own rows; who evicts whom is left to chance, what is read is not."""
    store = PagedKvStore(4, 40, 1, 1)
    prefixes = PrefixCache(store)
    errors = []

    def work(number):
        rng = np.random.default_rng(number)
        space = bytes([number])
        try:
            for _ in range(300):
                cache = PagedKvCache()
                tokens = np.repeat(rng.integers(0, 3, 6), rng.integers(1, 4, 6)).tolist()
                n = prefixes.attach(cache, tokens, namespace=space)
                expected = np.array([[100 * number + t] for t in tokens], np.float32)
                try:
                    cache.append_contiguous(store, expected[n:], expected[n:], len(tokens) - n)
                except PagedStoreExhausted:
                    cache.release(store)
                    continue
                prefixes.insert(tokens, cache, namespace=space)
                got = cache.to_contiguous(store)
                assert (got.k == expected).all(), (got.k, expected)
                assert (got.v == expected).all()
                if rng.integers(4) == 0:
                    prefixes.evict(int(rng.integers(1, 5)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    prefixes.check()
    assert prefixes.evictable_block_count == prefixes.stats().blocks_held
    prefixes.clear()
    assert store.free_block_count == 40


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_can_use_it_whatever_other_threads_do():
    assert run_python("""
        import os, threading
        import numpy as np, pagedkv
        store = pagedkv.PagedKvStore(4, 64, 1, 1)
        prefixes = pagedkv.PrefixCache(store)
        stop = False
        def work():
            ids = np.random.default_rng(0).integers(0, 4, (200, 40))
            row = np.ones((40, 1), np.float32)
            while not stop:
                for tokens in ids:
                    cache = pagedkv.PagedKvCache()
                    n = prefixes.attach(cache, tokens)
                    cache.append_contiguous(store, row[n:], row[n:], 40 - n)
                    prefixes.insert(tokens, cache)
                    cache.release(store)
        thread = threading.Thread(target=work)
        thread.start()
        for _ in range(40):
            child = os.fork()
            if child == 0:
                prefixes.check()
                prefixes.clear()
                prefixes.match([1, 2])
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        stop = True
        thread.join()
        print("done")
    """).split() == ["done"]


def test_a_long_sequence_grows_block_by_block():
    """Looking it up stays one comparison, however it came to be."""
    store = PagedKvStore(1, 4000, 1, 1)
    prefixes, cache = PrefixCache(store), PagedKvCache()
    for n in range(1, 2001):
        cache.push(store, *rows(2, 1))
        assert prefixes.insert(range(n), cache) == 1
    assert prefixes.match(range(3000)) == 2000
    prefixes.check()


# --- what it costs ---


def one_namespace(prefixes, n):
    for i in range(n):
        remember(prefixes, [i])


def a_namespace_each(prefixes, n):
    for i in range(n):
        remember(prefixes, [1], namespace=i.to_bytes(4, "little"))


def older_ones_held(prefixes, n):
    held = []
    for i in range(n):
        remember(prefixes, [i])
        held.append(attach(prefixes, [i, 0])[0])
    for i in range(100):
        remember(prefixes, [n + i])
    return held


def older_ones_protected(prefixes, n):
    for i in range(n):
        remember(prefixes, [i], ttl=1e6)
    for i in range(100):
        remember(prefixes, [n + i])


@pytest.mark.parametrize("fill_up", [one_namespace, a_namespace_each, older_ones_held, older_ones_protected])
def test_a_block_costs_the_same_whatever_else_is_there(fill_up):
    """Fifty times as much, and less than ten times the time: what looked at all of it would take fifty."""

    def seconds(n):
        store = PagedKvStore(1, n + 101, 1, 1)
        prefixes = PrefixCache(store)
        held = fill_up(prefixes, n)
        store.acquire(store.free_block_count)
        best = math.inf
        for _ in range(60):
            start = time.perf_counter()
            store.acquire(1)
            best = min(best, time.perf_counter() - start)
        assert prefixes.stats().blocks_evicted == 60
        del held
        return best

    assert seconds(20_000) < 10 * seconds(400)
