"""Many threads on one store, one sequence in two threads, and processes that fork."""

import os
import random
import sys
import threading
import time
from collections import Counter

import numpy as np
import pytest
from helpers import rows, run_python, unchanged

import pagedkv

N_THREADS = 8
LAYERS, WIDTH = 2, 1024  # rows large enough that the GIL is let go of while they move


def run_in_threads(work, n_threads=N_THREADS, timeout=120):
    """Run ``work(number)`` in threads that start together; the first error of any is raised here."""
    start = threading.Barrier(n_threads)
    errors = []

    def main(number):
        start.wait()
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=main, args=(number,), daemon=True) for number in range(n_threads)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0, deadline - time.monotonic()))
        assert not thread.is_alive(), "hangs"
    if errors:
        raise errors[0]


@pytest.fixture(autouse=True)
def switch_often():
    """Threads take turns a hundred times more often than they would, and kernels use several."""
    interval, n_threads = sys.getswitchinterval(), pagedkv.get_num_threads()
    sys.setswitchinterval(5e-5)
    pagedkv.set_num_threads(2)
    yield
    sys.setswitchinterval(interval)
    pagedkv.set_num_threads(n_threads)


class Worker:
    """A thread's sequences: every value that it ever writes is its own number."""

    def __init__(self, store, number):
        self.store = store
        self.value = np.float32(number + 1)
        self.draw = random.Random(number)
        self.caches = [pagedkv.PagedKvCache()]
        self.n_refused = 0

    def rows(self, *shape):
        return np.full((*shape, WIDTH), self.value, np.float32)

    def cache(self):
        return self.draw.choice(self.caches)

    def make_a_move(self):
        move = self.draw.choice([self.push, self.append, self.append, self.step, self.clone, self.shrink, self.read])
        try:
            move()
        except pagedkv.PagedStoreExhausted:
            self.n_refused += 1
            self.caches.remove(cache := self.cache())
            cache.release(self.store)
            self.caches.append(pagedkv.PagedKvCache())

    def push(self):
        row = self.rows(LAYERS)
        self.cache().push(self.store, row, row)

    def append(self):
        n = self.draw.randrange(20)
        part = self.rows(LAYERS, n)
        self.cache().append_contiguous(self.store, part, part, n)

    def step(self):
        lens = [self.draw.randrange(4) for _ in self.caches]
        with pagedkv.Step(self.store, self.caches, lens) as step:
            part = self.rows(sum(lens))
            for layer in range(LAYERS):
                step.write(layer, part, part)
            if self.draw.random() < 0.2:
                step.rollback()

    def clone(self):
        self.caches.append(self.cache().clone())
        if len(self.caches) > 4:
            self.caches.remove(self.cache())

    def shrink(self):
        cache = self.cache()
        if self.draw.random() < 0.5:
            cache.truncate(self.store, self.draw.randint(cache.first_position, cache.seq_len))
        else:
            cache.release(self.store)

    def read(self):
        cache = self.cache()
        got = cache.to_contiguous(self.store, layer=self.draw.randrange(LAYERS))
        assert (got.k == self.value).all(), "another thread's value"
        assert (got.v == self.value).all(), "another thread's value"
        if cache.seq_len:
            out = pagedkv.paged_attention(np.ones((1, 16, 64), np.float32), self.store, cache)
            assert np.allclose(out, self.value, rtol=1e-5), "another thread's value"


@pytest.mark.parametrize("total_blocks", [40, 1000])
def test_threads_with_sequences_of_their_own_never_meet(total_blocks):
    store = pagedkv.PagedKvStore(4, total_blocks, 16, 64, n_layers=LAYERS)
    workers = [Worker(store, number) for number in range(N_THREADS)]

    def work(number):
        for _ in range(250):
            workers[number].make_a_move()
        workers[number].caches.clear()

    run_in_threads(work)
    store.check()
    assert store.free_block_count == total_blocks
    stats = store.stats()
    assert stats.blocks_acquired == stats.blocks_released
    if total_blocks == 40:
        assert sum(worker.n_refused for worker in workers) > 0, "never full"


def test_no_block_is_handed_out_twice():
    store = pagedkv.PagedKvStore(1, 100, 1, 1)
    owner = [None] * 100

    def work(number):
        draw = random.Random(number)
        for _ in range(1500):
            try:
                ids = store.acquire(draw.randrange(1, 20))
            except pagedkv.PagedStoreExhausted:
                continue
            for block in ids:
                assert owner[block] is None
                owner[block] = number
            store.retain(ids)
            store.release(ids)
            for block in ids:
                assert owner[block] == number
                owner[block] = None
            store.release(ids)

    run_in_threads(work)
    store.check()
    assert store.free_block_count == 100


def test_a_pool_is_drawn_on_from_many_threads():
    pool = pagedkv.KvBlockPool(4, 20)

    def work(number):
        for n in range(400):
            try:
                cache = pagedkv.KvCache.with_pool(1, 1, pool, 4 * (n % 5))
                cache.extend(rows(20, 1), rows(20, 1))
            except pagedkv.KvPoolExhausted:
                continue
            assert 0 <= pool.free_blocks <= 20

    run_in_threads(work)
    assert pool.free_blocks == 20


def attend(store, cache):
    q = np.linspace(-1, 1, 3 * 16 * 64, dtype=np.float32).reshape(3, 16, 64)
    return pagedkv.paged_attention(q, store, cache, query_lens=3)


@pytest.mark.parametrize("read", [attend, lambda store, cache: cache.to_contiguous(store).k])
def test_reading_what_another_thread_releases_is_exact_or_refused(read):
    """The reader gets all of it, or RuntimeError, or (the sequence being empty by then) nothing of it."""
    store = pagedkv.PagedKvStore(16, 100, 16, 64)
    k, v = rows(800, WIDTH) / 2**24, rows(800, WIDTH)
    garbage = np.full((1600, WIDTH), np.nan, np.float32)
    cache = pagedkv.PagedKvCache()
    cache.append_contiguous(store, k, v, 800)
    expected = read(store, cache).tobytes()
    outcomes = Counter()
    enough = threading.Event()

    def work(number):
        if number:
            while not enough.is_set():
                read_once()
                time.sleep(random.choice([0, 1e-4]))
        else:
            try:
                deadline = time.monotonic() + 30
                while outcomes["released"] < 25 or outcomes["exact"] + outcomes["kept"] < 25:
                    time.sleep(random.uniform(0, 2e-3))  # or the reader would never find the sequence full
                    release_and_overwrite()
                    assert time.monotonic() < deadline, outcomes
            finally:
                enough.set()

    def read_once():
        try:
            got = read(store, cache)
        except RuntimeError:
            outcomes["refused"] += 1
        except ValueError as error:
            outcomes[str(error)] += 1
        else:
            outcomes["exact" if got.size else "empty"] += 1
            assert got.size == 0 or got.tobytes() == expected

    def release_and_overwrite():
        try:
            cache.release(store)
        except RuntimeError:
            outcomes["kept"] += 1
            return
        outcomes["released"] += 1
        other = pagedkv.PagedKvCache()
        other.append_contiguous(store, garbage, garbage, 1600)
        other.release(store)
        refill()

    def refill():
        while cache.seq_len == 0:
            try:
                cache.append_contiguous(store, k, v, 800)
            except RuntimeError:
                time.sleep(1e-4)

    run_in_threads(work, 2)
    store.check([cache])
    assert read(store, cache).tobytes() == expected
    assert outcomes["exact"]
    # To ask an empty sequence for its last three positions is the one other error.
    assert all("query_lens" in error for error in outcomes if ":" in error), outcomes


def test_readers_do_not_exclude_each_other():
    store = pagedkv.PagedKvStore(16, 200, 16, 64)
    cache = pagedkv.PagedKvCache()
    k, v = rows(3000, WIDTH), rows(3000, WIDTH)
    cache.append_contiguous(store, k, v, 3000)

    def work(number):
        for _ in range(3):
            assert np.array_equal(cache.to_contiguous(store).v, v)
            attend(store, cache)
            clone = cache.clone()
            assert clone.seq_len == 3000

    with unchanged(store, cache):
        run_in_threads(work, 4)


def test_two_threads_that_write_one_sequence_lose_nothing_silently():
    """It belongs to one thread at a time: a call of the other is refused or comes after."""
    store = pagedkv.PagedKvStore(16, 500, 16, 64)
    cache = pagedkv.PagedKvCache()
    n_written = [0, 0]

    def work(number):
        part = np.full((40, WIDTH), number + 1, np.float32)
        for _ in range(60):
            try:
                cache.append_contiguous(store, part, part, 40)
            except RuntimeError:
                continue
            n_written[number] += 40

    run_in_threads(work, 2)
    got = cache.to_contiguous(store).k
    assert [int((got[:, 0] == value).sum()) for value in (1, 2)] == n_written
    assert (got == got[:, :1]).all()


# --- how many threads a call may use ----------------------------------------------------------------


def test_the_number_of_threads_is_what_was_set():
    pagedkv.set_num_threads(3)
    assert pagedkv.get_num_threads() == 3
    for wrong in (0, -1, 257, 2**63):
        with pytest.raises(ValueError, match="n: expected"):
            pagedkv.set_num_threads(wrong)
    assert pagedkv.get_num_threads() == 3


@pytest.mark.parametrize(("setting", "expected"), [("3", "3"), ("256", "256"), (" 2 ", "2")])
def test_the_environment_sets_the_number_of_threads(setting, expected):
    code = "import pagedkv; print(pagedkv.get_num_threads())"
    assert run_python(code, PAGEDKV_NUM_THREADS=setting).strip() == expected


@pytest.mark.parametrize("setting", ["0", "-1", "many", "2.5", "257", "99999999999999999999"])
def test_an_environment_that_makes_no_sense_is_refused_by_name(setting):
    code = """
        try:
            import pagedkv
        except ValueError as error:
            print(error)
    """
    said = run_python(code, PAGEDKV_NUM_THREADS=setting)
    assert "PAGEDKV_NUM_THREADS" in said
    assert setting in said


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs an affinity mask")
def test_the_default_respects_the_affinity():
    code = """
        import os
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        import pagedkv
        print(pagedkv.get_num_threads())
    """
    assert run_python(code, PAGEDKV_NUM_THREADS="").strip() == "1"


# --- fork -------------------------------------------------------------------------------------------

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
