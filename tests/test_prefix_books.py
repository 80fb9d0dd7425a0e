"""The books of a prefix cache: blocks of several names, forgetting, clocks that fail, handles, what is refused."""

import gc
import math

import numpy as np
import pytest
from dtype_reference import DTYPES
from helpers import append, refused, unchanged
from prefix_support import attach, fill, remember, sequence

import pagedkv
from pagedkv import PagedKvCache, PagedKvStore, PagedStoreExhausted, PrefixCache, PrefixHandle


@pytest.fixture
def store(layered):
    return layered


# --- two names ----------------------------------------------------------------------------------------


def test_blocks_of_two_namespaces_can_be_evicted():
    store = PagedKvStore(4, 8, 1, 1)
    prefixes, first, second = PrefixCache(store), PagedKvCache(), PagedKvCache()
    append(store, first, 32)
    prefixes.insert(range(32), first, namespace=b"a")
    assert prefixes.attach(second, [*range(32), 1], namespace=b"a") == 32
    assert prefixes.insert(range(32), second, namespace=b"b") == 8
    assert (prefixes.stats().blocks_held, prefixes.stats().blocks_inserted) == (8, 8)
    first.release(store)
    second.release(store)
    assert (store.free_block_count, prefixes.evictable_block_count) == (0, 8)
    prefixes.check()
    assert prefixes.evict(3) == 3
    assert (store.free_block_count, prefixes.evictable_block_count) == (3, 5)
    append(store, PagedKvCache(), 32)  # takes the rest away, as any sequence that is short
    assert prefixes.stats().blocks_held == 0


def test_two_keys_of_one_namespace(store, prefixes):
    cache, _ = sequence(store, 8)
    assert prefixes.insert([1] * 8, cache) == 2
    assert prefixes.insert([2] * 8, cache) == 2
    cache.release(store)
    assert (prefixes.stats().blocks_held, prefixes.evictable_block_count, store.free_block_count) == (2, 2, 14)
    assert prefixes.match_blocks([1] * 9).tolist() == prefixes.match_blocks([2] * 9).tolist()
    prefixes.check()
    assert prefixes.evict(9) == 2
    assert store.free_block_count == 16


def test_a_name_that_goes_leaves_the_other(store, prefixes):
    cache, _ = sequence(store, 8)
    for space in (b"a", b"b"):
        prefixes.insert(range(8), cache, namespace=space)
    cache.release(store)
    assert prefixes.clear(namespace=b"a") == 0  # no block has left the cache
    assert prefixes.match([*range(8), 9], namespace=b"b") == 8
    assert (prefixes.stats().blocks_held, store.free_block_count) == (2, 14)
    assert prefixes.clear(namespace=b"b") == 2
    assert store.free_block_count == 16


def test_one_term_protects_a_block_under_all_its_names(store, prefixes, clock):
    cache, _ = sequence(store, 4)
    prefixes.insert(range(4), cache, namespace=b"a", ttl=10)
    prefixes.insert(range(4), cache, namespace=b"b")
    cache.release(store)
    assert prefixes.evictable_block_count == 0
    clock.now += 10
    assert prefixes.evictable_block_count == 1
    assert prefixes.evict(1) == 1
    assert prefixes.stats().namespaces == 0


# --- forgetting ---------------------------------------------------------------------------------------


def test_forget_takes_a_sequence_out_and_what_continues_it(store, prefixes):
    kept = remember(prefixes, [9] * 8)
    remember(prefixes, range(12), ttl=math.inf)
    remember(prefixes, [*range(8), 50, 51, 52, 53])
    running, _ = attach(prefixes, [*range(12), 1])
    assert prefixes.forget(range(12), start=5) == 3
    assert prefixes.match([*range(12), 1]) == prefixes.match([*range(8), 50, 51, 52, 53, 1]) == 4
    assert running.seq_len == 12
    assert prefixes.forget(range(12)) == 1
    assert prefixes.match(range(12)) == 0
    assert prefixes.match([*[9] * 8, 1]) == 8
    assert kept is not None
    running.release(store)
    prefixes.check()
    assert store.free_block_count == 14


@pytest.mark.parametrize(("tokens", "start"), [([], 0), ([0, 1], 0), ([5] * 8, 0), (range(8), 8), (range(8), 10**6)])
def test_forget_of_what_is_not_known(store, prefixes, tokens, start):
    remember(prefixes, range(8))
    before = prefixes.stats()
    assert prefixes.forget(tokens, start=start) == prefixes.forget(range(8), namespace=b"other") == 0
    assert prefixes.stats() == before


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"start": -1}, ValueError, "start"),
        ({"start": 1.0}, TypeError, "start"),
        ({"namespace": "a"}, TypeError, "namespace"),
    ],
)
def test_forget_refuses(store, prefixes, options, error, name):
    remember(prefixes, range(8))
    with refused(error, name, store):
        prefixes.forget(range(8), **options)


# --- K and V that are not finite ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_a_debug_store_lets_nothing_become_known_that_is_not_finite(dtype, bad, side):
    store = PagedKvStore(4, 8, 1, 2, n_layers=2, dtype=dtype, debug=True)
    prefixes, cache = PrefixCache(store), PagedKvCache()
    rows = np.ones((2, 2, 12, 2), np.float32)
    rows[side, 1, 5, 0] = bad
    cache.append_contiguous(store, *rows, 12)
    assert prefixes.insert(range(4), cache) == 1
    with refused(ValueError, "cache", store, cache):
        prefixes.insert(range(12), cache)
    assert prefixes.match(range(12)) == 4


# --- clocks -------------------------------------------------------------------------------------------


class Broken(Exception):
    pass


@pytest.mark.parametrize("answer", [None, "1", 1j, math.nan, Broken("no time")], ids=repr)
def test_a_clock_that_fails_changes_nothing(store, answer):
    seconds = [0.0]

    def clock():
        if isinstance(seconds[0], Broken):
            raise seconds[0]
        return seconds[0]

    prefixes = PrefixCache(store, clock=clock)
    remember(prefixes, [1] * 4, ttl=5)
    cache, _ = sequence(store, 8)
    taken = fill(store)
    seconds[0] = answer
    error = Broken if isinstance(answer, Broken) else (TypeError, ValueError)
    calls = [
        lambda: prefixes.insert(range(8), cache, ttl=5),
        lambda: prefixes.insert(range(8), cache),
        lambda: prefixes.attach(PagedKvCache(), [1] * 5),
        lambda: prefixes.evict(1),
        prefixes.stats,
        lambda: cache.reserve(store, 1),  # a short store ends the terms that are over
        lambda: append(store, cache, 4),
        lambda: pagedkv.Step(store, [cache], 1).__enter__(),
        lambda: store.acquire(1),
    ]
    for call in calls:
        with unchanged(store, cache), pytest.raises(error):
            call()
    seconds[0] = 6.0
    assert prefixes.evictable_block_count == 1
    assert prefixes.match([*range(8), 1]) == 0
    store.release(taken)
    prefixes.check()


def test_a_clock_may_use_the_cache_and_the_store(store):
    def clock():
        if used and not inside:
            inside.append(True)  # what it calls asks the clock as well
            cache = PagedKvCache()
            assert prefixes.attach(cache, [1] * 9) == 8
            prefixes.stats()
            cache.release(store)
            inside.pop()
        return 0.0

    inside = []
    used = []
    prefixes = PrefixCache(store, clock=clock)
    remember(prefixes, [1] * 8, ttl=5)
    used.append(True)
    remember(prefixes, [2] * 8)
    assert prefixes.evict(9) == 2
    prefixes.check()


def test_forgetting_keeps_the_order_of_namespaces():
    """A namespace shrinks, and by losing a term there a block becomes evictable in another one."""
    store = PagedKvStore(4, 64, 1, 1)
    prefixes = PrefixCache(store)
    first, _ = sequence(store, 40)
    prefixes.insert(range(40), first, namespace=b"shrinks", ttl=1000)
    remember(prefixes, [1] * 4, namespace=b"shrinks")
    remember(prefixes, range(32), namespace=b"largest then")
    held, _ = sequence(store, 20)
    ids = [*held.block_table.tolist(), int(first.block_table[0])]
    store.retain(ids)
    both = PagedKvCache()
    both.adopt_blocks(ids, 24, 4, store=store)
    prefixes.insert(range(24), both, namespace=b"shares")
    both.release(store)
    first.release(store)
    assert prefixes.forget(range(40), namespace=b"shrinks") == 9
    prefixes.check()
    assert prefixes.evict(1) == 1
    assert prefixes.match([*range(32), 1], namespace=b"largest then") == 28


def test_a_store_that_is_not_made_yet_has_no_prefix_cache():
    store = PagedKvStore.__new__(PagedKvStore)
    with pytest.raises(RuntimeError, match="^store: its __init__ has not run"):
        PrefixCache(store)
    store.__init__(2, 8, 1, 1)
    assert PrefixCache(store).match([1, 2, 3]) == 0


# --- handles ------------------------------------------------------------------------------------------


def test_a_handle_goes_on_after_eviction_and_clearing(store, prefixes):
    cache, handle, tokens = PagedKvCache(), PrefixHandle(), list(range(40))
    append(store, cache, 12)
    assert [prefixes.insert(tokens[:12], cache, handle=handle) for _ in range(2)] == [3, 0]
    prefixes.clear()
    append(store, cache, 4)
    assert prefixes.insert(tokens[:16], cache, handle=handle) == 4
    prefixes.forget(tokens[:16], start=8)
    append(store, cache, 4)
    assert prefixes.insert(tokens[:20], cache, handle=handle) == 3
    assert prefixes.match(tokens) == 20
    prefixes.check()


def test_a_handle_is_found_again_where_others_have_parted(store, prefixes):
    cache, handle, tokens = PagedKvCache(), PrefixHandle(), list(range(40))
    append(store, cache, 8)
    prefixes.insert(tokens[:8], cache, handle=handle)
    remember(prefixes, [*tokens[:6], 70, 71])  # cuts the node in which the handle is
    remember(prefixes, [*tokens[:10], 80, 81])  # and continues it in another way
    append(store, cache, 8)
    assert prefixes.insert(tokens[:16], cache, handle=handle) == 2
    assert prefixes.match(tokens) == 16
    prefixes.check()


def test_a_handle_is_lost_where_others_have_taken_its_place(store, prefixes):
    """The node is the same one, and as long as it was, with other tokens in it."""
    cache, handle, tokens = PagedKvCache(), PrefixHandle(), list(range(40))
    append(store, cache, 12)
    prefixes.insert(tokens[:12], cache, handle=handle)
    prefixes.forget(tokens[:12], start=8)
    other = [*tokens[:8], 70, 71, 72, 73]
    remember(prefixes, other)
    append(store, cache, 4)
    assert prefixes.insert(tokens[:16], cache, handle=handle) == 2
    assert prefixes.match([*other, *tokens[12:17]]) == 12
    assert prefixes.match(tokens) == 16
    prefixes.check()


def test_a_handle_that_a_clock_uses_elsewhere_stays_within_its_namespace(store):
    handle, calls = PrefixHandle(), []

    def clock():
        if not calls:
            calls.append(prefixes.insert(range(4), second, namespace=b"b", handle=handle))
        return 0.0

    prefixes = PrefixCache(store, clock=clock)
    first, second = PagedKvCache(), PagedKvCache()
    for cache in (first, second):
        append(store, cache, 8)
    assert prefixes.insert(range(4), first, namespace=b"a", ttl=1, handle=handle) == 1
    assert calls == [1]
    with refused(ValueError, "handle", store, second):
        prefixes.insert(range(8), second, namespace=b"b", handle=handle)
    assert prefixes.insert(range(8), first, namespace=b"a", handle=handle) == 1
    assert prefixes.match_blocks(range(9), namespace=b"a").tolist() == first.block_table.tolist()
    assert prefixes.match(range(9), namespace=b"b") == 4
    prefixes.check()


def test_a_handle_belongs_to_one_sequence(store, prefixes):
    cache, _ = sequence(store, 8)
    handle = PrefixHandle()
    prefixes.insert(range(8), cache, handle=handle)
    other = PrefixCache(PagedKvStore(4, 4, 2, 3))
    for call, error in [
        (lambda: prefixes.insert(range(8), cache, handle=handle, namespace=b"a"), ValueError),
        (lambda: other.insert(range(8), PagedKvCache(), handle=handle), ValueError),
        (lambda: prefixes.insert(range(8), cache, handle=3), TypeError),
    ]:
        with refused(error, "handle", store, cache):
            call()
    with refused(ValueError, "tokens", store, cache):
        prefixes.insert(range(7), cache, handle=handle)


def test_a_handle_that_was_refused_or_told_nothing_is_as_new(store, prefixes):
    cache, _ = sequence(store, 8)
    shapes = [pagedkv.LayerShape(None, 1, 2), pagedkv.LayerShape(8, 1, 2)]
    stores = pagedkv.ModelStores(shapes, 16, block_size=4)
    whole, handle = pagedkv.ModelSequence(stores), PrefixHandle()
    with pytest.raises(TypeError, match="tokens"):
        stores.prefixes.insert("no tokens", whole, handle=handle)
    assert stores.prefixes.insert([], whole, handle=handle) == 0
    assert prefixes.insert(range(8), cache, handle=handle) == 2
    with pytest.raises(ValueError, match="handle"):
        stores.prefixes.insert([], whole, handle=handle)


def test_a_handle_of_one_group_goes_on_with_it():
    shapes = [pagedkv.LayerShape(None, 1, 2), pagedkv.LayerShape(8, 1, 2)]
    stores = pagedkv.ModelStores(shapes, 16, block_size=4)
    whole, handle = pagedkv.ModelSequence(stores), PrefixHandle()
    with pagedkv.Step(stores, whole, 12) as step:
        for layer in range(2):
            step.write(layer, *np.ones((2, 12, 1, 2), np.float32))
    first, second = whole.caches
    assert stores.prefixes.groups[0].insert(range(4), first, handle=handle) == 1
    assert stores.prefixes.groups[0].insert(range(12), first, handle=handle) == 2  # another look at the same group
    for other, cache in ((stores.prefixes.groups[1], second), (stores.prefixes, whole)):
        with pytest.raises(ValueError, match="handle"):
            other.insert(range(12), cache, handle=handle)


def test_a_handle_that_is_used_elsewhere_while_tokens_are_read(store, prefixes):
    cache, _ = sequence(store, 8)
    handle = PrefixHandle()
    shapes = [pagedkv.LayerShape(None, 1, 2)] * 2 + [pagedkv.LayerShape(8, 1, 2)]
    stores = pagedkv.ModelStores(shapes, 16, block_size=4)
    whole = pagedkv.ModelSequence(stores)
    with pagedkv.Step(stores, whole, 8) as step:
        for layer in range(3):
            step.write(layer, *np.ones((2, 8, 1, 2), np.float32))

    class Tokens(list):
        def __getitem__(self, which):
            prefixes.insert(range(4), cache, handle=handle)
            prefixes.clear()
            return super().__getitem__(which)

    class Others(Tokens):
        def __iter__(self):
            stores.prefixes.insert(range(8), whole, handle=handle)
            return super().__iter__()

    assert prefixes.insert(Others(range(4)), cache, handle=handle) == 1
    assert prefixes.insert(Tokens(range(8)), cache, handle=handle) == 2
    assert prefixes.insert(range(8), cache, handle=handle) == 0
    prefixes.check()
    stores.prefixes.check()


# --- what is not made, or made twice ------------------------------------------------------------------


def test_it_is_made_once(store, prefixes):
    remember(prefixes, range(8))
    with pytest.raises(RuntimeError, match="runs once"):
        prefixes.__init__(PagedKvStore(4, 4, 2, 3))
    assert prefixes.match(range(9)) == 8
    prefixes.check()


@pytest.mark.parametrize(
    "call",
    [
        lambda it: it.match([1]),
        lambda it: it.match_blocks([1]),
        lambda it: it.attach(PagedKvCache(), [1]),
        lambda it: it.insert([1], PagedKvCache()),
        lambda it: it.forget([1]),
        lambda it: it.evict(1),
        lambda it: it.clear(),
        lambda it: it.stats(),
        lambda it: it.check(),
        lambda it: it.evictable_block_count,
        lambda it: it.is_evictable(0),
        repr,
    ],
)
def test_what_is_not_made_is_refused(call):
    with pytest.raises(RuntimeError, match="__init__"):
        call(PrefixCache.__new__(PrefixCache))


def test_a_cache_in_an_open_step_is_refused_where_nothing_is_known_too(store, prefixes):
    cache = PagedKvCache()
    with pagedkv.Step(store, [cache], 0), refused(RuntimeError, "cache", store, cache):
        prefixes.attach(cache, [1, 2, 3])


def test_a_finalizer_that_inserts_while_a_store_is_short():
    """Collected in the middle of whatever allocates next: nothing may wait for itself."""
    store = PagedKvStore(4, 8, 1, 1)
    prefixes = PrefixCache(store)
    made, ended = [], []

    class Late:
        def __init__(self):
            self.itself = self
            self.cache = PagedKvCache()
            append(store, self.cache, 8)
            made.append(True)

        def __del__(self):
            if self.cache.seq_len == 0:
                return
            prefixes.insert(range(8), self.cache)
            self.cache.release(store)
            try:
                append(store, PagedKvCache(), 32)
            except PagedStoreExhausted:
                ended.append(False)
            else:
                ended.append(True)

    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for round in range(50):
            try:
                Late()
                prefixes.attach(PagedKvCache(), range(9))
                remember(prefixes, [round] * 4)
            except PagedStoreExhausted:  # several wait for the collector, and hold all there is
                gc.collect()
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert len(ended) == len(made) > 10
    assert True in ended
    prefixes.check()
    prefixes.clear()
    assert store.free_block_count == 8
