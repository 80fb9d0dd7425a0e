"""TieredPrefixes: a prefix cache, and a tier behind it.

    loading    what a prompt begins with and memory does not know comes from the tier, on a thread, until a deadline
    storing    what is known goes to the tier, on another thread, so that neither waits for the other

Nobody waits for a tier longer than the deadline says, whatever the tier does. What comes from it is known only when it
was compared with what was asked for.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from types import TracebackType
from typing import SupportsIndex

from pagedkv import ModelSequence, PagedKvCache, PrefixCache
from pagedkv._arrays import as_size
from pagedkv._keys import Tokens, as_namespace, as_token_ids, as_ttl
from pagedkv.tiers.arguments import as_seconds, check_tier
from pagedkv.tiers.counts import Counts, TieredStats
from pagedkv.tiers.keys import KeySpace, RecordFormat
from pagedkv.tiers.loading import Loader, Loading
from pagedkv.tiers.prompts import GroupRecords, Ids, formats_of
from pagedkv.tiers.storing import Storer
from pagedkv.tiers.tier import Tier

_HANGS = 5.0  # seconds without a record after which a tier hangs, unless a load may take longer


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
        check_tier(tier)
        self.prefixes = prefixes
        self.tier = tier
        self._formats = formats_of(prefixes)
        self._model = KeySpace(self._formats[0], model).model
        self._by_block = RecordFormat.of(prefixes.store, chunk_blocks=1)
        from_use = as_size(from_use, "from_use", 1, 2**31 - 1)
        self._deadline = as_seconds(deadline, "deadline")
        self._token_seconds = math.inf if token_seconds is None else as_seconds(token_seconds, "token_seconds")
        most = as_size(max_waiting, "max_waiting", 1, 2**31 - 1)
        self._counts = Counts()
        self._loader = Loader(tier, self._known, self._records, self._counts, most)
        self._storer = Storer(tier, self._known, self._records, self._blocks, self._counts, most, from_use)
        self._is_open = True
        _all_tiered.add(self)

    def _forget(self) -> None:
        """As if nothing had been begun: so a fork's child begins, whatever other threads were doing."""
        self._counts.forget()
        self._loader.forget()
        self._storer.forget()

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
        seconds = self._deadline if deadline is None else as_seconds(deadline, "deadline")
        n_known, n_most = self._known(ids, name), self._whole(len(ids) - 1)
        if self._token_seconds < math.inf:
            seconds = min(seconds, self._token_seconds * max(n_most - n_known, 0) / 2)
        loading = Loading(ids, name, n_known, n_most, time.monotonic() + seconds)
        if self._is_open:
            self._storer.asked_for(ids, name)
        if n_known >= n_most:
            loading._end(None)
        elif self._is_open:
            self._loader.begin(loading)
        else:
            self._loader.skip(loading, "closed")
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
        if not isinstance(cache, (PagedKvCache, ModelSequence)):
            raise TypeError(f"cache: expected a PagedKvCache or ModelSequence, got {type(cache).__name__}")
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
        if n and self._is_open:
            self._storer.keep(ids[:n], name)
        elif n:
            self._counts.add(dropped=1)

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
        return self._storer.wait(as_seconds(timeout, "timeout"))

    @property
    def is_busy(self) -> bool:
        """Whether it loads or stores now, and holds blocks that are free or evictable a little later.

        Not so when nothing has come or gone for seconds: a tier that hangs is not waited for.
        """
        seconds = max(self._deadline, _HANGS)
        return self._loader.is_moving(seconds) or self._storer.is_moving(seconds)

    def stats(self) -> TieredStats:
        """What was done so far: a `TieredStats`."""
        return self._counts.stats(waiting=self._loader.n_waiting + self._storer.n_waiting)

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
        end = time.monotonic() + as_seconds(timeout, "timeout")
        self._is_open = False
        self._loader.end()
        is_stored = self._storer.end(max(end - time.monotonic(), 0))
        return self._loader.wait(max(end - time.monotonic(), 0)) and is_stored

    # --- small things ---

    def _whole(self, n: int) -> int:
        size = self.prefixes.store.block_size
        return max(n, 0) // size * size

    def _known(self, ids: Ids, name: bytes | None) -> int:
        """Positions of whole blocks that memory knows of these tokens but for the last one."""
        return self._whole(self.prefixes._match(ids, name))

    def _blocks(self, name: bytes | None) -> KeySpace:
        """Keys of single blocks, by which uses are counted."""
        return KeySpace(self._by_block, self._model, name)

    def _records(self, ids: Ids, name: bytes | None) -> list[GroupRecords]:
        return [
            GroupRecords(prefixes, KeySpace(format, self._model, name), ids)
            for prefixes, format in zip(self.prefixes.groups, self._formats, strict=True)
        ]


_all_tiered: weakref.WeakSet[TieredPrefixes] = weakref.WeakSet()


def _after_fork() -> None:
    for tiered in list(_all_tiered):
        tiered._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
