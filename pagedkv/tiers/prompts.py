"""The records of a prompt: which of them a group needs, how many a tier has, and moving them between it and a store.

    full groups      whole chunks from the first token on, then a shorter one, the tail, under a key of its own
    windowed groups  records of one block, and only those that the next query sees
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv import PagedKvCache, PagedStoreExhausted, PrefixCache
from pagedkv._windows import first_needed
from pagedkv.tiers.arguments import within
from pagedkv.tiers.keys import Chunk, KeySpace, RecordFormat
from pagedkv.tiers.records import encode, room_for, what_is_wrong
from pagedkv.tiers.saving_prefixes import hold
from pagedkv.tiers.tier import Tier

Ids = npt.NDArray[np.int64]
_HELD_BYTES = 2**23  # of blocks that are held while they are stored


class Moved(NamedTuple):
    """A record that was loaded or stored, or why it was not."""

    nbytes: int
    wrong: str | None = None


def formats_of(prefixes: PrefixCache) -> list[RecordFormat]:
    """Of a window's groups a record is a block: what a query sees begins at any of them."""
    return [
        RecordFormat.of(each.store, window=each.window, group=i, chunk_blocks=None if each.window is None else 1)
        for i, each in enumerate(prefixes.groups)
    ]


def find(tier: Tier, chunks: Sequence[Chunk]) -> int:
    """How many a tier says it has, from the first on; whatever it says, it is one of the answers that there are."""
    return within(tier.find([chunk.key for chunk in chunks]), len(chunks)) if chunks else 0


class GroupRecords:
    """The records of a prompt in one KV-cache group."""

    def __init__(self, prefixes: PrefixCache, space: KeySpace, ids: Ids) -> None:
        self.prefixes, self.space, self.ids = prefixes, space, ids
        self.chunks = space.chunks(ids)
        self.found: list[Chunk] | None = None  # what the tier has of it, as `longest` saw it

    def seen_at(self, n: int) -> list[Chunk]:
        """Those of the first n positions, which are whole blocks, that the next query sees."""
        space, size = self.space, self.space.format.chunk_tokens
        window, whole = space.format.window, n // size
        seen = self.chunks[first_needed(window, n) // size : whole]
        return seen if n % size == 0 else [*seen, self._tail(n)]

    def _tail(self, n: int) -> Chunk:
        whole = n // self.space.format.chunk_tokens
        before = self.chunks[whole - 1] if whole else None
        return self.space.chunk(self.ids[whole * self.space.format.chunk_tokens : n], before)

    # --- from a tier ---

    def longest(self, tier: Tier, n: int) -> int:
        """The most of the first n positions that a tier says it has."""
        if self.space.format.window is None:
            if self.found is None:
                self.found = self._whole_and_tail(tier)
            return min(n, sum(chunk.n_tokens for chunk in self.found))
        while n:
            seen = self.seen_at(n)
            n_found = find(tier, seen[::-1])
            if n_found == len(seen):
                self.found = seen
                return n
            n = seen[-1 - n_found].first_position  # whoever sees less than this does without it
        return 0

    def _whole_and_tail(self, tier: Tier) -> list[Chunk]:
        """The tail may be longer than what is asked for: it ends where the tokens do."""
        found, size = self.chunks[: find(tier, self.chunks)], self.space.format.block_size
        start = len(found) * self.space.format.chunk_tokens
        longest = min(len(self.ids) // size * size, start + self.space.format.chunk_tokens - size)
        for end in range(longest, start, -size):
            tail = self._tail(end)
            if find(tier, [tail]):
                return [*found, tail]
        return found

    def load(self, tier: Tier, n: int) -> Iterator[Moved]:
        """Bring what was found of the first n positions, record by record, each of which is known when it is there."""
        size = self.space.format.block_size
        there = hold(self.prefixes, self.ids[:n], self.space.namespace)
        held = [block for block in there if block >= 0]
        try:
            found = self.found or []
            for i, chunk in enumerate(found):
                start, end = chunk.first_position, chunk.first_position + chunk.n_tokens
                known = there[start // size : end // size]
                if start >= n or (len(known) * size == chunk.n_tokens and min(known) >= 0):
                    continue
                blocks, wrong = self._load(tier, chunk)
                held += blocks
                if wrong is None and not self._know(start, end, blocks):
                    wrong = "evicted"
                if wrong is not None and wrong.startswith("wrong "):
                    tier.remove([each.key for each in found[i:]])  # what follows is of no use without it
                yield Moved(chunk.nbytes, wrong)
                if wrong is not None:
                    return
        finally:
            self.prefixes.store.release(held)

    def _load(self, tier: Tier, chunk: Chunk) -> tuple[list[int], str | None]:
        """The blocks of a record, which are the caller's; or what was wrong with it.

        It is looked at when nobody can write into it any more, however late a tier's bytes come.
        """
        store = self.prefixes.store
        try:
            filling = store.fill(chunk.payload_bytes // chunk.space.format.block_bytes)
        except PagedStoreExhausted:
            return [], "no room"
        try:
            into = room_for(chunk, filling.views)
            if not within(tier.load([chunk.key], [into]), 1):
                return [], "missing"
            head = memoryview(bytes(into[0]))
            try:
                blocks = filling.commit()
            except BufferError:
                return [], "still in use"
        finally:
            filling.release()
        try:
            with store.pieces(blocks) as pieces:
                wrong = what_is_wrong(chunk, [head, *pieces.views])
        except BaseException:
            store.release(blocks)
            raise
        if wrong is not None:
            store.release(blocks)
            return [], f"wrong {wrong}"
        return blocks, None

    def _know(self, start: int, end: int, blocks: Sequence[int]) -> bool:
        """Have these blocks be known as those of positions start to end; False where what comes before no longer is."""
        store, size, cache = self.prefixes.store, self.space.format.block_size, PagedKvCache()
        store.retain(list(blocks))
        try:
            table = [-1] * (start // size) + list(blocks)
            cache.adopt_blocks(table, end, size, store=store, first_position=start)
        except BaseException:
            store.release(list(blocks))
            raise
        try:
            self.prefixes.insert(self.ids[:end], cache, namespace=self.space.namespace)
        finally:
            cache.release(store)
        if self.space.format.window is not None:
            return True
        return self.prefixes._match(np.append(self.ids[:end], 0), self.space.namespace) == end

    # --- to a tier ---

    def store(self, tier: Tier, n: int, is_over: Callable[[], bool]) -> Iterator[Moved]:
        """Store what the next query after the first n positions sees, where it is known, and not there yet.

        The same prompt again ends a token before: then it begins a block before.
        """
        if self.space.format.window is not None:
            yield from self._store_seen(tier, n - self.space.format.block_size, is_over)
        yield from self._store_seen(tier, n, is_over)

    def _store_seen(self, tier: Tier, n: int, is_over: Callable[[], bool]) -> Iterator[Moved]:
        """Blocks are held while they are read, so many at a time that a tier that hangs keeps few."""
        wanted, size = self.seen_at(n), self.space.format.block_size
        wanted = wanted[find(tier, wanted) :]
        n_run = max(_HELD_BYTES // max(self.space.format.payload_bytes(self.space.format.chunk_tokens), 1), 1)
        for i in range(0, len(wanted), n_run):
            run = wanted[i : i + n_run]
            first = run[0].first_position // size
            last = -(-(run[-1].first_position + run[-1].n_tokens) // size)
            blocks = hold(self.prefixes, self.ids[:n], self.space.namespace)
            store = self.prefixes.store
            store.release([block for block in [*blocks[:first], *blocks[last:]] if block >= 0])
            held = blocks[first:last]
            try:
                if len(held) < last - first or min(held) < 0:
                    return  # evicted meanwhile
                for chunk in run:
                    if is_over():
                        return
                    start = chunk.first_position // size - first
                    with store.pieces(held[start : start + -(-chunk.n_tokens // size)]) as pieces:
                        record = encode(chunk, pieces.views)
                        was_stored = within(tier.store([record]), 1)
                    yield Moved(chunk.nbytes, None if was_stored else "refused")
                    if not was_stored:
                        return
            finally:
                store.release([block for block in held if block >= 0])


def longest(groups: Sequence[GroupRecords], tier: Tier, n_known: int, n: int) -> int:
    """The most of the first n positions that a tier says it has in all groups: `n_known` or less if no more."""
    n_agreed = i = 0
    while n > n_known and n_agreed < len(groups):
        n_found = groups[i].longest(tier, n)
        n_agreed = n_agreed + 1 if n_found == n else 1
        n, i = n_found, (i + 1) % len(groups)
    return n
