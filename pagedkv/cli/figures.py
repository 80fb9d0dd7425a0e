"""What `bench` measures: figures, each with a yardstick that is timed in turn with it.

Needs NumPy and the public names of pagedkv alone, and no other file: benchmarks/compare.py runs this one
over several versions of the package.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import pagedkv
from pagedkv.formats import DTYPES

# One layer of a model with grouped-query attention: 32 query heads on 8 K/V heads of 128 values.
N_Q_HEADS, N_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
WIDTH = N_KV_HEADS * HEAD_DIM
POSITION_BYTES = 2 * WIDTH * 4
N_SEQUENCES, N_SHARING, N_OWN = 8, 32, 64
N_PUSHES, N_RESERVED, N_STEPS = 2048, 1 << 18, 16
# A figure is of no use with fewer rounds, and gains nothing from more.
LEAST_ROUNDS, MOST_ROUNDS = 14, 1000

Call = Callable[[], object]
F32 = npt.NDArray[np.float32]


class Pair(NamedTuple):
    """A call and its yardstick, ready to be timed."""

    call: Call
    yardstick: Call
    work: float = 1.0
    """How many times the yardstick's work the call does."""
    before: Call = lambda: None
    """Run before every round, untimed."""


class Figure(NamedTuple):
    """Something to measure."""

    name: str
    kind: str
    """"speed": yardstick time / time, more is better. "cost": time / yardstick time, less is better."""
    yardstick: str
    make: Callable[[int], Pair]
    """Makes the pair, for so many bytes of K/V."""
    n_threads: int


class Times(NamedTuple):
    """Seconds of each round; the yardstick's for as much work as the call's."""

    ours: list[float]
    theirs: list[float]


def measure(figure: Figure, memory: int, seconds: float) -> Times:
    """Times a figure and its yardstick in turn for so many seconds, after one round to warm up.

    Sets the process-wide number of threads meanwhile.
    """
    n_threads = pagedkv.get_num_threads()
    pagedkv.set_num_threads(figure.n_threads)
    collects = gc.isenabled()
    try:
        pair = figure.make(memory)
        calls = (pair.call, pair.yardstick)
        times: tuple[list[float], list[float]] = ([], [])
        gc.collect()
        gc.disable()
        deadline = perf_counter() + seconds
        for n in range(MOST_ROUNDS):
            if n > LEAST_ROUNDS and perf_counter() > deadline:
                break
            pair.before()
            for which in (n % 2, 1 - n % 2):  # neither always comes after the other
                start = perf_counter()
                calls[which]()
                times[which].append(perf_counter() - start)
        return Times(times[0][1:], [pair.work * t for t in times[1][1:]])
    finally:
        if collects:
            gc.enable()
        pagedkv.set_num_threads(n_threads)


def ratio(kind: str, times: Times) -> float:
    """How the minima compare."""
    speed = min(times.theirs) / min(times.ours)
    return speed if kind == "speed" else 1 / speed


def figures(n_threads: int) -> list[Figure]:
    """All figures: on one thread and, where the kernels use several, on n_threads."""
    numpy_rows, memcpy = "K[i] = k; V[i] = v in NumPy", "memcpy, 1 thread"
    found = [
        Figure("push, 128 floats", "cost", numpy_rows, lambda _: _push(128), 1),
        Figure("push, 1024 floats", "cost", numpy_rows, lambda _: _push(1024), 1),
        Figure("step of 32 sequences", "cost", f"{numpy_rows}, n += 1", lambda _: _step(), 1),
        Figure("reserve + release", "cost", "slices of a Python list", lambda _: _reserve(), 1),
    ]
    for n, tag in [(1, "1 thread"), (n_threads, "all threads")][: 1 if n_threads == 1 else 2]:
        read = f"reading memory, {tag}"
        found += [
            Figure(f"append, {tag}", "speed", memcpy, _append, n),
            Figure(f"gather, {tag}", "speed", memcpy, _gather, n),
            Figure(f"decode float32, {tag}", "speed", read, partial(_decode, n_threads=n), n),
        ]
        found += [
            Figure(f"decode {dtype}, {tag}", "speed", "decode float32", partial(_decode_in, dtype=dtype), n)
            for dtype in DTYPES[1:]
        ]
        found.append(Figure(f"shared prefix, {tag}", "speed", "the same, not shared", _shared_prefix, n))
    return found


# --- small calls --------------------------------------------------------------------------------------


def _push(width: int) -> Pair:
    store = pagedkv.PagedKvStore(BLOCK_SIZE, N_PUSHES // BLOCK_SIZE, width // HEAD_DIM, HEAD_DIM, prefault=True)
    cache = pagedkv.PagedKvCache()
    keys, values = np.zeros((2, N_PUSHES, width), np.float32)
    k, v = _rows(2, width)

    def push_all() -> None:
        push = cache.push
        for _ in range(N_PUSHES):
            push(store, k, v)

    def assign_all() -> None:
        for i in range(N_PUSHES):
            keys[i] = k
            values[i] = v

    return Pair(push_all, assign_all, before=lambda: cache.release(store))


def _step() -> Pair:
    """The books of a decode step alone: rows of one value."""
    batch = 32
    store = pagedkv.PagedKvStore(BLOCK_SIZE, batch * (MOST_ROUNDS + 1), 1, 1)
    caches = [pagedkv.PagedKvCache() for _ in range(batch)]
    row = _rows(batch, 1)
    keys, values = np.zeros((2, batch, N_STEPS * (MOST_ROUNDS + 1), 1), np.float32)
    lengths = [0] * batch

    def decode() -> None:
        for _ in range(N_STEPS):
            with pagedkv.Step(store, caches) as step:
                step.write(0, row, row)

    def assign() -> None:
        for _ in range(N_STEPS):
            for i in range(batch):
                keys[i, lengths[i]] = row[i]
                values[i, lengths[i]] = row[i]
                lengths[i] += 1

    return Pair(decode, assign)


def _reserve() -> Pair:
    store = pagedkv.PagedKvStore(1, 1 << 20, 1, 1)
    cache = pagedkv.PagedKvCache()
    free = list(range(1 << 20))

    def reserve_and_release() -> None:
        cache.reserve(store, N_RESERVED)
        cache.release(store)

    def slice_and_extend() -> None:
        taken = free[-N_RESERVED:]
        del free[-N_RESERVED:]
        free.extend(taken)

    return Pair(reserve_and_release, slice_and_extend)


# --- streams of memory --------------------------------------------------------------------------------


def _append(memory: int) -> Pair:
    store, caches = _filled(memory)
    n = caches[0].seq_len
    sources = cycle(np.ones((2, 2, n, WIDTH), np.float32))
    turns = cycle(caches)
    now: dict[str, Any] = {}

    def empty_one() -> None:
        now.update(cache=next(turns), source=next(sources))
        now["cache"].release(store)

    return Pair(lambda: now["cache"].append_contiguous(store, *now["source"], n), _memcpy(n, memory), before=empty_one)


def _gather(memory: int) -> Pair:
    store, caches = _filled(memory)
    n = caches[0].seq_len
    turns = cycle(caches)
    outs = [pagedkv.KvCache.with_capacity(N_KV_HEADS, HEAD_DIM, n) for _ in range(2)]
    for out in outs:
        next(turns).to_contiguous(store, out=out)  # touch its pages
    next_out = cycle(outs)
    return Pair(lambda: next(turns).to_contiguous(store, out=next(next_out)), _memcpy(n, memory))


def _decode(memory: int, n_threads: int) -> Pair:
    call = _decode_call(memory, "float32")
    parts = np.array_split(np.ones(_context(memory) * N_SEQUENCES * POSITION_BYTES // 4, np.float32), n_threads)
    pool = ThreadPoolExecutor(n_threads)
    # NumPy's maximum is a plain vector loop over one stream, and releases the GIL.
    return Pair(call, lambda: list(pool.map(np.max, parts)))


def _decode_in(memory: int, dtype: str) -> Pair:
    return Pair(_decode_call(memory, dtype), _decode_call(memory, "float32"))


def _decode_call(memory: int, dtype: str) -> Call:
    store, caches = _filled(memory, dtype)
    q = _rows(len(caches), N_Q_HEADS, HEAD_DIM)
    return lambda: pagedkv.paged_attention(q, store, caches)


def _shared_prefix(memory: int) -> Pair:
    """32 sequences over one prefix, against as many that hold it each for itself."""
    prefix = max(1, memory // N_SHARING // POSITION_BYTES // BLOCK_SIZE) * BLOCK_SIZE
    store = _shuffled_store((prefix + (N_SHARING + 1) * N_OWN) // BLOCK_SIZE)
    root = _grown(store, pagedkv.PagedKvCache(), prefix)
    caches = [_grown(store, root.clone(), N_OWN) for _ in range(N_SHARING)]
    lone_store = _shuffled_store(N_SHARING * (prefix + N_OWN) // BLOCK_SIZE)
    lone = [_grown(lone_store, pagedkv.PagedKvCache(), prefix + N_OWN) for _ in range(N_SHARING)]
    q = _rows(N_SHARING, N_Q_HEADS, HEAD_DIM)
    return Pair(
        lambda: pagedkv.paged_attention(q, store, caches), lambda: pagedkv.paged_attention(q, lone_store, lone)
    )


# --- what they share ----------------------------------------------------------------------------------


def _rows(*shape: int) -> F32:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def _context(memory: int) -> int:
    """Positions of each sequence, whole blocks."""
    return max(1, memory // N_SEQUENCES // POSITION_BYTES // BLOCK_SIZE) * BLOCK_SIZE


def _shuffled_store(total_blocks: int, dtype: str = "float32") -> pagedkv.PagedKvStore:
    """A store whose free blocks come in random order, as after hours of serving."""
    store = pagedkv.PagedKvStore(BLOCK_SIZE, total_blocks, N_KV_HEADS, HEAD_DIM, dtype=dtype, prefault=True)
    store.release(np.random.default_rng(0).permutation(store.acquire(total_blocks)))
    return store


def _grown(store: pagedkv.PagedKvStore, cache: pagedkv.PagedKvCache, n: int) -> pagedkv.PagedKvCache:
    k, v = _rows(2, n, WIDTH)
    cache.append_contiguous(store, k, v, n)
    return cache


def _filled(memory: int, dtype: str = "float32") -> tuple[pagedkv.PagedKvStore, list[pagedkv.PagedKvCache]]:
    """A shuffled store of as many positions as take so many bytes in float32, and sequences that fill it."""
    n = _context(memory)
    store = _shuffled_store(N_SEQUENCES * n // BLOCK_SIZE, dtype)
    k, v = _rows(2, n, WIDTH)
    caches = [pagedkv.PagedKvCache() for _ in range(N_SEQUENCES)]
    for cache in caches:
        cache.append_contiguous(store, k, v, n)
    return store, caches


def _memcpy(n_positions: int, memory: int) -> Call:
    """Copies K and V of so many positions within memory of the same kind, each time another part."""
    n = n_positions * POSITION_BYTES // 4
    n_parts = max(1, memory // (4 * n))
    source, target = np.ones((n_parts, n), np.float32), np.zeros((n_parts, n), np.float32)
    parts = cycle(range(n_parts))

    def copy() -> None:
        part = next(parts)
        np.copyto(target[part], source[part])

    return copy
