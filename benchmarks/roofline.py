"""Where attention stands under the machine's two roofs: the speed of memory, and of multiplying and adding.

    python benchmarks/roofline.py [--svg pagedkv/docs/roofline.svg] [--quick]

Prints a table and draws it (matplotlib, of the extra `bench`). The roofs are measured in the same run, right before and
after the points, and the best is taken of each:

- memory: `numpy.max` over 512 MiB of float32, each thread its own part (`common.Read`);
- arithmetic: `a @ b` of two square float32 matrices by NumPy's BLAS, one thread and all, each in a process of its own.

A point is a call of `paged_attention` on one layer: 32 query heads of 128 values, blocks of 16 in shuffled tables. Its
work is the two products, ``4 * head_dim`` flop for each query head and visible position; its bytes are K and V, once.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from time import perf_counter
from typing import NamedTuple

import numpy as np
from common import HEAD_DIM, N_Q_HEADS, Read, filled, in_turn, position_bytes, queries, rows, visible

import pagedkv

DTYPES = ("float32", "float16", "bfloat16", "int8")
GROUPS = (1, 4, 8)  # query heads of a K/V head
CACHED, NEW = 4096, 512
COLOURS = {"float32": "#1b5e8c", "float16": "#c0561b", "bfloat16": "#3c7d3a", "int8": "#7a4a94"}
MARKERS = {1: "o", 4: "s", 8: "^"}
INTENSITIES = 0.06, 8000  # what is drawn


class Point(NamedTuple):
    kind: str       # decode or prefill
    dtype: str
    group: int
    threads: int
    seconds: float
    n_bytes: float
    flop: float

    @property
    def intensity(self):
        return self.flop / self.n_bytes

    @property
    def speed(self):
        return self.flop / self.seconds


class Roofs(NamedTuple):
    bandwidth: float  # bytes a second
    peak: float       # flop a second

    def over(self, intensity):
        return np.minimum(self.bandwidth * intensity, self.peak)


def best(call, rounds):
    call()
    times = []
    for _ in range(rounds):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return min(times)


# --- the roofs ---------------------------------------------------------------------------------------


def measure_product():
    n = 2048
    a, b = rows(np.random.default_rng(0), 2, n, n)
    return 2 * n**3 / best(lambda: a @ b, 5)


def product_speed(n_threads):
    """flop/s of a matrix product; BLAS reads its number of threads when it is loaded."""
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    environment = os.environ | dict.fromkeys(names, str(n_threads))
    done = subprocess.run([sys.executable, __file__, "--product"], env=environment, capture_output=True, text=True,
                          check=True)
    return float(done.stdout)


def measure_roofs(n_threads, rounds):
    return Roofs(Read.n_bytes / best(Read(n_threads), rounds), product_speed(n_threads))


# --- the points --------------------------------------------------------------------------------------


def decode(dtype, group, n_threads, rounds):
    """Batches of sequences of 4096, in turn with others, so that no cache holds them."""
    batch = max(1, 2 * group)
    store, caches = filled([CACHED] * 3 * batch, n_kv_heads=N_Q_HEADS // group, dtype=dtype)
    next_batch = in_turn([caches[i:i + batch] for i in range(0, len(caches), batch)])
    q = queries(batch)
    seconds = best(lambda: pagedkv.paged_attention(q, store, next_batch(), n_threads=n_threads), rounds)
    positions = batch * CACHED
    return Point("decode", dtype, group, n_threads, seconds, positions * position_bytes(store),
                 4 * positions * N_Q_HEADS * HEAD_DIM)


def prefill(dtype, group, n_threads, rounds):
    store, caches = filled([CACHED + NEW], n_kv_heads=N_Q_HEADS // group, dtype=dtype)
    q = queries(NEW)
    call = lambda: pagedkv.paged_attention(q, store, caches, query_lens=NEW, n_threads=n_threads)  # noqa: E731
    return Point("prefill", dtype, group, n_threads, best(call, max(2, rounds // 4)),
                 (CACHED + NEW) * position_bytes(store), 4 * visible(NEW, CACHED + NEW) * N_Q_HEADS * HEAD_DIM)


def supported(dtype):
    try:
        pagedkv.PagedKvStore(1, 1, 1, 1, dtype=dtype)
    except ValueError:
        return False
    return True


def measure(thread_counts, rounds):
    """Roofs by thread count, and points."""
    before = {n: measure_roofs(n, rounds) for n in thread_counts}
    points = []
    for dtype in filter(supported, DTYPES):
        for group in GROUPS:
            for n in thread_counts:
                points.append(decode(dtype, group, n, rounds))
                print_row(points[-1], before[n])
        for n in thread_counts:
            points.append(prefill(dtype, 4, n, rounds))
            print_row(points[-1], before[n])
    after = {n: measure_roofs(n, rounds) for n in thread_counts}
    return {n: Roofs(*np.maximum(before[n], after[n])) for n in thread_counts}, points


# --- what is shown -----------------------------------------------------------------------------------

HEADER = "         dtype     group threads       time    GB/s    GF/s  flop/B  of roof"


def print_row(point, roofs):
    print(f"{point.kind:8} {point.dtype:9} {point.group:5} {point.threads:7} {point.seconds * 1e3:7.2f} ms "
          f"{point.n_bytes / point.seconds / 1e9:7.1f} {point.speed / 1e9:7.1f} {point.intensity:7.1f} "
          f"{point.speed / roofs.over(point.intensity):8.2f}", flush=True)


def print_table(roofs, points):
    for n, roof in roofs.items():
        print(f"{n} thread{'s' if n > 1 else ''}: reads {roof.bandwidth / 1e9:.1f} GB/s, "
              f"multiplies {roof.peak / 1e9:.0f} GF/s")
    print(HEADER)
    for point in points:
        print_row(point, roofs[point.threads])


def draw(roofs, points, path):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "pagedkv", "font.size": 9, "axes.linewidth": 0.6,
                            "font.family": "sans-serif", "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"]}
    from matplotlib import pyplot

    n_columns = len(roofs)
    figure, axes = pyplot.subplots(1, n_columns, figsize=(4.6 * n_columns, 3.9), sharey=True, squeeze=False,
                                   layout="constrained")
    figure.patch.set_facecolor("white")
    intensities = np.geomspace(*INTENSITIES, 200)
    for axis, (n, roof) in zip(axes[0], roofs.items(), strict=True):
        axis.plot(intensities, roof.over(intensities) / 1e9, color="#444444", linewidth=1)
        knee = roof.peak / roof.bandwidth
        axis.annotate(f"matrix product, {roof.peak / 1e9:.0f} GF/s", (0.9 * INTENSITIES[1], roof.peak / 1e9), (0, 3),
                      textcoords="offset points", color="#444444", fontsize=8, ha="right")
        axis.annotate(f"memory, {roof.bandwidth / 1e9:.1f} GB/s", (knee / 2, roof.peak / 2e9), (-7, 0),
                      textcoords="offset points", color="#444444", fontsize=8, ha="right")
        for point in points:
            if point.threads == n:
                axis.plot(point.intensity, point.speed / 1e9, MARKERS[point.group], color=COLOURS[point.dtype],
                          markersize=5.5, markeredgewidth=0.9,
                          markerfacecolor=COLOURS[point.dtype] if point.kind == "decode" else "white")
        axis.set(xscale="log", yscale="log", xlim=INTENSITIES, title=f"{n} thread{'s' if n > 1 else ''}",
                 xlabel="flop per byte of K and V")
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_formatter("{x:g}")
        axis.grid(True, which="major", color="#dddddd", linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_axisbelow(True)
    axes[0, 0].set_ylabel("GF/s")
    axes[0, 0].set_ylim(bottom=1)
    figure.legend(handles=legend(points), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None, "Title": "pagedkv: attention under the roofs of the machine"})
    pyplot.close(figure)


def legend(points):
    from matplotlib.lines import Line2D

    def entry(label, **style):
        return Line2D([], [], linestyle="", markersize=5.5, label=label, **style)

    shown = [dtype for dtype in DTYPES if any(point.dtype == dtype for point in points)]
    dtypes = [entry(f"decode, {dtype}", marker="o", color=COLOURS[dtype]) for dtype in shown]
    groups = [entry(f"{group} query head{'s' if group > 1 else ''} a K/V head", marker=MARKERS[group], color="#777777")
              for group in GROUPS]
    open_ = entry(f"hollow: prefill, {NEW} over {CACHED}", marker="s", color="#777777", markerfacecolor="white")
    return [*dtypes, *groups, open_]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--svg", metavar="FILE", help="draw it there")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--product", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.product:
        print(measure_product())
        return
    thread_counts = sorted({1, pagedkv.get_num_threads()})
    roofs, points = measure(thread_counts, 3 if options.quick else 15)
    print()
    print_table(roofs, points)
    if options.svg:
        draw(roofs, points, options.svg)


if __name__ == "__main__":
    main()
