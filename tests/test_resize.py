"""resize: a store has more memory from now on, or less; whatever is refused has changed nothing."""

import sys
import threading

import numpy as np
import pytest
from helpers import append, assert_rows, unchanged

from pagedkv import PagedKvCache, PagedKvStore, PagedStoreExhausted, PrefixCache

BLOCK = 4 * 2 * 3 * 4 * 2  # bytes: 4 rows of 2 heads of 3 floats, K and V


def made(n, most=None):
    return PagedKvStore.from_bytes(n * BLOCK, 4, 2, 3, max_bytes=None if most is None else most * BLOCK)


def test_up_and_down():
    store, cache = made(4, most=10), PagedKvCache()
    assert (store.total_blocks, store.free_block_count, store.nbytes) == (4, 4, 4 * BLOCK)
    with pytest.raises(PagedStoreExhausted) as full:
        cache.reserve(store, 17)
    assert (full.value.needed, full.value.free, full.value.total, full.value.can_ever_fit) == (5, 4, 4, False)
    store.resize(7 * BLOCK + 1)
    assert (store.total_blocks, store.nbytes) == (7, 7 * BLOCK)
    kv = append(store, cache, 20)
    store.resize(5 * BLOCK)
    assert (store.total_blocks, store.free_block_count) == (5, 0)
    with pytest.raises(PagedStoreExhausted):
        store.acquire()
    assert_rows(store, cache, *kv)
    store.check([cache])
    store.resize(10 * BLOCK)
    assert store.acquire(5) == [5, 6, 7, 8, 9]
    store.check([cache])


def test_what_is_known_is_evicted_as_far_as_it_has_to_be():
    store, cache, held = made(8), PagedKvCache(), PagedKvCache()
    prefixes = PrefixCache(store)
    append(store, cache, 24)
    prefixes.insert(range(24), cache)
    cache.release(store)
    kv = append(store, held, 8)
    store.resize(5 * BLOCK)
    assert prefixes.match(range(25)) == 12
    assert prefixes.stats().blocks_evicted == 3
    with unchanged(store, held), pytest.raises(ValueError, match=f"budget_bytes: expected at least {2 * BLOCK}, "):
        store.resize(BLOCK)
    assert prefixes.match(range(25)) == 12
    store.resize(2 * BLOCK)
    assert prefixes.match(range(25)) == 0
    assert_rows(store, held, *kv)
    prefixes.check()


@pytest.mark.parametrize(
    ("budget", "error"),
    [(0, ValueError), (BLOCK - 1, ValueError), (-1, ValueError), (9 * BLOCK, ValueError), (2**63, ValueError),
     ("1", TypeError), (2.0, TypeError), (None, TypeError)],
)
def test_refused(budget, error):
    store = made(4, most=8)
    with unchanged(store), pytest.raises(error, match="^budget_bytes: expected "):
        store.resize(budget)


@pytest.mark.parametrize(("most", "error"), [(3, ValueError), (-1, ValueError), ("8", TypeError), (2**70, ValueError)])
def test_the_most_that_it_may_become(most, error):
    with pytest.raises(error, match="^max_bytes: expected "):
        PagedKvStore.from_bytes(4 * BLOCK, 4, 2, 3, max_bytes=most)


def test_while_others_take_and_give_back():
    store, wrong, stop = made(64, most=64), [], threading.Event()

    def work(number):
        rows = np.full((30, 6), number, np.float32)
        while not stop.is_set():
            cache = PagedKvCache()
            try:
                cache.append_contiguous(store, rows, rows, 30)
            except PagedStoreExhausted:
                continue
            if not (cache.to_contiguous(store).k == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    refused = 0
    for i in range(3000):
        try:
            store.resize((8 if i % 2 else 64) * BLOCK)
        except ValueError:
            refused += 1
        assert store.total_blocks - store.free_block_count <= store.total_blocks
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    store.resize(BLOCK)
    store.check()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux is asked for pages back")
def test_memory_falls_with_it():
    from test_trim import resident

    store, cache = PagedKvStore.from_bytes(64 << 20, 16, 8, 128), PagedKvCache()
    rows = np.ones((16 * store.total_blocks, 1024), np.float32)
    cache.append_contiguous(store, rows, rows, len(rows))
    cache.truncate(store, 16)
    full = resident()
    store.resize(1 << 20)
    assert full - resident() > 60 << 20
