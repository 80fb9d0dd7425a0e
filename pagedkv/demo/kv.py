"""A model's K/V: layers that see everything and layers with a window, in a store each.

Layers of one store share a block table, so they hold and drop the same positions. A windowed layer
needs its last `window` positions only, a full one needs all: hence two stores, and for every
sequence a cache in each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from pagedkv import (
    PagedKvCache,
    PagedKvStore,
    PagedStoreExhausted,
    PrefixCache,
    Step,
    Waiting,
    plan_admission,
    room_for,
)
from pagedkv.demo.config import Config
from pagedkv.demo.model import F32, Attend


@dataclass(frozen=True)
class LayerGroup:
    """The layers with one window (None: they see everything), the store of their K/V, and what it remembers."""

    window: int | None
    layers: tuple[int, ...]
    store: PagedKvStore
    prefix: PrefixCache | None

    def first_needed(self, seq_len: int) -> int:
        """The first position that the queries from position `seq_len` on can see."""
        return 0 if self.window is None else max(0, seq_len + 1 - self.window)

    def at_once(self, n_new: int) -> int:
        """Of `n_new` positions, those whose blocks are held at the same time, but for the step that computes them."""
        return n_new if self.window is None else min(n_new, self.window)

    @property
    def bytes_held(self) -> int:
        """Bytes of the blocks that somebody holds."""
        held = self.store.total_blocks - self.store.free_block_count
        return held * (self.store.nbytes // self.store.total_blocks)


class ModelKv:
    """The stores of a model, and the forward passes over them.

    Parameters
    ----------
    config
        The shape of the model.
    block_size, n_blocks
        Of each store. A block costs memory from its first use on.
    dtype
        What the stores hold K/V as.
    remembers
        Whether blocks stay known when the sequence that computed them has ended, as long as nobody needs their room.
    """

    def __init__(
        self, config: Config, block_size: int, n_blocks: int, dtype: str = "float32", *, remembers: bool = False
    ) -> None:
        self.block_size = block_size
        self.n_blocks = n_blocks
        self.attention_seconds = 0.0
        self.groups: list[LayerGroup] = []
        self._scale = config.attention_scale
        self._place: dict[int, tuple[int, int]] = {}  # model layer -> its group, its layer in that group's store
        for number, window in enumerate(dict.fromkeys(config.windows)):
            layers = tuple(layer for layer, its_window in enumerate(config.windows) if its_window == window)
            self._place |= {layer: (number, index) for index, layer in enumerate(layers)}
            heads = (config.n_kv_heads, config.head_dim)
            store = PagedKvStore(
                block_size, n_blocks, *heads, v_head_dim=config.v_head_dim, n_layers=len(layers), dtype=dtype
            )
            self.groups.append(LayerGroup(window, layers, store, PrefixCache(store) if remembers else None))

    @property
    def bytes_held(self) -> int:
        return sum(group.bytes_held for group in self.groups)

    def picture(self, columns: int) -> list[str]:
        """Lines of text that show who holds which block of each store."""
        lines: list[str] = []
        for group in self.groups:
            sight = "everything" if group.window is None else f"{group.window} positions"
            n_marks = max(8, min(64, columns - 8))
            lines.append(f"{len(group.layers)} layers that see {sight}")
            lines += str(group.store.block_map(width=n_marks)).split("\n")
        return lines

    def blocks_for(self, n_positions: int) -> int:
        """Blocks that `n_positions` take in a store, at most: a window makes it fewer."""
        return -(-n_positions // self.block_size)

    def could_hold(self, n_positions: int) -> bool:
        """Whether a sequence could ever be that long, if it were alone."""
        return all(room_for(group.store).ever >= n_positions for group in self.groups)

    def match(self, tokens: Sequence[int]) -> int:
        """How many positions at the beginning of `tokens` every store remembers."""
        return min(0 if group.prefix is None else group.prefix.match(tokens) for group in self.groups)

    def forget(self) -> None:
        """Gives back the blocks that no sequence holds."""
        for group in self.groups:
            if group.prefix is not None:
                group.prefix.clear()

    @contextmanager
    def forward_pass(self, sequences: Sequence[SequenceKv], query_lens: Sequence[int]) -> Iterator[Attend]:
        """One `Step` in every store: all layers of all sequences advance by their query length, or none does.

        Yields the attention for `Gemma3.forward`.

        Raises
        ------
        PagedStoreExhausted
            A store has too few free blocks. Nothing was changed.
        """
        lengths = [sequence.seq_len for sequence in sequences]
        try:
            with ExitStack() as stack:
                steps = [
                    stack.enter_context(Step(group.store, [s.caches[number] for s in sequences], query_lens))
                    for number, group in enumerate(self.groups)
                ]
                yield lambda layer, q, k, v: self._attend(steps, layer, q, k, v)
        except BaseException:
            # The steps commit one after the other: should a later one fail, the earlier ones are taken back.
            for sequence, length in zip(sequences, lengths, strict=True):
                sequence.truncate(length)
            raise

    def _attend(self, steps: Sequence[Step], layer: int, q: F32, k: F32, v: F32) -> F32:
        started = time.perf_counter()
        number, index = self._place[layer]
        steps[number].write(index, k, v)
        out: F32 = steps[number].attend(index, q, scale=self._scale, window=self.groups[number].window)
        self.attention_seconds += time.perf_counter() - started
        return out


class SequenceKv:
    """The K/V of one sequence: a cache in every store of the model."""

    def __init__(self, kv: ModelKv) -> None:
        self._kv = kv
        self._n_remembered = 0  # blocks
        self.caches = [PagedKvCache() for _ in kv.groups]

    @property
    def seq_len(self) -> int:
        """Positions whose K/V is there."""
        return self.caches[0].seq_len

    def can_lend(self, n_positions: int) -> bool:
        """Whether a sequence that starts with the same `n_positions` finds here all that it will look at."""
        return n_positions <= self.seq_len and all(
            cache.first_position <= group.first_needed(n_positions)
            for group, cache in zip(self._kv.groups, self.caches, strict=True)
        )

    def borrow(self, lender: SequenceKv, n_positions: int) -> int:
        """Starts on the lender's first `n_positions`, a whole number of blocks; returns how many blocks that shares.

        A clone that is cut back, rather than `adopt_blocks`: what the lender's windows have dropped is not asked for.
        """
        for group, cache, lenders in zip(self._kv.groups, self.caches, lender.caches, strict=True):
            cache.clone_from(lenders)
            cache.truncate(group.store, n_positions)
        return self._n_whole_blocks()

    def attach(self, tokens: Sequence[int], n_positions: int) -> int:
        """Starts on `n_positions` that `ModelKv.match` has found; returns how many blocks that shares.

        It may be fewer positions: one that ends inside a block needs a copy, and there may be no block for it.
        """
        for group, cache in zip(self._kv.groups, self.caches, strict=True):
            if group.prefix is not None:
                group.prefix.attach(cache, tokens[: n_positions + 1])
        self.truncate(min(cache.seq_len for cache in self.caches))
        return self._n_whole_blocks()

    def remember(self, tokens: Sequence[int]) -> None:
        """Lets others start on the whole blocks that are computed, also when this sequence has ended."""
        n_blocks = self.seq_len // self._kv.block_size
        if n_blocks > self._n_remembered:
            for group, cache in zip(self._kv.groups, self.caches, strict=True):
                if group.prefix is not None:
                    group.prefix.insert(tokens[: self.seq_len], cache)
            self._n_remembered = n_blocks

    def can_reserve(self, n_new: int) -> bool:
        """Whether `reserve` would find the blocks."""
        for group, cache in zip(self._kv.groups, self.caches, strict=True):
            asked = Waiting(n_positions=cache.seq_len + group.at_once(n_new), cache=cache)
            [answer] = plan_admission(group.store, [asked], prefix=group.prefix)
            if not answer.can_start:
                return False
        return True

    def reserve(self, n_new: int) -> None:
        """Takes the blocks of `n_new` positions, in a windowed store those of a window. All or nothing.

        Raises
        ------
        PagedStoreExhausted
            They are not free now. The sequence is empty.
        """
        try:
            for group, cache in zip(self._kv.groups, self.caches, strict=True):
                cache.reserve(group.store, group.at_once(n_new))
        except PagedStoreExhausted:
            self.release()
            raise

    def drop_unneeded(self) -> None:
        """Gives back what the windows have left behind."""
        for group, cache in zip(self._kv.groups, self.caches, strict=True):
            cache.drop_before(group.store, group.first_needed(cache.seq_len))

    def truncate(self, n_positions: int) -> None:
        """Cuts the caches that are longer than `n_positions`."""
        for group, cache in zip(self._kv.groups, self.caches, strict=True):
            if cache.seq_len > n_positions:
                cache.truncate(group.store, n_positions)

    def release(self) -> None:
        """Gives every block back."""
        self._n_remembered = 0
        for group, cache in zip(self._kv.groups, self.caches, strict=True):
            cache.release(group.store)

    def _n_whole_blocks(self) -> int:
        return sum((cache.seq_len - cache.first_position) // self._kv.block_size for cache in self.caches)
