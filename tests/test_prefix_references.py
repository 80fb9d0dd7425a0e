"""A prefix cache's own reference to a block is nobody else's: it cannot be given back, adopted or written through."""

import pytest
from helpers import append, assert_rows, refused, unchanged
from prefix_support import attach, first, remember, sequence

from pagedkv import PagedKvCache, PagedKvError, PagedKvStore, PrefixCache

TOKENS = list(range(12))


@pytest.fixture(params=[False, True], ids=["", "debug"])
def store(request):
    return PagedKvStore(4, 16, 2, 3, debug=request.param)


@pytest.fixture
def prefixes(store):
    return PrefixCache(store)


@pytest.fixture
def known(prefixes):
    """The K and V of three blocks that the prefix cache alone holds, and their ids."""
    kv = remember(prefixes, TOKENS)
    return kv, prefixes.match_blocks([*TOKENS, 99]).tolist()


def is_whole(prefixes, kv):
    """What is known reads as it was written, and all of it can be evicted."""
    cache, n = attach(prefixes, [*TOKENS, 99])
    assert n == 12
    assert_rows(prefixes.store, cache, *kv)
    cache.release(prefixes.store)
    prefixes.check()
    assert prefixes.evictable_block_count == prefixes.stats().blocks_held == prefixes.evict(99)
    return True


@pytest.mark.parametrize("pick", [[0], [2], [0, 1, 2], [1, 1], [2, 0]])
def test_what_the_prefix_cache_alone_holds_cannot_be_given_back(store, prefixes, known, pick):
    kv, ids = known
    with refused(ValueError, "ids", store) as caught:
        store.release([ids[i] for i in pick])
    assert "the prefix cache alone holds" in str(caught.value)
    assert is_whole(prefixes, kv)
    assert store.free_block_count == 16


@pytest.mark.parametrize("at", range(4))
def test_a_list_is_given_back_whole_or_not_at_all(store, prefixes, known, at):
    kv, ids = known
    own = store.acquire(3)
    with refused(ValueError, "ids", store):
        store.release([*own[:at], ids[1], *own[at:]])
    assert prefixes.evictable_block_count == 3
    store.release(own)
    assert is_whole(prefixes, kv)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_as_often_as_it_was_retained(store, prefixes, known, n):
    kv, ids = known
    for _ in range(n):
        store.retain(ids)
    assert prefixes.evictable_block_count == 0
    with refused(ValueError, "ids", store) as caught:
        store.release(ids * (n + 1))
    assert "more often than it has holders" in str(caught.value)
    store.release(ids * n)
    assert [store.refcount(block) for block in ids] == [1, 1, 1]
    with refused(ValueError, "ids", store):
        store.release(ids)
    assert is_whole(prefixes, kv)


def test_under_two_names_it_is_still_one_reference(store, prefixes, known):
    kv, ids = known
    cache, _ = attach(prefixes, [*TOKENS, 99])
    prefixes.insert(TOKENS, cache, namespace=b"b")
    cache.release(store)
    with refused(ValueError, "ids", store):
        store.release(ids[:1])
    prefixes.clear(namespace=b"b")
    with refused(ValueError, "ids", store):
        store.release(ids[:1])
    assert is_whole(prefixes, kv)


def test_what_was_known_and_is_not_any_more(store, prefixes):
    cache, _ = sequence(store, 8)
    prefixes.insert(TOKENS[:8], cache)
    ids = cache.block_table.tolist()
    store.retain(ids)
    prefixes.clear()
    store.release(ids)
    cache.release(store)
    with refused(ValueError, "which is free", store):
        store.release(ids[:1])
    with refused(ValueError, "which is free", store):
        store.retain(ids[:1])
    assert store.free_block_count == 16


def test_it_cannot_be_adopted_unless_it_was_retained(store, prefixes, known):
    kv, ids = known
    cache = PagedKvCache()
    with refused(ValueError, "block_table", store, cache):
        cache.adopt_blocks(ids, 12, 4, store=store)
    store.retain(ids[:2])
    with refused(ValueError, "block_table", store, cache):
        cache.adopt_blocks(ids, 12, 4, store=store)
    with refused(ValueError, "more often than it has holders", store, cache):
        cache.adopt_blocks([*ids[:2], ids[0]], 12, 4, store=store)
    cache.adopt_blocks(ids[:2], 8, 4, store=store)
    assert_rows(store, cache, *first(kv, 8))
    cache.release(store)
    assert is_whole(prefixes, kv)


def test_nor_later_with_the_first_store_that_is_seen(store, prefixes, known):
    kv, ids = known
    cache = PagedKvCache()
    cache.adopt_blocks(ids, 12, 4)
    with unchanged(store), pytest.raises(ValueError, match="the prefix cache alone holds"):
        cache.reserve(store, 1)
    assert is_whole(prefixes, kv)


def test_it_cannot_be_written_through(store, prefixes, known):
    kv, ids = known
    own, other = store.acquire(2)
    store.copy_block(ids[0], own)
    for target in ids:
        with refused(ValueError, "dst", store):
            store.copy_block(own, target)
        store.retain([target])
        with refused(ValueError, "dst", store):
            store.copy_block(own, target)
        store.release([target])
    store.release([own, other])
    assert is_whole(prefixes, kv)


# --- a sequence whose own reference somebody else gave back ---


@pytest.fixture
def robbed(store, prefixes, known):
    cache, _ = attach(prefixes, [*TOKENS, 99])
    store.release(cache.block_table[1:2])  # nobody can tell that it was not the caller's
    return cache


ACTS = {
    "release": lambda store, cache: cache.release(store),
    "truncate": lambda store, cache: cache.truncate(store, 0),
    "drop_before": lambda store, cache: cache.drop_before(store, 8),
    "clone": lambda store, cache: cache.clone(),
    "clone_from": lambda store, cache: PagedKvCache().clone_from(cache),
}


def state(store, cache):
    return [store.refcount(block) for block in range(store.total_blocks)], cache.seq_len, cache.block_table.tolist()


@pytest.mark.parametrize("act", ACTS)
def test_it_is_found_by_whoever_would_give_it_back_again(store, prefixes, known, robbed, act):
    before = state(store, robbed)
    with pytest.raises(PagedKvError, match="not theirs"):
        ACTS[act](store, robbed)
    assert state(store, robbed) == before
    with pytest.raises(PagedKvError, match="is in 1 tables and has 0 holders beside the prefix cache"):
        store.check([robbed])


@pytest.mark.parametrize("store", [True], ids=["debug"], indirect=True)
def test_growing_it_shows_in_debug_mode(store, prefixes, known, robbed):
    with pytest.raises(PagedKvError, match="has 0 holders beside the prefix cache"):
        append(store, robbed, 1)


def test_dropping_a_robbed_sequence_leaves_the_rest_whole(store, prefixes, known):
    kv, _ = known
    cache, _ = attach(prefixes, [*TOKENS, 99])
    store.release(cache.block_table[1:2])
    del cache
    assert is_whole(prefixes, kv)
    assert store.free_block_count == 16
