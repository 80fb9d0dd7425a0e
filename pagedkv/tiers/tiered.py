"""TieredPrefixes: a prefix cache, and a tier behind it.

    load     what a prompt begins with and memory does not know comes from the tier, on a thread, until a deadline
    store    what is known goes to the tier, on another thread, so that neither waits for the other

Nobody waits for a tier longer than the deadline says, whatever the tier does. What comes from it is known only when it
was compared with what was asked for.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections import Counter, OrderedDict
from types import TracebackType
from typing import NamedTuple, SupportsIndex

import numpy as np

from pagedkv import ModelSequence, PagedKvCache, PrefixCache
from pagedkv._arrays import as_size
from pagedkv._keys import Tokens, as_namespace, as_token_ids, as_ttl
from pagedkv.stats import with_field_docs
from pagedkv.tiers.prompts import GroupRecords, Ids, formats_of, longest
from pagedkv.tiers.records import KeySpace, RecordFormat
from pagedkv.tiers.tier import Tier
from pagedkv.tiers.worker import Patience, Worker

_MOST_COUNTED = 2**16  # blocks of which is known how often they were asked for
_SLICE = 0.05  # seconds after which one that waits looks whether it was cancelled


@with_field_docs
class Loaded(NamedTuple):
    """What `Loading.wait` returns: a named tuple.

    Attributes
    ----------
    tokens : int
        Positions that can be reused now, and could not before.
    nbytes : int
        Bytes of the records that were loaded for it, of all groups.
    seconds : float
        From the beginning, or until now where it goes on.
    ended : str or None
        Why it did not bring all that the tier has: "deadline", "cancelled", "no room", "missing", "evicted", "error",
        "left alone" (the tier failed before), "busy", "dropped", "closed", or "wrong ..." of a record. None if it did.

    Examples
    --------
    >>> from pagedkv.tiers import Loaded
    >>> Loaded(16, 4096, 0.01, None).tokens
    16
    """

    tokens: int
    nbytes: int
    seconds: float
    ended: str | None


@with_field_docs
class TieredStats(NamedTuple):
    """What `TieredPrefixes.stats` returns: a named tuple of counts, since it was made unless it says now.

    Attributes
    ----------
    hits : int
        Positions that came from the tier, and can be reused by all groups.
    misses : int
        Positions of whole blocks that were asked for, and came from neither memory nor the tier.
    loaded : int
        Records that were loaded.
    loaded_bytes : int
        Their bytes.
    load_seconds : float
        The time it took, looking for them included.
    stored : int
        Records that were stored.
    stored_bytes : int
        Their bytes.
    store_seconds : float
        The time it took.
    corrupt : int
        Records that were not what they were asked for as.
    refused : int
        Records that the tier did not take.
    late : int
        Loads that had not ended at their deadline.
    skipped : int
        Loads that were not tried, since the tier hung, had failed, or too many waited.
    dropped : int
        Prompts that were not stored for the same reasons.
    errors : int
        Loads and stores that ended in an exception of the tier.
    waiting : int
        Loads and stores that are not done yet, now.

    Examples
    --------
    >>> from pagedkv.tiers import TieredStats
    >>> TieredStats().hits
    0
    """

    hits: int = 0
    misses: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    stored: int = 0
    stored_bytes: int = 0
    store_seconds: float = 0.0
    corrupt: int = 0
    refused: int = 0
    late: int = 0
    skipped: int = 0
    dropped: int = 0
    errors: int = 0
    waiting: int = 0


class Loading:
    """A prompt's beginning on its way from a tier to memory. `TieredPrefixes.load` makes it.

    Attributes
    ----------
    deadline : float
        When it is over at the latest, as `time.monotonic` counts.

    Notes
    -----
    Threads: any number.

    Examples
    --------
    >>> import tempfile, pagedkv
    >>> from pagedkv.tiers import FileTier, TieredPrefixes
    >>> prefixes = pagedkv.PrefixCache(pagedkv.PagedKvStore(4, 8, n_kv_heads=1, head_dim=2))
    >>> with tempfile.TemporaryDirectory() as folder, FileTier(folder, max_bytes=2**30) as tier:
    ...     with TieredPrefixes(prefixes, tier, model=b"a model") as tiered:
    ...         tiered.load(range(20)).wait().tokens           # nobody has stored it
    0
    """

    def __init__(self, ids: Ids, namespace: bytes | None, n_known: int, deadline: float) -> None:
        self.deadline = deadline
        self._ids, self._namespace, self._n_known = ids, namespace, n_known
        self._started = time.monotonic()
        self._tokens = self._nbytes = 0
        self._result: Loaded | None = None
        self._has_ended = threading.Event()
        self._is_cancelled = False

    @property
    def is_done(self) -> bool:
        """Whether nobody need wait for it any more: it has ended, was cancelled, or its deadline has passed."""
        return self._result is not None or self._is_cancelled or time.monotonic() >= self.deadline

    def wait(self) -> Loaded:
        """Wait until it is done, and say what has come: a `Loaded`."""
        while not self.is_done:
            self._has_ended.wait(max(min(self.deadline - time.monotonic(), _SLICE), 0))
        if self._result is not None:
            return self._result
        return self._so_far("cancelled" if self._is_cancelled else "deadline")

    def cancel(self) -> None:
        """Nobody waits for it any more. What has come stays, and no more comes than what is being read."""
        self._is_cancelled = True

    def _so_far(self, ended: str | None) -> Loaded:
        return Loaded(self._tokens, self._nbytes, time.monotonic() - self._started, ended)

    def _end(self, ended: str | None) -> None:
        self._result = self._so_far(ended)
        self._has_ended.set()

    def __repr__(self) -> str:
        return f"Loading({len(self._ids)} tokens, {'done' if self.is_done else 'running'})"


class _Known(NamedTuple):
    """A beginning that is known, or that was asked for."""

    ids: Ids
    namespace: bytes | None
    was_asked_for: bool


class TieredPrefixes:
    """A prefix cache with a tier behind it: what memory does not know comes from there, and what is known goes there.

    Parameters
    ----------
    prefixes : PrefixCache
        Of a store, or of a model's. It may be used without the tier too.
    tier : Tier
        A `FileTier`, or one of your own. It is not closed with this.
    model : bytes
        Whatever tells this model's K and V from any other's: weights, adapter, revision. Not empty.
    from_use : int, optional
        Which time that a beginning is asked for it is stored: 1 at once, 2 keeps out of the tier what comes only once.
    deadline : float, optional
        Seconds after which a load is over, whatever has come by then. ``math.inf`` for none.
    token_seconds : float, optional
        What computing a position takes. A load is over after half of what computing all of it would take, if that is
        less.
    max_waiting : int, optional
        Loads, and prompts that are to be stored, that wait at most. If more come the oldest is dropped.

    Attributes
    ----------
    prefixes : PrefixCache
        As given.
    tier : Tier
        As given.

    Raises
    ------
    TypeError, ValueError
        An argument of a wrong kind, or out of range.

    Notes
    -----
    A tier may raise, hang, or return anything: it costs a load its deadline and no more, and what is wrong is never
    known. After three failures in a row it is left alone for 1, 2, 4 ... 30 s. While it hangs, the blocks of a record
    that it reads, and of a few that it writes, stay held; they are free when it returns.

    Layers with a window are stored as the next query sees them at the places where requests end and where they
    started: only there can another one go on.

    Threads: any number at once. After a fork the child begins with nothing that waits.

    Examples
    --------
    >>> import tempfile, numpy as np, pagedkv
    >>> from pagedkv.tiers import FileTier, TieredPrefixes
    >>> def serve(tiered, prompt):
    ...     cache, store = pagedkv.PagedKvCache(), tiered.prefixes.store
    ...     n = tiered.attach(cache, prompt)
    ...     rows = np.ones((len(prompt) - n, 2), np.float32)               # stands for the model
    ...     cache.append_contiguous(store, rows, rows, len(rows))
    ...     tiered.insert(prompt, cache)
    ...     cache.release(store)
    ...     return n
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for process in range(2):
    ...         prefixes = pagedkv.PrefixCache(pagedkv.PagedKvStore(4, 8, n_kv_heads=1, head_dim=2))
    ...         with FileTier(folder, max_bytes=2**30) as tier, TieredPrefixes(prefixes, tier, model=b"a") as tiered:
    ...             serve(tiered, range(20))
    0
    19
    """

    def __init__(
        self,
        prefixes: PrefixCache,
        tier: Tier,
        *,
        model: bytes,
        from_use: SupportsIndex = 1,
        deadline: float = 1.0,
        token_seconds: float | None = None,
        max_waiting: SupportsIndex = 64,
    ) -> None:
        if not isinstance(prefixes, PrefixCache):
            raise TypeError(f"prefixes: expected a PrefixCache, got {type(prefixes).__name__}")
        for name in ("find", "load", "store", "remove"):
            if not callable(getattr(tier, name, None)):
                raise TypeError(f"tier: expected one with a method {name}, got {type(tier).__name__}")
        self.prefixes = prefixes
        self.tier = tier
        self._formats = formats_of(prefixes)
        self._model = KeySpace(self._formats[0], model).model
        self._by_block = RecordFormat.of(prefixes.store, chunk_blocks=1)
        self._from_use = as_size(from_use, "from_use", 1, 2**31 - 1)
        self._deadline = _as_seconds(deadline, "deadline")
        self._token_seconds = math.inf if token_seconds is None else _as_seconds(token_seconds, "token_seconds")
        most = as_size(max_waiting, "max_waiting", 1, 2**31 - 1)
        self._loads: Worker[Loading] = Worker(self._load, most, "pagedkv-load")
        self._stores: Worker[_Known] = Worker(self._store, most, "pagedkv-store")
        self._counts: Counter[str] = Counter()
        self._seconds = {"load": 0.0, "store": 0.0}
        self._uses: OrderedDict[bytes, int] = OrderedDict()
        self._is_open, self._goes_on = True, True
        self._forget()
        _all_tiered.add(self)

    def _forget(self) -> None:
        """As if nothing had been begun: so a fork's child begins, whatever other threads were doing."""
        self._lock = threading.Lock()
        self._loads.forget()
        self._stores.forget()
        self._load_patience, self._store_patience = Patience(), Patience()

    def __repr__(self) -> str:
        return f"TieredPrefixes({self.prefixes!r}, {self.tier!r})"

    def __enter__(self) -> TieredPrefixes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- what a server calls ---

    def load(self, tokens: Tokens, *, namespace: bytes | None = None, deadline: float | None = None) -> Loading:
        """Begin to bring what a prompt begins with from the tier to memory. Returns at once.

        Parameters
        ----------
        tokens : list, tuple, range or integer array ``[n]``
            A prompt's token ids, 0 to 2**63 - 1.
        namespace : bytes, optional
            Where to look. None is one of its own.
        deadline : float, optional
            Seconds after which it is over; without it what the `TieredPrefixes` was given.

        Returns
        -------
        Loading
            It is done at once where memory knows all whole blocks.

        Raises
        ------
        TypeError, ValueError
            An argument of a wrong kind.
        """
        ids, name = as_token_ids(tokens), as_namespace(namespace)
        seconds = self._deadline if deadline is None else _as_seconds(deadline, "deadline")
        n_known, n_most = self._known(ids, name), self._whole(len(ids) - 1)
        if self._token_seconds < math.inf:
            seconds = min(seconds, self._token_seconds * max(n_most - n_known, 0) / 2)
        loading = Loading(ids, name, n_known, time.monotonic() + seconds)
        if self._from_use > 1:
            self._put_store(_Known(ids, name, True))
        if n_known >= n_most:
            loading._end(None)
        elif not self._is_open:
            self._skip(loading, "closed")
        elif self._load_patience.is_over:
            self._skip(loading, "left alone")
        elif (now := self._loads.doing) is not None and time.monotonic() >= now.deadline:
            self._skip(loading, "busy")
        elif (dropped := self._loads.put(loading)) is not None:
            self._skip(dropped, "dropped")
        return loading

    def attach(
        self,
        cache: PagedKvCache | ModelSequence,
        tokens: Tokens,
        *,
        namespace: bytes | None = None,
        deadline: float | None = None,
    ) -> int:
        """Load, wait for it, and start a sequence on what is known then, as `PrefixCache.attach` does.

        Parameters
        ----------
        cache : PagedKvCache or ModelSequence
            Holds no blocks.
        tokens : list, tuple, range or integer array ``[n]``
            A prompt's token ids, 0 to 2**63 - 1.
        namespace : bytes, optional
            Where to look. None is one of its own.
        deadline : float, optional
            Seconds that it waits at most; without it what the `TieredPrefixes` was given.

        Returns
        -------
        int
            Positions reused, 0 to ``n - 1``.

        Raises
        ------
        TypeError, ValueError, RuntimeError
            As `PrefixCache.attach`.
        """
        ids, name = as_token_ids(tokens), as_namespace(namespace)
        self.load(ids, namespace=name, deadline=deadline).wait()
        n: int = self.prefixes.attach(cache, ids, namespace=name)
        self.store(ids[:n], namespace=name)  # where it parts from what is known, others may
        return n

    def insert(
        self,
        tokens: Tokens,
        cache: PagedKvCache | ModelSequence,
        *,
        namespace: bytes | None = None,
        priority: SupportsIndex = 0,
        ttl: float | None = None,
    ) -> int:
        """Remember a sequence, as `PrefixCache.insert` does, and `store` it.

        A sequence that grows is better inserted in ``prefixes``, with a handle, and stored when it ends.

        Parameters
        ----------
        tokens : list, tuple, range or integer array ``[n]``
            What the sequence's positions were computed from.
        cache : PagedKvCache or ModelSequence
            A sequence of the store.
        namespace : bytes, optional
            Where they can be found again. None is one of its own.
        priority : int, optional
            As for `PrefixCache.insert`; the tier has none.
        ttl : float, optional
            As for `PrefixCache.insert`; the tier has none.

        Returns
        -------
        int
            Blocks that were new in memory.

        Raises
        ------
        TypeError, ValueError
            As `PrefixCache.insert`.
        """
        ids, name = as_token_ids(tokens), as_namespace(namespace)
        n_new: int = self.prefixes.insert(ids, cache, namespace=name, priority=priority, ttl=as_ttl(ttl))
        self.store(ids[: cache.seq_len], namespace=name)
        return n_new

    def store(self, tokens: Tokens, *, namespace: bytes | None = None) -> None:
        """Have the tier keep what memory knows of these tokens. Returns at once.

        It is looked up when its turn comes: what was evicted by then is not stored, and nothing is held until then.

        Parameters
        ----------
        tokens : list, tuple, range or integer array ``[n]``
            Token ids, 0 to 2**63 - 1. Whole blocks of them are stored.
        namespace : bytes, optional
            Where they are known. None is one of its own.

        Raises
        ------
        TypeError, ValueError
            An argument of a wrong kind.
        """
        ids, name = as_token_ids(tokens), as_namespace(namespace)
        n = self._whole(len(ids))
        if n:
            self._put_store(_Known(ids[:n], name, False))

    def flush(self, timeout: float = math.inf) -> bool:
        """Wait until all that was given to `store` until now has been stored, or could not be.

        Parameters
        ----------
        timeout : float, optional
            Seconds that it waits at most.

        Returns
        -------
        bool
            Whether it is so.

        Raises
        ------
        TypeError, ValueError
            ``timeout`` is no number of seconds above 0.
        """
        return self._stores.wait(_as_seconds(timeout, "timeout"))

    @property
    def is_busy(self) -> bool:
        """Whether it loads or stores something now: then it holds blocks that are free or evictable a little later."""
        return self._loads.doing is not None or self._stores.doing is not None

    def stats(self) -> TieredStats:
        """What was done so far: a `TieredStats`."""
        waiting = sum(worker.n_waiting + (worker.doing is not None) for worker in (self._loads, self._stores))
        with self._lock:
            return TieredStats(
                **{name: self._counts[name] for name in TieredStats._fields if name in self._counts},
                load_seconds=self._seconds["load"],
                store_seconds=self._seconds["store"],
                waiting=waiting,
            )

    def close(self, timeout: float = 10.0) -> bool:
        """End all loads, and store what waits to be stored. The prefix cache and the tier stay as they are.

        Parameters
        ----------
        timeout : float, optional
            Seconds that it takes at most; what is not stored by then is dropped.

        Returns
        -------
        bool
            Whether all was stored, and the tier is in use no more.

        Raises
        ------
        TypeError, ValueError
            ``timeout`` is no number of seconds above 0.
        """
        end = time.monotonic() + _as_seconds(timeout, "timeout")
        self._is_open = False
        for loading in self._loads.drop_all():
            self._skip(loading, "closed")
        if (now := self._loads.doing) is not None:
            now.cancel()
        is_stored = self._stores.wait(max(end - time.monotonic(), 0))
        self._goes_on = False
        self._count("dropped", sum(not known.was_asked_for for known in self._stores.drop_all()))
        return self._loads.wait(max(end - time.monotonic(), 0)) and is_stored

    # --- small things ---

    def _whole(self, n: int) -> int:
        size = self.prefixes.store.block_size
        return max(n, 0) // size * size

    def _known(self, ids: Ids, name: bytes | None) -> int:
        """Positions of whole blocks that memory knows of these tokens but for the last one."""
        return self._whole(self.prefixes._match(ids, name))

    def _groups(self, ids: Ids, name: bytes | None) -> list[GroupRecords]:
        return [
            GroupRecords(prefixes, KeySpace(format, self._model, name), ids)
            for prefixes, format in zip(self.prefixes.groups, self._formats, strict=True)
        ]

    def _count(self, name: str, n: int = 1) -> None:
        with self._lock:
            self._counts[name] += n

    def _skip(self, loading: Loading, why: str) -> None:
        self._count("skipped")
        self._count("misses", self._whole(len(loading._ids) - 1) - loading._n_known)
        loading._end(why)

    def _put_store(self, known: _Known) -> None:
        dropped = self._stores.put(known) if self._is_open else known
        if dropped is not None and not dropped.was_asked_for:
            self._count("dropped")

    # --- on the thread that loads ---

    def _load(self, loading: Loading) -> None:
        started, ended = time.perf_counter(), None
        try:
            if loading.is_done:
                ended = "cancelled" if loading._is_cancelled else "deadline"
            else:
                ended = self._bring(loading)
                (self._load_patience.failed if ended == "deadline" else self._load_patience.succeeded)()
        except BaseException:  # of the tier, which may raise anything
            ended = "error"
            self._load_patience.failed()
            self._count("errors")
        n_missing = self._whole(len(loading._ids) - 1) - loading._n_known - loading._tokens
        with self._lock:
            self._seconds["load"] += time.perf_counter() - started
            self._counts["hits"] += loading._tokens
            self._counts["misses"] += max(n_missing, 0)
            self._counts["late"] += ended == "deadline"
        loading._end(ended)

    def _bring(self, loading: Loading) -> str | None:
        ids, name = loading._ids, loading._namespace
        n_before = n_known = self._known(ids, name)  # another load may have brought it meanwhile
        groups = self._groups(ids, name)
        n = longest(groups, self.tier, n_known, self._whole(len(ids) - 1))
        if n <= n_known:
            return None
        for group in groups:
            if loading.is_done:
                return "cancelled" if loading._is_cancelled else "deadline"
            for moved in group.load(self.tier, n):
                if moved.wrong is not None:
                    self._count("corrupt", moved.wrong.startswith("wrong "))
                    return moved.wrong
                n_known = self._known(ids, name)
                loading._tokens, loading._nbytes = max(n_known - n_before, 0), loading._nbytes + moved.nbytes
                with self._lock:
                    self._counts["loaded"] += 1
                    self._counts["loaded_bytes"] += moved.nbytes
                if loading._is_cancelled:
                    return "cancelled"
                if time.monotonic() >= loading.deadline and n_known < n:
                    return "deadline"
        return None

    # --- on the thread that stores ---

    def _store(self, known: _Known) -> None:
        started = time.perf_counter()
        try:
            if known.was_asked_for:
                self._use(known)
            elif self._store_patience.is_over:
                self._count("dropped")
            else:
                self._keep(known)
                self._store_patience.succeeded()
        except BaseException:  # of the tier, which may raise anything
            self._store_patience.failed()
            self._count("errors")
        with self._lock:
            self._seconds["store"] += time.perf_counter() - started

    def _keep(self, known: _Known) -> None:
        ids, name = known.ids, known.namespace
        n = self._known(np.append(ids, 0), name)
        if self._from_use > 1:
            n = min(n, self._used_enough(known))
        if not n:
            return
        for group in self._groups(ids[:n], name):
            for moved in group.store(self.tier, n, lambda: not self._goes_on):
                with self._lock:
                    self._counts["refused"] += moved.wrong is not None
                    self._counts["stored"] += moved.wrong is None
                    self._counts["stored_bytes"] += moved.nbytes if moved.wrong is None else 0
                if moved.wrong is not None:
                    return

    def _use(self, known: _Known) -> None:
        """Count that these tokens were asked for, block by block."""
        blocks = KeySpace(self._by_block, self._model, known.namespace).chunks(known.ids)
        for block in reversed(blocks):  # the last ones are forgotten first
            self._uses[block.key] = self._uses.pop(block.key, 0) + 1
        while len(self._uses) > _MOST_COUNTED:
            self._uses.popitem(last=False)

    def _used_enough(self, known: _Known) -> int:
        n = 0
        for chunk in KeySpace(self._by_block, self._model, known.namespace).chunks(known.ids):
            if self._uses.get(chunk.key, 0) < self._from_use:
                break
            n += chunk.n_tokens
        return n


def _as_seconds(seconds: float, name: str) -> float:
    if isinstance(seconds, (bool, np.bool_)) or not isinstance(seconds, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}: expected seconds, got {type(seconds).__name__}")
    if not seconds > 0:
        raise ValueError(f"{name}: expected more than 0 seconds, got {seconds}")
    try:
        return float(seconds)
    except OverflowError:
        return math.inf


_all_tiered: weakref.WeakSet[TieredPrefixes] = weakref.WeakSet()


def _after_fork() -> None:
    for tiered in list(_all_tiered):
        tiered._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
