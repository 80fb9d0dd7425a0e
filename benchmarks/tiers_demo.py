"""What keeping K/V saves: Gemma 3 270M computed, saved, restored and loaded, each beside its yardstick, in one run.

    python benchmarks/tiers_demo.py [NAME ...]         # all of it, or: restore load find open disk decode demo

Times are of the processor (all threads of the process), but for a decode step's. Files are in the page cache, but
where it says cold: then the kernel was told to forget them.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import pagedkv
from pagedkv.demo.engine import Engine
from pagedkv.demo.loading import ModelFile
from pagedkv.demo.model import Gemma3
from pagedkv.demo.prompts import PROMPTS
from pagedkv.serving import ModelStores, Scheduler
from pagedkv.tiers import (
    FileTier,
    KeySpace,
    RecordFormat,
    TieredPrefixes,
    encode,
    restore_prefixes,
    save_prefixes,
)

MIB = 2**20
N_NEW = 12


@cache
def model() -> tuple[Gemma3, Any]:
    file = ModelFile(None)
    return file.load(), file.tokenizer


def text(n: int) -> list[int]:
    """So many tokens of a text."""
    _, tokenizer = model()
    tokens = tokenizer.encode("".join(PROMPTS) * (n // 500 + 1))
    assert len(tokens) >= n
    return list(tokens[:n])


class Served:
    """A scheduler and an engine over fresh stores."""

    def __init__(self, dtype: str = "float32", n_blocks: int = 256, tier: FileTier | None = None) -> None:
        gemma, _ = model()
        self.stores = ModelStores(gemma.config.layers, n_blocks, dtype=dtype)
        self.tiered = tier and TieredPrefixes(self.stores.prefixes, tier, model=b"benchmark", deadline=600.0)
        self.scheduler = Scheduler(self.stores, max_prefill_tokens=512, tiered=self.tiered)
        self.engine = Engine(gemma, self.scheduler, (), self.tiered)

    def run(self, *prompts: list[int], n_new: int = N_NEW) -> tuple[list[list[int]], float, float]:
        """What is generated; seconds of the processor until the first token, and until all have one."""
        requests = [self.engine.submit(prompt, n_new) for prompt in prompts]
        started, firsts = time.process_time(), []
        while not self.scheduler.is_idle:
            for request in self.engine.step():
                if request.n_generated == 1:
                    firsts.append(time.process_time() - started)
        return [request.generated for request in requests], firsts[0], firsts[-1]

    def close(self) -> None:
        if self.tiered:
            self.tiered.close()
        self.engine.close()


def processor(call: Callable[[], Any]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def least(call: Callable[[], Any], rounds: int = 5) -> float:
    return min(processor(call) for _ in range(rounds))


def say(what: str, ratio: float, reach: float, detail: str) -> None:
    good = ratio <= reach if reach < 1 or "step" in what or "us" in what or "ms" in what else ratio >= reach
    print(f"{what:62} {ratio:9.4g}  reach {reach:7.4g}  {'ok ' if good else 'NOT'}  {detail}", flush=True)


def forget(folder: Path) -> None:
    """Out of the page cache."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=os.environ.get("PAGEDKV_BENCH_DIR")) as name:
        yield Path(name)


def restore() -> None:
    prompt = text(1025)
    for dtype, reach in (("float32", 1 / 30), ("int8", 1 / 60)):
        with folder() as path:
            first = Served(dtype)
            tokens, computing, _ = first.run(prompt)
            save_prefixes(path / "saved", first.stores.prefixes, model=b"m")
            first.close()

            times = []
            for _ in range(5):
                second = Served(dtype)
                started = time.process_time()
                restore_prefixes(path / "saved", second.stores.prefixes, model=b"m")
                times.append(time.process_time() - started)
                assert second.run(prompt)[0] == tokens
                assert second.scheduler.counts.positions_reused == 1024
                second.close()
            seconds = min(times)
            n_bytes = (path / "saved").stat().st_size
        detail = f"{computing:.2f} s, {seconds * 1e3:.1f} ms for {n_bytes / MIB:.1f} MiB; the same {N_NEW} tokens"
        say(f"restore, 1024 tokens, {dtype}, of computing", seconds / computing, reach, detail)


def load() -> None:
    """All that a load costs, keys, lookups and the prefix cache included."""
    store = pagedkv.PagedKvStore(16, 800, 8, 128, n_layers=4, prefault=True)
    prefixes, cache = pagedkv.PrefixCache(store), pagedkv.PagedKvCache()
    n = 16 * 384  # 192 MiB
    cache.append_contiguous(store, *np.ones((2, 4, n, 1024), np.float32), n)
    prefixes.insert(range(n), cache)
    cache.release(store)
    with folder() as path, FileTier(path / "tier", max_bytes=2**31) as tier:
        tiered = TieredPrefixes(prefixes, tier, model=b"m", deadline=600.0)
        tiered.store(range(n))
        assert tiered.flush()
        assert tiered.stats().stored == 192, tiered.stats()
        for how in ("page cache", "cold"):
            times = []
            for _ in range(5):
                prefixes.clear()
                if how == "cold":
                    forget(path / "tier")
                started = time.perf_counter()
                times.append((processor(lambda: tiered.load(range(n + 1)).wait()), time.perf_counter() - started))
                assert prefixes.match(range(n + 1)) == n
            cpu, wall = min(times)
            detail = f"{wall / 192 * 1e6:.0f} us of the clock"
            say(f"load, {how}, us of CPU a MiB", cpu / 192 * 1e6, 900, detail)
        tiered.close()


def find() -> None:
    store = pagedkv.PagedKvStore(16, 8, 8, 128, n_layers=4)
    prefixes = pagedkv.PrefixCache(store)
    space = KeySpace(RecordFormat.of(store, chunk_blocks=1), b"m")
    payload = [memoryview(bytes(space.format.block_bytes))]
    tokens = np.arange(32768)
    with folder() as path, FileTier(path / "tier", max_bytes=2**32) as tier:
        assert tier.store([encode(chunk, payload) for chunk in space.chunks(tokens)]) == 2048
        seconds = least(lambda: tier.find([chunk.key for chunk in space.chunks(tokens)]), 20)
        say("find, 32768 tokens in 2048 records, ms", seconds * 1e3, 5, "")
    del prefixes


def opening() -> None:
    store = pagedkv.PagedKvStore(4, 4, 1, 16)
    space = KeySpace(RecordFormat.of(store, chunk_blocks=1), b"m")
    payload = [memoryview(bytes(space.format.block_bytes))]
    with folder() as path:
        with FileTier(path / "tier", max_bytes=2**32) as tier:
            assert tier.store([encode(chunk, payload) for chunk in space.chunks(range(40_000))]) == 10_000
        for how in ("cold", "page cache"):
            times = []
            for _ in range(5):
                if how == "cold":
                    forget(path / "tier")
                started = time.perf_counter()
                cpu = processor(lambda: FileTier(path / "tier", max_bytes=2**32).close())
                times.append((time.perf_counter() - started, cpu))
            wall, cpu = min(times)
            say(f"opening, 10 000 records, {how}, ms", wall * 1e3, 300, f"{cpu * 1e3:.0f} ms of CPU")


def disk() -> None:
    with folder() as path, FileTier(path / "tier", max_bytes=2**32) as tier:
        served = Served(n_blocks=256, tier=tier)
        served.run(text(2048), n_new=1)
        served.close()
        shape = model()[0].config.layers[0]
        whole = 2048 * 18 * shape.n_kv_heads * (shape.head_dim + shape.v_head_dim) * 4
        n_bytes = tier.stats().nbytes
        say("bytes on disk, Gemma, 2048 tokens", n_bytes / whole, 0.4, f"{n_bytes / MIB:.1f} of {whole / MIB:.1f} MiB")


def decode() -> None:
    """Wall time: what a client sees. The other thread loads 1 GiB meanwhile, again and again."""
    prompts = [text(64)[i:] for i in range(8)]
    served = Served(n_blocks=512)
    requests = [served.engine.submit(prompt, 400) for prompt in prompts]
    while any(request.n_generated < 2 for request in requests):
        served.engine.step()

    def steps(n: int) -> list[float]:
        times = []
        for _ in range(n):
            started = time.perf_counter()
            served.engine.step()
            times.append(time.perf_counter() - started)
        return times

    store = pagedkv.PagedKvStore(16, 2048 + 64, 8, 128, n_layers=4)
    prefixes, cache = pagedkv.PrefixCache(store), pagedkv.PagedKvCache()
    n = 16 * 2048  # 1 GiB
    cache.reserve(store, n)
    for _ in range(0, n, 2048):
        cache.append_contiguous(store, *np.ones((2, 4, 2048, 1024), np.float32), 2048)
    prefixes.insert(range(n), cache)
    cache.release(store)
    with folder() as path, FileTier(path / "tier", max_bytes=2**32) as tier:
        tiered = TieredPrefixes(prefixes, tier, model=b"m", deadline=600.0)
        tiered.store(range(n))
        assert tiered.flush()
        alone, beside = [], []
        for _ in range(3):
            alone += steps(20)
            prefixes.clear()
            loading = tiered.load(range(n + 1))
            while not loading.is_done:
                beside += steps(1)
            assert loading.wait().tokens == n
        tiered.close()
    ratio = statistics.median(beside) / statistics.median(alone)
    detail = f"{statistics.median(alone) * 1e3:.1f} ms alone, {len(beside)} steps beside"
    say("a decode step of 8 beside the load of 1 GiB", ratio, 1.15, detail)
    for request in requests:
        served.engine.cancel(request)
    served.close()


def demo() -> None:
    _, tokenizer = model()
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    starts: list[list[tuple[list[list[int]], float, float]]] = [[], []]
    for _ in range(4):
        with folder() as path, FileTier(path / "tier", max_bytes=2**32) as tier:
            for start in starts:
                served = Served(tier=tier)
                start.append(served.run(*prompts))
                n_rows = served.engine.prefill.tokens
                served.close()
    first, second = (min(start, key=lambda each: each[2]) for start in starts)
    assert first[0] == second[0]
    detail = f"{first[1] * 1e3:.0f} and {second[1] * 1e3:.0f} ms"
    say("the demo's first token, second start, of the first start's", second[1] / first[1], 0.2, detail)
    detail = f"{first[2] * 1e3:.0f} and {second[2] * 1e3:.0f} ms; {n_rows} rows"
    say("until all eight have one", second[2] / first[2], 0.2, detail)


PARTS = {
    "restore": restore, "load": load, "find": find, "open": opening, "disk": disk, "decode": decode, "demo": demo,
}  # fmt: skip

if __name__ == "__main__":
    for name in sys.argv[1:] or PARTS:
        PARTS[name]()
