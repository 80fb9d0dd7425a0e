"""What a scheduler asks before it starts a request: how much room there is, and who may start."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import add, le, mul
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, SupportsIndex

from pagedkv._arrays import as_size
from pagedkv._groups import bytes_of
from pagedkv._keys import Tokens, as_count, as_namespace, as_token_ids
from pagedkv._windows import first_held, growth
from pagedkv.prefix import PrefixCache
from pagedkv.sequence import PagedKvCache
from pagedkv.stats import with_field_docs
from pagedkv.store import PagedKvStore

if TYPE_CHECKING:
    from pagedkv._groups import _Groups, _Sequence


@with_field_docs
class Room(NamedTuple):
    """What `room_for` returns: how many more positions a sequence can be given.

    Attributes
    ----------
    now : int
        Positions that the free blocks give.
    with_eviction : int
        Positions, with what the prefix cache could give up; pushed one after the other, since what a copy leaves to the
        prefix cache alone can be evicted for the next.
    ever : int
        Positions, when everybody else has given back.

    Examples
    --------
    >>> import pagedkv
    >>> room = pagedkv.room_for(pagedkv.PagedKvStore(block_size=16, total_blocks=8, n_kv_heads=1, head_dim=2))
    >>> room.now
    128
    """

    now: int
    with_eviction: int
    ever: int


@dataclass(frozen=True)
class PendingRequest:
    """A request that waits to start.

    Parameters
    ----------
    tokens : list, tuple or integer array ``[n]``, optional
        What it starts with: a prompt, and what was generated before it was preempted. Looked up in the prefix cache.
    n_positions : int, optional
        Positions that must have their blocks when it starts; ``n`` without it.
    n_most : int, optional
        Positions that it will have at most. Without it, as many as it starts with.
    namespace : bytes, optional
        Where the prefix cache looks it up.
    cache : PagedKvCache or ModelSequence, optional
        A sequence that holds blocks already, such as a fork, and is not looked up. The positions above count from
        its beginning; a shared block that has to be copied first counts as one that is needed.
    first_position : int, optional
        Positions before it that are known are given back at once, as a window leaves them behind: whole blocks of them
        can be evicted again, and do not count among the most that it holds. What the windows of a model or of a prefix
        cache leave behind counts so by itself.
    chunk : int, optional
        It grows by that many positions at a time, and drops what its windows have left behind: where there is a window,
        it starts with the blocks that `ModelSequence.reserve` takes, and never holds more. Without it, it grows at
        once.

    Notes
    -----
    The values are checked by `plan_admission`, which names the request by its place.

    Threads: its ``cache`` belongs to one at a time.

    Examples
    --------
    >>> import pagedkv
    >>> request = pagedkv.PendingRequest([5, 6, 7], n_most=100)  # a prompt of three tokens, at most 97 new ones
    >>> request.n_most
    100
    """

    tokens: Tokens = ()
    n_positions: SupportsIndex | None = None
    n_most: SupportsIndex | None = None
    namespace: bytes | None = None
    cache: PagedKvCache | _Sequence | None = None
    first_position: SupportsIndex = 0
    chunk: SupportsIndex | None = None


@with_field_docs
class Admission(NamedTuple):
    """What `plan_admission` says of one request: a named tuple.

    Attributes
    ----------
    verdict : "now", "evict", "wait" or "never"
        Its blocks are free; they are when the prefix cache gives some up, as the store has it do; it has to wait for
        others to give back; the store is too small for it.
    n_blocks : int
        Blocks that are to be taken for it when it starts; of a model, in all stores together.
    num_cached_tokens : int
        Positions whose K/V is there already.

    Examples
    --------
    >>> import pagedkv
    >>> store = pagedkv.PagedKvStore(block_size=16, total_blocks=8, n_kv_heads=1, head_dim=2)
    >>> [admission] = pagedkv.plan_admission(store, [pagedkv.PendingRequest(range(40))])
    >>> admission, admission.can_start
    (Admission(verdict='now', n_blocks=3, num_cached_tokens=0), True)
    """

    verdict: Literal["now", "evict", "wait", "never"]
    n_blocks: int
    num_cached_tokens: int

    @property
    def can_start(self) -> bool:
        """Whether the verdict is "now" or "evict"."""
        return self.verdict in ("now", "evict")


def room_for(
    store: PagedKvStore | _Groups, cache: PagedKvCache | _Sequence | None = None, *, prefix: PrefixCache | None = None
) -> Room:
    """How many more positions fit into a sequence, or into a new one: now, with eviction, and ever.

    Counted are the rest of its tail, reserved blocks, and the copies of shared blocks that appending makes.

    Parameters
    ----------
    store : PagedKvStore or ModelStores
        A model's positions need blocks in all of its stores.
    cache : PagedKvCache or ModelSequence, optional
        The sequence; a new one without it.
    prefix : PrefixCache, optional
        That of the store, or of the model that the store is one of. Without it, nothing counts as evictable.

    Returns
    -------
    Room

    Raises
    ------
    TypeError, ValueError
        Arguments of another type; another store's cache or prefix cache.
    RuntimeError
        The cache is in use by a running call.

    Notes
    -----
    Threads: a snapshot. Another thread may take the blocks before the caller does.

    Examples
    --------
    >>> import numpy as np, pagedkv
    >>> store, cache = pagedkv.PagedKvStore(4, 8, n_kv_heads=1, head_dim=2), pagedkv.PagedKvCache()
    >>> cache.append_contiguous(store, *np.ones((2, 6, 2), np.float32), 6)
    >>> pagedkv.room_for(store, cache)
    Room(now=26, with_eviction=26, ever=26)
    >>> fork = cache.clone()                          # its tail is shared: the next position takes a copy
    >>> pagedkv.room_for(store, fork), pagedkv.room_for(store)
    (Room(now=22, with_eviction=22, ever=26), Room(now=24, with_eviction=24, ever=32))
    """
    named = _named(store, prefix)
    return _room_in_all(named, cache) if named.is_model else _room_in_one(named, cache)


def plan_admission(
    store: PagedKvStore | _Groups,
    pending: Iterable[PendingRequest],
    *,
    prefix: PrefixCache | None = None,
    keep_free: SupportsIndex = 0,
    overtake: bool = False,
) -> list[Admission]:
    """Which of the waiting requests can start together, in their order.

    Takes nothing and changes nothing. What a request finds in the prefix cache it need not take, and
    nobody can evict it any more for the requests after it.

    Parameters
    ----------
    store : PagedKvStore or ModelStores
        A model's requests need blocks in all of its stores, and bytes of the budget that these share.
    pending : iterable of PendingRequest
        The one whose turn it is first.
    prefix : PrefixCache, optional
        That of the store, or of the model that the store is one of. Without it, nothing is known of any prompt, and
        nothing counts as evictable.
    keep_free : int, optional
        Blocks, free or evictable, that are left for the running requests to grow into; of a model, in each of its
        stores.
    overtake : bool, optional
        Whether a request may start that fits while one before it has to wait. By default none may, so that a large
        request's turn comes.

    Returns
    -------
    list of Admission
        One for each request.

    Raises
    ------
    TypeError, ValueError
        Arguments of a wrong kind; a `PendingRequest` is named by its place.
    RuntimeError
        A cache of a request is in use by a running call.

    Notes
    -----
    Attach all that can start before the first of them takes blocks: then no eviction takes what another one was
    promised. Should other threads have been faster, the step that runs short raises `PagedStoreExhausted` and
    changes nothing.

    Threads: a snapshot, as `room_for`.

    Examples
    --------
    >>> import pagedkv
    >>> store = pagedkv.PagedKvStore(4, 8, n_kv_heads=1, head_dim=2)
    >>> queue = [pagedkv.PendingRequest(range(n)) for n in (20, 40, 16, 4)]
    >>> [admission.verdict for admission in pagedkv.plan_admission(store, queue)]
    ['now', 'never', 'wait', 'wait']
    >>> [admission.verdict for admission in pagedkv.plan_admission(store, queue, overtake=True)]
    ['now', 'never', 'wait', 'now']
    """
    named = _named(store, prefix)
    stores, n_kept, supply = named.stores, as_count(keep_free, "keep_free"), _Supply(named)
    pinned: list[set[int]] = [set() for _ in stores]  # found by requests that start: no longer evictable
    plan: list[Admission] = []
    someone_waits = False
    for place, request in enumerate(pending):
        if not isinstance(request, PendingRequest):
            raise TypeError(f"pending[{place}]: expected a PendingRequest, got {type(request).__name__}")
        try:
            needed, most, n_cached, found = _demand(named, request)
        except (TypeError, ValueError) as error:
            raise type(error)(f"pending[{place}]: {error}") from None
        new = [ids - known for ids, known in zip(found, pinned, strict=True)]
        n_new = [len(ids) for ids in new]
        verdict: Literal["now", "evict", "wait", "never"] = "wait"
        if not fits_alone(stores, most):
            verdict = "never"
        elif (overtake or not someone_waits) and supply.covers([*map(add, needed, n_new)], n_kept):
            verdict = "now" if supply.is_free(needed) else "evict"
            supply.take(needed, n_new)
            pinned = [known | ids for ids, known in zip(new, pinned, strict=True)]
        someone_waits |= verdict == "wait"
        plan.append(Admission(verdict, sum(needed), n_cached))
    return plan


def fits_alone(stores: tuple[PagedKvStore, ...], n_blocks: Sequence[int]) -> bool:
    """Whether stores of one budget can have so many blocks each at once, when nobody else holds any."""
    n_bytes = sum(map(mul, n_blocks, map(_block_bytes, stores)))
    return all(map(le, n_blocks, [store.total_blocks for store in stores])) and n_bytes <= bytes_of(stores)[0]


# --- what there is ---


class _Supply:
    """What stores of one budget have: free and evictable blocks, each of its own, and the bytes that all share."""

    def __init__(self, named: _Named) -> None:
        stores, prefix = named.stores, named.prefix
        limit, held, evictable = bytes_of(stores)
        self.sizes = [_block_bytes(store) for store in stores]
        self.free = [store.total_blocks - store.stats().held_blocks for store in stores]
        self.idle = [store.evictable_block_count if prefix else 0 for store in stores]
        self.free_bytes = limit - held
        self.idle_bytes = evictable if prefix else 0

    def is_free(self, needed: Sequence[int]) -> bool:
        """Whether so many blocks of each can be taken and nothing is evicted."""
        return all(map(le, needed, self.free)) and self.bytes_of(needed) <= self.free_bytes

    def covers(self, needed: Sequence[int], n_kept: int = 0) -> bool:
        """Whether they can be taken with eviction, and so many more of each."""
        every = [n + n_kept for n in needed]
        n_bytes = self.free_bytes + self.idle_bytes
        return all(map(le, every, map(add, self.free, self.idle))) and self.bytes_of(every) <= n_bytes

    def take(self, needed: Sequence[int], pinned: Sequence[int]) -> None:
        """What is left, when evictable ones are `pinned`. Which store gives up bytes does not matter to their sum."""
        for i, (n, n_pinned) in enumerate(zip(needed, pinned, strict=True)):
            n_evicted = max(0, n - self.free[i])
            self.free[i] += n_evicted - n
            self.idle[i] -= n_evicted + n_pinned
        n_bytes = self.bytes_of(needed)
        n_evicted = max(0, n_bytes - self.free_bytes)
        self.free_bytes += n_evicted - n_bytes
        self.idle_bytes -= n_evicted + self.bytes_of(pinned)

    def bytes_of(self, n_blocks: Sequence[int]) -> int:
        return sum(map(mul, n_blocks, self.sizes))


def _block_bytes(store: PagedKvStore) -> int:
    return store.nbytes // store.total_blocks


# --- what was named ---


class _Named(NamedTuple):
    """What the caller named, a store or a model's, in one form for both."""

    stores: tuple[PagedKvStore, ...]
    windows: Sequence[int | None]  # what a query sees in each
    prefix: PrefixCache | None  # as far as it is that of these stores
    is_model: bool

    def caches_of(self, cache: object) -> Sequence[PagedKvCache]:
        """The cache that a sequence has in each store; new ones without one."""
        if cache is None:
            return [PagedKvCache() for _ in self.stores]
        caches = None if isinstance(cache, type) else getattr(cache, "caches", None) if self.is_model else (cache,)
        if not isinstance(caches, tuple) or len(caches) != len(self.stores) or not _all_are(caches, PagedKvCache):
            wanted = "ModelSequence" if self.is_model else "PagedKvCache"
            raise TypeError(f"cache: expected a {wanted} or None, got {type(cache).__name__}")
        return caches


def _named(store: PagedKvStore | _Groups, prefix: PrefixCache | None) -> _Named:
    is_model = not isinstance(store, PagedKvStore)
    stores = (getattr(store, "stores", None) if not isinstance(store, type) else None) if is_model else (store,)
    if not isinstance(stores, tuple) or not stores or not _all_are(stores, PagedKvStore):
        raise TypeError(f"store: expected a PagedKvStore or ModelStores, got {type(store).__name__}")
    if prefix is not None:
        if not isinstance(prefix, PrefixCache):
            raise TypeError(f"prefix: expected a PrefixCache or None, got {type(prefix).__name__}")
        if prefix.stores != stores:
            if is_model or store not in prefix.stores:
                raise ValueError("prefix: expected the store's own prefix cache, got another's")
            prefix = prefix.groups[prefix.stores.index(store)]
    if isinstance(store, PagedKvStore):  # its window is known to nobody but its prefix cache
        return _Named(stores, (prefix.window if prefix else None,), prefix, is_model)
    return _Named(stores, store.windows, prefix, is_model)


def _all_are(items: Iterable[object], kind: type) -> bool:
    return all([isinstance(item, kind) for item in items])


# --- room ---


def _room_in_one(named: _Named, sequence: object) -> Room:
    [store], [cache], prefix = named.stores, named.caches_of(sequence), named.prefix
    n_evictable = 0 if prefix is None else prefix.evictable_block_count
    n_free = store.free_block_count
    cache.blocks_needed_for(store, 0)  # refuses what is another store's, or in use
    return Room(
        _fitting(store, cache, n_free, None),
        _fitting(store, cache, n_free + n_evictable, prefix),
        store.total_blocks * store.block_size + cache.first_position - cache.seq_len,
    )

def _room_in_all(named: _Named, sequence: object) -> Room:
    """Where stores share a budget: what each still has of its own, and the bytes that all of them have together."""
    stores, caches, supply = named.stores, named.caches_of(sequence), _Supply(named)
    limit = bytes_of(stores)[0]

    def needed(n: int) -> list[int]:
        return [cache.blocks_needed_for(each, n) for each, cache in zip(stores, caches, strict=True)]

    # Blocks of each as if nobody else held any: what a window has dropped counts as room.
    dropped = [cache.first_position // each.block_size for each, cache in zip(stores, caches, strict=True)]
    totals = [each.total_blocks for each in stores]
    n_table = min([(limit + supply.bytes_of(dropped)) // sum(supply.sizes), *map(add, totals, dropped)])
    ever = max(0, n_table * stores[0].block_size - caches[0].seq_len)
    now = bisect_left(range(1, ever + 1), True, key=lambda n: not supply.is_free(needed(n)))
    return Room(now, bisect_left(range(1, ever + 1), True, key=lambda n: not supply.covers(needed(n))), ever)


def _fitting(store: PagedKvStore, cache: PagedKvCache, n_blocks: int, prefix: PrefixCache | None) -> int:
    """How many positions can be pushed, one after the other, with so many blocks to take.

    The copy of a block that the sequence shares with the prefix cache alone costs none where that can evict: the block
    that was copied can be evicted then.
    """
    size = store.block_size
    index = cache.seq_len // size
    for block in cache.block_table[index:].tolist():
        if store.refcount(block) > 1:
            if n_blocks == 0:
                break
            n_blocks -= prefix is None or not prefix._is_evictable_without_one(block)
        index += 1
    else:
        index += n_blocks
    return max(0, index * size - cache.seq_len)


# --- what a request asks for ---


def _demand(named: _Named, request: PendingRequest) -> tuple[list[int], list[int], int, list[set[int]]]:
    """For each store the blocks to take at the start and those held at most, how many positions are known, and for each
    store the evictable blocks among those that are found.
    """
    stores, prefix = named.stores, named.prefix
    size, ids = stores[0].block_size, as_token_ids(request.tokens)
    n_positions = len(ids) if request.n_positions is None else as_count(request.n_positions, "n_positions")
    n_most = n_positions if request.n_most is None else as_count(request.n_most, "n_most")
    n_most = max(n_most, n_positions, len(ids))
    first = as_count(request.first_position, "first_position")
    chunk = None if request.chunk is None else as_size(request.chunk, "chunk", 1, sys.maxsize)
    caches = named.caches_of(request.cache)
    runs = any([cache.capacity for cache in caches])
    n_known, looked_up = caches[0].seq_len, tuple[tuple[Any, Any], ...]()
    if prefix is not None and not runs:
        n_known, looked_up = prefix._look_up(ids, as_namespace(request.namespace))
    # Blocks that it does not hold, before those that it does.
    gone = [cache.first_position // size if runs else min(first, n_known) // size for cache in caches]
    if chunk is not None or not runs:
        gone = [max(n, first_held(seen, n_known, size) // size) for n, seen in zip(gone, named.windows, strict=True)]
    found = [set(ids[n:][idle[n:]].tolist()) for n, (ids, idle) in zip(gone, looked_up, strict=bool(looked_up))]

    def growths(n: int) -> list[int]:
        return [growth(window, n_known, max(0, n - n_known), chunk, size) for window in named.windows]

    start = growths(n_positions)
    if runs:
        needed = [cache.blocks_needed_for(each, n) for each, cache, n in zip(stores, caches, start, strict=True)]
    else:
        needed = [-(-(n_known + n) // size) - n_known // size for n in start]
    most = [-(-(n_known + n) // size) - n_gone for n, n_gone in zip(growths(n_most), gone, strict=True)]
    return needed, most, n_known, found or [set() for _ in stores]
