"""What a prefix cache with a tier behind it has done so far."""

from __future__ import annotations

import threading
from collections import Counter
from typing import NamedTuple

from pagedkv.stats import with_field_docs


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


class Counts:
    """Of both threads."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._seconds = {"load_seconds": 0.0, "store_seconds": 0.0}
        self.forget()

    def forget(self) -> None:
        """A fork's child begins with a lock of its own: another thread may have held this one."""
        self._lock = threading.Lock()

    def add(self, **counts: int) -> None:
        """These more."""
        with self._lock:
            self._counts.update({name: int(n) for name, n in counts.items()})

    def add_seconds(self, name: str, seconds: float) -> None:
        """So much more of ``load_seconds`` or ``store_seconds``."""
        with self._lock:
            self._seconds[name] += seconds

    def stats(self, waiting: int) -> TieredStats:
        """All of them."""
        with self._lock:
            return TieredStats(**self._counts, **self._seconds, waiting=waiting)  # type: ignore[arg-type]
