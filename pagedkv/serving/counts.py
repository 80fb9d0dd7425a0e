"""What a scheduler has done so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SchedulerCounts:
    """What a scheduler has done since its construction.

    Attributes
    ----------
    positions_computed : int
        Rows that went through the model.
    positions_reused : int
        Positions that were known when requests started for the first time.
    positions_loaded : int
        Those of them that a tier has brought.
    positions_missed : int
        Positions that were left to compute then: with those reused, all tokens of their prompts.
    positions_restored : int
        Positions that were still known when preempted requests started again.
    positions_recomputed : int
        Positions that were left to compute once more then.
    preemptions : int
        Times that a request had to give its blocks back and wait again.
    most_running : int
        The most requests that ran at once.

    Notes
    -----
    Threads: belongs to its scheduler's thread.

    Examples
    --------
    >>> from pagedkv.serving import LayerShape, ModelStores, Scheduler
    >>> counts = Scheduler(ModelStores([LayerShape(None, 1, 4)], total_blocks=8)).counts
    >>> counts.positions_reused, counts.preemptions
    (0, 0)
    """

    positions_computed: int = 0
    positions_reused: int = 0
    positions_loaded: int = 0
    positions_missed: int = 0
    positions_restored: int = 0
    positions_recomputed: int = 0
    preemptions: int = 0
    most_running: int = 0
