"""The `against` fixture: a benchmark whose every round is preceded by a round of its yardstick."""

from __future__ import annotations

import os
from statistics import median
from time import perf_counter

import pytest

import pagedkv

LINES = []


@pytest.fixture
def against(benchmark):
    """Time a call and its yardstick in turn, and report by how much they differ.

    ``against(call, yardstick, kind, rounds=..., setup=...)``: with kind "speed" the ratio is
    yardstick time / call time (1.0: as fast as the ceiling; the work must be the same), with "cost"
    it is call time / yardstick time (1.0: as dear as the plain way).
    """

    def run(call, yardstick, kind, *, rounds=30, setup=lambda: None, work=1.0):
        times = []

        def before_round():
            setup()
            start = perf_counter()
            yardstick()
            times.append((perf_counter() - start) * work)

        call()
        benchmark.pedantic(call, setup=before_round, rounds=rounds, iterations=1, warmup_rounds=1)
        if benchmark.disabled:  # --benchmark-disable: whether it runs, not how fast
            return
        ours = benchmark.stats.stats
        theirs = times[1:]
        fastest, middle = min(theirs) / ours.min, median(theirs) / ours.median
        if kind == "cost":
            fastest, middle = 1 / fastest, 1 / middle
        benchmark.extra_info.update(
            kind=kind, ratio_min=round(fastest, 3), ratio_median=round(middle, 3), threads=pagedkv.get_num_threads())
        LINES.append((benchmark.name, kind, fastest, middle, ours.min))

    return run


@pytest.fixture(params=sorted({1, os.cpu_count() or 1}), ids=lambda n: f"threads={n}")
def n_threads(request):
    """One thread, then all."""
    before = pagedkv.get_num_threads()
    pagedkv.set_num_threads(request.param)
    yield request.param
    pagedkv.set_num_threads(before)


def pytest_terminal_summary(terminalreporter):
    if not LINES:
        return
    terminalreporter.section("ratios (speed: of the ceiling, more is better; cost: of the plain way, less is better)")
    width = max(len(name) for name, *_ in LINES)
    for name, kind, fastest, middle, seconds in LINES:
        terminalreporter.write_line(
            f"{name:<{width}}  {kind:<5}  {fastest:6.2f} of minima  {middle:6.2f} of medians  {seconds * 1e6:12.1f} us")
