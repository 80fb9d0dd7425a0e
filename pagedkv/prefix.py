"""PrefixCache: which block holds the K/V of which tokens, so that a request starts on what was computed before."""

from __future__ import annotations

import heapq
import operator
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import count
from types import EllipsisType
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from pagedkv._arrays import as_size
from pagedkv._keys import Tokens, as_count, as_namespace, as_token_ids, as_ttl
from pagedkv._radix import NEVER, Blocks, Node, RadixTree, cut_out, plan_eviction
from pagedkv.errors import PagedKvError, PagedStoreExhausted
from pagedkv.sequence import PagedKvCache
from pagedkv.stats import PrefixStats
from pagedkv.store import PagedKvStore

_NOT_CACHED, _EVICTABLE, _PROTECTED = range(3)  # Kind in allocator.pxd


class PrefixCache:
    """Shares the blocks of equal beginnings between sequences that need not live at the same time.

    It holds one reference to every block that was inserted. A store that runs short asks it before it
    raises: the blocks that were not used for longest go first, from the ends of the known beginnings, and
    only those that no sequence holds. If all of them are too few, none goes and the store raises
    `PagedStoreExhausted`.

    Parameters
    ----------
    store : PagedKvStore
        Has one prefix cache at a time, and knows it weakly: dropping this object gives its blocks back.
    clock : callable, optional
        Seconds as a float, never decreasing; what ``ttl`` is measured with.

    Raises
    ------
    TypeError, ValueError
        No store; a store that has a prefix cache already.

    Notes
    -----
    Tokens: a list, tuple or one-dimensional integer array of ids from 0 to 2**63 - 1, compared one by one. How the
    ids are spelled makes no difference. A ValueError names ``tokens`` where one is negative, a boolean or no integer.

    Namespaces: ``bytes``, or None, which is a namespace of its own and not the same as ``b""``. Tenants, adapters or
    salts that use different ones never share a block. Eviction takes from the namespace that holds the most blocks,
    which is the one furthest above an equal share; a burst in one cannot push another below its share as long as
    the first has blocks to give. Shares are an order, no reservation: nothing lies idle while a request is refused.

    Threads: all methods may be called from any thread. A sequence that is handed over belongs to the caller.

    Method: Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", NeurIPS 2024,
    section 3 (RadixAttention).

    Examples
    --------
    >>> import numpy as np, pagedkv
    >>> store = pagedkv.PagedKvStore(block_size=4, total_blocks=8, n_kv_heads=1, head_dim=2)
    >>> prefixes = pagedkv.PrefixCache(store)
    >>> prompt, cache = [5, 6, 7, 8, 9, 10], pagedkv.PagedKvCache()
    >>> cache.append_contiguous(store, *np.ones((2, 6, 2), np.float32), 6)
    >>> prefixes.insert(prompt, cache)           # one whole block
    1
    >>> cache.release(store)
    >>> second = pagedkv.PagedKvCache()
    >>> prefixes.attach(second, [5, 6, 7, 8, 1, 2, 3])
    4
    >>> second
    PagedKvCache(seq_len=4, capacity=4, blocks=[0])
    """

    def __init__(self, store: PagedKvStore, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._trees: dict[bytes | None, RadixTree] = {}
        if not isinstance(store, PagedKvStore):
            raise TypeError(f"store: expected a PagedKvStore, got {type(store).__name__}")
        if not callable(clock):
            raise TypeError(f"clock: expected a callable, got {type(clock).__name__}")
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()  # of everything below; nothing is taken from the store while it is held
        self._terms: list[tuple[float, int, Node]] = []  # a heap: each node with a term is above one of these
        self._numbers = count()
        self._held = 0
        self._hit_tokens = 0
        self._missed_tokens = 0
        self._inserted = 0
        self._evicted = 0
        self._books = store._reclaim_from(self)
        with _forking:
            _alive.add(self)

    def __del__(self) -> None:
        if self._trees:
            self._clear(self._trees.values())

    def __repr__(self) -> str:
        return f"PrefixCache(blocks={self._held}, evictable={self.evictable_block_count}, store={self._store!r})"

    def __reduce__(self) -> Any:
        raise TypeError("PrefixCache: cannot be copied or pickled, it holds blocks of a store by id")

    @property
    def store(self) -> PagedKvStore:
        """The store whose blocks these are."""
        return self._store

    @property
    def evictable_block_count(self) -> int:
        """Blocks that could be given up now: nobody else holds them, and no ``ttl`` protects them. O(1)."""
        self._end_terms_now()
        return self._books.n_evictable

    def is_evictable(self, block: SupportsIndex) -> bool:
        """Whether a block is one of those that could be given up now.

        Parameters
        ----------
        block : int
            The id of a block of the store.

        Returns
        -------
        bool

        Raises
        ------
        TypeError, IndexError
            ``block`` is no integer, or out of range.
        """
        if not self._store.refcount(block):
            return False
        self._end_terms_now()
        return self._books.is_idle(operator.index(block))

    # --- reading ---

    def match(self, tokens: Tokens, *, namespace: bytes | None = None) -> int:
        """How many of these tokens' positions `attach` would reuse. Changes nothing, and is no use of them.

        Parameters
        ----------
        tokens : list, tuple, range or integer array ``[n]``
            A prompt's token ids, 0 to 2**63 - 1.
        namespace : bytes, optional
            Where to look. None is one of its own.

        Returns
        -------
        int
            0 to ``n - 1``: one token at least is left to compute, for its logits.

        Raises
        ------
        TypeError, ValueError
            ``tokens`` or ``namespace`` of a wrong kind.
        """
        data, name = as_token_ids(tokens)[:-1].tobytes(), as_namespace(namespace)
        with self._lock:
            tree = self._trees.get(name)
            return 0 if tree is None else tree.find(data)[1]

    def match_blocks(self, tokens: Tokens, *, namespace: bytes | None = None) -> Blocks:
        """The ids of the whole blocks that `attach` would share: int32 ``[match(tokens) // block_size]``.

        They are not retained: another thread may evict them as soon as this returns.

        Arguments and errors as for `match`.
        """
        data, name = as_token_ids(tokens)[:-1].tobytes(), as_namespace(namespace)
        with self._lock:
            tree = self._trees.get(name)
            if tree is None:
                return np.empty(0, np.int32)
            node, n = tree.find(data)
            return tree.blocks_to(node)[: n // self._store.block_size]

    def attach(self, cache: PagedKvCache, tokens: Tokens, *, namespace: bytes | None = None) -> int:
        """Start an empty sequence on the longest beginning of ``tokens`` that is known.

        Whole blocks are shared. Where the tokens part inside a block, the sequence gets a block of its own and a
        copy of the rows that match, in all layers; if that block cannot be had, reuse ends before it.

        Parameters
        ----------
        cache : PagedKvCache
            Holds no blocks. It will have ``seq_len`` positions: what is returned.
        tokens : list, tuple, range or integer array ``[n]``
            A prompt's token ids, 0 to 2**63 - 1.
        namespace : bytes, optional
            Where to look. None is one of its own.

        Returns
        -------
        int
            Positions reused, 0 to ``n - 1``.

        Raises
        ------
        TypeError, ValueError
            An argument of a wrong kind; a cache that holds blocks.
        RuntimeError
            The cache is in use by a running call.
        """
        ids, name = as_token_ids(tokens), as_namespace(namespace)
        if not isinstance(cache, PagedKvCache):
            raise TypeError(f"cache: expected a PagedKvCache, got {type(cache).__name__}")
        if cache.capacity:
            raise ValueError(f"cache: expected one that holds no blocks, got {cache!r}")
        return self._attach(cache, ids, len(ids) - 1, name)

    def _attach(self, cache: PagedKvCache, ids: npt.NDArray[np.int64], n_most: int, name: bytes | None) -> int:
        """`attach` to what is known of the first `n_most` tokens; what was asked for are all of them."""
        store, size = self._store, self._store.block_size
        n, blocks = self._share(ids[: max(n_most, 0)].tobytes(), name)
        try:
            if n % size:
                blocks = self._copy_last(blocks)
                n = min(n, len(blocks) * size)
            if len(blocks):
                cache.adopt_blocks(blocks, len(blocks) * size, size, store=store)
        except BaseException:
            store.release(blocks)
            raise
        if n % size:
            cache.truncate(store, n)
        with self._lock:
            self._hit_tokens += n
            self._missed_tokens += len(ids) - n
        return n

    def _share(self, data: bytes, name: bytes | None) -> tuple[int, Blocks]:
        """The length of the longest known beginning, and its blocks, retained; the last one may match in part."""
        size = self._store.block_size
        with self._lock:
            tree = self._trees.get(name)
            if tree is None:
                return 0, np.empty(0, np.int32)
            node, n = tree.find(data)
            end = -(-n // size) * size
            node = tree.cut(tree.descend(node, end), end)
            tree.use(node)
            blocks = tree.blocks_to(node)
            self._store.retain(blocks)  # under the lock: nobody evicts them before
            return n, blocks

    def _copy_last(self, blocks: Blocks) -> Blocks:
        """The blocks with a copy for the last one, or without it if there is none to copy to. It is held until then."""
        copied = blocks.copy()
        try:
            copied[-1:] = self._store.acquire(1)
        except PagedStoreExhausted:
            copied = blocks[:-1]
        else:
            self._store.copy_block(int(blocks[-1]), int(copied[-1]))
        self._store.release(blocks[-1:])
        return copied

    # --- changing ---

    def insert(
        self,
        tokens: Tokens,
        cache: PagedKvCache,
        *,
        namespace: bytes | None = None,
        priority: SupportsIndex = 0,
        ttl: float | None = None,
    ) -> int:
        """Remember the whole blocks of a sequence whose tokens these are. The sequence may be running, and go on.

        Parameters
        ----------
        tokens : list, tuple, range or integer array ``[n]``
            What the sequence's positions were computed from. Only blocks that lie wholly within both ``n`` and
            ``seq_len`` are taken; what is known already stays as it is.
        cache : PagedKvCache
            A sequence of the store. Blocks that `PagedKvCache.drop_before` gave back cannot be inserted any more: such
            a sequence can only continue what is known up to there, or else nothing is inserted.
        namespace : bytes, optional
            Where they can be found again. None is one of its own.
        priority : int, optional
            Within a namespace, blocks of a higher priority are evicted after all those of a lower one. A block
            has the highest that it was inserted with.
        ttl : float, optional
            Seconds for which the blocks of these tokens are not evicted at all; ``math.inf`` is for good.
            `clear` takes them nevertheless.

        Returns
        -------
        int
            Blocks that were new.

        Raises
        ------
        TypeError, ValueError
            An argument of a wrong kind or value; a sequence of another store.
        """
        ids, name = as_token_ids(tokens), as_namespace(namespace)
        if not isinstance(cache, PagedKvCache):
            raise TypeError(f"cache: expected a PagedKvCache, got {type(cache).__name__}")
        rank, seconds = as_size(priority, "priority", -sys.maxsize, sys.maxsize), as_ttl(ttl)
        size = self._store.block_size
        n = min(len(ids), cache.seq_len) // size
        if n == 0:
            return 0
        if cache.store is not self._store:
            raise ValueError(f"cache: expected a sequence of {self._store!r}, got one of {cache.store!r}")
        data, table = ids[: n * size].tobytes(), cache.block_table[:n]
        with self._lock:
            self._end_terms()
            tree = self._trees.get(name) or RadixTree(size)
            node, at = tree.find(data)
            new = table[at // size :]
            if len(new) and new[0] < 0:  # dropped, and not known
                return 0
            self._store.retain(new)
            self._trees[name] = tree
            expires = NEVER if seconds is None else self._clock() + seconds
            end = tree.cut(node, at)
            if len(new):
                # What begins inside a block that others know is used up to there by the path; its block is new.
                end = tree.grow(end, data[at * 8 :], new, rank, expires)
                self._books.mark(new, _PROTECTED if expires > NEVER else _EVICTABLE)
            protected = tree.use(end, rank, expires)
            for part in protected:
                self._books.mark(part.blocks, _PROTECTED)
            if expires > NEVER and (len(new) or end in protected):
                heapq.heappush(self._terms, (expires, next(self._numbers), end))
            self._held += len(new)
            self._inserted += len(new)
        return len(new)

    def evict(self, n: SupportsIndex) -> int:
        """Give up to ``n`` blocks back to the store, in the order of eviction.

        Parameters
        ----------
        n : int
            Blocks, 0 or more.

        Returns
        -------
        int
            How many went: fewer than ``n`` where sequences hold the rest, or a ``ttl`` protects it.

        Raises
        ------
        TypeError, ValueError
            ``n`` is no integer of at least 0.
        """
        n_wanted = as_count(n, "n")
        with self._lock:
            self._end_terms()
            return self._evict(n_wanted)

    def reclaim(self, n: SupportsIndex) -> int:
        """Give ``n`` blocks back to the store, or none: what a store calls that is short of them.

        Arguments, result and errors as for `evict`.
        """
        n_wanted = as_count(n, "n")
        with self._lock:
            self._end_terms()
            return self._evict(n_wanted) if n_wanted <= self._books.n_evictable else 0

    def clear(self, *, namespace: bytes | EllipsisType | None = ...) -> int:
        """Forget one namespace, or all of them, protected or not. What sequences hold stays theirs.

        Parameters
        ----------
        namespace : bytes or None, optional
            All of them without it; None is one of its own.

        Returns
        -------
        int
            How many blocks were held.

        Raises
        ------
        TypeError
            ``namespace`` is no bytes and not None.
        """
        name = namespace if namespace is ... else as_namespace(namespace)
        with self._lock:
            return self._clear([tree for key, tree in self._trees.items() if name is ... or key == name])

    # --- looking after it ---

    def stats(self) -> PrefixStats:
        """Counters as a `PrefixStats`. O(1)."""
        return PrefixStats(
            blocks_held=self._held,
            evictable_blocks=self.evictable_block_count,
            namespaces=len(self._trees),
            hit_tokens=self._hit_tokens,
            missed_tokens=self._missed_tokens,
            blocks_inserted=self._inserted,
            blocks_evicted=self._evicted,
        )

    def check(self) -> None:
        """Raise `PagedKvError` if the books do not balance, the store's included. Walks over everything."""
        with self._lock:
            held: list[int] = []
            for tree in self._trees.values():
                if fault := tree.fault():
                    raise PagedKvError(f"prefix cache: {fault}")
                held += np.concatenate([node.blocks for node in tree.below(tree.root)]).tolist()
        if len(set(held)) != len(held) or len(held) != self._held:
            raise PagedKvError(f"{len(held)} blocks are in the prefix cache, {self._held} are counted")
        for block in held:
            if not self._store.refcount(block):
                raise PagedKvError(f"block {block} is in the prefix cache and has no holder")
        self._store.check()

    def _end_terms_now(self) -> None:
        if self._terms:
            with self._lock:
                self._end_terms()

    def _end_terms(self) -> None:
        """Let go of what was protected until now."""
        if not self._terms:
            return
        now = self._clock()
        while self._terms and self._terms[0][0] <= now:
            node = heapq.heappop(self._terms)[2]
            while node.parent is not None and NEVER < node.expires <= now:
                node.expires = NEVER
                self._books.mark(node.blocks, _EVICTABLE)
                node = node.parent
            if node.expires > now:  # and so are those above it, at least
                heapq.heappush(self._terms, (node.expires, next(self._numbers), node))

    def _evict(self, n: int) -> int:
        gone: list[Blocks] = []
        left = n
        try:
            for tree, node, n_last in plan_eviction(self._trees.values(), self._books.n_idle_at_end, n):
                gone.append(tree.trim(node, n_last))
                left -= n_last
            if left and self._books.n_evictable > n - left:
                left -= cut_out(self._trees.values(), self._books.end_of_idle, self._books.n_idle_at_end, left, gone)
        finally:  # an interrupt must not lose what has left the tree
            self._give_back(gone)
        return n - left

    def _clear(self, trees: Iterable[RadixTree]) -> int:
        n_held = self._held
        self._give_back([blocks for tree in trees for blocks in tree.forget_below(tree.root, 0)])
        self._terms = [term for term in self._terms if term[2].parent is not None]
        heapq.heapify(self._terms)
        n_gone = n_held - self._held
        self._evicted -= n_gone
        return n_gone

    def _give_back(self, gone: list[Blocks]) -> None:
        """Blocks that are in no tree any more."""
        self._trees = {name: tree for name, tree in self._trees.items() if tree.n_blocks}
        blocks = np.concatenate([np.empty(0, np.int32), *gone])
        self._held -= len(blocks)
        self._evicted += len(blocks)
        self._books.mark(blocks, _NOT_CACHED)
        self._store.release(blocks)


# --- fork: no child inherits a tree that another thread was in the middle of changing ---

_forking = threading.Lock()
_alive: weakref.WeakSet[PrefixCache] = weakref.WeakSet()
_stopped = ExitStack()


def _stop_all() -> None:
    _stopped.enter_context(_forking)
    for prefixes in list(_alive):
        _stopped.enter_context(prefixes._lock)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_stop_all, after_in_parent=_stopped.close, after_in_child=_stopped.close)
