"""Ways to interrupt: by real signals at any moment, and without chance at every boundary there is."""

import dis
import gc
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from hostile import Array, Indexed, Iterated
from proof_world import WorldClock

HERE = str(Path(__file__).parent)
# What a caller hands over and is called back: an interrupt comes there too, in the middle of the call.
CALLED_BACK = {
    method.__code__ for method in (WorldClock.__call__, Indexed.__index__, Array.__array__, Iterated.__iter__)
}

needs_signals = pytest.mark.skipif(
    not hasattr(signal, "setitimer") or not hasattr(signal, "pthread_kill"), reason="needs signals of POSIX"
)


class Interrupt(KeyboardInterrupt):
    """What Ctrl-C raises. One of our own, so that a real Ctrl-C still ends the tests."""


def is_inside(frame):
    """Whether a frame is in the middle of a call into the package: in it, or in what it calls, but not in the test."""
    return not frame.f_code.co_filename.startswith(HERE) or frame.f_code in CALLED_BACK


class Boundary:
    """Raises at the n-th boundary. `hit` says whether there were as many."""

    def __init__(self, n):
        self.left = n

    @property
    def hit(self):
        return self.left <= 0

    def pass_one(self):
        self.left -= 1
        if self.left == 0:
            raise Interrupt

    def run(self, act):
        """Whether the act was interrupted."""
        handled = sys.exc_info()[1]
        interrupted = False
        # What the collector calls would have boundaries of its own, at other places each time.
        collects = gc.isenabled()
        gc.disable()
        try:
            self.begin()
            try:
                act()
            finally:
                self.end()
        except Interrupt:
            interrupted = True
        finally:
            if collects:
                gc.enable()
        assert sys.exc_info()[1] is handled, "the interpreter still handles an error of the act"
        return interrupted


# At both ends of an except clause no interpreter looks for signals, and an error of a trace function leaves the handled
# one in place for good, with the frames that it holds. What an error in the clause itself leads to begins with COPY.
ENDS = {dis.opmap[name] for name in ("PUSH_EXC_INFO", "POP_EXCEPT") if name in dis.opmap}
COPY_AND_END = bytes([dis.opmap["COPY"], dis.opmap["POP_EXCEPT"]]) if ENDS else None


def is_untouchable(code, at):
    return code[at] in ENDS or code[at : at + 4 : 2] == COPY_AND_END


class Bytecode(Boundary):
    """Before every instruction of the package's Python code, at each function's entry, and as it returns."""

    def begin(self):
        self.before = sys.gettrace()
        # CPython 3.11 lends it to the call for a frame, and gives up its own reference if one inside that call raises.
        self.held = self.trace
        sys.settrace(self.held)

    def end(self):
        sys.settrace(self.before)

    def trace(self, frame, event, argument):
        if not is_inside(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event != "exception" and not is_untouchable(frame.f_code.co_code, frame.f_lasti):
            self.pass_one()
        return self.trace


class Call(Boundary):
    """Before every call of a C function by the package's Python code, and as it returns: what it returns is lost."""

    def begin(self):
        self.before = sys.getprofile()
        self.held = self.profile
        sys.setprofile(self.held)

    def end(self):
        sys.setprofile(self.before)

    def profile(self, frame, event, argument):
        if event in ("c_call", "c_return") and is_inside(frame):
            self.pass_one()


WAYS = {"bytecode": Bytecode, "call": Call}


class Fire:
    """Signals at random moments, which interrupt what `run` runs: at most once each."""

    number = None

    def __init__(self, draw):
        self.draw = draw
        self.armed = False
        self.n_interrupts = 0

    def __enter__(self):
        self.before = signal.signal(self.number, self.handle)
        return self

    def __exit__(self, *error):
        self.armed = False
        signal.signal(self.number, self.before)

    def handle(self, number, frame):
        if self.armed:
            self.armed = False  # a second one, in the caller's own cleaning up, would be the caller's
            self.n_interrupts += 1
            raise Interrupt

    def run(self, act, within=2e-4):
        """Whether the act was interrupted, which it may be in so many seconds."""
        try:
            try:
                self.armed = True
                self.shoot(within)
                act()
            finally:
                self.armed = False
        except Interrupt:  # also one that came before the act had begun
            return True
        return False


class Timer(Fire):
    """The system's: a signal that waits for nobody, and is heard as soon as the interpreter looks for it."""

    number = getattr(signal, "SIGALRM", None)

    def shoot(self, within):
        signal.setitimer(signal.ITIMER_REAL, max(self.draw.uniform(0, within), 1e-6))

    def __exit__(self, *error):
        signal.setitimer(signal.ITIMER_REAL, 0)
        super().__exit__(*error)


class Thread(Fire):
    """Another thread's, as it gets its turn: what runs has let go of the GIL."""

    number = getattr(signal, "SIGUSR1", None)

    def __enter__(self):
        self.interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        self.within = None
        self.ended = False
        self.thread = threading.Thread(target=self.keep_shooting, args=(threading.get_ident(),), daemon=True)
        self.thread.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.ended = True
        self.thread.join()
        sys.setswitchinterval(self.interval)
        super().__exit__(*error)

    def shoot(self, within):
        self.within = within

    def keep_shooting(self, target):
        while not self.ended:
            time.sleep(self.draw.uniform(0, self.within or 1e-4))
            if self.armed:
                signal.pthread_kill(target, self.number)


def boundaries(way, rounds, attempt):
    """Call ``attempt(way(n))`` for every n until there are no more boundaries, or for some, evenly.

    Which ones are left out, is known only when all have been counted: the first attempt does.
    """
    attempt(way(sys.maxsize))  # what only a first call does is done
    counter = way(sys.maxsize)
    attempt(counter)
    n_all = sys.maxsize - counter.left
    stride = max(1, -(-n_all // rounds))
    if stride > 1 and stride % 2 == 0:
        stride += 1  # a loop of an even number of instructions is met at all of them
    for n in range(1, n_all + 1, stride):
        boundary = way(n)
        attempt(boundary)
        assert boundary.hit, "the same act has fewer boundaries than before"
    return n_all
