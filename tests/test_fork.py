"""Processes that fork, whatever their threads are doing."""

import os

import pytest
from helpers import run_python

FORK = """
    import os, signal, sys, threading, time, warnings
    import numpy as np
    import pagedkv

    warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
    pagedkv.set_num_threads(4)
    store = pagedkv.PagedKvStore(16, 400, 8, 128)
    k = np.random.default_rng(1).standard_normal((3000, 1024), np.float32)
    q = k[:64].reshape(64, 8, 128).copy()

    def work():
        cache = pagedkv.PagedKvCache()
        cache.append_contiguous(store, k, k, 3000)
        out = pagedkv.paged_attention(q, store, cache, query_lens=64)
        assert np.array_equal(cache.to_contiguous(store).k, k)
        with pagedkv.Step(store, cache, 64) as step:
            step.write(0, k[:64], k[:64])
        cache.release(store)
        return out.tobytes()

    def in_child(check, seconds=60):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                check()
                status = 0
            finally:
                os._exit(status)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return status
            time.sleep(0.01)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise SystemExit("the child hangs")

    def same():
        assert work() == expected

    expected = work()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
class TestFork:
    def test_a_child_works_after_threads_were_used(self):
        run_python(FORK + "    assert in_child(same) == 0\n    same()\n")

    def test_and_a_child_of_the_child(self):
        run_python(
            FORK
            + """
    def again():
        same()
        assert in_child(same) == 0
    assert in_child(again) == 0
    same()
"""
        )

    def test_and_one_that_is_forked_while_other_threads_are_in_kernels(self):
        run_python(
            FORK
            + """
    stop = threading.Event()
    def busy():
        own = pagedkv.PagedKvStore(16, 200, 8, 128)
        while not stop.is_set():
            cache = pagedkv.PagedKvCache()
            cache.append_contiguous(own, k, k, 3000)
            pagedkv.paged_attention(q, own, cache, query_lens=64)
    threads = [threading.Thread(target=busy, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    def free_blocks_and_same():
        assert store.free_block_count == 400
        store.check()
        same()
    for _ in range(8):
        time.sleep(0.005)
        assert in_child(free_blocks_and_same) == 0
    stop.set()
    for thread in threads:
        thread.join()
    same()
"""
        )

    def test_and_one_that_is_forked_inside_an_open_step(self):
        """The child's copy of the step is its own: it can end it either way."""
        run_python(
            FORK
            + """
    cache = pagedkv.PagedKvCache()
    cache.append_contiguous(store, k[:100], k[:100], 100)
    with pagedkv.Step(store, cache, 50) as step:
        step.write(0, k[:50], k[:50])
        def commit():
            step.commit()
            assert cache.seq_len == 150
            assert np.array_equal(cache.to_contiguous(store).k[100:], k[:50])
        assert in_child(commit) == 0
        assert in_child(step.rollback) == 0
        assert cache.seq_len == 100
    assert cache.seq_len == 150
"""
        )

    def test_and_one_that_is_forked_while_other_threads_hold_the_locks_of_the_same_store(self):
        """Those threads are gone in the child, wherever they were; what they held there stays held."""
        run_python(
            FORK
            + """
    prefixes = pagedkv.PrefixCache(store)
    stop = threading.Event()
    def busy(number):
        part = np.full((160, 1024), number, np.float32)
        tokens, namespace = list(range(160)), bytes([number])
        while not stop.is_set():
            cache = pagedkv.PagedKvCache()
            n = prefixes.attach(cache, tokens, namespace=namespace)
            with pagedkv.Step(store, cache, 160 - n) as step:
                step.write(0, part[n:], part[n:])
            prefixes.insert(tokens, cache, namespace=namespace)
            assert (cache.to_contiguous(store).k == number).all()
            cache.release(store)
            prefixes.evict(3)
    threads = [threading.Thread(target=busy, args=(number,), daemon=True) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    def child():
        prefixes.check()
        for number in range(1, 5):
            cache = pagedkv.PagedKvCache()
            prefixes.attach(cache, list(range(160)), namespace=bytes([number]))
            assert (cache.to_contiguous(store).k == number).all()
            cache.release(store)
        prefixes.clear()
        store.check()
        same()
    for _ in range(20):
        time.sleep(0.003)
        assert in_child(child) == 0
    stop.set()
    for thread in threads:
        thread.join()
    prefixes.clear()
    assert store.free_block_count == 400
"""
        )
