"""trim: the memory of free blocks goes back to the system, and nothing else changes."""

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from helpers import append, assert_rows, unchanged

from pagedkv import PagedKvCache, PagedKvStore, PrefixCache


def resident():
    """Bytes of this process in memory, as the system counts them."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system is asked in Linux's way")
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_resident_memory_falls_and_blocks_work_again(dtype):
    store, kept, gone = PagedKvStore(16, 1024, 8, 128, n_layers=2, dtype=dtype), PagedKvCache(), PagedKvCache()
    kv = append(store, kept, 160)
    rows = np.ones((2, 16 * 1000, 1024), np.float32)
    gone.append_contiguous(store, rows, rows, 16 * 1000)
    full = resident()
    gone.release(store)
    with unchanged(store, kept):
        n_bytes = store.trim()
    assert n_bytes > 0.9 * 1000 * store.nbytes / 1024
    assert full - resident() > 0.9 * n_bytes
    store.check([kept])
    if dtype == "float32":
        assert_rows(store, kept, *kv)
    gone.append_contiguous(store, rows, rows, 16 * 1000)
    np.testing.assert_allclose(gone.to_contiguous(store, layer=1).k, 1, rtol=1e-3)
    assert store.trim() == 0


def test_what_is_known_stays_and_what_was_never_used_is_left_alone():
    store = PagedKvStore(64, 64, 8, 128)
    prefixes, cache = PrefixCache(store), PagedKvCache()
    assert store.trim() == 0
    kv = append(store, cache, 640)
    prefixes.insert(range(640), cache)
    cache.release(store)
    assert store.trim() == 0
    assert prefixes.attach(cache, range(641)) == 640
    assert_rows(store, cache, *kv)


def test_trim_while_others_append():
    """Each thread's rows are its own number: a page that is given back under them reads as zero."""
    store, wrong, stop = PagedKvStore(16, 256, 1, 256), [], threading.Event()

    def work(number):
        rows = np.full((200, 256), number, np.float32)
        for _ in range(60):
            cache = PagedKvCache()
            cache.append_contiguous(store, rows, rows, 200)
            got = cache.to_contiguous(store)
            if not ((got.k == number).all() and (got.v == number).all()):
                wrong.append(number)
            cache.release(store)

    def trim():
        while not stop.is_set():
            store.trim()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    trimming = threading.Thread(target=trim)
    trimming.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    trimming.join()
    assert not wrong
    store.check()
    assert store.free_block_count == 256
