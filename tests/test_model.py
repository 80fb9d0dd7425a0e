"""A state machine drives the real classes and the twin side by side, and compares them after every move."""

import functools
import gc
import random
from inspect import signature

import numpy as np
import pytest
import reference
from dtype_reference import DTYPES, RAW, encode
from helpers import scrambled
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pairs import CachePair, Handle, StepPair, StorePair, both, compare, compare_contiguous

import pagedkv

MAX_CACHES = 9
N_WALKS = settings.default.max_examples // 25

pick = st.integers(0, 23)  # which one: modulo how many there are
few = st.integers(0, 6)
many = st.one_of(few, few, st.integers(0, 40))
dtypes = st.sampled_from(DTYPES)


class Machine(RuleBasedStateMachine):
    """Three stores of different block sizes, widths and layers: one in debug mode, one of NaN, one as it comes."""

    def __init__(self):
        super().__init__()
        self.stores = []
        self.caches = [self.new_pair() for _ in range(3)]
        self.handles = []
        self.steps = []
        self.out = {}
        self.n_values = 0

    @initialize(
        totals=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12)),
        dtypes=st.tuples(dtypes, dtypes, dtypes),
    )
    def make_stores(self, totals, dtypes):
        (n, m, k), (a, b, c) = totals, dtypes
        self.stores = [
            StorePair.make(3, n, n_kv_heads=2, head_dim=2, v_head_dim=1, n_layers=2, dtype=a),
            StorePair.make(1, m, n_kv_heads=1, head_dim=1, v_head_dim=3, n_layers=1, dtype=b, debug=True),
            StorePair.make(4, k, n_kv_heads=3, head_dim=1, v_head_dim=1, n_layers=3, dtype=c),
        ]
        self.stores[0].poison()

    def new_pair(self):
        return CachePair(pagedkv.PagedKvCache(), reference.Cache())

    def new_twin_step(self, *arguments):
        return reference.Step(*arguments)

    # --- choosing ---

    def store(self, which):
        return self.stores[which % len(self.stores)]

    def cache(self, which):
        return self.caches[which % len(self.caches)]

    def cache_and_store(self, which):
        """A cache, and mostly the store it belongs to: every eighth time any other."""
        cache = self.cache(which)
        return cache, (self.store_of(cache) if which % 8 else None) or self.store(which)

    def store_of(self, cache):
        return next((store for store in self.stores if store.twin is cache.twin.store), None)

    def place_in(self, cache, which):
        """A position of the sequence: its start, its end, one past it, or any between."""
        return cache.twin.seq_len * which // 22 + (which == 23)

    def new_rows(self, store, *shape):
        """float32 K and V of the given leading shape."""
        values = []
        for width in (store.twin.k_width, store.twin.v_width):
            n = int(np.prod(shape)) * width
            values.append(scrambled(self.n_values, n).reshape(*shape, width))
            self.n_values += n
        return values

    def as_given(self, store, k, v):
        """Rows as a caller may have them: every other time as the bits that the store would make of them."""
        if store.twin.dtype in RAW and self.n_values % 2:
            return [encode(store.twin.dtype, rows).values for rows in (k, v)]
        return [k, v]

    def add_cache(self, real, twin):
        """One more sequence; beyond a number that is easy to look through, another makes room."""
        idle = [i for i, cache in enumerate(self.caches) if not cache.twin.in_step]
        if len(self.caches) >= MAX_CACHES and idle:
            self.forget(idle[self.n_values % len(idle)], in_cycle=False)
        self.caches.append(CachePair(real, twin))

    # --- growing ---

    @rule(which=pick)
    def push(self, which):
        self.push_to(*self.cache_and_store(which))

    @rule(n=st.integers(1, 3))
    def decode(self, n):
        """Every sequence that has begun grows by n positions, in turn; one that cannot go on makes room."""
        for _ in range(n):
            for cache in self.caches:
                store = self.store_of(cache)
                if store and not cache.twin.in_step and not self.push_to(cache, store):
                    self.release_to(cache, store)

    def push_to(self, cache, store):
        k, v = self.new_rows(store, store.twin.n_layers)
        given = self.as_given(store, k, v)
        if store.twin.n_layers == 1:
            given = [rows.reshape(-1) for rows in given]
        return both(lambda: cache.real.push(store.real, *given), lambda: cache.twin.push(store.twin, k, v))

    @rule(which=pick, n=many, strided=st.booleans())
    def append_contiguous(self, which, n, strided):
        cache, store = self.cache_and_store(which)
        k, v = self.new_rows(store, store.twin.n_layers, n)
        k_given, v_given = self.as_given(store, k, v)
        if strided:
            k_given, v_given = np.asfortranarray(k_given), v_given[:, ::-1].copy()[:, ::-1]
        both(
            lambda: cache.real.append_contiguous(store.real, k_given, v_given, n),
            lambda: cache.twin.append(store.twin, k, v),
        )

    @rule(which=pick, n=many)
    def reserve(self, which, n):
        cache, store = self.cache_and_store(which)
        both(lambda: cache.real.reserve(store.real, n), lambda: cache.twin.reserve(store.twin, n))

    @rule(which=pick, n=many)
    def blocks_needed_for(self, which, n):
        cache, store = self.cache_and_store(which)
        result = both(
            lambda: cache.real.blocks_needed_for(store.real, n), lambda: cache.twin.blocks_needed_for(store.twin, n)
        )
        assert result is None or result[0] == result[1]

    # --- sharing ---

    @rule()
    def new_cache(self):
        new = self.new_pair()
        self.add_cache(new.real, new.twin)

    @rule(which=pick)
    def clone(self, which):
        cache = self.cache(which)
        result = both(cache.real.clone, cache.twin.clone)
        if result:
            self.add_cache(*result)

    @rule(which=pick, source=pick)
    def clone_from(self, which, source):
        cache, source = self.cache(which), self.cache(source)
        both(lambda: cache.real.clone_from(source.real), lambda: cache.twin.clone_from(source.twin))

    @rule(which=pick, n_blocks=few, n_reserved=st.integers(0, 2), bound=st.booleans())
    def adopt(self, which, n_blocks, n_reserved, bound):
        """Another's full blocks and a few fresh ones become the start of a new sequence, or of one that has blocks."""
        source = self.cache(which)
        store = self.store_of(source)
        if store is None or source.twin.in_step:
            return
        n_full = source.twin.seq_len // store.twin.block_size - source.twin.n_dropped
        n_reserved = min(n_reserved, store.twin.free_block_count)
        first = source.twin.n_dropped
        last = first + min(n_blocks, n_full)
        ids = source.real.block_table[first:last]
        blocks = source.twin.table[first:last]
        store.real.retain(ids)
        store.twin.retain(blocks)
        table = ids.tolist() + store.real.acquire(n_reserved)
        blocks = blocks + store.twin.acquire(n_reserved)
        seq_len, size = (last - first) * store.twin.block_size, store.twin.block_size
        new = self.new_pair()
        target = new if n_blocks else self.cache(which + n_reserved)
        result = both(
            lambda: target.real.adopt_blocks(table, seq_len, size, store=store.real if bound else None),
            lambda: target.twin.adopt_blocks(blocks, seq_len, size, store.twin if bound else None),
        )
        if result is None:
            self.handles.append(Handle(store, table, blocks))
        elif target is new:
            self.add_cache(new.real, new.twin)

    @rule(which=pick, seq_len=few, size=st.integers(1, 4))
    def adopt_what_is_wrong(self, which, seq_len, size):
        cache = self.cache(which)
        if seq_len % size or seq_len:
            both(lambda: cache.real.adopt_blocks([], seq_len, size), lambda: cache.twin.adopt_blocks([], seq_len, size))

    # --- blocks by id ---

    @rule(which=pick, n=st.integers(0, 3))
    def acquire(self, which, n):
        store = self.store(which)
        result = both(lambda: store.real.acquire(n), lambda: store.twin.acquire(n))
        if result:
            ids, blocks = result
            assert len(set(ids)) == len(ids) == n
            self.handles.append(Handle(store, ids, blocks))

    @rule(which=pick, chosen=st.lists(pick, max_size=4))
    def retain(self, which, chosen):
        """Any blocks of a sequence, the tail and reserved ones too. Those of a step are its own business."""
        cache = self.cache(which)
        store = self.store_of(cache)
        if store is None or cache.twin.in_step:
            return
        places = [i for i, block in enumerate(cache.twin.table) if block is not None]
        if not places:
            return
        chosen = [places[i % len(places)] for i in chosen]
        table = cache.real.block_table.tolist()
        handle = Handle(store, [table[i] for i in chosen], [cache.twin.table[i] for i in chosen])
        store.real.retain(handle.ids)
        store.twin.retain(handle.blocks)
        self.handles.append(handle)

    @rule(which=pick, as_array=st.booleans(), n=st.integers(1, 6))
    def release_ids(self, which, as_array, n):
        if not self.handles:
            return
        handle = self.handles[which % len(self.handles)]
        ids, blocks = handle.ids[:n], handle.blocks[:n]
        handle.store.real.release(np.array(ids, np.int64) if as_array else ids)
        handle.store.twin.release(blocks)
        del handle.ids[:n], handle.blocks[:n]
        if not handle.ids:
            self.handles.remove(handle)

    @rule(which=pick)
    def release_one_too_many(self, which):
        """A list with one reference more than the block has: refused whole."""
        handles = [handle for handle in self.handles if handle.ids]
        if handles:
            handle = handles[which % len(handles)]
            n_more = handle.blocks[0].holders
            both(
                lambda: handle.store.real.release(handle.ids + handle.ids[:1] * n_more),
                lambda: handle.store.twin.release(handle.blocks + handle.blocks[:1] * n_more),
            )

    @rule(src=pick, dst=pick)
    def copy_block(self, src, dst):
        handles = [handle for handle in self.handles if handle.ids]
        if not handles:
            return
        source = handles[src % len(handles)]
        target = handles[dst % len(handles)]
        if source.store is target.store:
            both(
                lambda: source.store.real.copy_block(source.ids[0], target.ids[-1]),
                lambda: source.store.twin.copy_block(source.blocks[0], target.blocks[-1]),
            )

    # --- shrinking ---

    @rule(which=pick)
    def release(self, which):
        self.release_to(*self.cache_and_store(which))

    def release_to(self, cache, store):
        both(lambda: cache.real.release(store.real), lambda: cache.twin.release(store.twin))

    @rule(which=pick, place=pick)
    def truncate(self, which, place):
        cache, store = self.cache_and_store(which)
        new_len = self.place_in(cache, place)
        both(lambda: cache.real.truncate(store.real, new_len), lambda: cache.twin.truncate(store.twin, new_len))

    @rule(which=pick, new_len=many)
    def can_truncate_to(self, which, new_len):
        cache = self.cache(which)
        assert cache.real.can_truncate_to(new_len) == cache.twin.can_truncate_to(new_len)

    @rule(which=pick, place=pick)
    def drop_before(self, which, place):
        cache, store = self.cache_and_store(which)
        position = self.place_in(cache, place)
        both(lambda: cache.real.drop_before(store.real, position), lambda: cache.twin.drop_before(store.twin, position))

    @rule(which=pick, in_cycle=st.booleans())
    def forget(self, which, in_cycle):
        """The last reference goes, to the reference count or to the collector of cycles."""
        cache = self.cache(which)
        if cache.twin.in_step or len(self.caches) == 1:
            return
        self.handles += self.unbound_blocks(cache)
        self.caches.remove(cache)
        cache.twin.forget()
        if in_cycle:
            cycle = [cache.real]
            cycle.append(cycle)
            del cycle
        cache.real = None
        if in_cycle:
            gc.collect(0)

    def unbound_blocks(self, cache):
        """Handles of the blocks that this cache cannot give back, since it was never told their store."""
        twin = cache.twin
        if not twin.table or twin.store is not None:
            return []
        store = next(store for store in self.stores if store.twin.block_size == twin.block_size)
        return [Handle(store, cache.real.block_table.tolist(), list(twin.table))]

    # --- reading ---

    @rule(which=pick, layer=few, reuse=st.booleans())
    def to_contiguous(self, which, layer, reuse):
        cache, store = self.cache_and_store(which)
        layer %= store.twin.n_layers
        out = self.out.get(store.twin) if reuse else None

        def twin_rows():
            cache.twin.use(store.twin)
            if cache.twin.first_position:
                raise ValueError("dropped")
            return cache.twin.rows()

        result = both(lambda: cache.real.to_contiguous(store.real, layer=layer, out=out), twin_rows)
        if result:
            real, rows = result
            assert out is None or real is out
            compare_contiguous(real, rows, layer, store.twin.dtype)
            self.out[store.twin] = real

    # --- steps ---

    @rule(which=pick, lens=st.lists(few, max_size=4), order=st.permutations(range(MAX_CACHES)))
    def open_step(self, which, lens, order):
        if len(self.steps) == 2:
            return
        store = self.store(which)
        in_order = [self.caches[i] for i in order if i < len(self.caches)]
        mine = [cache for cache in in_order if cache.twin.store in (None, store.twin) or which % 8 == 0]
        caches = mine[: len(lens)]
        lens = lens[: len(caches)]
        real = pagedkv.Step(store.real, [cache.real for cache in caches], lens)
        twin = self.new_twin_step(store.twin, [cache.twin for cache in caches], lens)
        if both(real.__enter__, twin.enter):
            step = StepPair(real, twin, caches)
            self.steps.append(step)
            assert real.n_rows == twin.n_rows
            assert real.positions.tolist() == twin.positions
            assert real.new_blocks == twin.new_blocks
            assert real.seq_lens == tuple(cache.seq_len + n for cache, n in twin.batch())

    @rule(which=pick, layers=st.lists(few, min_size=1, max_size=3))
    def write_layers(self, which, layers):
        if not self.steps:
            return
        step = self.steps[which % len(self.steps)]
        store = next(store for store in self.stores if store.twin is step.twin.store)
        for layer in layers:
            k, v = self.new_rows(store, step.twin.n_rows)
            step.real.write(layer % store.twin.n_layers, *self.as_given(store, k, v))
            step.twin.write(layer % store.twin.n_layers, k, v)

    @rule(which=pick, end=st.sampled_from(["commit", "leave", "rollback", "raise", "forget"]), finish=st.booleans())
    def end_step(self, which, end, finish):
        if not self.steps:
            return
        if finish:
            self.write_layers(which, [0, 1, 2])
        step = self.steps.pop(which % len(self.steps))
        if end in ("commit", "leave"):
            leave = step.real.commit if end == "commit" else lambda: step.real.__exit__(None, None, None)
            both(leave, step.twin.commit)
        elif end == "raise":
            assert not step.real.__exit__(KeyError, KeyError("a layer went wrong"), None)
            step.twin.rollback()
        elif end == "rollback":
            both(step.real.rollback, step.twin.rollback)
        else:
            step.real = None
            step.twin.rollback()

    # --- what is compared ---

    @invariant()
    def same(self):
        for store in self.stores:
            compare(
                store,
                [cache for cache in self.caches if self.belongs(cache, store)],
                [handle for handle in self.handles if handle.store is store],
                sum(step.twin.new_blocks for step in self.steps if step.twin.store is store.twin),
            )
        for cache in self.caches:
            store = self.store_of(cache)
            assert cache.real.store is (store.real if store else None)

    def belongs(self, cache, store):
        """Adopted blocks without a store are known by their block size, which every store has its own of."""
        if cache.twin.store is None and cache.twin.table:
            return cache.twin.block_size == store.twin.block_size
        return cache.twin.store in (None, store.twin)

    def teardown(self):
        """When everything is let go of, every block is free."""
        self.let_go()
        for store in self.stores:
            store.real.check()
            assert store.real.free_block_count == store.real.total_blocks

    def let_go(self):
        for step in self.steps:
            step.real.rollback()
        for cache in self.caches:
            self.handles += self.unbound_blocks(cache)
        for handle in self.handles:
            handle.store.real.release(handle.ids)
        self.caches.clear()
        self.steps.clear()


TestModel = Machine.TestCase


# A walk draws each argument of a move by its name.
ARGUMENTS = {
    **dict.fromkeys(["which", "place", "src", "dst", "source"], lambda draw: draw.randrange(24)),
    **dict.fromkeys(["strided", "as_array", "in_cycle", "reuse", "bound"], lambda draw: draw.random() < 0.5),
    "n": lambda draw: min(int(draw.expovariate(1 / 5)), 40),
    "n_blocks": lambda draw: draw.randrange(5),
    "n_reserved": lambda draw: draw.randrange(3),
    "layer": lambda draw: draw.randrange(3),
    "size": lambda draw: draw.randrange(1, 5),
    "seq_len": lambda draw: draw.randrange(7),
    "new_len": lambda draw: draw.randrange(41),
    "chosen": lambda draw: draw.choices(range(24), k=draw.randrange(4)),
    "layers": lambda draw: draw.choices(range(3), k=3),
    "lens": lambda draw: [int(draw.expovariate(1 / 2)) for _ in range(draw.randrange(5))],
    "order": lambda draw: draw.sample(range(MAX_CACHES), MAX_CACHES),
    "finish": lambda draw: draw.random() < 0.8,
    "end": lambda draw: draw.choice(["commit", "commit", "leave", "rollback", "raise", "forget"]),
}
MOVES = {  # and how often each is made
    "adopt": 1,
    "adopt_what_is_wrong": 1,
    "acquire": 1,
    "append_contiguous": 2,
    "blocks_needed_for": 1,
    "can_truncate_to": 1,
    "clone": 2,
    "clone_from": 1,
    "copy_block": 1,
    "decode": 1,
    "drop_before": 1,
    "end_step": 2,
    "forget": 1,
    "new_cache": 1,
    "open_step": 2,
    "push": 2,
    "release": 1,
    "release_ids": 2,
    "release_one_too_many": 1,
    "reserve": 1,
    "retain": 1,
    "to_contiguous": 1,
    "truncate": 1,
    "write_layers": 1,
}


@functools.cache
def argument_names(machine, move):
    return list(signature(getattr(machine, move)).parameters)[1:]


def walk(machine, moves, arguments, n, draw):
    """n moves, by their names and how often each is made, with the comparison after every one."""
    for name in draw.choices(list(moves), list(moves.values()), k=n):
        drawn = [arguments[argument](draw) for argument in argument_names(type(machine), name)]
        getattr(machine, name)(*drawn)
        machine.same()
    machine.teardown()


@pytest.mark.parametrize("seed", range(N_WALKS))
def test_walk(seed):
    """The same moves by plain chance: they come further into full stores than Hypothesis does, and much faster."""
    draw = random.Random(seed)
    machine = Machine()
    totals = draw.randrange(1, 40), draw.randrange(1, 40), draw.randrange(1, 16)
    machine.make_stores(totals, [DTYPES[(seed + i) % len(DTYPES)] for i in range(3)])
    walk(machine, MOVES, ARGUMENTS, 2000, draw)
