"""`python -m pagedkv bench`: the main numbers on this machine."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

import pagedkv
from pagedkv.cli import results
from pagedkv.cli.common import CliError, check_writable, positive, read_json, size, table, write_json
from pagedkv.cli.figures import Figure, figures, measure, ratio
from pagedkv.cli.results import Result

SUMMARY = "measure the main numbers on this machine, in about a minute"
EXAMPLES = """\
examples:
  python -m pagedkv bench
  python -m pagedkv bench --only decode --seconds 20
  python -m pagedkv bench --json before.json          # then change something
  python -m pagedkv bench --compare before.json

Every figure is a ratio to a yardstick that is timed in turn with it: speeds to a ceiling (more is better), costs
to the plain way (less is better). Ratios are of the fastest rounds. The noise is half the range that seven
parts of the run cover.

exit codes:
  0  measured, and nothing got worse
  1  --compare: a figure got worse, by more than the noise
  2  something is wrong with the options or the files"""

# Between two processes memory lies elsewhere, which moves figures more than a process can see.
LEAST_CHANGE = 0.1
_BAR_WIDTH = 20


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the command."""
    parser.add_argument("--json", metavar="FILE", help='write the ratios as JSON; "-" prints nothing else')
    parser.add_argument("--compare", metavar="FILE", help="say what moved since --json wrote that file")
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="only figures whose name contains this; may be repeated"
    )
    parser.add_argument("--seconds", type=positive, default=50, metavar="N", help="time for all rounds (default: 50)")
    parser.add_argument(
        "--memory",
        type=size,
        default=256 << 20,
        metavar="SIZE",
        help="K/V to read, far beyond the caches; about three times as much is used (default: 256MiB)",
    )
    parser.add_argument(
        "--threads", type=positive, metavar="N", help='what "all threads" means (default: as `info` says)'
    )


def run(options: argparse.Namespace) -> int:
    """Measures and prints; returns the exit code: 1 if a figure got worse, else 0.

    Raises
    ------
    CliError
        What the user can put right.
    """
    before, there = _load(options.compare) if options.compare else (None, {})
    if options.json:
        check_writable(options.json)
    if options.threads and options.threads > 256:
        raise CliError(f"--threads: expected at most 256, got {options.threads}")
    chosen = _choose(figures(options.threads or pagedkv.get_num_threads()), options.only)
    if before is not None and not {figure.name for figure in chosen} & {result.name for result in before}:
        raise CliError(f"{options.compare}: has none of the figures to measure")
    measured = _measure(chosen, options.memory, options.seconds)

    quiet = options.json == "-"
    here = {**machine(), "memory": options.memory}
    if options.json:
        write_json(results.to_json(measured, here), options.json)
    if not quiet:
        print(report(measured, sys.stdout.encoding))
    if before is None:
        return 0
    changes = results.compare_all(before, measured, LEAST_CHANGE)
    other = ", ".join(f"{name} was {there[name]}" for name in here if name in there and there[name] != here[name])
    text = f"since {options.compare}{other and f' ({other})'}:\n" + table(results.rows_of(changes), "<>>><")
    print(text if quiet else f"\n{text}", file=sys.stderr if quiet else sys.stdout)
    return int(any(change.verdict == "worse" for change in changes))


def machine() -> dict[str, object]:
    """What the ratios depend on."""
    info = pagedkv.cpu_info()
    return {
        "pagedkv": pagedkv.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "simd": info.simd,
        "num_threads": info.num_threads,
        "huge_pages": info.huge_pages,
    }


def report(measured: Sequence[Result], encoding: str | None) -> str:
    """The table with its bars: a bar is a ratio, with a mark at 1.0."""
    full, mark = ("█", "│") if (encoding or "").lower().replace("-", "") == "utf8" else ("#", "|")
    here = machine()
    lines = [
        f"pagedkv {here['pagedkv']}, {here['simd']}, {here['num_threads']} threads, "
        f"huge pages {here['huge_pages']}, Python {here['python']}, NumPy {here['numpy']}"
    ]
    for kind, head in (
        ("cost", "cost: time / time of the yardstick, less is better"),
        ("speed", "speed: time of the yardstick / time, more is better"),
    ):
        of_kind = [result for result in measured if result.kind == kind]
        if not of_kind:
            continue
        top = max(1.0, *(result.ratio for result in of_kind))
        rows = [
            [
                f"  {result.name}",
                f"{result.ratio:.2f}",
                bar(result.ratio / top, 1 / top, full, mark),
                f"±{result.noise:.0%}" if mark == "│" else f"+-{result.noise:.0%}",
                _time(result.seconds),
                result.yardstick,
            ]
            for result in of_kind
        ]
        lines += ["", head, table([["", "ratio", "", "noise", "time", "yardstick"], *rows], "<><>><")]
    return "\n".join(lines)


def bar(part: float, one: float, full: str, mark: str) -> str:
    """A bar over `part` of its width, with a mark at `one`."""
    cells = [full if i < round(part * _BAR_WIDTH) else " " for i in range(_BAR_WIDTH)]
    cells[min(round(one * _BAR_WIDTH), _BAR_WIDTH - 1)] = mark
    return "".join(cells)


def _time(seconds: float) -> str:
    unit, scale = ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
    return f"{seconds * scale:.1f} {unit}"


def _load(path: str) -> tuple[list[Result], dict[str, Any]]:
    """The results that a file keeps, and the machine they come from."""
    value: Any = read_json(path)
    try:
        found = results.from_json(value)
    except ValueError as error:
        raise CliError(f"{path}: {error}") from None
    there = value.get("machine_info")
    return found, there if isinstance(there, dict) else {}


def _choose(all_of_them: Sequence[Figure], only: Iterable[str] | None) -> list[Figure]:
    wanted = list(only or [""])
    for text in wanted:
        if not any(text in figure.name for figure in all_of_them):
            raise CliError(f"--only: no figure is called like {text!r}; there are {_names(all_of_them)}")
    return [figure for figure in all_of_them if any(text in figure.name for text in wanted)]


def _names(all_of_them: Sequence[Figure]) -> str:
    return "; ".join(figure.name for figure in all_of_them)


def _measure(chosen: Sequence[Figure], memory: int, seconds: float) -> list[Result]:
    measured = []
    for number, figure in enumerate(chosen, 1):
        _progress(f"{number:2}/{len(chosen)}  {figure.name}")
        try:
            times = measure(figure, memory, seconds / len(chosen))
        except MemoryError:
            _progress("")
            raise CliError("--memory: cannot be had") from None
        groups = results.group_ratios(figure.kind, times.ours, times.theirs)
        best = ratio(figure.kind, times)
        measured.append(Result(figure.name, figure.kind, figure.yardstick, best, groups, min(times.ours)))
    _progress("")
    return measured


def _progress(text: str) -> None:
    """One line that overwrites itself; on a terminal only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
