"""PrefixCache.walk and namespaces: what is known, block by block, whatever others do meanwhile."""

import copy
import math
import pickle
import threading

import numpy as np
import pytest
from helpers import refused
from prefix_support import remember, sequence
from test_serving import make_stores
from test_serving_hostile import computed

import pagedkv
from pagedkv import LayerShape, PagedKvStore, PrefixCache


@pytest.fixture
def store(layered):
    return layered


def shown(prefixes, **options):
    """Each known beginning up to a block's end, by following parents."""
    seen = {}
    for block in prefixes.walk(**options):
        before = seen[block.parent][:-1] if block.parent else (block.namespace,)
        seen[block.id] = (*before, *block.tokens.tolist(), block.block)
        assert len(seen[block.id]) - 2 == block.position + len(block.tokens)
    return set(seen.values())


def test_what_is_known_with_parents_first(prefixes):
    remember(prefixes, range(12))
    remember(prefixes, [*range(6), 50, 51, 52, 53, 54, 55], namespace=b"a")
    remember(prefixes, [*range(6), 60, 61], namespace=b"a")
    table = prefixes.match_blocks(range(13)).tolist()
    assert shown(prefixes, namespace=None) == {(None, *range(4 * i + 4), block) for i, block in enumerate(table)}
    known = [[*range(4)], [*range(6), 50, 51], [*range(6), 50, 51, 52, 53, 54, 55], [*range(6), 60, 61]]
    expected = {(b"a", *k, prefixes.match_blocks([*k, 99], namespace=b"a")[-1]) for k in known}
    assert shown(prefixes, namespace=b"a") == expected
    assert shown(prefixes) == expected | shown(prefixes, namespace=None)
    assert prefixes.namespaces() == [None, b"a"]
    assert list(prefixes.walk(namespace=b"none")) == []


def test_every_field(prefixes, clock):
    remember(prefixes, range(8), namespace=b"a", priority=3, ttl=10)
    clock.now += 4
    first, second = prefixes.walk()
    assert first._replace(tokens=None, id=None) == (b"a", None, 0, 0, None, 0, 3, 6.0)
    assert second.tokens.tolist() == [4, 5, 6, 7]
    assert second.tokens.dtype == np.int64
    assert not second.tokens.flags.writeable
    clock.now += 7
    assert [block.remaining for block in prefixes.walk()] == [None, None]
    prefixes.clear()
    remember(prefixes, range(4), ttl=math.inf)
    assert [block.remaining for block in prefixes.walk()] == [math.inf]


def test_holes_are_left_out_and_named_as_parents(store):
    prefixes = PrefixCache(store, window=3)
    cache, _ = sequence(store, 12)
    cache.drop_before(store, 8)
    prefixes.insert(range(12), cache)
    [last] = prefixes.walk()
    assert last.position == 8
    remember(prefixes, range(8))
    first, second, again = prefixes.walk()
    assert (first.parent, second.parent, again.parent) == (0, first.id, second.id)
    assert (again.id, again.parent) == (last.id, last.parent)


def test_an_id_is_never_used_for_others(store):
    """Whatever is cut, evicted, and grows again: by a dict of all that was ever seen."""
    prefixes, ids = PrefixCache(store), {}
    rng = np.random.default_rng(0)
    cache, _ = sequence(store, 16)
    for _ in range(1500):
        tokens = rng.integers(0, 2, 16)
        prefixes.insert(tokens[: 4 * rng.integers(1, 5)], cache, namespace=[None, b"a"][rng.integers(2)])
        if rng.random() < 0.7:
            prefixes.forget(tokens, namespace=[None, b"a"][rng.integers(2)], start=int(rng.integers(16)))
        if rng.random() < 0.02:
            prefixes.clear()
        for key in shown_ids(prefixes):
            assert ids.setdefault(key[0], key[1]) == key[1]
    assert len(ids) > 500


def shown_ids(prefixes):
    seen = {}
    for block in prefixes.walk():
        seen[block.id] = (*(seen[block.parent] if block.parent else (block.namespace,)), *block.tokens.tolist())
    return list(seen.items())


def test_ids_stay_where_others_part_and_what_follows_goes(store):
    prefixes = PrefixCache(store)
    cache, _ = sequence(store, 16)
    prefixes.insert(range(16), cache)
    ids = [block.id for block in prefixes.walk()]
    assert len(set(ids)) == 4
    prefixes.insert([*range(6), 99, 99], cache)
    prefixes.forget(range(16), start=12)
    assert {block.id for block in prefixes.walk() if block.block in cache.block_table[[0, 2]]} == {ids[0], ids[2]}
    prefixes.insert(range(16), cache)
    assert ids[3] not in {block.id for block in prefixes.walk()}


def test_a_node_that_grows_past_its_ids():
    """More blocks than a node has ids for: the next ones come in another one."""
    n = 70_000
    store = PagedKvStore(1, n, 1, 1)
    prefixes, cache, handle = PrefixCache(store), pagedkv.PagedKvCache(), pagedkv.PrefixHandle()
    cache.adopt_blocks(store.acquire(n), n, 1, store=store)
    tokens = np.arange(n)
    for end in (1, 65_534, 65_535, 65_536, 65_537, n):
        prefixes.insert(tokens[:end], cache, handle=handle)
    assert prefixes.match(tokens) == n - 1
    before = 0
    ids = set()
    for block in prefixes.walk():
        assert block.parent == before
        before = block.id
        ids.add(before)
    assert len(ids) == n
    prefixes.check()


def test_it_shows_one_moment_of_a_namespace(prefixes):
    remember(prefixes, range(16))
    remember(prefixes, range(8), namespace=b"a")
    walk = prefixes.walk()
    first = next(walk)
    prefixes.clear()
    remember(prefixes, range(4), namespace=b"late")
    rest = list(walk)  # the others of its namespace as they were; b"a" has gone, and b"late" came later
    assert [block.position for block in (first, *rest)] == [0, 4, 8, 12]
    assert {block.namespace for block in rest} == {None}
    with pytest.raises(StopIteration):
        next(walk)


def test_it_changes_nothing(prefixes):
    for i in range(3):
        remember(prefixes, [i, *range(7)])
    before = prefixes.stats()
    for _ in range(3):
        list(prefixes.walk())
    assert prefixes.stats() == before
    assert prefixes.evict(1) == 1
    assert prefixes.match([0, *range(8)]) == 4  # the first is still the one that was not used for longest


def test_it_keeps_the_cache_that_it_looks_at(store):
    walk = PrefixCache(store).walk()
    with pytest.raises(ValueError, match="store"):
        PrefixCache(store)
    assert list(walk) == []
    del walk
    remember(PrefixCache(store), range(4))


@pytest.mark.parametrize("namespace", ["a", 3, [b"a"], bytearray(b"a")], ids=repr)
def test_what_is_no_namespace(store, prefixes, namespace):
    with refused(TypeError, "namespace", store):
        prefixes.walk(namespace=namespace)


def test_a_walk_is_no_value(prefixes):
    for act in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="walk"):
            act(prefixes.walk())


def test_a_clock_that_fails_and_one_that_walks(store):
    answers = [0.0]
    prefixes = PrefixCache(store, clock=lambda: answers[0]() if callable(answers[0]) else answers[0])
    remember(prefixes, range(8))
    walk = prefixes.walk()

    def other():
        answers[0] = 1.0
        assert len(list(walk)) == 2  # of the same one
        return 2.0

    answers[0] = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        next(walk)
    answers[0] = other
    assert list(walk) == []
    assert len(list(prefixes.walk())) == 2


def test_threads_that_change_it_and_share_a_walk():
    """Every block that comes fits to its parent, and nothing is lost of what stays."""
    store = PagedKvStore(4, 64, 1, 1)
    prefixes = PrefixCache(store)
    remember(prefixes, range(40), ttl=math.inf)
    stop, errors = threading.Event(), []

    def change(number):
        rng = np.random.default_rng(number)
        while not stop.is_set():
            remember(prefixes, [*range(6), *rng.integers(0, 9, 10).tolist()], namespace=[None, b"x"][number])

    def look():
        try:
            for _ in range(60):
                known = [tokens[1:-1] for tokens in shown(prefixes, namespace=None)]
                assert {tuple(range(n)) for n in range(4, 41, 4)} <= set(known)
        except BaseException as error:
            errors.append(error)

    shared = prefixes.walk()
    threads = [threading.Thread(target=change, args=(i,)) for i in range(2)]
    lookers = [threading.Thread(target=look), *(threading.Thread(target=list, args=(shared,)) for _ in range(2))]
    for thread in (*threads, *lookers):
        thread.start()
    for thread in lookers:
        thread.join()
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
    prefixes.check()


def test_of_a_models_stores_each_has_its_own():
    """The first, or the one that is asked for: a window has dropped what the full layers know."""
    stores = make_stores(32, [LayerShape(None, 1, 4), LayerShape(5, 1, 8)])
    sequence = computed(stores, range(16))
    sequence.drop_unneeded()
    stores.prefixes.insert(range(16), sequence, namespace=b"a")
    full, windowed = stores.prefixes.groups
    assert [block.position for block in full.walk()] == [0, 4, 8, 12]
    assert [block.position for block in windowed.walk()] == [12]
    assert [block.position for block in stores.prefixes.walk()] == [0, 4, 8, 12]
    assert full.namespaces() == windowed.namespaces() == stores.prefixes.namespaces() == [b"a"]
