"""Many threads on one store, and one sequence in two threads."""

import ctypes
import os
import random
import sys
import sysconfig
import threading
import time
from collections import Counter

import numpy as np
import pytest
from helpers import rows, run_python, unchanged

import pagedkv

N_THREADS = 8
SECONDS = float(os.environ.get("PAGEDKV_THREADS_SECONDS", 3))  # of the test with the most threads
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
    """A thread's sequences: every value that it ever writes is its own number.

    The token of a position is its index, in a namespace of its own: what is known of one of its sequences fits all.
    """

    def __init__(self, prefixes, number):
        self.store = prefixes.store
        self.prefixes = prefixes
        self.namespace = bytes([number])
        self.value = np.float32(number + 1)
        self.draw = random.Random(number)
        self.caches = [pagedkv.PagedKvCache()]
        self.n_moves = Counter()

    def rows(self, *shape):
        return np.full((*shape, WIDTH), self.value, np.float32)

    def cache(self):
        return self.draw.choice(self.caches)

    def make_a_move(self):
        moves = [self.push, self.append, self.append, self.step, self.clone, self.shrink, self.read, self.read]
        move = self.draw.choice([*moves, self.insert, self.insert, self.attach, self.attach])
        try:
            move()
        except pagedkv.PagedStoreExhausted:
            self.n_moves["refused"] += 1
            self.caches.remove(cache := self.cache())
            cache.release(self.store)
            self.caches.append(pagedkv.PagedKvCache())
        else:
            self.n_moves[move.__name__] += 1

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
            out = step.attend(0, np.ones((sum(lens), 16, 64), np.float32))
            assert np.allclose(out, self.value, rtol=1e-5), "another thread's value"
            if self.draw.random() < 0.2:
                step.rollback()

    def clone(self):
        self.keep(self.cache().clone())

    def keep(self, cache):
        self.caches.append(cache)
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

    def insert(self):
        cache = self.cache()
        self.prefixes.insert(range(cache.seq_len), cache, namespace=self.namespace)

    def attach(self):
        cache = pagedkv.PagedKvCache()
        self.prefixes.attach(cache, range(self.draw.randrange(1, 80)), namespace=self.namespace)
        self.keep(cache)


@pytest.mark.parametrize("total_blocks", [60, 1000])
def test_sixteen_threads_with_sequences_of_their_own_never_meet(total_blocks):
    store = pagedkv.PagedKvStore(4, total_blocks, 16, 64, n_layers=LAYERS)
    prefixes = pagedkv.PrefixCache(store)
    workers = [Worker(prefixes, number) for number in range(16)]
    end = time.monotonic() + SECONDS

    def work(number):
        while time.monotonic() < end:
            workers[number].make_a_move()
        workers[number].caches.clear()

    run_in_threads(work, len(workers), timeout=SECONDS + 120)
    prefixes.check()
    assert store.free_block_count == total_blocks - prefixes.stats().blocks_held
    prefixes.clear()
    assert store.free_block_count == total_blocks
    stats = store.stats()
    assert stats.blocks_acquired == stats.blocks_released
    n_moves = sum((worker.n_moves for worker in workers), Counter())
    print(dict(n_moves), prefixes.stats())  # shown by pytest -s
    assert set(n_moves) >= {"push", "append", "step", "clone", "shrink", "read", "insert", "attach"}
    if total_blocks == 60:
        assert n_moves["refused"] > 0, "never full"
        assert prefixes.stats().blocks_evicted > 0, "never evicted"


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


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="needs a CPython built without the GIL")
def test_the_gil_stays_off():
    """An extension that did not say that it can do without would turn it on; each one is imported."""
    code = """
        import importlib, pkgutil, sys
        import pagedkv
        found = [module.name for module in pkgutil.walk_packages(pagedkv.__path__, "pagedkv.")]
        compiled = [name for name in found if importlib.util.find_spec(name).origin.endswith((".so", ".pyd"))]
        for name in compiled:
            importlib.import_module(name)
        print(len(compiled), sys._is_gil_enabled())
    """
    n_compiled, enabled = run_python(code, PYTHON_GIL="").split()
    assert int(n_compiled) >= 15
    assert enabled == "False"
    assert not sys._is_gil_enabled(), "something else that the tests import has turned it on"


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


# --- the threads of an OpenMP runtime ----------------------------------------------------------------

OPENMP = """
    import ctypes, os
    import numpy as np, pagedkv

    def count():
        return len(os.listdir("/proc/self/task"))

    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in [(8, 8, 64), (3000, 2, 64), (3000, 2, 64)])
    expected = pagedkv.attention(q, k, v, n_threads=1)
    print(pagedkv.use_openmp())                                    # none is loaded
    ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_LOCAL)            # as for another library alone
    print(pagedkv.use_openmp(), pagedkv.use_openmp(True))
    before = count()
    for n_threads in (1, 2, 3):
        assert (pagedkv.attention(q, k, v, n_threads=n_threads) == expected).all()
    print(count() - before)                                        # the two that three threads are more than one
    if os.fork() == 0:                                             # which has none of them
        assert (pagedkv.attention(q, k, v, n_threads=2) == expected).all()
        print("child", count(), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
    print(pagedkv.use_openmp(False))
    before = count()
    assert (pagedkv.attention(q, k, v, n_threads=2) == expected).all()
    print(count() - before)                                        # a helper of the library's own
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_the_threads_of_an_openmp_runtime():
    try:
        ctypes.CDLL("libgomp.so.1")
    except OSError:
        pytest.skip("there is no libgomp")
    said = run_python(OPENMP, OPENBLAS_NUM_THREADS="1").split()
    assert said == ["False", "True", "True", "2", "child", "2", "False", "1"]


def test_use_openmp_takes_a_bool():
    for wrong in (1, None, "yes"):
        with pytest.raises(TypeError, match="^on: expected"):
            pagedkv.use_openmp(wrong)
    assert pagedkv.use_openmp(False) is False
