"""Measured ratios, how they are kept, and what is to be believed of a difference. Plain Python, and no other file
of the package: benchmarks/compare.py uses it beside several versions of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

FORMAT = 1
N_GROUPS = 7


class Result(NamedTuple):
    """A figure as it was measured."""

    name: str
    kind: str
    """"speed": more is better. "cost": less is better."""
    yardstick: str
    ratio: float
    """Of the minima of all rounds."""
    ratios: tuple[float, ...]
    """The same of parts of the run, or of several runs: how far it scatters."""
    seconds: float = 0.0
    """The fastest call. Not kept: times can be compared on one machine only."""

    @property
    def noise(self) -> float:
        """Half the width of what `ratios` cover, relative to their median."""
        return (max(self.ratios) - min(self.ratios)) / 2 / median(self.ratios)


class Change(NamedTuple):
    """A figure, then and now."""

    name: str
    then: float
    now: float
    gain: float
    """How many times better it is now."""
    verdict: str
    """"better", "worse", or "same" for what may well be noise."""


def group_ratios(kind: str, ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, ...]:
    """The ratio of minima of each of seven parts of a run."""
    n = len(ours)
    edges = [i * n // N_GROUPS for i in range(N_GROUPS + 1)]
    parts = [slice(a, b) for a, b in pairwise(edges) if b > a]
    speeds = [min(theirs[part]) / min(ours[part]) for part in parts]
    return tuple(speed if kind == "speed" else 1 / speed for speed in speeds)


def compare(then: Result, now: Result, least: float) -> Change:
    """Whether a figure moved: its ratios do not overlap with the former ones, and the medians are apart by more
    than `least` (0.1: a tenth).

    Of two times seven ratios of one and the same thing, all of one half exceed all of the other by chance
    once in 1716 comparisons.
    """
    before, after = median(then.ratios), median(now.ratios)
    gain = after / before if now.kind == "speed" else before / after
    is_apart = max(then.ratios) < min(now.ratios) or max(now.ratios) < min(then.ratios)
    moved = is_apart and abs(gain - 1) > least
    return Change(now.name, before, after, gain, ("better" if gain > 1 else "worse") if moved else "same")


def compare_all(then: Iterable[Result], now: Iterable[Result], least: float) -> list[Change]:
    """The changes of the figures that are in both, in the order of `now`."""
    before = {result.name: result for result in then}
    return [compare(before[result.name], result, least) for result in now if result.name in before]


def rows_of(changes: Iterable[Change]) -> list[list[str]]:
    """The cells of a table of changes, with its head."""
    rows = [["", "then", "now", "change", ""]]
    for change in changes:
        verdict = "" if change.verdict == "same" else change.verdict
        rows.append(
            [change.name, f"{change.then:.2f}", f"{change.now:.2f}", f"{change.now / change.then - 1:+.1%}", verdict]
        )
    return rows


def to_json(results: Iterable[Result], machine: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run: ratios, and the machine they come from."""
    return {
        "format": FORMAT,
        "machine_info": machine,
        "benchmarks": [
            {
                "name": result.name,
                "kind": result.kind,
                "yardstick": result.yardstick,
                "ratio": round(result.ratio, 4),
                "ratios": [round(each, 4) for each in result.ratios],
            }
            for result in results
        ],
    }


def from_json(value: Any) -> list[Result]:
    """The results of what `to_json` made.

    Raises
    ------
    ValueError
        It is something else.
    """
    try:
        if value["format"] != FORMAT:
            raise ValueError(f"expected format {FORMAT}, got {value['format']!r}")
        results = [
            Result(
                str(each["name"]),
                str(each["kind"]),
                str(each["yardstick"]),
                float(each["ratio"]),
                tuple(float(ratio) for ratio in each["ratios"]),
            )
            for each in value["benchmarks"]
        ]
    except (TypeError, KeyError):
        raise ValueError("expected what bench --json writes") from None
    if any(result.kind not in ("speed", "cost") or not result.ratios for result in results):
        raise ValueError("expected what bench --json writes")
    if not all(0 < ratio < float("inf") for result in results for ratio in result.ratios):
        raise ValueError("expected ratios above zero")
    return results
