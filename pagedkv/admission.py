"""What a scheduler asks before it starts a request: how much room there is, and who may start."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import add, le, mul
from typing import TYPE_CHECKING, Literal, NamedTuple, SupportsIndex

from pagedkv._groups import bytes_of
from pagedkv._keys import Tokens, as_count, as_namespace, as_token_ids
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

    Notes
    -----
    Threads: a plain value.

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
class Waiting:
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
    cache : PagedKvCache, optional
        A sequence that holds blocks already, such as a fork, and is not looked up. The positions above count from
        its beginning; a shared block that has to be copied first counts as one that is needed.
    first_position : int, optional
        Positions before it that are known are given back at once, as a window leaves them behind: whole blocks of them
        can be evicted again, and do not count among the most that it holds.

    Notes
    -----
    The values are checked by `plan_admission`, which names the request by its place.

    Threads: a plain value, but for its ``cache``.

    Examples
    --------
    >>> import pagedkv
    >>> request = pagedkv.Waiting([5, 6, 7], n_most=100)     # a prompt of three tokens, at most 97 new ones
    >>> request.n_most
    100
    """

    tokens: Tokens = ()
    n_positions: SupportsIndex | None = None
    n_most: SupportsIndex | None = None
    namespace: bytes | None = None
    cache: PagedKvCache | None = None
    first_position: SupportsIndex = 0


@with_field_docs
class Admission(NamedTuple):
    """What `plan_admission` says of one request: a named tuple.

    Attributes
    ----------
    verdict : "now", "evict", "wait" or "never"
        Its blocks are free; they are when the prefix cache gives some up, as the store has it do; it has to wait for
        others to give back; the store is too small for it.
    n_blocks : int
        Blocks that are to be taken for it when it starts.
    n_reused : int
        Positions whose K/V is there already.

    Notes
    -----
    Threads: a plain value.

    Examples
    --------
    >>> import pagedkv
    >>> store = pagedkv.PagedKvStore(block_size=16, total_blocks=8, n_kv_heads=1, head_dim=2)
    >>> [admission] = pagedkv.plan_admission(store, [pagedkv.Waiting(range(40))])
    >>> admission, admission.can_start
    (Admission(verdict='now', n_blocks=3, n_reused=0), True)
    """

    verdict: Literal["now", "evict", "wait", "never"]
    n_blocks: int
    n_reused: int

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
    if not isinstance(store, PagedKvStore):
        return _room_in_all(store, cache, prefix)
    prefix = _check(store, prefix)
    n_evictable = 0 if prefix is None else prefix.evictable_block_count
    if cache is None:
        cache = PagedKvCache()
    elif not isinstance(cache, PagedKvCache):
        raise TypeError(f"cache: expected a PagedKvCache or None, got {type(cache).__name__}")
    n_free = store.free_block_count
    cache.blocks_needed_for(store, 0)  # refuses what is another store's, or in use
    return Room(
        _fitting(store, cache, n_free, None),
        _fitting(store, cache, n_free + n_evictable, prefix),
        store.total_blocks * store.block_size + cache.first_position - cache.seq_len,
    )


def plan_admission(
    store: PagedKvStore,
    waiting: Iterable[Waiting],
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
    store : PagedKvStore
    waiting : iterable of Waiting
        The one whose turn it is first.
    prefix : PrefixCache, optional
        That of the store, or of the model that the store is one of. Without it, nothing is known of any prompt, and
        nothing counts as evictable.
    keep_free : int, optional
        Blocks, free or evictable, that are left for the running requests to grow into.
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
        Arguments of a wrong kind; a `Waiting` is named by its place.
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
    >>> queue = [pagedkv.Waiting(range(n)) for n in (20, 40, 16, 4)]
    >>> [admission.verdict for admission in pagedkv.plan_admission(store, queue)]
    ['now', 'never', 'wait', 'wait']
    >>> [admission.verdict for admission in pagedkv.plan_admission(store, queue, overtake=True)]
    ['now', 'never', 'wait', 'now']
    """
    prefix = _check(store, prefix)
    n_evictable = 0 if prefix is None else prefix.evictable_block_count
    n_free = store.free_block_count
    n_kept = as_count(keep_free, "keep_free")
    pinned: set[int] = set()  # found by requests that start: no longer evictable
    plan: list[Admission] = []
    someone_waits = False
    for place, request in enumerate(waiting):
        if not isinstance(request, Waiting):
            raise TypeError(f"waiting[{place}]: expected a Waiting, got {type(request).__name__}")
        try:
            n_blocks, n_most, n_reused, found = _demand(store, prefix, request)
        except (TypeError, ValueError) as error:
            raise type(error)(f"waiting[{place}]: {error}") from None
        newly_pinned = found - pinned
        n_left = n_free + n_evictable - len(newly_pinned) - n_blocks
        verdict: Literal["now", "evict", "wait", "never"] = "wait"
        if n_most > store.total_blocks:
            verdict = "never"
        elif n_left >= n_kept and (overtake or not someone_waits):
            verdict = "now" if n_blocks <= n_free else "evict"
            pinned |= newly_pinned
            n_free = max(0, n_free - n_blocks)
            n_evictable = n_left - n_free
        someone_waits |= verdict == "wait"
        plan.append(Admission(verdict, n_blocks, n_reused))
    return plan


def _check(store: PagedKvStore, prefix: PrefixCache | None) -> PrefixCache | None:
    """The prefix cache, as far as it is the store's."""
    if not isinstance(store, PagedKvStore):
        raise TypeError(f"store: expected a PagedKvStore, got {type(store).__name__}")
    if prefix is None:
        return None
    if not isinstance(prefix, PrefixCache):
        raise TypeError(f"prefix: expected a PrefixCache or None, got {type(prefix).__name__}")
    if store not in prefix.stores:
        raise ValueError("prefix: expected the store's own prefix cache, got another's")
    return prefix.groups[prefix.stores.index(store)]


def _room_in_all(store: _Groups, sequence: object, prefix: PrefixCache | None) -> Room:
    """Where stores share a budget: what each still has of its own, and the bytes that all of them have together."""
    found = getattr(store, "stores", None)
    stores: tuple[PagedKvStore, ...] = found if isinstance(found, tuple) else ()
    if not stores or not all(isinstance(each, PagedKvStore) for each in stores):
        raise TypeError(f"store: expected a PagedKvStore or ModelStores, got {type(store).__name__}")
    caches: Sequence[PagedKvCache]
    caches = [PagedKvCache() for _ in stores] if sequence is None else getattr(sequence, "caches", ())
    if len(caches) != len(stores) or not all(isinstance(cache, PagedKvCache) for cache in caches):
        raise TypeError(f"cache: expected a ModelSequence or None, got {type(sequence).__name__}")
    for each in stores:
        _check(each, prefix)
    limit, held, evictable = bytes_of(stores)
    sizes = [each.nbytes // each.total_blocks for each in stores]
    unheld = [each.total_blocks - each.stats().held_blocks for each in stores]
    idle = [each.evictable_block_count if prefix else 0 for each in stores]
    room, could_be_room = limit - held, limit - held + (evictable if prefix else 0)

    def fits(n: int, free: list[int], n_bytes: int) -> bool:
        needed = [cache.blocks_needed_for(each, n) for each, cache in zip(stores, caches, strict=True)]
        return all(map(le, needed, free)) and sum(map(mul, needed, sizes)) <= n_bytes

    # Blocks of each as if nobody else held any: what a window has dropped counts as room.
    dropped = [cache.first_position // each.block_size for each, cache in zip(stores, caches, strict=True)]
    n_table = min([(limit + sum(map(mul, dropped, sizes))) // sum(sizes), *map(add, _totals(stores), dropped)])
    ever = max(0, n_table * stores[0].block_size - caches[0].seq_len)
    now = bisect_left(range(1, ever + 1), True, key=lambda n: not fits(n, unheld, room))
    evicting = list(map(add, unheld, idle))
    return Room(now, bisect_left(range(1, ever + 1), True, key=lambda n: not fits(n, evicting, could_be_room)), ever)


def _totals(stores: tuple[PagedKvStore, ...]) -> list[int]:
    return [each.total_blocks for each in stores]


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


def _demand(store: PagedKvStore, prefix: PrefixCache | None, request: Waiting) -> tuple[int, int, int, set[int]]:
    """Blocks to take at the start; blocks held at most; positions that are known; evictable blocks among theirs."""
    size, ids = store.block_size, as_token_ids(request.tokens)
    n_positions = len(ids) if request.n_positions is None else as_count(request.n_positions, "n_positions")
    n_most = n_positions if request.n_most is None else as_count(request.n_most, "n_most")
    n_most = max(n_most, n_positions, len(ids))
    first = as_count(request.first_position, "first_position")
    cache = request.cache
    if cache is not None and not isinstance(cache, PagedKvCache):
        raise TypeError(f"cache: expected a PagedKvCache or None, got {type(cache).__name__}")
    if cache is not None and cache.capacity:
        n_blocks = cache.blocks_needed_for(store, max(0, n_positions - cache.seq_len))
        return n_blocks, -(-(n_most - cache.first_position) // size), cache.seq_len, set()
    if prefix is None:
        return -(-n_positions // size), -(-n_most // size), 0, set()
    n_reused, [(shared, idle)] = prefix._look_up(ids, as_namespace(request.namespace))
    n_dropped = min(first, n_reused) // size
    found = set(shared[n_dropped:][idle[n_dropped:]].tolist())
    return max(0, -(-n_positions // size) - len(shared)), -(-n_most // size) - n_dropped, n_reused, found
