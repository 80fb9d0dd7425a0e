"""PrefixCache.events: what is learned and forgotten, in order; and what is dropped, closed, collected or forked."""

import copy
import gc
import json
import math
import os
import pickle
import sys
import threading
import tracemalloc
import weakref

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


class Picture:
    """What is known, kept by who walks once and then reads events; and begins anew where it misses one."""

    def __init__(self, prefixes, events):
        self.prefixes, self.events = prefixes, events
        self.n_begun = 0
        self.begin()

    def begin(self):
        self.n_begun += 1
        self.next = self.events.sequence
        self.incarnation = self.events.incarnation
        self.known = {block.id: self.of(block) for block in self.prefixes.walk()}

    @staticmethod
    def of(it):
        return it.namespace, it.parent, it.position, tuple(it.tokens.tolist()), it.block

    def read(self, n=None):
        for event in self.events.poll(n):
            if event.incarnation == self.incarnation and event.sequence < self.next:
                continue  # the walk has seen it
            if (event.incarnation, event.sequence) != (self.incarnation, self.next):
                self.begin()
                continue
            self.next += 1
            if event.kind == "stored":
                assert event.id not in self.known
                self.known[event.id] = self.of(event)
            elif event.kind == "removed":
                gone = self.known.pop(event.id)
                assert gone[:3] + gone[4:] == (event.namespace, event.parent, event.position, event.block)
            else:
                self.known = {
                    id: it for id, it in self.known.items() if event.namespace is not ... and it[0] != event.namespace
                }

    def is_right(self):
        return self.known == {block.id: self.of(block) for block in self.prefixes.walk()}


def fields(events):
    return [(event.kind, event.namespace, event.position, event.block) for event in events]


def test_every_field(prefixes):
    with prefixes.events() as events:
        assert events.poll() == []
        remember(prefixes, range(8), namespace=b"a")
        blocks = prefixes.match_blocks(range(9), namespace=b"a").tolist()
        first, second = prefixes.walk()
        stored = events.poll()
        for event, block in zip(stored, (first, second), strict=True):
            assert event[:3] == ("stored", block.position // 4, events.incarnation)
            assert event[3:7] == (b"a", block.id, block.parent, block.position)
            assert event.tokens.tolist() == block.tokens.tolist()
            assert event.tokens.dtype == np.int64
            assert not event.tokens.flags.writeable
            assert event.block == block.block
        assert events.poll() == []
        prefixes.forget(range(8), namespace=b"a", start=4)
        assert events.poll() == [("removed", 2, events.incarnation, b"a", second.id, first.id, 4, None, blocks[1])]
        prefixes.clear()
        assert events.poll() == [("cleared", 3, events.incarnation, ..., 0, 0, 0, None, -1)]
        assert (events.sequence, events.n_dropped, events.capacity) == (4, 0, 16384)


def test_blocks_that_begin_inside_a_node_above(prefixes):
    """Their tokens, and their parents, are those of the walk."""
    with prefixes.events() as events:
        picture = Picture(prefixes, events)
        remember(prefixes, range(12))
        remember(prefixes, [*range(6), 50, 51, 52, 53])
        remember(prefixes, [*range(7), 60])
        remember(prefixes, [*range(5), 70, 71, 72])
        picture.read()
        assert len(picture.known) == 6
        assert picture.is_right()
        prefixes.evict(3)
        picture.read()
        assert len(picture.known) == 3
        assert picture.is_right()
        assert picture.n_begun == 1


def test_a_split_and_a_use_are_no_events(prefixes):
    remember(prefixes, range(12))
    with prefixes.events() as events:
        remember(prefixes, [*range(6), 9, 9])
        assert fields(events.poll()) == [("stored", None, 4, prefixes.match_blocks([*range(6), 9, 9, 9])[1])]
        prefixes.attach(pagedkv.PagedKvCache(), range(12))
        remember(prefixes, range(12), priority=3, ttl=math.inf)
        prefixes.forget([7, 7, 7, 7])
        prefixes.clear(namespace=b"none")
        prefixes.evict(0)
        assert events.poll() == []


def test_what_a_store_takes_that_is_short(store, prefixes):
    remember(prefixes, range(8), namespace=b"a")
    with prefixes.events() as events:
        n = len(store.acquire(store.total_blocks - 1))
        assert n == store.total_blocks - 1
        assert [event[:1] + event[3:4] + event[6:8] for event in events.poll()] == [("removed", b"a", 4, None)]


def test_clear_is_one_event(prefixes):
    for space in (None, b"", b"a"):
        remember(prefixes, range(8), namespace=space)
    with prefixes.events() as events:
        for space in (None, b"a"):
            prefixes.clear(namespace=space)
        assert [event.namespace for event in events.poll()] == [None, b"a"]
        prefixes.clear()
        prefixes.clear()
        assert [(event.kind, event.namespace) for event in events.poll()] == [("cleared", ...)]
        remember(prefixes, range(4), namespace=b"")
        assert fields(events.poll())[0][:3] == ("stored", b"", 0)


def test_names_outlive_their_namespaces(prefixes):
    names = [bytes([65 + i]) * 1000 for i in range(20)]
    with prefixes.events() as events:
        for name in names:
            remember(prefixes, range(4), namespace=name)
            prefixes.forget(range(4), namespace=name)
        assert [event.namespace for event in events.poll()] == [name for name in names for _ in range(2)]


@pytest.mark.parametrize("way", ["read", "dropped", "cleared", "closed"])
def test_names_go_with_the_last_event_that_has_them(prefixes, way):
    """By what Python's allocators count: a megabyte each."""
    tracemalloc.start()
    try:
        with prefixes.events(capacity=2) as events:
            before = tracemalloc.get_traced_memory()[0]
            for i in range(8):
                name = bytes([65 + i]) * 1_000_000
                remember(prefixes, range(4), namespace=name)
                if way == "cleared":
                    prefixes.clear()
                prefixes.clear(namespace=name)
                if way == "read":
                    events.poll()
                del name
                n = (tracemalloc.get_traced_memory()[0] - before) / 1e6
                assert n < (0.5 if way == "read" else 1.5)
            if way == "closed":
                events.close()
                assert tracemalloc.get_traced_memory()[0] - before < 5e5
    finally:
        tracemalloc.stop()


def test_holes_of_a_window(store):
    prefixes = PrefixCache(store, window=3)
    with prefixes.events() as events:
        cache, _ = sequence(store, 12)
        cache.drop_before(store, 8)
        prefixes.insert(range(12), cache)
        [last] = events.poll()
        assert (last.position, last.tokens.tolist()) == (8, [8, 9, 10, 11])
        remember(prefixes, range(8))
        stored = {event.position: event for event in events.poll()}
        assert sorted(stored) == [0, 4]
        assert (stored[4].parent, last.parent) == (stored[0].id, stored[4].id)


def test_a_full_queue_keeps_the_newest_and_says_so(prefixes):
    with prefixes.events(capacity=3) as events:
        for i in range(5):
            remember(prefixes, [i] * 4, namespace=bytes([65 + i]))
        assert (events.n_dropped, events.sequence) == (2, 5)
        assert [event.sequence for event in events.poll(2)] == [2, 3]
        remember(prefixes, [7] * 4, namespace=b"f")
        assert [(event.sequence, event.namespace) for event in events.poll()] == [(4, b"E"), (5, b"f")]
        assert events.n_dropped == 2
        for i in range(4):
            prefixes.clear(namespace=bytes([65 + i]))
        assert events.n_dropped == 3
        assert [event.sequence for event in events.poll()] == [7, 8, 9]
        assert (events.n_dropped, events.sequence) == (3, 10)


def test_polling_some(prefixes):
    with prefixes.events() as events:
        remember(prefixes, range(24))
        assert events.poll(0) == []
        found = [*events.poll(1), *events.poll(np.int64(2)), *events.poll(99)]
        assert [event.sequence for event in found] == [*range(6)]


def test_many_at_once():
    """More than are copied at a time, with a block size that makes that one event, too."""
    for size, n in ((1, 5000), (70_000, 3)):
        store = PagedKvStore(size, n, 1, 1)
        prefixes, cache = PrefixCache(store), pagedkv.PagedKvCache()
        cache.adopt_blocks(store.acquire(n), n * size, size, store=store)
        with prefixes.events() as events:
            prefixes.insert(np.arange(n * size), cache)
            found = events.poll()
        assert [event.tokens[0] for event in found] == [*range(0, n * size, size)]
        assert found[-1].tokens[-1] == n * size - 1


@pytest.mark.parametrize(
    ("kind", "capacity"),
    [
        *((ValueError, n) for n in (0, -1, 2**24 + 1, 10**9, 2**64)),
        *((TypeError, it) for it in (1.5, "a", None, True, [1])),
    ],
)
def test_what_is_no_capacity(store, prefixes, kind, capacity):
    with refused(kind, "capacity", store):
        prefixes.events(capacity)
    prefixes.events(2**24).close()
    prefixes.events(1).close()


@pytest.mark.parametrize("n", [-1, 1.5, "a", True, [1]], ids=repr)
def test_what_is_no_number_of_events(store, prefixes, n):
    with prefixes.events() as events:
        remember(prefixes, range(4))
        with pytest.raises((TypeError, ValueError), match="n: expected"):
            events.poll(n)
        assert len(events.poll()) == 1


def test_one_reader_at_a_time(prefixes):
    first = prefixes.events()
    with pytest.raises(ValueError, match="events"):
        prefixes.events()
    with pytest.raises(ValueError, match="events"):
        prefixes.groups[0].events()
    first.close()
    second = prefixes.groups[0].events()
    first.close()  # it is not its own any more
    remember(prefixes, range(4))
    assert len(second.poll()) == 1
    assert second.incarnation != first.incarnation


def test_closed_and_not_made(prefixes):
    with prefixes.events() as events:
        remember(prefixes, range(4))
    assert events.ended
    assert (events.sequence, events.n_dropped) == (1, 0)
    for act in (events.poll, events.__enter__):
        with pytest.raises(RuntimeError, match="events"):
            act()
    remember(prefixes, range(8))
    assert events.sequence == 1
    assert "ended" in repr(events)
    with pytest.raises(TypeError, match="PrefixEvents"):
        pagedkv.PrefixEvents()
    empty = pagedkv.PrefixEvents.__new__(pagedkv.PrefixEvents)
    assert (empty.ended, empty.sequence, empty.n_dropped, empty.capacity) == (True, 0, 0, 0)
    with pytest.raises(RuntimeError, match="events"):
        empty.poll()
    empty.close()
    repr(empty)


def test_a_reader_is_no_value(prefixes):
    with prefixes.events() as events:
        for act in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="PrefixEvents"):
                act(events)


def test_a_reader_that_is_dropped(prefixes):
    for way in ("alone", "in a circle"):
        events = prefixes.events()
        remember(prefixes, range(8), namespace=b"a")
        if way == "in a circle":

            class Node:
                def __del__(self):
                    self.seen = self.events.poll(1)

            node = Node()
            node.own, node.events = node, events
            del node
        gone = weakref.ref(events)
        del events
        gc.collect()
        assert gone() is None
        prefixes.clear()
    with prefixes.events() as events:
        assert events.poll() == []


def test_a_cache_that_is_dropped_while_it_is_read(store):
    prefixes = PrefixCache(store)
    events = prefixes.events()
    remember(prefixes, range(8), namespace=b"a")
    assert not events.ended
    del prefixes  # a reader does not keep it
    assert store.free_block_count == store.total_blocks
    assert events.ended
    assert [event.kind for event in events.poll()] == ["stored", "stored", "cleared"]
    other = PrefixCache(store)
    with other.events() as news:
        remember(other, range(4))
        assert len(news.poll()) == 1
        assert events.poll() == []
        events.close()
        remember(other, range(8))
        assert len(news.poll()) == 1


def test_a_circle_of_all(layered):
    """In whatever order they are collected, with a store that holds the reader by an attribute."""

    class Store(PagedKvStore):
        pass

    store = Store(4, 8, 1, 1)
    store.prefixes = PrefixCache(store)
    store.events = store.prefixes.events()
    remember(store.prefixes, range(8), namespace=b"a")
    gone = weakref.ref(store), weakref.ref(store.events), weakref.ref(store.prefixes)
    del store
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3


def test_of_a_models_stores_each_has_its_own():
    stores = make_stores(32, [LayerShape(None, 1, 4), LayerShape(5, 1, 8)])
    full, windowed = (group.events() for group in stores.prefixes.groups)
    with pytest.raises(ValueError, match="events"):
        stores.prefixes.events()  # the first one's
    sequence = computed(stores, range(16))
    sequence.drop_unneeded()
    stores.prefixes.insert(range(16), sequence, namespace=b"a")
    assert [event.position for event in full.poll()] == [0, 4, 8, 12]
    assert [event.position for event in windowed.poll()] == [12]
    stores.prefixes.clear()
    assert [[event.kind for event in events.poll()] for events in (full, windowed)] == [["cleared"]] * 2
    full.close()
    with stores.prefixes.events() as events:
        assert events.poll() == []


@pytest.mark.parametrize("what", ["read", "write"])
def test_changes_while_it_is_read(prefixes, what):
    """By another thread, in between: what was read is not counted as dropped, and nothing comes twice."""
    with prefixes.events(capacity=2) as events:
        remember(prefixes, range(8))
        between = []

        def interfere(frame, *_):  # as a value is made
            if frame.f_globals["__name__"] == "namedtuple_PrefixEvent" and not between:
                between.append([])
                if what == "read":
                    between[0] += events.poll(1)
                else:
                    remember(prefixes, range(50, 62))

        sys.setprofile(interfere)
        try:
            found = events.poll()
        finally:
            sys.setprofile(None)
        assert between
        assert [event.sequence for event in (*between[0], *found)] == [0, 1]
        assert [event.sequence for event in events.poll()] == ([] if what == "read" else [3, 4])
        assert events.n_dropped == (0 if what == "read" else 1)


def test_threads_that_read_write_and_close():
    """Each event comes to one reader, in order, or is counted as dropped."""
    store = PagedKvStore(4, 64, 1, 1)
    prefixes = PrefixCache(store)
    stop, errors, found = threading.Event(), [], [[], []]
    events = prefixes.events(capacity=50)

    def change(number):
        rng = np.random.default_rng(number)
        while not stop.is_set():
            remember(prefixes, [*range(6), *rng.integers(0, 9, 10).tolist()], namespace=[None, b"x" * 99][number])
            if rng.random() < 0.1:
                prefixes.clear(namespace=[None, b"x" * 99][number])

    def look(mine):
        try:
            while events.sequence < 5000:
                mine += [event.sequence for event in events.poll()]
        except BaseException as error:
            errors.append(error)

    writers = [threading.Thread(target=change, args=(i,)) for i in range(2)]
    readers = [threading.Thread(target=look, args=(mine,)) for mine in found]
    for thread in (*writers, *readers):
        thread.start()
    for thread in readers:
        thread.join()
    stop.set()
    for thread in writers:
        thread.join()
    found.append([event.sequence for event in events.poll()])
    assert not errors
    assert all(mine == sorted(mine) for mine in found)
    everything = [number for mine in found for number in mine]
    assert len(everything) == len(set(everything))
    assert len(everything) + events.n_dropped == events.sequence > 500
    prefixes.check()
    picture = Picture(prefixes, events)
    remember(prefixes, range(30, 38))
    picture.read()
    assert picture.is_right()

    def poll_on():
        while True:
            events.poll()

    remember(prefixes, range(40))
    closer = threading.Thread(target=events.close)
    closer.start()
    with pytest.raises(RuntimeError, match="closed"):
        poll_on()
    closer.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_has_another_incarnation_and_begins_anew(prefixes):
    with prefixes.events() as events:
        picture = Picture(prefixes, events)
        remember(prefixes, range(8), namespace=b"a")
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                remember(prefixes, range(50, 58))
                picture.read()
                said = [picture.is_right(), picture.n_begun, events.incarnation == picture.incarnation]
                said.append(events.incarnation)
                os.write(write, json.dumps(said).encode())
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as file:
            is_right, n_begun, same, incarnation = json.load(file)
        os.waitpid(child, 0)
        assert (is_right, n_begun, same) == (True, 2, True)
        assert incarnation != events.incarnation
        picture.read()
        assert picture.is_right()
        assert picture.n_begun == 1
        assert len(picture.known) == 2


def test_incarnations_are_drawn():
    stores = [PagedKvStore(4, 8, 1, 1) for _ in range(50)]
    caches = [PrefixCache(store) for store in stores]
    drawn = {prefixes.events().incarnation for prefixes in caches}
    assert len(drawn) == 50
    assert max(drawn) > 2**56
    assert min(drawn) >= 0
