"""A world whose every row says which tokens led to it, so that whatever is mixed up shows; and how to look at it.

A world has places: a store, its prefix cache, and which layers of the model it holds. A plain store is a model of one
place. `snapshot` is all that can be seen, `order` is what only shows as it is used up, `truth` is what must hold at any
time, and `finish` gives everything back and finds the stores whole.
"""

import os
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from helpers import contiguous_state
from prefix_support import Clock

import pagedkv

PRIME = 16_777_213  # below 2**24: a float32 holds every remainder
ROUNDS = int(os.environ.get("PAGEDKV_PROOF_ROUNDS", 100))  # of each thing that is tried; 3000 once in a while
END = 2**62  # an id that no sequence has: what comes after it is never known


class Wrong(AssertionError):
    """A fault that was found; its message is the same for the same fault, so that faults can be counted."""


def expect(fine, message):
    if not fine:
        raise Wrong(message)


@lru_cache(maxsize=4096)
def rows_of(tokens, layers, width):
    """``[len(layers), len(tokens), width]``: a row depends on all tokens up to there, the layer, its place."""
    remainders, value = [], 1
    for token in tokens:
        value = (value * 31 + token + 1) % PRIME
        remainders.append(value)
    rows = np.array(remainders, np.int64).reshape(1, -1, 1) + 104_729 * np.arange(width)
    return ((rows + 7919 * np.array(layers).reshape(-1, 1, 1)) % PRIME).astype(np.float32)


class WorldClock(Clock):
    """Seconds that pass when told to; `instead` is what is called for them, and may be anything."""

    instead = None

    def __call__(self):
        return self.now if self.instead is None else self.instead(self)


class Place:
    """A store, its prefix cache, and the model's numbers of its layers."""

    def __init__(self, store, prefixes, layers):
        self.store = store
        self.known = prefixes
        self.layers = layers

    @property
    def prefixes(self):
        if self.known is None:  # it was dropped: a store may have another one then
            self.known = pagedkv.PrefixCache(self.store)
        return self.known

    def kv_of(self, tokens, first, last):
        """What the positions have in all layers: ``[n_layers, n, width]`` of K, and of V its negative."""
        tokens = tuple(tokens)
        return [
            np.ascontiguousarray(sign * rows_of(tokens, self.layers, width)[:, first:last])
            for width, sign in ((self.store.k_width, 1), (self.store.v_width, -1))
        ]

    def check_rows(self, blocks, tokens, first, last, name):
        """The positions from the first to the last, of a table that begins with position 0, have the tokens' rows."""
        size = self.store.block_size
        if last <= first:
            return
        used = blocks[first // size : -(-last // size)]
        expect(all(self.store.refcount(block) for block in used), f"blocks of {name} are free")
        expected = self.kv_of(tokens, first, last)
        start = first // size
        for index in range(len(self.layers)):
            for view, side in ((self.store.k_block, 0), (self.store.v_block, 1)):
                stored = np.concatenate([view(block, index) for block in used])
                stored = stored[first - start * size : last - start * size]
                right = expected[side][index]
                expect(stored.shape == right.shape and (stored == right).all(), f"rows of others are read in {name}")


@dataclass
class Sequence:
    """A sequence that has, or will have, these tokens."""

    tokens: list[int]
    caches: list[pagedkv.PagedKvCache]
    whole: Any = None  # the ModelSequence, where it is one
    after: list[int] | None = None  # what it may have become a fork of


@dataclass
class World:
    places: list[Place]
    clock: WorldClock
    sequences: dict[str, Sequence] = field(default_factory=dict)
    prompts: list[tuple[bytes | None, list[int]]] = field(default_factory=list)  # all that may be known
    loose: list[int] = field(default_factory=list)  # blocks of the first store that the caller holds
    contiguous: dict[str, tuple[list[int], pagedkv.KvCache]] = field(default_factory=dict)
    pool: pagedkv.KvBlockPool | None = None
    kept: dict[str, Any] = field(default_factory=dict)  # what an act leaves for the next
    events: pagedkv.PrefixEvents | None = None  # a reader of the first place's
    alternatives: list[Any] = field(default_factory=list)  # acts that lead to further states that are as good
    model: Any = None  # the ModelStores, where the places are those of a model
    hands_over = False  # blocks may be on their way to the caller when an interrupt comes

    @classmethod
    def plain(cls, total_blocks=24, *, block_size=4, n_layers=2):
        clock = WorldClock()
        store = pagedkv.PagedKvStore(block_size, total_blocks, 1, 2, v_head_dim=1, n_layers=n_layers)
        return cls([Place(store, pagedkv.PrefixCache(store, clock=clock), tuple(range(n_layers)))], clock)

    @property
    def store(self):
        return self.places[0].store

    @property
    def prefixes(self):
        return self.places[0].prefixes

    def cache(self, name):
        return self.sequences[name].caches[0]

    def rows(self, name, n):
        """K and V of its next n positions."""
        sequence = self.sequences[name]
        at = sequence.caches[0].seq_len
        return self.places[0].kv_of(sequence.tokens, at, at + n)

    def start(self, name, tokens, n=0):
        """A sequence of the first place that is to have these tokens, and has the first n."""
        self.sequences[name] = Sequence(list(tokens), [pagedkv.PagedKvCache()])
        if n:
            self.cache(name).append_contiguous(self.store, *self.rows(name, n), n)
        return self.cache(name)

    def know(self, tokens, namespace=None, **options):
        """What a request leaves behind."""
        cache = self.start("", tokens, len(tokens))
        self.may_know(tokens, namespace)
        self.prefixes.insert(tokens, cache, namespace=namespace, **options)
        self.sequences.pop("").caches[0].release(self.store)

    def may_know(self, tokens, namespace=None):
        self.prompts.append((namespace, list(tokens)))

    # --- what can be seen ---

    def snapshot(self):
        """Everything that can be looked at without a change."""
        found = {"clock": self.clock.now}
        for number, place in enumerate(self.places):
            store, prefixes = place.store, place.prefixes
            counts = [store.refcount(block) for block in range(store.total_blocks)]
            counters = store.stats()._replace(exhaustions=0)  # a request that was refused may be counted
            found[f"store {number}"] = (counts, store.free_block_count, counters)
            found[f"prefixes {number}"] = (
                prefixes.stats(),
                [(prefixes.match([*tokens, END], namespace=space), known.tolist(), self._bytes_of(place, known))
                 for space, tokens in self.prompts
                 for known in [prefixes.match_blocks([*tokens, END], namespace=space)]],
                [prefixes.is_evictable(block) for block in range(store.total_blocks)],
                [(*block[:4], tuple(block.tokens.tolist()), *block[5:]) for block in prefixes.walk()],
            )  # fmt: skip
        for name, sequence in self.sequences.items():
            for number, (place, cache) in enumerate(zip(self.places, sequence.caches, strict=True)):
                found[f"sequence {name!r} {number}"] = self._state_of(place, cache)
        held = [block for block in self.loose if self.store.refcount(block)]
        found["loose"] = self._bytes_of(self.places[0], held)
        if self.events is not None:
            found["events"] = (self.events.sequence, self.events.n_dropped, self.events.ended)
        for name, (_, cache) in self.contiguous.items():
            found[f"contiguous {name!r}"] = contiguous_state(cache)
        if self.pool is not None:
            found["pool"] = (self.pool.total_blocks, self.pool.held, self.pool.free_blocks)
        return found

    def _bytes_of(self, place, blocks, n=None, first=0):
        store, size = place.store, place.store.block_size
        return [
            view(int(block), layer)[: size if n is None else n - (first + i) * size].tobytes()
            for i, block in enumerate(blocks)
            if block >= 0 and (n is None or n > (first + i) * size)
            for layer in range(store.n_layers)
            for view in (store.k_block, store.v_block)
        ]

    def _state_of(self, place, cache):
        table = cache.block_table.tolist()
        first = cache.first_position // place.store.block_size
        content = self._bytes_of(place, table[first:], cache.seq_len, first)
        return cache.seq_len, cache.capacity, cache.first_position, table, cache.store is place.store, content

    def order(self):
        """In which order blocks would go: first while sequences run, then when they have ended; and be handed out."""
        found = []
        if self.events is not None and not self.events.ended:
            found.append([(*event[:2], *event[3:7], event.block) for event in self.events.poll()])  # not yet read
        for place in self.places:
            found.append(self._evict_all(place))
        for sequence in self.sequences.values():
            for place, cache in zip(self.places, sequence.caches, strict=True):
                cache.release(place.store)
        for place in self.places:
            found.append(self._evict_all(place))
            self.clock.now += 1e6
            found.append(self._evict_all(place))
            ids = place.store.acquire(place.store.free_block_count)
            place.store.release(ids)
            found.append(ids)
        return found

    def _evict_all(self, place):
        store, gone = place.store, []
        while True:
            before = [store.refcount(block) for block in range(store.total_blocks)]
            if not place.prefixes.evict(1):
                return gone
            gone.append([block for block, count in enumerate(before) if count != store.refcount(block)])

    # --- what must hold ---

    def truth(self):
        """Every row is right, every holder is known, the books balance, and nobody is left locked."""
        for name, sequence in self.sequences.items():
            for place, cache in zip(self.places, sequence.caches, strict=True):
                table = cache.block_table.tolist()
                try:
                    place.check_rows(table, sequence.tokens, cache.first_position, cache.seq_len, "a sequence")
                except Wrong:
                    if sequence.after is None:
                        raise
                    place.check_rows(table, sequence.after, cache.first_position, cache.seq_len, "a fork")
                try:
                    cache.blocks_needed_for(place.store, 1)
                    cache.reserve(place.store, 0)
                except RuntimeError as error:
                    raise Wrong(f"a sequence is left locked: {error}") from None
                expect(cache.seq_len <= len(sequence.tokens), f"{name} is longer than it can be")
        for number, place in enumerate(self.places):
            self._truth_of(place, self.loose if number == 0 else [])
        for tokens, cache in self.contiguous.values():
            k, v = self.places[0].kv_of(tokens, 0, cache.seq_len)
            expect(np.array_equal(cache.k, k[0]) and np.array_equal(cache.v, v[0]), "contiguous rows are wrong")

    def _truth_of(self, place, loose):
        store, prefixes = place.store, place.prefixes
        known = set()
        size = store.block_size
        for space, tokens in self.prompts:
            # A window shows the last blocks of each length that is known.
            for n in range(size, len(tokens) + size, size) if prefixes.window else [len(tokens)]:
                blocks = prefixes.match_blocks([*tokens[:n], END], namespace=space).tolist()
                place.check_rows(blocks, tokens, blocks.count(-1) * size, len(blocks) * size, "a prefix")
                n_known = prefixes.match([*tokens[:n], END], namespace=space)
                expect(n_known >= len(blocks) * size, "a match is short")
                known.update(set(blocks) - {-1})
        caches = [cache for sequence in self.sequences.values()
                  for at, cache in zip(self.places, sequence.caches, strict=True) if at is place]  # fmt: skip
        try:
            prefixes.check()
            store.check(caches)
        except pagedkv.PagedKvError as error:
            raise Wrong(f"check: {error}") from None
        lost = prefixes.stats().blocks_held - len(known)  # before a hole in what a window has left behind
        expect(lost == 0 or prefixes.window, "the prefix cache holds blocks that nobody can find")
        named = Counter([*known, *loose, *(block for cache in caches for block in cache.block_table.tolist())])
        for block in range(store.total_blocks):
            count = store.refcount(block)
            expect(count >= named[block], "a block that is in use has been given away")
            if count == named[block] + 1 and lost:
                lost -= 1
            else:
                expect(count == named[block] or self.hands_over, "a block has a holder that nobody knows")

    def spoil(self):
        """Overwrite what is free: whoever reads a block that was given back by mistake reads this."""
        for place in self.places:
            store = place.store
            n = store.free_block_count * store.block_size
            if n:
                other = pagedkv.PagedKvCache()
                widths = store.k_width, store.v_width
                nan = [np.full((store.n_layers, n, width), np.nan, np.float32) for width in widths]
                other.append_contiguous(store, *nan, n)
                other.release(store)

    def finish(self):
        """Let go of everything: the stores are whole."""
        self.kept.clear()
        for place in self.places:
            for sequence in self.sequences.values():
                sequence.caches[self.places.index(place)].release(place.store)
            place.prefixes.clear()
            expect(place.prefixes.stats().blocks_held == 0, "clear left blocks")
        self.store.release(self.loose)
        if self.hands_over:  # the caller has to see to them
            counts = enumerate([self.store.refcount(block) for block in range(self.store.total_blocks)])
            self.store.release([block for block, count in counts for _ in range(count)])
        for place in self.places:
            try:
                place.prefixes.check()
                place.store.check()
            except pagedkv.PagedKvError as error:
                raise Wrong(f"check in the end: {error}") from None
            free = place.store.free_block_count
            expect(free == place.store.total_blocks, "blocks are lost for good")
        for _, cache in self.contiguous.values():
            cache.release_to_pool()
        expect(self.pool is None or self.pool.held == 0, "a pool's budget is lost for good")
