"""Snapshots of counters, and of what is known: plain values that stay as they were."""

import inspect
import re
from types import EllipsisType
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

_T = TypeVar("_T", bound=type)


def with_field_docs(cls: _T) -> _T:
    """A named tuple whose fields have docstrings: what its own says of them under Attributes."""
    _, _, section = (inspect.getdoc(cls) or "").partition("Attributes\n----------\n")
    for names, text in re.findall(r"^([\w, ]+) : .*\n((?:    .*\n?)+)", section, re.MULTILINE):
        for name in names.split(", "):
            getattr(cls, name).__doc__ = inspect.cleandoc(text)
    return cls


@with_field_docs
class StoreStats(NamedTuple):
    """What `PagedKvStore.stats` returns: a named tuple of counts. Unless said otherwise they count blocks.

    Attributes
    ----------
    total_blocks : int
        Blocks of the store.
    free_blocks : int
        Blocks that nobody holds now.
    held_blocks : int
        Blocks that somebody holds now: ``total_blocks - free_blocks``.
    peak_held_blocks : int
        The most that were held at once, since the store was made.
    blocks_acquired : int
        Blocks taken from the free ones, since the store was made.
    blocks_released : int
        Blocks that their last holder gave back, since the store was made.
    copies_on_write : int
        Shared blocks that were copied because a holder was about to write, since the store was made.
    exhaustions : int
        Requests that were refused since too few blocks were free, since the store was made. One that asks for more
        than ``total_blocks`` is refused before it is counted.
    nbytes : int
        Bytes of K and V of all blocks and layers.

    Notes
    -----
    Threads: where other threads use the store, its fields may be of slightly different moments.

    Examples
    --------
    >>> import pagedkv
    >>> store = pagedkv.PagedKvStore(block_size=16, total_blocks=8, n_kv_heads=2, head_dim=4)
    >>> ids = store.acquire(3)
    >>> store.release(ids[:2])
    >>> stats = store.stats()
    >>> stats.held_blocks, stats.peak_held_blocks, stats.blocks_acquired, stats.blocks_released
    (1, 3, 3, 2)
    """

    total_blocks: int
    free_blocks: int
    held_blocks: int
    peak_held_blocks: int
    blocks_acquired: int
    blocks_released: int
    copies_on_write: int
    exhaustions: int
    nbytes: int


@with_field_docs
class GroupStats(NamedTuple):
    """What `ModelStores.stats` returns: a named tuple of counts of all stores of a model.

    Attributes
    ----------
    nbytes : int
        Bytes of K and V that the blocks of all stores may take together.
    free_bytes : int
        Bytes of these that no held block takes now.
    held_bytes : int
        Bytes of the blocks that somebody holds now, prefix caches among them: ``nbytes - free_bytes``.
    evictable_bytes : int
        Bytes of those of them that prefix caches could give up now.
    blocks_acquired : int
        Blocks taken from the free ones, since the stores were made.
    blocks_released : int
        Blocks that their last holder gave back, since the stores were made.
    copies_on_write : int
        Shared blocks that were copied because a holder was about to write, since the stores were made.
    exhaustions : int
        Requests that were refused since too few blocks were free, since the stores were made.
    stores : tuple of StoreStats
        Those of each store.

    Notes
    -----
    Threads: where other threads use the stores, its fields may be of slightly different moments.

    Examples
    --------
    >>> from pagedkv import LayerShape, ModelSequence, ModelStores
    >>> stores = ModelStores([LayerShape(None, 1, 4), LayerShape(8, 1, 4)], total_blocks=8)
    >>> sequence = ModelSequence(stores)
    >>> sequence.reserve(20)
    >>> stats = stores.stats()
    >>> stats.held_bytes, stats.free_bytes, [store.held_blocks for store in stats.stores]
    (2048, 6144, [2, 2])
    """

    nbytes: int
    free_bytes: int
    held_bytes: int
    evictable_bytes: int
    blocks_acquired: int
    blocks_released: int
    copies_on_write: int
    exhaustions: int
    stores: tuple[StoreStats, ...]


@with_field_docs
class PrefixStats(NamedTuple):
    """What `PrefixCache.stats` returns: a named tuple of counts.

    Attributes
    ----------
    blocks_held : int
        Blocks that the prefix cache holds now, alone or with others.
    evictable_blocks : int
        Those of them that it could give up now.
    namespaces : int
        Namespaces that have blocks now.
    hit_tokens : int
        Positions that `PrefixCache.attach` reused, since the cache was made.
    missed_tokens : int
        Positions that it left to compute, since the cache was made.
    blocks_inserted : int
        Blocks that were new to `PrefixCache.insert`, since the cache was made.
    blocks_evicted : int
        Blocks that eviction took, since the cache was made; what `PrefixCache.clear` took is not among them.

    Notes
    -----
    Threads: where other threads use the cache, its fields may be of slightly different moments.

    Examples
    --------
    >>> import numpy as np, pagedkv
    >>> store, cache = pagedkv.PagedKvStore(4, 8, n_kv_heads=1, head_dim=2), pagedkv.PagedKvCache()
    >>> prefixes = pagedkv.PrefixCache(store)
    >>> cache.append_contiguous(store, *np.ones((2, 6, 2), np.float32), 6)
    >>> blocks = prefixes.insert(range(6), cache)
    >>> reused = prefixes.attach(pagedkv.PagedKvCache(), range(6))
    >>> stats = prefixes.stats()
    >>> stats.blocks_held, stats.hit_tokens, stats.missed_tokens
    (1, 4, 2)
    """

    blocks_held: int
    evictable_blocks: int
    namespaces: int
    hit_tokens: int
    missed_tokens: int
    blocks_inserted: int
    blocks_evicted: int


@with_field_docs
class PrefixEvent(NamedTuple):
    """What `PrefixEvents.poll` returns for each thing that a prefix cache has learned or forgotten: a named tuple.

    Attributes
    ----------
    kind : str
        ``"stored"``: a block is known under some tokens. ``"removed"``: it is not any more, be it evicted or forgotten.
        ``"cleared"``: nothing is known in the namespace, or in any, whatever was stored before.
    sequence : int
        The number of this event: the one after it has the next, 0 comes first. What is missing was dropped.
    incarnation : int
        A random number of 64 bits, of this `PrefixEvents` in this process. Where it is another one, what was told by
        events before counts for nothing.
    namespace : bytes, None or Ellipsis
        In which namespace; ``...`` where all were cleared.
    id, parent, position : int
        As in `KnownBlock`: of this place, of the one before it, and of its first token. 0 of what was cleared.
    tokens : int64 array ``[block_size]`` or None
        Of a block that was stored; read-only.
    block : int
        The id of the store's block; -1 of what was cleared.

    Examples
    --------
    >>> import numpy as np, pagedkv
    >>> store, cache = pagedkv.PagedKvStore(4, 8, n_kv_heads=1, head_dim=2), pagedkv.PagedKvCache()
    >>> prefixes = pagedkv.PrefixCache(store)
    >>> cache.append_contiguous(store, *np.ones((2, 8, 2), np.float32), 8)
    >>> with prefixes.events() as events:
    ...     blocks = prefixes.insert(range(8), cache)
    ...     cleared = prefixes.clear()
    ...     first, second, last = events.poll()
    >>> second.kind, second.sequence, second.tokens.tolist(), second.block, second.parent == first.id
    ('stored', 1, [4, 5, 6, 7], 1, True)
    >>> last.kind, last.sequence, last.namespace
    ('cleared', 2, Ellipsis)
    """

    kind: Literal["stored", "removed", "cleared"]
    sequence: int
    incarnation: int
    namespace: bytes | EllipsisType | None
    id: int
    parent: int
    position: int
    tokens: npt.NDArray[np.int64] | None
    block: int


@with_field_docs
class KnownBlock(NamedTuple):
    """What `PrefixCache.walk` returns for each block that is known under some tokens: a named tuple.

    Attributes
    ----------
    namespace : bytes or None
        In which namespace.
    id : int
        Of this place among the tokens, 1 to 2**64 - 1: it stands for these tokens and all before them, whichever block
        holds them, and never for others in the same prefix cache.
    parent : int
        The id of the place before it, 0 at the beginning. With a ``window``, no block need be known there.
    position : int
        Of its first token: a multiple of the block size.
    tokens : int64 array ``[block_size]``
        Read-only.
    block : int
        The id of the store's block.
    priority : int
        As it was inserted, or higher.
    remaining : float or None
        Seconds for which it is not evicted; infinite for good, None without a term.

    Examples
    --------
    >>> import numpy as np, pagedkv
    >>> store, cache = pagedkv.PagedKvStore(4, 8, n_kv_heads=1, head_dim=2), pagedkv.PagedKvCache()
    >>> prefixes = pagedkv.PrefixCache(store)
    >>> cache.append_contiguous(store, *np.ones((2, 8, 2), np.float32), 8)
    >>> blocks = prefixes.insert(range(8), cache)
    >>> first, second = prefixes.walk()
    >>> second.position, second.tokens.tolist(), second.block, second.parent == first.id
    (4, [4, 5, 6, 7], 1, True)
    """

    namespace: bytes | None
    id: int
    parent: int
    position: int
    tokens: npt.NDArray[np.int64]
    block: int
    priority: int
    remaining: float | None
