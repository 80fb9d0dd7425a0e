"""PrefixCache(window=): beginnings of which only the end is known, as layers with a sliding window leave them."""

import random

import numpy as np
import pytest
from helpers import append, assert_rows, refused
from prefix_support import attach, fill, remember, sequence
from test_serving import SIZE, make_stores
from test_serving_hostile import computed

import pagedkv
from pagedkv import PagedKvCache, PagedKvStore, PrefixCache
from pagedkv.serving import LayerShape, ModelSequence

WINDOW = 6


@pytest.fixture
def store(layered):
    return layered


@pytest.fixture
def prefixes(store):
    assert store.block_size == 4
    return PrefixCache(store, window=WINDOW)


def dropped(prefixes, tokens, position, **options):
    """Insert a sequence of these tokens that has dropped its beginning, and let it go; its K and V, and new blocks."""
    cache, kv = sequence(prefixes.store, len(tokens))
    cache.drop_before(prefixes.store, position)
    n = prefixes.insert(tokens, cache, **options)
    cache.release(prefixes.store)
    return kv, n


def between(kv, start, stop):
    return tuple(side[:, start:stop] for side in kv)


# What a query of window 6 at position n sees: n - 5 to n. Of 24 tokens, 16 to 23 are known.
@pytest.mark.parametrize(
    ("n", "usable"), [(24, 24), (23, 23), (22, 22), (21, 21), (20, 0), (17, 0), (16, 0), (15, 0), (5, 0), (0, 0)]
)
def test_a_dropped_beginning_is_known_as_far_as_the_next_query_sees(store, prefixes, n, usable):
    kv, n_new = dropped(prefixes, range(24), 16)
    assert n_new == 2
    assert prefixes.stats()[:3] == (2, 2, 1)
    prompt = [*range(n), 99]
    assert prefixes.match(prompt) == usable
    cache, got = attach(prefixes, prompt)
    assert got == usable
    first = 16 if usable else 0
    assert cache.first_position == first
    assert_rows(store, cache, *between(kv, first, usable))
    blocks = prefixes.match_blocks(prompt).tolist()
    assert blocks == [-1] * (first // 4) + cache.block_table.tolist()[first // 4 : usable // 4]
    append(store, cache, 9)  # it goes on like any other
    prefixes.check()


def test_a_query_sees_no_more_than_it_needs(store, prefixes):
    """What is known before the window is not shared, and can go."""
    remember(prefixes, range(24))
    cache, n = attach(prefixes, [*range(24), 99])
    assert (n, cache.first_position) == (24, 16)
    assert cache.block_table.tolist()[:4] == [-1] * 4
    assert prefixes.evictable_block_count == 4
    assert prefixes.evict(9) == 4
    assert prefixes.match([*range(24), 99]) == 24
    assert prefixes.match(range(17)) == 0
    cache.release(store)
    assert prefixes.evict(9) == 2
    assert prefixes.stats().blocks_held == prefixes.stats().namespaces == 0
    prefixes.check()


def test_a_sequence_that_has_all_fills_the_holes(store, prefixes):
    dropped(prefixes, range(24), 16)
    cache, kv = sequence(store, 20)
    assert prefixes.insert(range(20), cache) == 4  # its own fifth block is not needed
    cache.release(store)
    for n in range(1, 24):
        assert prefixes.match(range(n + 1)) == n
    other, n = attach(prefixes, range(13))
    assert n == 12
    assert_rows(store, other, *between(kv, 4, 12))
    assert prefixes.stats().blocks_held == 6


def test_of_several_holes_the_nearest_counts(prefixes):
    """Of twelve blocks the third and the seventh are missing."""
    cache, _ = sequence(prefixes.store, 48)
    table = cache.block_table.tolist()
    for start, stop in (
        (44, 48),
        (28, 44),
        (12, 24),
        (0, 8),
    ):  # from the end, so that each is told of a dropped beginning
        part = PagedKvCache()
        prefixes.store.retain(table[start // 4 : stop // 4])
        part.adopt_blocks(
            [-1] * (start // 4) + table[start // 4 : stop // 4], stop, 4, store=prefixes.store, first_position=start
        )
        assert prefixes.insert(range(stop), part) == (stop - start) // 4
        part.release(prefixes.store)
    known = [block not in (2, 6) for block in range(12)]
    for n in range(48):

        def is_usable(n):
            return all(known[position // 4] for position in range(max(0, n - WINDOW + 1), n))

        longest = max(m for m in range(n + 1) if is_usable(m) and (m == n or m % 4 == 0 or known[m // 4]))
        assert prefixes.match(range(n + 1)) == longest, n
    prefixes.check()


def test_a_hole_where_the_last_rows_would_be_copied_from(store, prefixes):
    """Reuse ends before it, and what another sequence knows of them is found where all known tokens are its own too."""
    dropped(prefixes, [*range(10), 50, *range(11, 24)], 16)  # a hole where positions 8 to 11 are
    assert prefixes.match(range(11)) == 0
    kv = remember(prefixes, range(12))
    cache, n = attach(prefixes, [*range(10), 60])
    assert n == 10
    assert_rows(store, cache, *between(kv, 4, 10))
    assert prefixes.match([*range(10), 50, 60]) == 8


def test_what_goes_and_what_stays(store, prefixes):
    """Ends first; where sequences hold them, what lies before, its end first, and what follows stays known."""
    held, _ = sequence(store, 24)
    prefixes.insert(range(24), held)
    held.drop_before(store, 19)
    remember(prefixes, range(100, 108))
    assert prefixes.evictable_block_count == 6
    assert prefixes.evict(2) == 2
    assert prefixes.match(range(100, 109)) == 0
    assert prefixes.evict(1) == 1
    assert [prefixes.match(range(n + 1)) for n in (12, 16, 20, 21, 24)] == [12, 12, 12, 21, 24]
    assert prefixes.evict(9) == 3
    assert [prefixes.match(range(n + 1)) for n in (12, 16, 20, 21, 24)] == [0, 0, 0, 21, 24]
    assert prefixes.stats().blocks_evicted == 6
    prefixes.check()


def test_the_larger_namespace_gives_first_in_the_middle_too(store, prefixes):
    for name, n in ((b"small", 12), (b"large", 24)):
        cache, _ = sequence(store, n)
        prefixes.insert(range(n), cache, namespace=name)
        cache.drop_before(store, n - 4)
        globals()[name] = cache  # held until the test ends
    try:
        assert prefixes.evict(3) == 3
        kept = {name: prefixes.match(range(30), namespace=name) for name in (b"small", b"large")}
        assert kept == {b"small": 12, b"large": 8}  # equal shares now: three blocks each
    finally:
        del globals()[b"small"], globals()[b"large"]


def test_a_hole_at_the_end_goes_with_what_follows_it(prefixes):
    """Nothing is left of tokens that no known block continues."""
    dropped(prefixes, range(24), 16)
    assert prefixes.forget(range(24), start=20) == 1
    assert prefixes.stats().blocks_held == 1
    assert prefixes.forget(range(24), start=16) == 1
    assert prefixes.stats()[:3] == (0, 0, 0)
    dropped(prefixes, range(24), 16)
    assert prefixes.forget(range(24)) == 2
    assert prefixes.stats()[:3] == (0, 0, 0)
    prefixes.check()


def test_only_holes_are_nothing(store, prefixes):
    cache, _ = sequence(store, 10)
    cache.drop_before(store, 8)
    assert prefixes.insert(range(10), cache) == 0  # its whole blocks are gone
    assert prefixes.stats()[:3] == (0, 0, 0)
    cache.drop_before(store, 10)
    assert prefixes.insert(range(10), cache) == 0
    prefixes.check()


def test_terms_and_priorities_of_holes_that_are_filled(store):
    now = [0.0]
    prefixes = PrefixCache(store, window=WINDOW, clock=lambda: now[0])
    dropped(prefixes, range(16), 8, ttl=5, priority=1)
    assert prefixes.evictable_block_count == 0
    remember(prefixes, range(8))
    assert prefixes.evictable_block_count == 0  # what continues them needs them, and is protected
    now[0] = 6.0
    assert prefixes.evictable_block_count == 4
    prefixes.check()


def test_a_handle_of_a_sequence_that_drops_as_it_grows(store, prefixes):
    cache, handle, kv = PagedKvCache(), pagedkv.PrefixHandle(), []
    for n in range(1, 61):
        kv.append(append(store, cache, 1))
        assert prefixes.insert(range(n), cache, handle=handle) == (n % 4 == 0)
        cache.drop_before(store, max(0, n + 1 - WINDOW))
        if n % 4 == 0:
            assert prefixes.match(range(n + 1)) == n
        if n == 30:
            prefixes.clear()  # from here on it is one with a dropped beginning
            assert prefixes.insert(range(n), cache, handle=handle) == 1
    prefixes.evict(60)
    assert prefixes.match(range(61)) == 60
    other, _ = attach(prefixes, range(61))
    both = [np.concatenate([pair[side] for pair in kv[other.first_position :]], 1) for side in (0, 1)]
    assert_rows(store, other, *both)
    prefixes.check()


def test_short_of_blocks_it_goes_on_by_what_it_has_left_behind():
    """A sequence of a window lives in a store that holds little more than the window, and stays known."""
    store = PagedKvStore(4, 5, 1, 2)
    prefixes, cache, handle = PrefixCache(store, window=WINDOW), PagedKvCache(), pagedkv.PrefixHandle()
    for n in range(1, 200):
        append(store, cache, 1)
        prefixes.insert(range(n), cache, handle=handle)
        cache.drop_before(store, max(0, n + 1 - WINDOW))
    whole = cache.seq_len // 4 * 4
    assert prefixes.match(range(whole + 1)) == whole
    assert prefixes.stats().blocks_evicted > 40
    prefixes.check()


def test_a_window_of_one_needs_nothing_before(store):
    prefixes = PrefixCache(store, window=1)
    dropped(prefixes, range(12), 8)
    assert [prefixes.match(range(n + 1)) for n in range(13)] == [0, 0, 0, 0, 4, 4, 4, 4, 8, 9, 10, 11, 12]
    cache, n = attach(prefixes, range(9))
    assert (n, cache.first_position, cache.block_table.tolist()) == (8, 8, [-1, -1])
    append(store, cache, 3)


@pytest.mark.parametrize("window", [None, 10**9, 2**63 - 1])
def test_who_sees_all_needs_all(store, window):
    prefixes = PrefixCache(store, window=window)
    assert prefixes.window == window
    dropped(prefixes, range(12), 8)
    assert prefixes.match(range(13)) == 0
    remember(prefixes, range(8))
    assert prefixes.match(range(13)) == (12 if window else 8)  # without a window, holes are not remembered
    prefixes.check()


@pytest.mark.parametrize("window", [0, -1, 2**63, 10**30, -(10**30)], ids=str)
def test_windows_that_are_none(window):
    store = PagedKvStore(4, 2, 1, 1)
    with refused(ValueError, "window", store):
        PrefixCache(store, window=window)


@pytest.mark.parametrize("window", [True, 2.0, "2", [2], np.float32(2)], ids=repr)
def test_windows_that_are_no_number(window):
    store = PagedKvStore(4, 2, 1, 1)
    with refused(TypeError, "window", store):
        PrefixCache(store, window=window)


def test_a_refusal_leaves_the_store_without_a_prefix_cache():
    store = PagedKvStore(4, 2, 1, 1)
    with pytest.raises(ValueError, match="window"):
        PrefixCache(store, window=0)
    assert PrefixCache(store, window=np.int64(3)).window == 3


def test_a_debug_store_looks_at_what_is_there():
    store = PagedKvStore(4, 8, 1, 1, debug=True)
    prefixes, cache = PrefixCache(store, window=2), PagedKvCache()
    rows = np.ones((12, 1), np.float32)
    rows[10] = np.nan
    cache.append_contiguous(store, rows, rows, 12)
    cache.drop_before(store, 8)
    with refused(ValueError, "cache", store, cache):
        prefixes.insert(range(12), cache)
    rows[10] = 1
    other = PagedKvCache()
    other.append_contiguous(store, rows, rows, 12)
    other.drop_before(store, 8)
    assert prefixes.insert(range(12), other) == 1


def test_without_room_for_a_copy_whole_blocks_that_are_seen(store, prefixes):
    """Where the rows of a block cannot be copied, the next shorter beginning may need what is missing."""
    dropped(prefixes, range(24), 16)
    remember(prefixes, range(100, 124))
    keep, _ = attach(prefixes, [*range(100, 124), 1])  # held, so that no block can be had for it
    other, _ = attach(prefixes, [*range(24), 1])
    prefixes.evict(9)
    taken = fill(store)
    cache, n = attach(prefixes, [*range(22), 99])
    assert (n, cache.capacity) == (0, 0)  # 20 would need positions 15 to 19
    cache, n = attach(prefixes, [*range(100, 123), 99])
    assert n == 0  # 120 is a beginning as good, but for the window's blocks: positions 115 to 119 are there from 116 on
    store.release(taken)
    keep.release(store)
    other.release(store)
    prefixes.check()


# --- a model's stores ---

MIXED = [LayerShape(None, 1, 4), LayerShape(5, 1, 8), LayerShape(9, 1, 4)]


@pytest.mark.parametrize("seed", range(12))
def test_the_greatest_length_that_all_stores_can_serve(seed):
    """Each was told of other tokens, after other drops: whole blocks, or all that is known, by asking for each."""
    chance = random.Random(seed)
    stores = make_stores(96, MIXED)
    told = [[], [], []]
    assert [cache.window for cache in stores.prefixes.groups] == [None, 5, 9]
    for _ in range(10):
        tokens = [chance.randrange(2) if i < 4 else i for i in range(chance.randrange(8, 28))]
        sequence = computed(stores, tokens)
        whole = len(tokens) // SIZE * SIZE
        for group, prefix, cache, known in zip(
            stores.groups, stores.prefixes.groups, sequence.caches, told, strict=True
        ):
            if group.window and chance.random() < 0.5:
                cache.drop_before(group.store, chance.randrange(len(tokens)))
            if chance.random() < 0.7:
                prefix.insert(tokens, cache)
                known += [tokens[:whole]] * (cache.first_position < whole)
        sequence.release()
    found = set()
    for _ in range(60):
        tokens = [chance.randrange(2) if i < 4 else i for i in range(chance.randrange(1, 30))]
        most = max(
            n for n in range(len(tokens)) if all(any(k[:n] == tokens[:n] for k in [[], *known]) for known in told)
        )
        lengths = [n for n in range(most + 1) if n % SIZE == 0 or n == most]
        lengths = [n for n in lengths if all(c.match(tokens[: n + 1]) == n for c in stores.prefixes.groups)]
        assert stores.prefixes.match(tokens) == max(lengths)
        sequence = ModelSequence(stores)
        assert stores.prefixes.attach(sequence, tokens) == max(lengths)
        for group, cache in zip(stores.groups, sequence.caches, strict=True):
            assert cache.first_position == group.shape.first_needed(max(lengths)) // SIZE * SIZE
        assert {cache.seq_len for cache in sequence.caches} == {max(lengths)}
        sequence.release()
        stores.prefixes.check()
        found.add(max(lengths))
    assert len(found) > 2
    stores.prefixes.clear()
    assert all(group.store.free_block_count == group.store.total_blocks for group in stores.groups)


def test_a_model_remembers_what_it_has_left_behind():
    """After drop_unneeded: the full layers know all, those with a window the end, and the next request starts there."""
    stores = make_stores(32, MIXED)
    sequence = computed(stores, range(24))
    sequence.drop_unneeded()
    stores.prefixes.insert(range(24), sequence)
    sequence.release()
    assert stores.prefixes.match([*range(24), 1]) == 24
    assert stores.prefixes.match(range(9)) == 0
    other = ModelSequence(stores)
    assert stores.prefixes.attach(other, [*range(24), 1]) == 24
    n_needed = [-(-24 // SIZE) - group.shape.first_needed(24) // SIZE for group in stores.groups]
    assert [sum(block >= 0 for block in cache.block_table.tolist()) for cache in other.caches] == n_needed
