"""All that a server does, in one machine: sequences, forks, beams, windows, steps that fail, and a prefix cache that a
store asks for blocks before it refuses. Against the twins, with every byte compared after every move.

The twin of the prefix cache holds the blocks of the twin of the store, so that both see the same holders.
"""

import os
import random

import numpy as np
import pytest
import reference
from dtype_reference import DTYPES
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from pairs import CachePair, Handle, StorePair, both, outcome
from prefix_reference import Prefixes
from prefix_support import Clock
from test_model import ARGUMENTS, MAX_CACHES, MOVES, Machine, dtypes, few, pick, walk

import pagedkv

# 10**5 moves in CI; PAGEDKV_MODEL_MOVES=1000000 once in a while, for some minutes.
N_MOVES = int(os.environ.get("PAGEDKV_MODEL_MOVES", 100_000 if os.environ.get("CI") else 10_000))
MOVES_A_WALK = 5000

IDS = [0, 1, 2**32]  # equal in their low bits but for the second
SPACES = [None, b"", b"a"]
WAYS_TO_FAIL = ["model", "shape", "type", "early", "twice"]
SPELLINGS = [list, tuple, np.array]
END = 5  # an id that no sequence has: what comes after it is never known

tokens = st.lists(st.sampled_from(IDS), max_size=9)
spaces = st.sampled_from(SPACES)
spellings = st.sampled_from(SPELLINGS)


class Failed(Exception):
    """What goes wrong in a layer of the model."""


class Store(reference.Store):
    """A twin that evicts before it refuses: all that is missing, or nothing."""

    prefixes = None

    def refuse_more_than_free(self, needed, can_ever_fit):
        missing, n_idle = needed - self.free_block_count, len(self.prefixes.idle())
        if 0 < missing <= n_idle:
            self.evict(missing)
        try:
            super().refuse_more_than_free(needed, can_ever_fit)
        except reference.StoreShort as refusal:
            refusal.evictable = n_idle
            raise

    def evict(self, n):
        """What goes also takes along what comes after it and a sequence holds."""
        before = self.prefixes.blocks()
        self.prefixes.evict(n)
        self.release(list(before - self.prefixes.blocks()))


class Sequence(reference.Cache):
    """A twin that knows which tokens its positions were computed from; None where it cannot be told."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.tokens = []

    def append(self, store, k, v):
        super().append(store, k, v)
        if self.tokens is not None:
            self.tokens += self.draw.choices(IDS, k=k.shape[1])

    def clone(self):
        other = Sequence(self.draw)
        other.clone_from(self)
        return other

    def clone_from(self, source):
        super().clone_from(source)
        self.tokens = None if source.tokens is None else list(source.tokens)

    def adopt_blocks(self, blocks, seq_len, block_size, store=None):
        """Blocks of any place of any sequence: what they were computed from is not known any more."""
        super().adopt_blocks(blocks, seq_len, block_size, store)
        self.tokens = None if seq_len else []

    def truncate(self, store, new_len):
        super().truncate(store, new_len)
        if new_len == 0:
            self.tokens = []
        elif self.tokens is not None:
            del self.tokens[new_len:]

    def forget(self):
        super().forget()
        self.tokens = []

    def attach(self, store, space, prompt, used):
        """`used` is the beginning that ends inside a block and of which the last rows are copied, or None."""
        prefixes = store.prefixes
        n = prefixes.match(space, prompt)
        whole = prefixes.whole_blocks(space, n, prompt)
        lent = [prefixes.spaces[space][used].block] if used else []
        if n:
            prefixes.use(space, used or prompt[:n])
        store.retain(whole + lent)
        own = []
        if used:
            try:
                own = store.acquire(1)
                own[0].copy_first(n % store.block_size, lent[0])
            except reference.StoreShort:
                n -= n % store.block_size
            store.release(lent)
        if n:
            table, size = whole + own, store.block_size
            reference.Cache.adopt_blocks(self, table, len(table) * size, size, store)
            reference.Cache.truncate(self, store, n)
            self.tokens = list(prompt[:n])
        prefixes.hit_tokens += n
        prefixes.missed_tokens += len(prompt) - n
        return n


def reorder(store, caches, parents):
    if any(parent >= len(caches) for parent in parents):
        raise IndexError("no such parent")
    for cache in caches:
        cache.use(store)
    forks = [caches[parent].clone() for parent in parents]
    for i, fork in enumerate(forks):
        if parents[i] != i:
            caches[i].clone_from(fork)
    for fork in forks:
        fork.forget()


def go_wrong(step, layer, how):
    """What a model may do to a step that is open; always as `Failed`."""
    n = step.n_rows
    refused = False
    try:
        if how == "shape":
            step.write(layer, np.ones((n + 1, 2), np.float32), np.ones((n + 1, 4), np.float32))
        elif how == "type":
            step.write(layer, np.ones((n, 2)), np.ones((n, 4)))
        elif how == "early":
            step.attend(layer, np.ones((n + 1, 2, 1), np.float32))
        elif how == "twice":
            step.__enter__()
    except (TypeError, ValueError, RuntimeError):
        refused = True
    assert refused == (how != "model")
    raise Failed  # not from there: what it came from would keep the step


class Server(Machine):
    """One store and its prefix cache, with the moves of `Machine` and those of a server."""

    def __init__(self):
        self.draw = random.Random(0)
        super().__init__()

    @initialize(block_size=st.integers(1, 4), total=st.integers(2, 24), dtype=dtypes, debug=st.booleans())
    def make_stores(self, block_size, total, dtype, debug):
        self.clock = Clock()
        self.is_debug = debug
        store = StorePair.make(block_size, total, 2, 1, v_head_dim=2, n_layers=2, dtype=dtype, debug=debug, twin=Store)
        self.stores = [store]
        self.pair = store
        self.prefixes = pagedkv.PrefixCache(store.real, clock=self.clock)
        self.known = Prefixes(block_size, lambda block: block.holders > 1, self.clock)
        store.twin.prefixes = self.known
        self.n_looks = 0

    def new_pair(self):
        return CachePair(pagedkv.PagedKvCache(), Sequence(self.draw))

    # --- the prefix cache ---

    @rule(which=pick, place=pick, own=tokens, space=spaces, spell=spellings)
    def start(self, which, place, own, space, spell):
        """A new sequence on the beginning of another one, on something known, or on nothing."""
        known = [key for entries in self.known.spaces.values() for key in entries]
        begun = [*known, *(tuple(cache.twin.tokens or ()) for cache in self.caches)]
        begun = begun[which * len(begun) // 24]
        prompt = (*begun[: len(begun) * place // 22], *own)
        if prompt:
            new = self.new_pair()
            self.attach(new, prompt, space, spell)
            self.add_cache(new.real, new.twin)

    def attach(self, cache, prompt, space, spell):
        real, twin = self.pair.real, self.pair.twin
        n = self.known.match(space, prompt)
        assert self.prefixes.match(spell(prompt), namespace=space) == n
        shared = self.prefixes.match_blocks(spell(prompt), namespace=space)
        sources = self.known.sources(space, n, prompt)
        used = self.known.last_used(space, sources) if sources else None
        got = self.prefixes.attach(cache.real, spell(prompt), namespace=space)
        assert cache.twin.attach(twin, space, prompt, used) == got
        assert cache.real.block_table[: len(shared)].tolist() == shared.tolist()
        assert cache.real.store is (real if got else None)

    @rule(which=pick)
    def attach_to_what_has_begun(self, which):
        cache = self.cache(which)
        if cache.twin.table:
            _, error = outcome(lambda: self.prefixes.attach(cache.real, [0, 1, 0, 1]))
            assert isinstance(error, RuntimeError if cache.twin.in_step else ValueError)

    @rule(
        which=pick,
        place=pick,
        space=spaces,
        priority=st.sampled_from([0, 0, 0, 2, -1]),
        ttl=st.sampled_from([None, None, None, 1, 5]),
        spell=spellings,
    )
    def insert(self, which, place, space, priority, ttl, spell):
        """The whole blocks of a sequence, also of one in a step; in any namespace, so that some are in several."""
        cache = self.cache(which)
        twin = cache.twin
        if twin.tokens is None:
            return
        prompt = twin.tokens[: len(twin.tokens) * place // 22]
        n = len(prompt) // self.pair.twin.block_size
        key = tuple(prompt[: n * self.pair.twin.block_size])
        options = {"namespace": space, "priority": priority, "ttl": ttl}
        if self.is_debug and not all(map(self.is_finite, filter(None, twin.table[:n]))):
            _, error = outcome(lambda: self.prefixes.insert(prompt, cache.real, **options))
            assert isinstance(error, ValueError)
            return
        before = self.known.blocks()
        new = self.known.insert(space, key, twin.table[:n], priority, ttl) if n else []
        self.pair.twin.retain(list(set(new) - before))
        assert self.prefixes.insert(spell(prompt) if prompt else [], cache.real, **options) == len(new)

    def is_finite(self, block):
        rows = [block.row(offset) for offset in range(self.pair.twin.block_size)]
        return all(np.isfinite(side).all() for row in rows for side in row)

    @rule(n=few)
    def evict(self, n):
        n_idle = len(self.known.idle())
        assert self.prefixes.evict(n) == min(n, n_idle)
        self.pair.twin.evict(min(n, n_idle))

    @rule(n=few)
    def take_too_many(self, n):
        """Nothing is evicted for a request that cannot be met."""
        with pytest.raises(pagedkv.PagedStoreExhausted):
            self.pair.real.acquire(self.pair.real.free_block_count + len(self.known.idle()) + 1 + n)

    @precondition(lambda self: len(self.known.blocks()) > 6)
    @rule()
    def clear(self):
        blocks = self.known.blocks()
        assert self.prefixes.clear() == len(blocks)
        self.known.spaces.clear()
        self.pair.twin.release(list(blocks))

    @rule(which=pick, place=pick, own=tokens, space=spaces, start=few)
    def forget_tokens(self, which, place, own, space, start):
        """Something that is known, or begins or continues it."""
        known = [(), *self.known.spaces.get(space, ())]
        key = known[which * len(known) // 24]
        prompt = (*key[: len(key) * place // 22], *own)
        before = self.known.blocks()
        assert self.prefixes.forget(prompt, namespace=space, start=start) == self.known.forget(space, prompt, start)
        self.pair.twin.release(list(before - self.known.blocks()))

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds):
        self.clock.now += seconds

    # --- whole requests ---

    @rule(which=pick, place=pick, own=tokens, space=spaces, priority=st.sampled_from([0, 0, 1]), finish=st.booleans())
    def serve(self, which, place, own, space, priority, finish):
        """Attach, compute what is left, insert, and mostly end: what most of the entries come from."""
        self.start(which, place, own, space, list)
        cache = self.caches[-1]
        if cache.twin.in_step:
            return
        k, v = self.new_rows(self.pair, 2, len(own))
        both(
            lambda: cache.real.append_contiguous(self.pair.real, k, v, len(own)),
            lambda: cache.twin.append(self.pair.twin, k, v),
        )
        self.insert(len(self.caches) - 1, 22, space, priority, None, list)
        if finish:
            self.release_to(cache, self.pair)

    # --- beams ---

    @rule(order=st.permutations(range(MAX_CACHES)), parents=st.lists(st.integers(0, 4), max_size=5))
    def reorder(self, order, parents):
        """Any sequences: those of a step and parents out of range are refused, and nothing is changed."""
        chosen = [self.caches[i] for i in order if i < len(self.caches)][: len(parents)]
        parents = parents[: len(chosen)]
        both(
            lambda: pagedkv.reorder(self.pair.real, [cache.real for cache in chosen], parents),
            lambda: reorder(self.pair.twin, [cache.twin for cache in chosen], parents),
        )

    # --- steps ---

    @rule(
        lens=st.lists(few, min_size=1, max_size=4),
        order=st.permutations(range(MAX_CACHES)),
        layer=few,
        how=st.sampled_from(WAYS_TO_FAIL),
    )
    def fail_in_a_layer(self, lens, order, layer, how):
        """A whole forward pass that goes wrong in one of its layers: in the model, or by what it hands over."""
        chosen = [self.caches[i] for i in order if i < len(self.caches)][: len(lens)]
        lens = lens[: len(chosen)]
        n = sum(lens)
        rows = [self.new_rows(self.pair, n) for _ in range(2)]

        def forward():
            with pagedkv.Step(self.pair.real, [cache.real for cache in chosen], lens) as step:
                for i in range(2):
                    if i == layer % 2:
                        go_wrong(step, i, how)
                    step.write(i, *rows[i])
                    step.attend(i, np.ones((n, 2, 1), np.float32), window=1)

        def twin():
            step = reference.Step(self.pair.twin, [cache.twin for cache in chosen], lens)
            step.enter()
            step.rollback()
            raise Failed

        assert both(forward, twin) is None

    # --- what is compared ---

    @invariant()
    def same(self):
        handles = list(self.handles)
        self.handles += self.known_blocks()
        try:
            super().same()
        finally:
            self.handles[:] = handles
        self.prefixes.check()
        self.n_looks += 1
        if self.n_looks % 2 == 0:  # looking ends the terms that are over, which moves have to see to themselves
            self.same_counters()
        if self.n_looks % 8 == 0:
            self.same_picture()

    def same_counters(self):
        known = self.known
        assert self.prefixes.stats() == (
            len(known.blocks()),
            len(known.idle()),
            len(known.spaces),
            known.hit_tokens,
            known.missed_tokens,
            known.inserted,
            known.evicted,
        )

    def known_blocks(self):
        """The prefix cache as a holder: which block each known beginning has, found as a request would."""
        size = self.pair.twin.block_size
        for space, entries in self.known.spaces.items():
            longer = {key[:-size] for key in entries}
            for key in entries:
                if key not in longer:
                    ids = self.prefixes.match_blocks([*key, END], namespace=space).tolist()
                    path = [entries[key[:end]].block for end in range(size, len(key) + 1, size)]
                    assert len(ids) == len(path)
                    yield Handle(self.pair, ids, path)

    def same_picture(self):
        """Holders are compared elsewhere, so that counting them is enough here."""
        picture = self.pair.real.block_map([cache.real for cache in self.caches if cache.twin.store])
        held, cached = self.pair.twin.held, self.known.blocks()
        idle = len(self.known.idle())
        assert picture.free == self.pair.twin.free_block_count
        assert picture.private == sum(block.holders == 1 and block not in cached for block in held)
        assert picture.shared == sum(block.holders > 1 for block in held)
        assert (picture.evictable, picture.cached) == (idle, len(cached))
        assert picture.kept == sum(block.holders == 1 for block in cached) - idle
        assert picture.most_holders == max((block.holders for block in held), default=0)

    def let_go(self):
        super().let_go()
        self.prefixes.clear()


TestServer = Server.TestCase

ARGUMENTS = ARGUMENTS | {
    "own": lambda draw: draw.choices(IDS, k=draw.randrange(10)),
    "space": lambda draw: draw.choice(SPACES),
    "spell": lambda draw: draw.choice(SPELLINGS),
    "priority": lambda draw: draw.choice([0, 0, 0, 2, -1]),
    "ttl": lambda draw: draw.choice([None, None, None, 1, 5]),
    "start": lambda draw: draw.choice([0, 0, 1, 3]),
    "seconds": lambda draw: draw.randrange(1, 4),
    "parents": lambda draw: [draw.randrange(5) for _ in range(draw.randrange(6))],
    "how": lambda draw: draw.choice(WAYS_TO_FAIL),
}
SERVER_MOVES = MOVES | {
    "attach_to_what_has_begun": 1,
    "evict": 1,
    "fail_in_a_layer": 2,
    "forget_tokens": 1,
    "insert": 4,
    "reorder": 2,
    "serve": 4,
    "start": 3,
    "take_too_many": 1,
    "wait": 1,
}


@pytest.mark.parametrize("seed", range(-(-N_MOVES // MOVES_A_WALK)))
def test_walk_of_a_server(seed):
    """The same moves by plain chance, much faster and further than Hypothesis makes them."""
    draw = random.Random(seed)
    machine = Server()
    machine.make_stores(draw.randrange(1, 5), draw.randrange(2, 25), DTYPES[seed % 4], debug=seed % 3 == 0)
    walk(machine, SERVER_MOVES, ARGUMENTS, min(MOVES_A_WALK, N_MOVES), draw)
