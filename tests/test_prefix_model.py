"""A state machine over sequences and their prefix cache, against the twin, with the bytes of every position compared.

Each written row is new, so a block that was given out again, or one that another beginning owns, is seen.
"""

import itertools
from collections import Counter

import numpy as np
import pytest
from helpers import store_rows
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prefix_reference import Prefixes
from prefix_support import Clock
from test_prefix_events import Picture

import pagedkv

IDS = [0, 1, 2**32]  # equal in their low bits but for the second
SPACES = [None, b"", b"a"]
SPELLINGS = [list, tuple, np.array]
END = 5  # an id that no sequence has: what comes after it is never known

tokens = st.lists(st.sampled_from(IDS), max_size=9)


class Sequence:
    def __init__(self, cache, tokens, space):
        self.cache = cache
        self.tokens = tokens
        self.space = space
        self.rows = []  # bytes of each position, all layers
        self.handle = pagedkv.PrefixHandle()
        self.handled = []  # tokens that were inserted by it, and that it takes for granted


class Machine(RuleBasedStateMachine):
    @initialize(
        block_size=st.integers(1, 4),
        total=st.integers(3, 20),
        window=st.sampled_from([None, None, None, 1, 2, 3, 4, 6, 9]),
        capacity=st.sampled_from([1, 2, 5, 20, 1000]),
    )
    def begin(self, block_size, total, window, capacity):
        self.store = pagedkv.PagedKvStore(block_size, total, 1, 1, n_layers=2, debug=True)
        self.size = block_size
        self.clock = Clock()
        self.prefixes = pagedkv.PrefixCache(self.store, clock=self.clock, window=window)
        self.picture = Picture(self.prefixes, self.prefixes.events(capacity))
        self.twin = Prefixes(block_size, self.is_held, self.clock, window)
        self.sequences = []
        self.content = {}  # block that is cached -> the bytes of its rows
        self.numbers = itertools.count(1)
        self.refused = 0
        self.n_missed = 0  # events, when the picture was begun anew

    def is_held(self, block):
        return any(block in sequence.cache.block_table for sequence in self.sequences)

    def pick(self, data):
        return data.draw(st.sampled_from(self.sequences))

    # --- sequences ---

    @rule(data=st.data(), own=tokens, space=st.sampled_from(SPACES), spell=st.sampled_from(SPELLINGS))
    def start(self, data, own, space, spell):
        """On the beginning of another one, on something known, or on nothing."""
        known = [list(key) for known in self.twin.spaces.values() for key in known]
        begun = data.draw(st.sampled_from([[], *known, *(s.tokens for s in self.sequences)]))
        prompt = begun[: data.draw(st.integers(0, len(begun)))] + own
        if prompt:
            self.begin_sequence(prompt, space, spell)

    def begin_sequence(self, prompt, space, spell):
        n = self.twin.match(space, tuple(prompt))
        assert self.prefixes.match(spell(prompt), namespace=space) == n
        cache = pagedkv.PagedKvCache()
        free = self.store.free_block_count
        reused = self.prefixes.attach(cache, spell(prompt), namespace=space)
        used, held = tuple(prompt[:n]), set(self.twin.seen_blocks(space, n, tuple(prompt)))
        if sources := self.twin.sources(space, n, tuple(prompt)):
            used = self.twin.last_used(space, sources)
            source = self.twin.spaces[space][used].block
            if free:
                pass
            elif self.twin.idle() - held:
                self.evict_twin(1, held)
            else:
                n = self.twin.usable(space, n - n % self.size, tuple(prompt))
                used = tuple(prompt[:n])
                self.refused += 1
        assert reused == cache.seq_len == n
        assert cache.first_position == self.twin.first_seen(n) * self.size
        whole = self.twin.shared_blocks(space, n, tuple(prompt))
        assert cache.block_table[: len(whole)].tolist() == whole
        if n:
            self.twin.use(space, used)
        self.twin.hit_tokens += n
        self.twin.missed_tokens += len(prompt) - n
        sequence = Sequence(cache, prompt, space)
        for block in whole:
            sequence.rows += [None] * self.size if block < 0 else self.content[block]
        if n % self.size:
            sequence.rows += self.content[source][: n % self.size]
        self.sequences.append(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), n=st.integers(1, 9))
    def grow(self, data, n):
        sequence = self.pick(data)
        while len(sequence.tokens) < sequence.cache.seq_len + n:
            sequence.tokens = [*sequence.tokens, data.draw(st.sampled_from(IDS))]
        self.append(sequence, n)

    def append(self, sequence, n):
        cache = sequence.cache
        values = np.array([next(self.numbers) for _ in range(4 * n)], np.float32).reshape(2, 2, n, 1)
        k, v = values
        missing = cache.blocks_needed_for(self.store, n) - self.store.free_block_count
        if missing > len(self.twin.idle()):
            evictable = None
            try:  # pytest.raises would keep the frame, and with it the cache, until some collection
                cache.append_contiguous(self.store, k, v, n)
            except pagedkv.PagedStoreExhausted as full:
                evictable = full.evictable
            assert evictable == len(self.twin.idle())
            return
        self.evict_twin(missing)
        cache.append_contiguous(self.store, k, v, n)
        sequence.rows += [k[:, i].tobytes() + v[:, i].tobytes() for i in range(n)]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data):
        sequence = self.pick(data)
        other = Sequence(sequence.cache.clone(), list(sequence.tokens), sequence.space)
        other.rows = list(sequence.rows)
        self.sequences.append(other)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def truncate(self, data):
        sequence = self.pick(data)
        n = data.draw(st.integers(sequence.cache.first_position, sequence.cache.seq_len))
        sequence.cache.truncate(self.store, n)
        sequence.tokens = sequence.tokens[: max(n, 1)]
        del sequence.rows[n:]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def drop_before(self, data):
        sequence = self.pick(data)
        sequence.cache.drop_before(self.store, data.draw(st.integers(0, sequence.cache.seq_len)))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), by_collection=st.booleans())
    def release(self, data, by_collection):
        sequence = self.pick(data)
        self.sequences.remove(sequence)
        if not by_collection:
            sequence.cache.release(self.store)
        del sequence.cache  # the sequence itself is in what Hypothesis drew

    # --- the prefix cache ---

    @precondition(lambda self: self.sequences)
    @rule(
        data=st.data(),
        priority=st.sampled_from([0, 0, 0, 2, -1]),
        ttl=st.sampled_from([None, None, None, 1, 5]),
        spell=st.sampled_from(SPELLINGS),
        space=st.sampled_from([..., ..., *SPACES]),
        rename=st.sampled_from([None, None, None, 0, 1]),
        by_handle=st.booleans(),
    )
    def insert(self, data, priority, ttl, spell, space, rename, by_handle):
        """Under the sequence's own name, or one more: in another namespace, or by other tokens."""
        sequence = self.pick(data)
        prompt = sequence.tokens[: data.draw(st.integers(0, len(sequence.tokens)))]
        if rename is not None:
            prompt = [rename, *prompt[1:]] if prompt else prompt
        space = sequence.space if space is ... else space
        handle = None
        before = len(sequence.handled) // self.size
        if self.twin.gaps(space, tuple(sequence.handled[: before * self.size]), self.table_of(sequence, before)):
            by_handle = False  # which would leave the hole, as long as it is not lost
        if by_handle and space == sequence.space and prompt[: len(sequence.handled)] == sequence.handled:
            sequence.handled, handle = prompt, sequence.handle
        self.put_in(sequence, prompt, priority, ttl, spell, space, handle)

    def put_in(self, sequence, prompt, priority, ttl, spell, space, handle=None):
        n = min(len(prompt), sequence.cache.seq_len) // self.size
        table = self.table_of(sequence, n)
        new = self.twin.insert(space, tuple(prompt[: n * self.size]), table, priority, ttl) if n else []
        added = self.prefixes.insert(
            spell(prompt) if prompt else [], sequence.cache, namespace=space, priority=priority, ttl=ttl, handle=handle
        )
        assert added == len(new)
        for block in new:
            at = table.index(block) * self.size
            self.content[block] = sequence.rows[at : at + self.size]

    def table_of(self, sequence, n):
        table = [None if block < 0 else block for block in sequence.cache.block_table[:n].tolist()]
        return table + [None] * (n - len(table))

    @rule(
        prompt=st.lists(st.sampled_from(IDS), min_size=1, max_size=12),
        space=st.sampled_from(SPACES),
        priority=st.sampled_from([0, 0, 0, 1]),
        ttl=st.sampled_from([None, None, None, 2]),
        n_dropped=st.sampled_from([0, 0, 2, 4, 8]),
    )
    def remember(self, prompt, space, priority, ttl, n_dropped):
        """A whole request: what most of the entries come from."""
        self.begin_sequence(prompt, space, list)
        sequence = self.sequences[-1]
        self.append(sequence, len(prompt) - sequence.cache.seq_len)
        if self.twin.window:
            sequence.cache.drop_before(self.store, min(n_dropped, sequence.cache.seq_len))
        self.put_in(sequence, prompt, priority, ttl, list, space)
        self.sequences.remove(sequence)
        sequence.cache.release(self.store)

    @rule(n=st.integers(0, 6))
    def evict(self, n):
        n = min(n, len(self.twin.idle()))
        assert self.prefixes.evict(n) == n
        self.evict_twin(n)

    @rule()
    def take_too_many(self):
        """Nothing is evicted for a request that cannot be met."""
        with pytest.raises(pagedkv.PagedStoreExhausted):
            self.store.acquire(self.store.free_block_count + len(self.twin.idle()) + 1)

    def evict_twin(self, n, held=()):
        """What the store has taken, or will take; `held` besides what sequences hold."""
        if n > 0:
            self.twin.is_held = lambda block: block in held or self.is_held(block)
            self.twin.evict(n)
            self.twin.is_held = self.is_held

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds):
        self.clock.now += seconds

    @rule(data=st.data(), space=st.sampled_from(SPACES), more=tokens, start=st.sampled_from([0, 0, 1, 2, 5]))
    def forget(self, data, space, more, start):
        known = data.draw(st.sampled_from([(), *self.twin.spaces.get(space, ())]))
        prompt = (*known, *more)
        if len(self.twin.blocks()) > 3 or not known:
            assert self.prefixes.forget(prompt, namespace=space, start=start) == self.twin.forget(space, prompt, start)

    @precondition(lambda self: len(self.twin.blocks()) > 6)
    @rule()
    def clear(self):
        assert self.prefixes.clear() == len(self.twin.blocks())
        self.twin.spaces.clear()

    @precondition(lambda self: len(self.twin.blocks()) > 6)
    @rule(space=st.sampled_from(SPACES))
    def clear_one(self, space):
        assert self.prefixes.clear(namespace=space) == self.twin.clear(space)

    @rule(n=st.sampled_from([None, None, 1, 3]))
    def read_events(self, n):
        """Who has walked once and read all that came since has the same picture as who walks now."""
        events, picture = self.picture.events, self.picture
        n_dropped, n_begun = events.n_dropped, picture.n_begun
        picture.read(n)
        assert picture.n_begun <= n_begun + 1
        assert events.n_dropped == n_dropped
        if picture.n_begun > n_begun:
            assert n_dropped > self.n_missed  # nothing else makes it begin anew
            self.n_missed = n_dropped
        if picture.next == events.sequence:
            assert picture.is_right()
            assert len(picture.known) == sum(
                entry.block is not None for known in self.twin.spaces.values() for entry in known.values()
            )
        else:
            assert n is not None

    @rule()
    def read_events_anew(self):
        self.picture.events.close()
        self.picture = Picture(self.prefixes, self.prefixes.events(self.picture.events.capacity))
        self.n_missed = 0

    # --- what is always true ---

    @invariant()
    def same_entries(self):
        blocks = self.twin.blocks()
        stats = self.prefixes.stats()
        assert stats == (
            len(blocks),
            len(self.twin.idle()),
            len(self.twin.spaces),
            self.twin.hit_tokens,
            self.twin.missed_tokens,
            self.twin.inserted,
            self.twin.evicted,
        )
        for space, known in self.twin.spaces.items():
            for key, entry in known.items():
                got = self.prefixes.match_blocks([*key, END], namespace=space)
                n = self.twin.match(space, (*key, END))
                assert got.tolist() == self.twin.shared_blocks(space, n, key)
                if self.twin.window is None:
                    assert got[-1] == entry.block
        assert set(self.prefixes.namespaces()) == set(self.twin.spaces)
        walked = [
            (b.namespace, b.position, tuple(b.tokens.tolist()), b.block, b.priority, b.remaining)
            for b in self.prefixes.walk()
        ]
        assert Counter(walked) == Counter(
            (space, len(key) - self.size, key[-self.size :], entry.block, entry.priority, self.twin.remaining(entry))
            for space, known in self.twin.spaces.items()
            for key, entry in known.items()
            if entry.block is not None
        )
        self.prefixes.check()

    @invariant()
    def same_bytes(self):
        for sequence in self.sequences:
            sides = [store_rows(self.store, sequence.cache, layer) for layer in range(2)]
            got = [
                b"".join(sides[layer][side][i].tobytes() for side in range(2) for layer in range(2))
                for i in range(len(sides[0][0]))
            ]
            assert got == sequence.rows[sequence.cache.first_position :]
        for block in self.twin.blocks():
            got = [
                b"".join(
                    view(block, layer)[i].tobytes()
                    for view in (self.store.k_block, self.store.v_block)
                    for layer in range(2)
                )
                for i in range(self.size)
            ]
            assert got == self.content[block]

    @invariant()
    def every_reference_has_an_owner(self):
        tables = [sequence.cache.block_table.tolist() for sequence in self.sequences]
        named = Counter([*self.twin.blocks(), *(block for table in tables for block in table if block >= 0)])
        assert [self.store.refcount(block) for block in range(self.store.total_blocks)] == [
            named[block] for block in range(self.store.total_blocks)
        ]


TestPrefixCache = Machine.TestCase
TestPrefixCache.settings = settings(max_examples=max(50, settings.default.max_examples // 2))
