"""Tiers and saved files: CPU time a MiB of storing, loading, saving and restoring, against the system calls alone.

The files are in the page cache: what a disk adds is the disk's.
"""

import os
import zlib

import numpy as np
import pytest

import pagedkv
from pagedkv.tiers import FileTier, KeySpace, RecordFormat, encode, fetch, restore_sequence, room_for, save_sequence

N_TOKENS = 1024
LAYERS = {"float32": 4, "int8": 16}  # a block of half a MiB


@pytest.fixture(params=["float32", "int8"])
def held(request):
    """A store, a sequence in it, its chunks, and what their bytes are."""
    layers = LAYERS[request.param]
    store = pagedkv.PagedKvStore(16, 3 * N_TOKENS // 16, 8, 128, n_layers=layers, dtype=request.param, prefault=True)
    cache, rng = pagedkv.PagedKvCache(), np.random.default_rng(0)
    k, v = rng.standard_normal((2, layers, N_TOKENS, store.k_width), dtype=np.float32)
    cache.append_contiguous(store, k, v, N_TOKENS)
    space = KeySpace(RecordFormat.of(store), b"benchmark")
    return store, cache, space.chunks(range(N_TOKENS))


def views(store, cache):
    return store.pieces(cache.block_table.tolist())


def writev(fd, pieces):
    """To a file of its own, which has no pages yet, as ours has none."""
    os.ftruncate(fd, 0)
    os.lseek(fd, 0, os.SEEK_SET)
    for i in range(0, len(pieces), 1024):
        os.writev(fd, pieces[i : i + 1024])


def test_store(against, held, tmp_path):
    """With checksums, keys, a new segment of 256 MiB now and then, and eviction of what was before."""
    store, cache, chunks = held
    fd = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT)
    with views(store, cache) as pieces, FileTier(tmp_path / "tier", max_bytes=2**32) as tier:
        n = len(pieces.views) // len(chunks)

        def ours():
            tier.remove([chunk.key for chunk in chunks])
            records = [encode(c, pieces.views[i * n : (i + 1) * n]) for i, c in enumerate(chunks)]
            assert tier.store(records) == len(chunks)

        against(ours, lambda: writev(fd, pieces.views), "speed", rounds=10)
    os.close(fd)


def test_load(against, held, tmp_path):
    """preadv into the same memory, and CRC-32 of it, are the yardstick."""
    store, cache, chunks = held
    with views(store, cache) as pieces, FileTier(tmp_path / "tier", max_bytes=2**32) as tier:
        n = len(pieces.views) // len(chunks)
        tier.store([encode(c, pieces.views[i * n : (i + 1) * n]) for i, c in enumerate(chunks)])
        fd = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT)
        writev(fd, pieces.views)
        with store.fill(N_TOKENS // 16) as filling:
            into = [room_for(c, filling.views[i * n : (i + 1) * n]) for i, c in enumerate(chunks)]

            def ours():
                for chunk, room in zip(chunks, into, strict=True):
                    assert fetch(tier, [chunk], [room]).n == 1

            def plain():
                at = 0
                for i in range(len(chunks)):
                    some = filling.views[i * n : (i + 1) * n]
                    at += os.preadv(fd, some, at)
                    crc = 0
                    for view in some:
                        crc = zlib.crc32(view, crc)

            against(ours, plain, "speed")
            into.clear()
        os.close(fd)


def test_find_32768_tokens(benchmark, tmp_path):
    """All that a prompt's lookup costs: its keys, and asking. To be reached: 5 ms."""
    store = pagedkv.PagedKvStore(16, 8, 8, 128, n_layers=4)
    space = KeySpace(RecordFormat.of(store, chunk_blocks=1), b"benchmark")
    payload = [memoryview(bytes(space.format.block_bytes))]
    tokens = list(range(32768))
    with FileTier(tmp_path / "tier", max_bytes=2**32) as tier:
        assert tier.store([encode(chunk, payload) for chunk in space.chunks(tokens)]) == 2048
        assert benchmark(lambda: tier.find([chunk.key for chunk in space.chunks(tokens)])) == 2048


def test_save(against, held, tmp_path):
    """With fsync, as the yardstick has it."""
    store, cache, _ = held
    with views(store, cache) as pieces:
        fd = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT)

        def plain():
            writev(fd, pieces.views)
            os.fsync(fd)

        def ours():
            save_sequence(tmp_path / "saved", range(N_TOKENS), cache, model=b"m")

        against(ours, plain, "speed", rounds=10)
        os.close(fd)


def test_restore(benchmark, held, tmp_path):
    store, cache, _ = held
    save_sequence(tmp_path / "saved", range(N_TOKENS), cache, model=b"m")

    def ours():
        _, [again] = restore_sequence(tmp_path / "saved", store, model=b"m")
        again.release(store)

    benchmark(ours)
    benchmark.extra_info["MiB"] = os.path.getsize(tmp_path / "saved") / 2**20
