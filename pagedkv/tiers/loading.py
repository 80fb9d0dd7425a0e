"""From a tier to memory: what a prompt begins with, record by record, on a thread, until a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pagedkv.stats import with_field_docs
from pagedkv.tiers.counts import Counts
from pagedkv.tiers.prompts import GroupRecords, Ids, longest
from pagedkv.tiers.tier import Tier
from pagedkv.tiers.worker import Patience, Worker

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

    def __init__(self, ids: Ids, namespace: bytes | None, n_known: int, n_most: int, deadline: float) -> None:
        self.deadline = deadline
        self._ids, self._namespace, self._n_known, self._n_most = ids, namespace, n_known, n_most
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


class Loader:
    """The thread that loads, and what waits for it.

    `known` says how many positions of whole blocks memory knows, `records` is what makes a prompt's `GroupRecords`.
    """

    def __init__(
        self,
        tier: Tier,
        known: Callable[[Ids, bytes | None], int],
        records: Callable[[Ids, bytes | None], Sequence[GroupRecords]],
        counts: Counts,
        most: int,
    ) -> None:
        self._tier, self._known, self._records, self._counts = tier, known, records, counts
        self._worker: Worker[Loading] = Worker(self._load, most, "pagedkv-load")
        self._patience = Patience()

    def forget(self) -> None:
        """As if nothing had been begun."""
        self._worker.forget()
        self._patience = Patience()

    def is_moving(self, seconds: float) -> bool:
        """Whether it loads, and has brought something in the last so many seconds."""
        return self._worker.is_moving(seconds)

    @property
    def n_waiting(self) -> int:
        return self._worker.n_waiting + (self._worker.doing is not None)

    def begin(self, loading: Loading) -> None:
        """It is loaded when its turn comes, or ends at once."""
        if self._patience.is_over:
            self.skip(loading, "left alone")
        elif (now := self._worker.doing) is not None and time.monotonic() >= now.deadline:
            self.skip(loading, "busy")
        elif (dropped := self._worker.put(loading)) is not None:
            self.skip(dropped, "dropped")

    def skip(self, loading: Loading, why: str) -> None:
        """It is not tried."""
        self._counts.add(skipped=1, misses=loading._n_most - loading._n_known)
        loading._end(why)

    def end(self) -> None:
        """All that waits ends, and what is being loaded with the record that is being read."""
        for loading in self._worker.drop_all():
            self.skip(loading, "closed")
        if (now := self._worker.doing) is not None:
            now.cancel()

    def wait(self, seconds: float) -> bool:
        """Until it does nothing, for so long at most; whether that is so."""
        return self._worker.wait(seconds)

    # --- on the thread ---

    def _load(self, loading: Loading) -> None:
        started, ended = time.perf_counter(), None
        try:
            if loading.is_done:
                ended = "cancelled" if loading._is_cancelled else "deadline"
            else:
                ended = self._bring(loading)
                (self._patience.failed if ended == "deadline" else self._patience.succeeded)()
        except BaseException:  # of the tier, which may raise anything
            ended = "error"
            self._patience.failed()
            self._counts.add(errors=1)
        n_missing = loading._n_most - loading._n_known - loading._tokens
        self._counts.add(hits=loading._tokens, misses=max(n_missing, 0), late=ended == "deadline")
        self._counts.add_seconds("load_seconds", time.perf_counter() - started)
        loading._end(ended)

    def _bring(self, loading: Loading) -> str | None:
        ids, name = loading._ids, loading._namespace
        n_before = n_known = self._known(ids, name)  # another load may have brought it meanwhile
        groups = self._records(ids, name)
        n = longest(groups, self._tier, n_known, loading._n_most)
        if n <= n_known:
            return None
        for group in groups:
            if loading.is_done:
                return "cancelled" if loading._is_cancelled else "deadline"
            for moved in group.load(self._tier, n):
                if moved.wrong is not None:
                    self._counts.add(corrupt=moved.wrong.startswith("wrong "))
                    return moved.wrong
                self._worker.moved()
                n_known = self._known(ids, name)
                loading._tokens, loading._nbytes = max(n_known - n_before, 0), loading._nbytes + moved.nbytes
                self._counts.add(loaded=1, loaded_bytes=moved.nbytes)
                if loading._is_cancelled:
                    return "cancelled"
                if time.monotonic() >= loading.deadline and n_known < n:
                    return "deadline"
        return None
