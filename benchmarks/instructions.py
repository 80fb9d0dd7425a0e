"""Instructions of the small calls, counted by valgrind and compared exactly.

Times of microseconds scatter by more than what a change does to them; counts of instructions do not. Each kind of call
is run N times and 2 N times in processes that are the same otherwise, and the difference of what
`valgrind --tool=callgrind` counts is taken: start-up, imports and setting up cancel. Hashes are not random,
memory begins at the same addresses (valgrind sees to that), kernels are those of plain C.

    python benchmarks/instructions.py             # compare with instructions.json
    python benchmarks/instructions.py --save      # count, and keep it there

Counts hold for one version of Python, NumPy, the C compiler and the C library on one kind of machine; they are compared
where these are the same as when they were saved.

Exit codes: 0 the same, fewer, or nothing to compare with; 1 more instructions; 2 no valgrind.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SAVED = Path(__file__).with_suffix(".json")
REPEATS = 80
# Where the package lies changes a count by some hundred in all. Less than half an instruction a call is no change.
LEAST = 0.5

# name -> how often a repeat makes the call
CALLS = {"push, 128 floats": 256, "reserve + release of 16 blocks": 64, "step of 32 sequences": 16}

CODE = """
import gc
import sys

import numpy as np

import pagedkv

if not pagedkv.__file__.startswith({tree!r}):
    sys.exit("expected pagedkv from " + {tree!r} + ", got " + pagedkv.__file__)


def push(n):
    store = pagedkv.PagedKvStore(16, 16, 1, 128, prefault=True)
    cache = pagedkv.PagedKvCache()
    k, v = np.ones((2, 128), np.float32)
    for _ in range(n):
        for _ in range(256):
            cache.push(store, k, v)
        cache.release(store)


def reserve(n):
    store = pagedkv.PagedKvStore(1, 64, 1, 1, prefault=True)
    cache = pagedkv.PagedKvCache()
    for _ in range(n):
        for _ in range(64):
            cache.reserve(store, 16)
            cache.release(store)


def step(n):
    store = pagedkv.PagedKvStore(16, 32, 1, 1, prefault=True)
    caches = [pagedkv.PagedKvCache() for _ in range(32)]
    row = np.ones((32, 1), np.float32)
    for _ in range(n):
        for _ in range(16):
            with pagedkv.Step(store, caches) as step:
                step.write(0, row, row)
        for cache in caches:
            cache.release(store)


gc.disable()
for call, n in zip((push, reserve, step), {repeats!r}):
    call(2)
    call(n)
"""


def valgrind():
    """Where it is, or None."""
    return shutil.which("valgrind")


def total(tree, repeats):
    """Instructions of a whole process."""
    environment = {
        "PATH": os.environ.get("PATH", ""),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PAGEDKV_SIMD": "plain",
        "PAGEDKV_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [valgrind(), "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable, "-c",
         CODE.format(tree=str(tree), repeats=tuple(repeats))],
        cwd=tree, env=environment, capture_output=True, text=True, check=False)
    collected = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or not collected:
        raise RuntimeError(f"{tree}: ended with {done.returncode}:\n{done.stderr}")
    return int(collected[1])


def count(tree, repeats=REPEATS, only=None):
    """name -> instructions of a call, for the package in that folder."""
    names = [name for name in CALLS if only is None or name in only]
    plain = total(tree, [repeats] * len(CALLS))
    return {
        name: round(
            (total(tree, [repeats * (1 + (name == each)) for each in CALLS]) - plain) / (repeats * CALLS[name]), 1)
        for name in names
    }


def compare(then, now):
    """The rows of a table, and the names of what takes more instructions now."""
    rows = [["", "then", "now", "change", ""]]
    grown = []
    for name in now:
        if name not in then:
            continue
        more = now[name] - then[name]
        verdict = "" if abs(more) < LEAST else "worse" if more > 0 else "better"
        rows.append([name, f"{then[name]:.1f}", f"{now[name]:.1f}", f"{more:+.1f}", verdict])
        grown += [name] if verdict == "worse" else []
    return rows, grown


def environment():
    """What counts depend on, beside the package."""
    import numpy

    command = [shutil.which("cc") or "gcc", "-dumpfullversion"]
    compiler = subprocess.run(command, capture_output=True, text=True, check=False)
    return {
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "compiler": compiler.stdout.strip(),
        "libc": " ".join(platform.libc_ver()),
        "machine": platform.machine(),
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="keep the counts in instructions.json")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the folder of the built package (default: this one)")
    parser.add_argument("--file", type=Path, default=SAVED, help="where counts are kept")
    options = parser.parse_args(arguments)
    if not valgrind():
        print("instructions.py: valgrind is not installed", file=sys.stderr)
        return 2

    saved = json.loads(options.file.read_text(encoding="utf-8")) if options.file.exists() else {}
    version = ".".join(platform.python_version_tuple()[:2])
    here, counts = environment(), count(options.tree.resolve())
    if options.save:
        saved[version] = {"environment": here, "counts": counts}
        options.file.write_text(json.dumps(dict(sorted(saved.items())), indent=2) + "\n", encoding="utf-8")
    there = saved.get(version, {"environment": None, "counts": {}})
    if there["environment"] != here:
        print(f"no counts are saved for {here}; it has {there['environment']}")
        for name, number in counts.items():
            print(f"{name}: {number}")
        return 0
    rows, grown = compare(there["counts"], counts)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return int(bool(grown))


if __name__ == "__main__":
    sys.exit(main())
