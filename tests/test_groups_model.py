"""A state machine drives a model's stores and sequences and their twin side by side, compared after every move.

Three groups of other widths and windows share one budget. Whatever is refused, and whatever runs out of memory at any
allocation, has changed nothing in any of them.
"""

import contextlib
import gc

import groups_reference as twin
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from proof_starved import testcapi

import pagedkv
from pagedkv import LayerShape, ModelSequence, ModelStores

SIZE = 3
# Layers of three kinds, in no order: two see all, two see 5 positions in wider rows, one sees 7 and has K wider than V.
FULL, WIDE, UNEVEN = LayerShape(None, 1, 1), LayerShape(5, 2, 2), LayerShape(7, 1, 3, 2)
SHAPES = [FULL, WIDE, FULL, UNEVEN, WIDE]
BLOCK_BYTES = [SIZE * 2 * (1 + 1) * 4, SIZE * 2 * (4 + 4) * 4, SIZE * (3 + 2) * 4]
WINDOWS = [None, 5, 7]
LEAST = sum(BLOCK_BYTES)
MAX_SEQUENCES = 6

WITHOUT_MEMORY = ["step", "reserve", "reorder", "clone"]

pick = st.integers(0, 23)
few = st.integers(0, 7)


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pairs = []
        self.n_values = 0

    @initialize(budget=st.integers(LEAST, 30 * LEAST), of_each=st.booleans(), debug=st.booleans())
    def make(self, budget, of_each, debug):
        most, self.debug = 30 * LEAST, debug
        if of_each:
            total = budget // LEAST
            self.stores = ModelStores(SHAPES, total, block_size=SIZE, debug=debug)
            budget, most, totals = total * LEAST, total * LEAST, [total] * 3
        else:
            self.stores = ModelStores.from_bytes(budget, SHAPES, block_size=SIZE, debug=debug, max_bytes=most)
            totals = [most // size for size in BLOCK_BYTES]
        self.most = most
        self.twin = twin.Groups(SIZE, BLOCK_BYTES, WINDOWS, budget, totals)
        self.add()

    def add(self):
        self.pairs.append((ModelSequence(self.stores), twin.Sequence(self.twin)))

    def pair(self, which):
        return self.pairs[which % len(self.pairs)]

    def both(self, ours, theirs):
        """Both do it, or both refuse."""
        try:
            theirs()
        except twin.Short:
            with pytest.raises(pagedkv.PagedStoreExhausted):
                ours()
            return False
        except ValueError:
            with pytest.raises(ValueError, match="expected"):
                ours()
            return False
        ours()
        return True

    # --- growing ---

    @rule(which=st.lists(pick, max_size=4), lens=st.lists(few, min_size=4, max_size=4), ends=st.sampled_from("cccrx"))
    def step(self, which, lens, ends):
        chosen = list({n % len(self.pairs): None for n in which})
        pairs = [self.pairs[n] for n in chosen]
        lens = lens[: len(pairs)]
        values = [[self.next_value() for _ in range(n)] for n in lens]

        def ours():
            with pagedkv.Step(self.stores, [real for real, _ in pairs], lens) as step:
                new = np.array([value for part in values for value in part], np.float32)
                lengths = [theirs.seq_len + n for (_, theirs), n in zip(pairs, lens, strict=True)]
                assert step.seq_lens == tuple(lengths)
                positions = [range(length - n, length) for length, n in zip(lengths, lens, strict=True)]
                assert step.positions.tolist() == [p for part in positions for p in part]
                for layer in np.random.default_rng(self.n_values).permutation(len(SHAPES)).tolist():
                    self.write(step, layer, new)
                    if lens:
                        self.attend(step, layer, pairs, values)
                if ends == "r":
                    step.rollback()
                elif ends == "x":
                    raise InterruptedError

        if ends == "c":
            if self.both(ours, lambda: twin.grow(self.twin, [theirs for _, theirs in pairs], lens)):
                for (_, theirs), part in zip(pairs, values, strict=True):
                    theirs.values += part
            return
        with contextlib.suppress(pagedkv.PagedStoreExhausted, InterruptedError):
            ours()

    def write(self, step, layer, new):
        shape = SHAPES[layer]
        k = np.repeat(new[:, None] + layer / 8, shape.n_kv_heads * shape.head_dim, axis=1)
        step.write(layer, k, -k[:, : shape.n_kv_heads * shape.v_head_dim])

    def attend(self, step, layer, pairs, values):
        """A query of zeros sees the mean of what its window shows, and is told the layer's window by the stores."""
        shape = SHAPES[layer]
        if any(shape.window is not None and theirs.first_position(WINDOWS.index(shape.window))
               > shape.first_needed(theirs.seq_len) for _, theirs in pairs):
            return  # cut back to where the window's beginning is gone
        out = step.attend(layer, np.zeros((step.n_rows, shape.n_kv_heads, shape.head_dim), np.float32))
        row = 0
        for (_, theirs), part in zip(pairs, values, strict=True):
            whole = np.array(theirs.values[: theirs.seq_len] + part, np.float64) + layer / 8
            before = len(whole) - len(part)
            for n in range(before + 1, len(whole) + 1):
                seen = whole[0 if shape.window is None else max(0, n - shape.window) : n]
                np.testing.assert_allclose(out[row], -seen.mean(), rtol=1e-5)
                row += 1

    def next_value(self):
        self.n_values += 1
        return self.n_values

    @rule(which=pick, n=few)
    def reserve(self, which, n):
        real, theirs = self.pair(which)
        assert real.blocks_needed_for(n) == tuple(theirs.needed(g, n) for g in range(3))
        self.both(lambda: real.reserve(n), lambda: twin.grow(self.twin, [theirs], [n]))

    # --- shrinking ---

    @rule(which=pick, eighths=st.integers(0, 9))
    def truncate(self, which, eighths):
        real, theirs = self.pair(which)
        n = theirs.seq_len * eighths // 8
        self.both(lambda: real.truncate(n), lambda: theirs.truncate(n))

    @rule(which=pick)
    def release_reserved(self, which):
        real, theirs = self.pair(which)
        real.release_reserved()
        theirs.cut(theirs.seq_len)

    @rule(which=pick)
    def drop_unneeded(self, which):
        real, theirs = self.pair(which)
        real.drop_unneeded()
        theirs.drop_unneeded()

    @rule(which=pick)
    def release(self, which):
        real, theirs = self.pair(which)
        for _ in range(2):
            real.release()
            theirs.release()

    @rule(which=pick)
    def forget(self, which):
        real, theirs = self.pairs.pop(which % len(self.pairs))
        theirs.release()
        del real
        gc.collect(0)
        if not self.pairs:
            self.add()

    # --- forks ---

    @rule(which=pick)
    def clone(self, which):
        real, theirs = self.pair(which)
        if len(self.pairs) < MAX_SEQUENCES:
            self.pairs.append((real.clone(), theirs.fork()))

    @rule()
    def new(self):
        if len(self.pairs) < MAX_SEQUENCES:
            self.add()

    @rule(parents=st.lists(pick, min_size=MAX_SEQUENCES, max_size=MAX_SEQUENCES))
    def reorder(self, parents):
        parents = [parent % len(self.pairs) for parent, _ in zip(parents, self.pairs, strict=False)]
        pagedkv.reorder(self.stores, [real for real, _ in self.pairs], parents)
        twin.reorder([theirs for _, theirs in self.pairs], parents)

    # --- the budget ---

    @rule(budget=st.integers(1, 31 * LEAST))
    def resize(self, budget):
        def theirs():
            if not max(LEAST, self.twin.held_bytes) <= budget <= self.most:
                raise ValueError
            self.twin.limit = budget

        self.both(lambda: self.stores.resize(budget), theirs)

    @rule()
    def trim(self):
        assert self.stores.trim() >= 0

    # --- failure ---

    @precondition(lambda self: testcapi and not self.debug)  # its check comes when the change is done
    @rule(which=pick, other=pick, n=few, at=st.integers(0, 40), what=st.sampled_from(WITHOUT_MEMORY))
    def without_memory(self, which, other, n, at, what):
        """One allocation fails: it is done as if nothing had been, or MemoryError comes and nothing has."""
        (real, theirs), (second, _) = self.pair(which), self.pair(other)
        batch = [real] if real is second else [real, second]
        acts = {
            "step": lambda: pagedkv.Step(self.stores, batch, n).__enter__().rollback(),
            "reserve": lambda: real.reserve(n),
            "reorder": lambda: pagedkv.reorder(self.stores, batch, [len(batch) - 1] * len(batch)),
            "clone": lambda: real.clone().release(),
        }
        act = acts[what]
        testcapi.set_nomemory(at, at + 1)
        try:
            act()
        except (MemoryError, pagedkv.PagedStoreExhausted):
            testcapi.remove_mem_hooks()
            return
        finally:
            testcapi.remove_mem_hooks()
        if what == "reserve":
            twin.grow(self.twin, [theirs], [n])
        elif what == "reorder":
            sequences = [pair for _, pair in (self.pair(which), self.pair(other))][: len(batch)]
            twin.reorder(sequences, [len(batch) - 1] * len(batch))

    # --- what must be true ---

    @precondition(lambda self: self.pairs)
    @invariant()
    def both_are_alike(self):
        groups = self.twin
        expected = twin.refcounts(groups, [theirs for _, theirs in self.pairs])
        for g, store in enumerate(self.stores.stores):
            named = {}  # the real id of each of the twin's blocks
            for real, theirs in self.pairs:
                table = real.caches[g].block_table.tolist()
                assert [block == -1 for block in table] == [block is None for block in theirs.tables[g]]
                for block, id in zip(theirs.tables[g], table, strict=True):
                    assert block is None or named.setdefault(block, id) == id
            assert len(set(named.values())) == len(named)
            assert {block: store.refcount(id) for block, id in named.items()} == dict(expected[g])
            room = (groups.limit - groups.held_bytes) // BLOCK_BYTES[g]
            assert store.free_block_count == min(groups.totals[g] - len(groups.held[g]), room)
        stats = self.stores.stats()
        assert (stats.nbytes, stats.held_bytes, stats.evictable_bytes) == (groups.limit, groups.held_bytes, 0)
        assert (stats.free_bytes, self.stores.nbytes_in_use) == (groups.limit - groups.held_bytes, groups.held_bytes)
        assert [each.held_blocks for each in stats.stores] == [len(held) for held in groups.held]
        for real, theirs in self.pairs:
            firsts = [theirs.first_position(g) for g in range(3)]
            capacities = [len(table) * SIZE for table in theirs.tables]
            assert (real.seq_len, real.first_position, real.capacity) == (theirs.seq_len, max(firsts), min(capacities))
            for layer, shape in enumerate(SHAPES):
                start = firsts[WINDOWS.index(shape.window)]
                got = real.to_contiguous(layer, start=min(start, theirs.seq_len))
                whole = np.array(theirs.values[start:], np.float32)[:, None] + np.float32(layer / 8)
                assert (got.k == whole).all()
                assert (got.v == -whole).all()
        self.stores.check([real for real, _ in self.pairs])


TestGroups = Machine.TestCase
