"""A state machine drives the real classes and the twin side by side, and compares them after every move."""

import gc

import numpy as np
import reference
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import pagedkv
from pairs import CachePair, Handle, StepPair, StorePair, both, compare, compare_contiguous

MAX_CACHES = 9

pick = st.integers(0, 23)  # which one: modulo how many there are
few = st.integers(0, 6)
many = st.integers(0, 40)


def scrambled(number, n):
    """n float32 of arbitrary bits: denormals, infinities and NaNs with all kinds of payloads among them."""
    seeds = np.arange(number, number + n, dtype=np.uint32)
    return (seeds * np.uint32(2654435761) ^ np.uint32(0x7F800000) * (seeds % 5 == 0)).astype(np.uint32).view(np.float32)


class Machine(RuleBasedStateMachine):
    """Three stores of different block sizes, widths and layers: one in debug mode, one of NaN, one as it comes."""

    def __init__(self):
        super().__init__()
        self.stores = []
        self.caches = [CachePair(pagedkv.PagedKvCache(), reference.Cache()) for _ in range(3)]
        self.handles = []
        self.steps = []
        self.out = {}
        self.n_values = 0

    @initialize(totals=st.tuples(st.integers(1, 24), st.integers(1, 12), st.integers(1, 8)))
    def make_stores(self, totals):
        large, medium, small = totals
        self.stores = [
            StorePair.make(3, large, n_kv_heads=2, head_dim=2, v_head_dim=1, n_layers=2),
            StorePair.make(1, medium, n_kv_heads=1, head_dim=1, v_head_dim=3, n_layers=1, debug=True),
            StorePair.make(4, small, n_kv_heads=3, head_dim=1, v_head_dim=1, n_layers=3),
        ]
        self.stores[0].poison()

    # --- choosing ---

    def store(self, which):
        return self.stores[which % len(self.stores)]

    def cache(self, which):
        return self.caches[which % len(self.caches)]

    def cache_and_store(self, which):
        """A cache, and mostly the store it belongs to: every eighth time any other."""
        cache = self.cache(which)
        own = [store for store in self.stores if store.twin is cache.twin.store]
        return cache, own[0] if own and which % 8 else self.store(which)

    def new_rows(self, store, *shape):
        """K and V of the given leading shape."""
        values = []
        for width in (store.twin.k_width, store.twin.v_width):
            n = int(np.prod(shape)) * width
            values.append(scrambled(self.n_values, n).reshape(*shape, width))
            self.n_values += n
        return values

    def add_cache(self, real, twin):
        self.caches.append(CachePair(real, twin))

    # --- growing ---

    @rule(which=pick)
    def push(self, which):
        cache, store = self.cache_and_store(which)
        k, v = self.new_rows(store, store.twin.n_layers)
        shape = (-1,) if store.twin.n_layers == 1 else k.shape
        both(
            lambda: cache.real.push(store.real, k.reshape(shape), v.reshape(v.shape if len(shape) > 1 else shape)),
            lambda: cache.twin.push(store.twin, k, v),
        )

    @rule(which=pick, n=many, strided=st.booleans())
    def append_contiguous(self, which, n, strided):
        cache, store = self.cache_and_store(which)
        k, v = self.new_rows(store, store.twin.n_layers, n)
        k_given, v_given = (np.asfortranarray(k), v[:, ::-1].copy()[:, ::-1]) if strided else (k, v)
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

    @precondition(lambda self: len(self.caches) < MAX_CACHES)
    @rule()
    def new_cache(self):
        self.add_cache(pagedkv.PagedKvCache(), reference.Cache())

    @precondition(lambda self: len(self.caches) < MAX_CACHES)
    @rule(which=pick)
    def clone(self, which):
        cache = self.cache(which)
        result = both(cache.real.clone, cache.twin.clone)
        if result:
            self.add_cache(*result)

    @rule(which=pick, source=pick)
    def clone_from(self, which, source):
        cache, source = self.cache(which), self.cache(source)
        if cache is not source:
            self.keep_unbound_blocks(cache)
        both(lambda: cache.real.clone_from(source.real), lambda: cache.twin.clone_from(source.twin))

    @precondition(lambda self: len(self.caches) < MAX_CACHES)
    @rule(which=pick, n_blocks=few, n_reserved=st.integers(0, 2), bound=st.booleans())
    def adopt(self, which, n_blocks, n_reserved, bound):
        """Another's full blocks and a few fresh ones become the start of a new sequence, or of one that has blocks."""
        source = self.cache(which)
        store = next((store for store in self.stores if store.twin is source.twin.store), None)
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
        target = self.cache(which + n_reserved) if n_blocks == 0 else CachePair(pagedkv.PagedKvCache(), reference.Cache())
        result = both(
            lambda: target.real.adopt_blocks(table, seq_len, size, store=store.real if bound else None),
            lambda: target.twin.adopt_blocks(blocks, seq_len, size, store.twin if bound else None),
        )
        if result is None:
            self.handles.append(Handle(store, table, blocks))
        elif target not in self.caches:
            self.caches.append(target)

    @rule(which=pick, seq_len=few, size=st.integers(1, 4))
    def adopt_what_is_wrong(self, which, seq_len, size):
        cache = self.cache(which)
        if seq_len % size or seq_len:
            both(
                lambda: cache.real.adopt_blocks([], seq_len, size), lambda: cache.twin.adopt_blocks([], seq_len, size)
            )

    # --- blocks by id ---

    @rule(which=pick, n=few)
    def acquire(self, which, n):
        store = self.store(which)
        result = both(lambda: store.real.acquire(n), lambda: store.twin.acquire(n))
        if result:
            ids, blocks = result
            assert len(set(ids)) == len(ids) == n
            self.handles.append(Handle(store, ids, blocks))

    @rule(which=pick, data=st.data())
    def retain(self, which, data):
        """Any blocks of a sequence, the tail and reserved ones too. Those of a step are its own business."""
        cache = self.cache(which)
        store = next((store for store in self.stores if store.twin is cache.twin.store), None)
        if store is None or cache.twin.in_step:
            return
        places = [i for i, block in enumerate(cache.twin.table) if block is not None]
        if not places:
            return
        chosen = data.draw(st.lists(st.sampled_from(places), max_size=4))
        table = cache.real.block_table.tolist()
        handle = Handle(store, [table[i] for i in chosen], [cache.twin.table[i] for i in chosen])
        store.real.retain(handle.ids)
        store.twin.retain(handle.blocks)
        self.handles.append(handle)

    @precondition(lambda self: self.handles)
    @rule(which=pick, as_array=st.booleans(), n=st.integers(1, 6))
    def release_ids(self, which, as_array, n):
        handle = self.handles[which % len(self.handles)]
        ids, blocks = handle.ids[:n], handle.blocks[:n]
        handle.store.real.release(np.array(ids, np.int64) if as_array else ids)
        handle.store.twin.release(blocks)
        del handle.ids[:n], handle.blocks[:n]
        if not handle.ids:
            self.handles.remove(handle)

    @precondition(lambda self: self.handles)
    @rule(which=pick)
    def release_one_too_many(self, which):
        """A list with one reference more than the block has: refused whole."""
        handle = self.handles[which % len(self.handles)]
        if handle.ids:
            n_more = handle.blocks[0].holders
            both(
                lambda: handle.store.real.release(handle.ids + handle.ids[:1] * n_more),
                lambda: handle.store.twin.release(handle.blocks + handle.blocks[:1] * n_more),
            )

    @precondition(lambda self: self.handles)
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
        cache, store = self.cache_and_store(which)
        both(lambda: cache.real.release(store.real), lambda: cache.twin.release(store.twin))

    @rule(which=pick, new_len=many)
    def truncate(self, which, new_len):
        cache, store = self.cache_and_store(which)
        both(lambda: cache.real.truncate(store.real, new_len), lambda: cache.twin.truncate(store.twin, new_len))

    @rule(which=pick, new_len=many)
    def can_truncate_to(self, which, new_len):
        cache = self.cache(which)
        assert cache.real.can_truncate_to(new_len) == cache.twin.can_truncate_to(new_len)

    @rule(which=pick, position=many)
    def drop_before(self, which, position):
        cache, store = self.cache_and_store(which)
        both(
            lambda: cache.real.drop_before(store.real, position), lambda: cache.twin.drop_before(store.twin, position)
        )

    @precondition(lambda self: len(self.caches) > 1)
    @rule(which=pick, in_cycle=st.booleans())
    def forget(self, which, in_cycle):
        """The last reference goes, to the reference count or to the collector of cycles."""
        cache = self.cache(which)
        if cache.twin.in_step:
            return
        self.keep_unbound_blocks(cache)
        self.caches.remove(cache)
        cache.twin.forget()
        if in_cycle:
            cycle = [cache.real]
            cycle.append(cycle)
            del cycle
        cache.real = None
        if in_cycle:
            gc.collect(0)

    def keep_unbound_blocks(self, cache):
        """A cache whose store was never named cannot give its blocks back; from now on the test holds them."""
        twin = cache.twin
        if twin.table and twin.store is None and not twin.in_step:
            store = next(store for store in self.stores if store.twin.block_size == twin.block_size)
            self.handles.append(Handle(store, cache.real.block_table.tolist(), list(twin.table)))

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
            compare_contiguous(real, rows, layer)
            self.out[store.twin] = real

    # --- steps ---

    @precondition(lambda self: len(self.steps) < 2)
    @rule(which=pick, lens=st.lists(few, max_size=4), order=st.permutations(range(MAX_CACHES)))
    def open_step(self, which, lens, order):
        store = self.store(which)
        in_order = [self.caches[i] for i in order if i < len(self.caches)]
        mine = [cache for cache in in_order if cache.twin.store in (None, store.twin) or which % 8 == 0]
        caches = mine[: len(lens)]
        lens = lens[: len(caches)]
        real = pagedkv.Step(store.real, [cache.real for cache in caches], lens)
        twin = reference.Step(store.twin, [cache.twin for cache in caches], lens)
        if both(real.__enter__, twin.enter):
            step = StepPair(real, twin, caches)
            self.steps.append(step)
            assert real.n_rows == twin.n_rows
            assert real.positions.tolist() == twin.positions
            assert real.new_blocks == twin.new_blocks
            assert real.seq_lens == tuple(cache.seq_len + n for cache, n in twin.batch())

    @precondition(lambda self: self.steps)
    @rule(which=pick, layers=st.lists(few, min_size=1, max_size=3))
    def write_layers(self, which, layers):
        step = self.steps[which % len(self.steps)]
        store = next(store for store in self.stores if store.twin is step.twin.store)
        for layer in layers:
            k, v = self.new_rows(store, step.twin.n_rows)
            step.real.write(layer % store.twin.n_layers, k, v)
            step.twin.write(layer % store.twin.n_layers, k, v)

    @precondition(lambda self: self.steps)
    @rule(which=pick, end=st.sampled_from(["commit", "leave", "rollback", "raise", "forget"]), finish=st.booleans())
    def end_step(self, which, end, finish):
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
            real = cache.real.store
            assert real is next((store.real for store in self.stores if store.twin is cache.twin.store), None)

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
            if cache.twin.table and cache.twin.store is None:
                self.keep_unbound_blocks(cache)
        for handle in self.handles:
            handle.store.real.release(handle.ids)
        self.caches.clear()
        self.steps.clear()


TestModel = Machine.TestCase
