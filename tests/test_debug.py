"""debug=True: what is free or fresh is NaN, for every dtype and every way to take and to give back, and every change
of the books is followed by a check of them."""

import gc
import os
import weakref

import numpy as np
import pytest
from dtype_reference import DTYPES, KINDS, SCALED
from dtype_support import make, normal
from helpers import books_of, cache_state
from proof_starved import can_starve, in_child, is_refused

import pagedkv
from pagedkv import PagedKvCache, PagedKvError, PrefixCache, Step
from pagedkv.serving import LayerShape, ModelStores


class World:
    """Two sequences, a prefix cache that shares two blocks with the first and has two alone, and three blocks by id."""

    def __init__(self, dtype="float32"):
        self.store = make(dtype, block_size=2, debug=True)
        self.prefixes = PrefixCache(self.store)
        self.first, self.second, gone = PagedKvCache(), PagedKvCache(), PagedKvCache()
        for cache, n in ((self.first, 5), (self.second, 4), (gone, 4)):
            cache.append_contiguous(self.store, *self.rows(n), n)
        self.prefixes.insert([1, 2, 3, 4, 5], self.first)
        self.prefixes.insert([9, 9, 9, 9], gone)
        self.cached = gone.block_table.tolist()
        gone.release(self.store)
        self.ids = self.store.acquire(3)
        self.one, self.two = self.rows(1), self.rows(2)

    def rows(self, n):
        return normal(3, 2, n, 2, 3)

    def open_step(self, n=3):
        step = Step(self.store, [self.second], n)
        step.__enter__()
        step.write(0, *self.rows(n))
        return step

    def fork(self):
        """A sequence whose part-full tail is shared."""
        return self.first.clone()


def parts(store, block):
    """Views of what is NaN where a block was filled: its values, or its scales."""
    for side in "kv":
        yield getattr(store, f"{side}_{'scales' if store.dtype in SCALED else 'block'}")(block)


def is_nan(values):
    decode = KINDS["bfloat16" if values.dtype == np.uint16 else "float32"].decode
    return np.isnan(decode(values))


def evict_for_want(world):
    world.store.acquire(world.store.free_block_count + 2)


def reorder(world):
    pagedkv.reorder(world.store, [world.first, world.second], [0, 0])


# What gives blocks back, and which; the views of them are taken before.
LETTING_GO = {
    "release ids": (lambda w: w.store.release(w.ids), lambda w: w.ids),
    "release": (lambda w: w.second.release(w.store), lambda w: w.second.block_table.tolist()),
    "truncate": (lambda w: w.first.truncate(w.store, 4), lambda w: w.first.block_table.tolist()[2:]),
    "drop_before": (lambda w: w.second.drop_before(w.store, 3), lambda w: w.second.block_table.tolist()[:1]),
    "clone_from": (lambda w: w.second.clone_from(w.first), lambda w: w.second.block_table.tolist()),
    "reorder": (reorder, lambda w: w.second.block_table.tolist()),
    "evict": (lambda w: w.prefixes.evict(2), lambda w: w.cached),
    "clear": (lambda w: w.prefixes.clear(), lambda w: w.cached),
    "evict for want": (evict_for_want, lambda w: w.cached),
    "collect": (lambda w: delattr(w, "second"), lambda w: w.second.block_table.tolist()),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LETTING_GO)
def test_what_is_given_back_is_nan(dtype, name):
    world = World(dtype)
    let_go, blocks = LETTING_GO[name]
    views = [view for block in blocks(world) for view in parts(world.store, block)]
    if name != "release ids":  # which were never written
        assert not any(is_nan(view).all() for view in views)
    let_go(world)
    assert all(is_nan(view).all() for view in views)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_step_took_is_nan_before_and_after(dtype):
    world = World(dtype)
    step = Step(world.store, [world.second], 3)
    step.__enter__()
    new = [block for block in range(16) if world.store.refcount(block) and block not in world.ids]
    fresh = [view for block in new[-2:] for view in parts(world.store, block)]
    assert all(is_nan(view).all() for view in fresh)
    step.write(0, *world.rows(3))
    assert not any(is_nan(view).all() for view in fresh)
    step.rollback()
    assert all(is_nan(view).all() for view in fresh)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_were_not_copied_are_nan(dtype):
    """Of a shared tail only the rows that were written come along."""
    world = World(dtype)
    fork = world.fork()
    fork.reserve(world.store, 1)
    assert fork.block_table[2] != world.first.block_table[2]
    for values in parts(world.store, int(fork.block_table[2])):
        assert not is_nan(values[0]).any()
        assert is_nan(values[1]).all()


CHANGES = {
    "acquire": lambda w: w.store.acquire(1),
    "retain": lambda w: w.store.retain(w.ids),
    "release ids": lambda w: w.store.release(w.ids),
    "push": lambda w: w.first.push(w.store, *w.one),
    "append": lambda w: w.first.append_contiguous(w.store, *w.two, 2),
    "reserve": lambda w: w.first.reserve(w.store, 4),
    "release": lambda w: w.first.release(w.store),
    "truncate": lambda w: w.first.truncate(w.store, 1),
    "drop_before": lambda w: w.first.drop_before(w.store, 4),
    "clone": lambda w: w.first.clone(),
    "clone_from": lambda w: w.first.clone_from(w.second),
    "adopt_blocks": lambda w: PagedKvCache().adopt_blocks(w.ids, 2, 2, store=w.store),
    "reorder": reorder,
    "enter": lambda w: Step(w.store, [w.second], 3).__enter__(),
    "insert": lambda w: w.prefixes.insert([7, 7, 7], w.second),
    "attach": lambda w: w.prefixes.attach(PagedKvCache(), [1, 2, 3, 4, 5]),
    "evict": lambda w: w.prefixes.evict(1),
    "forget": lambda w: w.prefixes.forget([1, 2, 3, 4]),
    "clear": lambda w: w.prefixes.clear(namespace=b"another"),
}


LAST = 15


def break_the_books(world):
    """A block that nobody has taken has a holder."""
    books_of(world.store)[0][LAST] = 1


def mend_the_books(world):
    books_of(world.store)[0][LAST] = 0


@pytest.mark.parametrize("name", CHANGES)
def test_a_check_follows_every_change(name):
    world = World()
    break_the_books(world)
    with pytest.raises(PagedKvError, match=f"block {LAST} was never handed out and has holders"):
        CHANGES[name](world)
    mend_the_books(world)
    world.store.check()


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_check_follows_the_end_of_a_step(end):
    world = World()
    step = world.open_step()
    break_the_books(world)
    with pytest.raises(PagedKvError, match=f"block {LAST}"):
        getattr(step, end)()
    mend_the_books(world)
    world.store.check()


def test_a_step_that_finds_the_books_wrong_on_entering_holds_nothing():
    world = World()
    break_the_books(world)
    free = world.store.free_block_count
    with pytest.raises(PagedKvError, match=f"block {LAST}"), Step(world.store, [world.second], 3):
        pass
    mend_the_books(world)
    assert world.store.free_block_count == free
    world.second.push(world.store, *world.rows(1))


# --- without memory, and without anybody who holds it ---


def books(world):
    """Who holds what; what came and went at once is no change."""
    counts = [world.store.refcount(block) for block in range(world.store.total_blocks)]
    return counts, world.prefixes.stats(), [cache_state(cache) for cache in (world.first, world.second)]


@can_starve
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("name", CHANGES)
def test_no_check_fails_for_want_of_memory_after_the_change(name):
    """Whichever allocation fails, the books are as before, or the change is made and nothing was raised."""

    def work(say):
        faults, n_refused, calm, n = [], 0, 0, 0
        while calm < 3:
            say(f"after {n}")
            gc.collect(0)
            world = World()
            before = books(world)
            refused = is_refused([lambda: CHANGES[name](world)], n)  # noqa: B023
            world.store.check([world.first, world.second])
            if refused and books(world) != before:
                faults.append(n)
            n_refused += refused
            calm = 0 if refused else calm + 1
            n += 1
        return faults, n_refused

    faults, n_refused = in_child(work)
    assert not faults
    assert n_refused or name == "evict"


class Circle:
    """Holds what it is given, and itself."""

    def __init__(self, *held):
        self.held = (*held, self)


@pytest.mark.parametrize(("at", "block", "fault"), [
    (0, 2, "block 2 is twice in the free list"),
    (3, 4, "block 4 is twice in the free list"),
    (1, 5, "block 5 is in the free list and has holders"),
    (1, 6, "the free list holds 6, not an id of a block that was ever held"),
    (1, -1, "the free list holds -1, not an id of a block that was ever held"),
])  # fmt: skip
def test_a_free_list_that_is_none(at, block, fault):
    store = make("float32", block_size=2)
    ids = store.acquire(6)
    store.release(ids[:5])
    free = books_of(store)[1]
    assert free[:5] == [4, 3, 2, 1, 0]
    before, free[at] = free[at], block
    for _ in range(2):  # looking leaves no mark
        with pytest.raises(PagedKvError, match=f"^{fault}$"):
            store.check()
    assert free[at] == block
    free[at] = before
    store.check()
    assert store.acquire(6) == [0, 1, 2, 3, 4, 6]


def test_a_circle_is_collected_and_leaves_nothing():
    world = World()
    step = world.open_step()
    fork = world.fork()
    pieces = world.store.pieces(world.ids)
    filling = world.store.fill(1)
    handle = pagedkv.PrefixHandle()
    world.prefixes.insert([1, 2, 3, 4, 5], world.first, handle=handle)
    circle = Circle(world, step, fork, pieces, filling, handle)
    seen = [weakref.ref(each) for each in (world.store, world.prefixes, world.first, world.second, fork, step, circle)]
    del world, step, fork, pieces, filling, handle, circle
    assert any(each() is not None for each in seen)
    gc.collect()
    assert not any(each() is not None for each in seen)


def test_a_peer_that_is_collected_leaves_its_bytes_to_the_others():
    """Blocks that a caller took by id, of a store that is no more, are nobody's."""
    stores = ModelStores.from_bytes(1 << 20, [LayerShape(8, 1, 16), LayerShape(None, 1, 16)], debug=True)
    first, second = (group.store for group in stores.groups)
    most = second.free_block_count
    cache = PagedKvCache()
    cache.append_contiguous(first, *np.ones((2, 200, 16), np.float32), 200)
    first.acquire(7)
    assert second.free_block_count < most
    gone = weakref.ref(first)
    circle = Circle(stores, first, cache)
    del stores, first, cache, circle
    gc.collect()
    assert gone() is None
    assert second.free_block_count == most
    ids = second.acquire(most)
    second.check()
    second.release(ids)
    assert second.trim() >= 0
    second.check()
    assert second.free_block_count == most
