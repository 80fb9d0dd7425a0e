"""Code of the caller that runs in the middle of a call: finalizers, signal handlers, clocks, other threads, forks.

    python -c "import proof_meddling; proof_meddling.main('finalizer', 100)"

Each round is one of the scenarios, and a meddler that does something to the same store and prefix cache meanwhile, with
sequences of its own. Afterwards every row is right, the books balance, and nothing is lost. One that hangs is ended.
"""

import faulthandler
import gc
import os
import random
import signal
import sys
import sysconfig
import threading
import time
from contextlib import suppress

import proof_prefix  # noqa: F401  adds its scenarios
from proof_core import SCENARIOS, text
from proof_ways import Bytecode, Interrupt, Thread
from proof_world import END, World

import pagedkv


class Meddler:
    """Does one thing after the other, each as a whole, with texts that nobody else has."""

    def __init__(self, world, draw, number=0, takes=True):
        self.world = world
        self.draw = draw
        self.namespace = b"meddler %d" % number
        self.texts = [text(700 + 10 * number, 5) + text(701 + 10 * number + i, 2 + 2 * i) for i in range(4)]
        for tokens in self.texts:
            world.may_know(tokens, self.namespace)
        self.faults = []
        self.n_calls = 0
        self.inside = {}  # how deep each thread is
        self.acts = [self.look, self.insert, self.insert, self.attach, self.attach, self.evict, self.forget]
        if takes:  # an interrupt would lose what is on its way to the caller
            self.acts.append(self.run_short)

    def __call__(self):
        me = threading.get_ident()
        if self.inside.get(me, 0) > 2:
            return
        self.inside[me] = self.inside.get(me, 0) + 1
        try:
            self.n_calls += 1
            self.draw.choice(self.acts)()
        except pagedkv.PagedStoreExhausted:
            pass
        except Interrupt:
            raise
        except BaseException as error:  # in a finalizer nobody would hear of it
            self.faults.append(f"{type(error).__name__}: {error}")
        finally:
            self.inside[me] -= 1

    def begin(self, n=None):
        tokens, cache = self.draw.choice(self.texts), pagedkv.PagedKvCache()
        n = len(tokens) if n is None else n
        cache.append_contiguous(self.world.store, *self.world.places[0].kv_of(tokens, 0, n), n)
        return tokens, cache

    def look(self):
        prefixes = self.world.prefixes
        for tokens in self.texts:
            assert 0 <= prefixes.match([*tokens, END], namespace=self.namespace) <= len(tokens)
        stats = prefixes.stats()
        assert 0 <= stats.evictable_blocks <= stats.blocks_held <= self.world.store.total_blocks
        prefixes.check()

    def insert(self):
        tokens, cache = self.begin()
        self.world.prefixes.insert(tokens, cache, namespace=self.namespace, priority=self.draw.choice([0, 0, 1]))
        cache.release(self.world.store)

    def attach(self):
        """And go on, into a block of its own if need be: what others may read stays as it is."""
        place, tokens, cache = self.world.places[0], self.draw.choice(self.texts), pagedkv.PagedKvCache()
        n = self.world.prefixes.attach(cache, [*tokens, END], namespace=self.namespace)
        place.check_rows(cache.block_table.tolist(), tokens, cache.first_position, n, "what was attached")
        if n < len(tokens):
            cache.push(self.world.store, *(side[:, 0] for side in place.kv_of(tokens, n, n + 1)))
            place.check_rows(cache.block_table.tolist(), tokens, cache.first_position, n + 1, "what went on")
        cache.release(self.world.store)

    def evict(self):
        self.world.prefixes.evict(self.draw.choice([1, 1, 3]))

    def forget(self):
        start = self.draw.choice([0, 5])
        self.world.prefixes.forget(self.draw.choice(self.texts), namespace=self.namespace, start=start)

    def run_short(self):
        """Take all that is free, so that a push makes somebody's known blocks go."""
        store = self.world.store
        ids = store.acquire(store.free_block_count)
        try:
            _, cache = self.begin(1)
            cache.release(store)
        finally:
            store.release(ids)


class Ghost:
    """Garbage from the beginning: its finalizer meddles, and leaves another one."""

    def __init__(self, meddle):
        self.me, self.meddle, self.alive = self, meddle, True

    def __del__(self):
        if self.meddle.haunted:
            Ghost(self.meddle)
            self.meddle()


def by_finalizer(act, meddle, draw):
    before = gc.get_threshold()
    meddle.haunted = True
    for _ in range(3):
        Ghost(meddle)
    try:
        gc.set_threshold(draw.choice([1, 2, 7, 20]), 0)  # 0: whatever has lived long
        act()
    finally:
        gc.set_threshold(*before)
        meddle.haunted = False
        gc.collect()


def by_handler(act, meddle, draw):
    """Of a signal, at random moments; the next one comes some time after the handler has returned."""

    def handle(number, frame):
        meddle()
        if meddle.armed:
            signal.setitimer(signal.ITIMER_REAL, 10 ** draw.uniform(-6, -4))

    before = signal.signal(signal.SIGALRM, handle)
    meddle.armed = True
    try:
        signal.setitimer(signal.ITIMER_REAL, 10 ** draw.uniform(-6, -4))
        act()
    finally:
        meddle.armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Meddling(Bytecode):
    """At every so many boundaries, instead of an interrupt."""

    def __init__(self, meddle, stride):
        super().__init__(sys.maxsize)
        self.meddle, self.stride, self.n = meddle, stride, 0

    def pass_one(self):
        self.n += 1
        if self.n % self.stride == 0:
            before = sys.gettrace()
            sys.settrace(None)
            self.meddle()
            sys.settrace(before)


def at_boundaries(act, meddle, draw):
    Meddling(meddle, draw.choice([3, 7, 11, 23])).run(act)


def by_clock(act, meddle, draw):
    """Of the prefix cache: it is asked in the middle of calls, and asks back."""
    clock = meddle.world.clock

    def instead(clock):
        meddle()
        return clock.now

    with suppress(pagedkv.PagedStoreExhausted):
        meddle.world.know(meddle.texts[0], namespace=meddle.namespace, ttl=1e9)  # or nobody would ask it
    clock.instead = instead
    try:
        with suppress(pagedkv.PagedStoreExhausted):  # what is protected is in the way
            act()
    finally:
        clock.instead = None


def fork(meddle):
    """A child finds whole books, uses them, and leaves; returns whether it was content."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1] == 0
    status = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it ends a child that hangs
        signal.setitimer(signal.ITIMER_REAL, 20)
        n_before = len(meddle.faults)
        for _ in range(3):
            meddle()
        meddle.world.prefixes.check()
        meddle.world.prefixes.clear()
        meddle.world.prefixes.check()
        with suppress(pagedkv.PagedStoreExhausted):
            meddle.insert()
        status = len(meddle.faults) - n_before
    finally:
        os._exit(status)


def by_fork(act, meddle, draw):
    def handle(number, frame):
        meddle.n_calls += 1
        if not fork(meddle):
            meddle.faults.append("a child did not end well")

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 10 ** draw.uniform(-6, -3))
        act()
        time.sleep(1e-3)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


WAYS = {
    "finalizer": by_finalizer,
    "handler": by_handler,
    "boundaries": at_boundaries,
    "clock": by_clock,
    "fork": by_fork,
}


def finish(world, meddle):
    assert not meddle.faults, meddle.faults
    gc.collect()
    world.truth()
    world.finish()


def run(way, scenario, draw):
    world, acts = scenario.begin()
    meddle = Meddler(world, draw)

    def act():
        for each in acts:
            each()

    WAYS[way](act, meddle, draw)
    finish(world, meddle)
    return meddle.n_calls


def run_in_threads(draw, n_acts, n_threads=8):
    """All on one store, which is short. Finalizers run in all of them; the first one is interrupted, and forks."""
    world = World.plain(20)
    meddlers = [Meddler(world, random.Random(draw.random()), number, takes=False) for number in range(n_threads)]
    ghostly = Meddler(world, random.Random(draw.random()), n_threads, takes=False)
    errors, before = [], gc.get_threshold()

    def work(meddle):
        try:
            for _ in range(n_acts):
                meddle()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(meddle,), daemon=True) for meddle in meddlers[1:]]
    ghostly.haunted = True
    gc.set_threshold(50, 0)
    for _ in range(3):
        Ghost(ghostly)
    for thread in threads:
        thread.start()
    with Thread(draw) as fire:
        for i in range(n_acts):
            fire.run(meddlers[0], 2e-3)
            if i % 50 == 0 and not fork(meddlers[0]):  # in the middle of what the others do
                meddlers[0].faults.append("a child did not end well")
    for thread in threads:
        thread.join()
    gc.set_threshold(*before)
    ghostly.haunted = False
    ghostly.faults += [f"{error!r}" for error in errors]
    for meddle in meddlers:
        ghostly.faults += meddle.faults
    finish(world, ghostly)
    return sum(meddle.n_calls for meddle in [*meddlers, ghostly]), fire.n_interrupts


def main(way, rounds, seed=1):
    faulthandler.dump_traceback_later(60 + rounds, exit=True)
    gc.freeze()  # what is there by now is no garbage: each collection would look at all of it
    draw = random.Random(f"{way} {seed}")
    sys.setswitchinterval(5e-5)
    if way == "threads":
        n_calls, n_interrupts = run_in_threads(draw, 3 * rounds)
        print(n_calls, "calls in threads", n_interrupts, "interrupts")
        assert n_interrupts
    else:
        scenarios = [scenario for scenario in SCENARIOS if not scenario.alone and scenario.costs == 1]
        draw.shuffle(scenarios)
        n_calls = sum(run(way, scenarios[i % len(scenarios)], draw) for i in range(rounds))
        print(n_calls, "calls in the middle of others")
    if way == "finalizer" and sysconfig.get_config_var("Py_GIL_DISABLED"):
        return  # the collector counts objects by the five hundred there, and comes when the act is over
    assert n_calls >= rounds // 2  # a timer may be slower than what it is to interrupt
