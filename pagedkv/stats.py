"""Snapshots of counters: plain values that stay as they were. They import nothing, since every owner returns them."""

from __future__ import annotations

from typing import NamedTuple


class StoreStats(NamedTuple):
    """What ``PagedKvStore.stats()`` returns. Counts of blocks, but for the bytes; counters run since construction."""

    total_blocks: int
    free_blocks: int
    held_blocks: int
    peak_held_blocks: int
    blocks_acquired: int
    blocks_released: int
    copies_on_write: int
    exhaustions: int
    nbytes: int


class PrefixStats(NamedTuple):
    """What ``PrefixCache.stats()`` returns. Counters run since construction.

    ``hit_tokens`` were reused by `attach`, ``missed_tokens`` were left to compute. ``blocks_evicted`` counts what
    eviction took, not what `clear` did.
    """

    blocks_held: int
    evictable_blocks: int
    namespaces: int
    hit_tokens: int
    missed_tokens: int
    blocks_inserted: int
    blocks_evicted: int
