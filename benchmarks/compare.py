"""Compare the working tree with a commit, on this machine.

Builds both, each in a folder of its own, and runs the figures of `python -m pagedkv bench` over them in alternating
processes, so that whatever else the machine does falls on both. A figure has moved if all processes of one side
measured a better ratio than all of the other, and the medians are apart by more than --least. Where valgrind is
installed, the instructions of small calls are counted and compared exactly (see instructions.py).

    python benchmarks/compare.py                          # with the last commit
    python benchmarks/compare.py v0.1.0 --only decode
    python benchmarks/compare.py main --in-place          # the working tree is built already

Exit codes: 0 nothing got worse, 1 something did, 2 wrong usage, or it cannot be built.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import instructions

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "compare"


def module(name, folder="cli"):
    """A file of the working tree's package, alone: the package that is measured may be of any version, or not built."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "pagedkv" / folder / f"{name.rpartition('.')[2]}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


# --- two trees ----------------------------------------------------------------------------------------


def git(*arguments):
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        stop(f"git {' '.join(arguments)}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def stop(message):
    print(f"compare.py: {message}", file=sys.stderr)
    sys.exit(2)


def checkout(commit, folder):
    """The files of a commit, in a folder that is named after it and kept for the next time."""
    name = git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}").decode().strip()[:12]
    target = folder / name
    if not target.exists():
        target.mkdir(parents=True)
        with tarfile.open(fileobj=io.BytesIO(git("archive", "--format=tar", name))) as archive:
            safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(target, **safely)
    return target


def snapshot(folder):
    """The working tree's files as they are, committed or not; what has not changed since last time is not touched."""
    target = folder / "tree"
    names = [name for name in git("ls-files", "-co", "--exclude-standard", "-z").decode().split("\0") if name]
    names = [name for name in names if name.startswith("pagedkv/") or "/" not in name]
    names = [name for name in names if (ROOT / name).is_file()]
    for name in names:
        source, copy = ROOT / name, target / name
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
    for path in (target / "pagedkv").rglob("*"):
        gone = path.relative_to(target).as_posix() not in names
        if gone and path.suffix in (".py", ".pyx", ".pxd", ".pyi", ".h"):
            path.unlink()
    return target


def build(tree):
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        stop(f"{tree} cannot be built:\n{done.stdout}{done.stderr}")


# --- measuring ----------------------------------------------------------------------------------------

MEASURE = """
import sys
sys.path.insert(0, {benchmarks!r})
import compare
compare.measure_here({tree!r}, {only!r}, {memory!r}, {seconds!r})
"""


def measure_here(tree, only, memory, seconds):
    """In a process of its own: prints {name: [kind, ratio, seconds]}, None for what this version cannot do."""
    import pagedkv

    if not Path(pagedkv.__file__).is_relative_to(tree):
        raise ImportError(f"expected pagedkv from {tree}, got {pagedkv.__file__}")
    if importlib.util.find_spec("pagedkv.formats") is None:  # of a version that has it elsewhere
        module("pagedkv.formats", ".")
    figures = module("figures")
    found = {}
    for figure in figures.figures(pagedkv.get_num_threads()):
        if only and not any(text in figure.name for text in only):
            continue
        try:
            times = figures.measure(figure, memory, seconds)
        except (TypeError, ValueError, AttributeError, NotImplementedError):
            found[figure.name] = None
        else:
            found[figure.name] = [figure.kind, figures.ratio(figure.kind, times), min(times.ours)]
    print(json.dumps(found))


def measure(tree, only, memory, seconds):
    code = MEASURE.format(
        benchmarks=str(ROOT / "benchmarks"), tree=str(tree), only=only, memory=memory, seconds=seconds)
    # With -c the current folder is where packages are looked for first.
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        stop(f"{tree}: the benchmark ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout)


def compare_trees(then, now, *, rounds=7, only=(), memory=256 << 20, seconds=1.0, least=0.03):
    """The changes of all figures that both trees have, and the names of the others."""
    results = module("results")
    runs = {then: [], now: []}
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        for tree in (then, now) if number % 2 == 0 else (now, then):
            runs[tree].append(measure(tree, list(only), memory, seconds))
    progress("")

    def collect(tree):
        for name, first in runs[tree][0].items():
            if all(run[name] for run in runs[tree]):
                ratios = tuple(run[name][1] for run in runs[tree])
                yield results.Result(name, first[0], "", sorted(ratios)[len(ratios) // 2], ratios)

    broken = [name for name, figure in runs[now][0].items() if figure is None]
    if broken:
        stop(f"{now}: fails to run: {', '.join(broken)}")
    changes = results.compare_all(collect(then), collect(now), least)
    compared = {change.name for change in changes}
    return changes, [name for name in runs[now][0] if name not in compared]


def progress(text):
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


# --- the command --------------------------------------------------------------------------------------


def show(rows):
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        line = "  ".join([f"{name:<{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(cells, widths[1:], strict=True))])
        print(line.rstrip())


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="HEAD", help="what to compare with (default: HEAD)")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="only figures named like this")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="processes for each side (default: 7)")
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help="for a figure and process (default: 1)")
    parser.add_argument("--memory", type=int, default=256, metavar="MIB", help="K/V to read (default: 256 MiB)")
    parser.add_argument("--least", type=float, default=0.03, metavar="X", help="least change to report (default: 0.03)")
    parser.add_argument("--in-place", action="store_true", help="the working tree is built: do not copy and build it")
    parser.add_argument("--no-instructions", action="store_true", help="do not count instructions")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.memory < 1:
        parser.error("--rounds and --memory: expected at least 1")

    then = checkout(options.commit, FOLDER)
    now = ROOT if options.in_place else snapshot(FOLDER)
    for tree in {then, now} - {ROOT}:
        progress(f"building {tree.name}")
        build(tree)
    changes, left_out = compare_trees(
        then, now, rounds=options.rounds, only=options.only, memory=options.memory << 20, seconds=options.seconds,
        least=options.least)
    print(f"ratios, {then.name} and the working tree, medians of {options.rounds} processes")
    show(module("results").rows_of(changes))
    for name in left_out:
        print(f"{name}: not in both")
    worse = [change.name for change in changes if change.verdict == "worse"]

    if not options.no_instructions:
        if instructions.valgrind():
            rows, grown = instructions.compare(instructions.count(then), instructions.count(now))
            print("\ninstructions of a call")
            show(rows)
            worse += grown
        else:
            print("\ninstructions: not counted, valgrind is not installed")
    print(f"\nworse: {', '.join(worse)}" if worse else "\nnothing got worse")
    return int(bool(worse))


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.exit(main())
