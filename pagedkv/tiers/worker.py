"""A thread that does one thing after another, beside whoever gives it something to do."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

_Job = TypeVar("_Job")

_FAILURES = 3  # in a row, after which nothing is tried for a while
_LONGEST_PAUSE = 30.0  # seconds; the first is one, and each further failure doubles it


class Worker(Generic[_Job]):
    """Does jobs in the order in which they come. Of those that wait there is a most; then the oldest is dropped.

    Its thread is there as long as there is something to do. What `do` raises is lost: it is to raise nothing.
    """

    def __init__(self, do: Callable[[_Job], object], most: int, name: str) -> None:
        self._do, self._most, self._name = do, most, name
        self.forget()

    def forget(self) -> None:
        """As if there had never been a job: so a fork's child begins, which has none of its parent's threads."""
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._thread: threading.Thread | None = None
        self.doing: _Job | None = None
        self._moved = 0.0

    def moved(self) -> None:
        """The job goes on: it has done a part of what it does."""
        self._moved = time.monotonic()

    def is_moving(self, seconds: float) -> bool:
        """Whether there is a job, and it has begun or gone on in the last so many seconds."""
        return self.doing is not None and time.monotonic() - self._moved < seconds

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()  # an interrupt may have come before it was started

    def put(self, job: _Job) -> _Job | None:
        """One more; what is dropped for it, which is the job itself where no thread can be had."""
        with self._changed:
            self._waiting.append(job)
            if not self._is_running:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:
                    return self._waiting.pop()
            return self._waiting.popleft() if len(self._waiting) > self._most else None

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    self._changed.notify_all()
                    return
                self.moved()
                self.doing = self._waiting.popleft()
            try:
                self._do(self.doing)
            finally:
                self.doing = None

    def wait(self, seconds: float) -> bool:
        """Until nothing is left to do, for so long at most; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_running, min(seconds, threading.TIMEOUT_MAX))

    def drop_all(self) -> list[_Job]:
        """What waits, which waits no longer."""
        with self._changed:
            dropped = list(self._waiting)
            self._waiting.clear()
        return dropped


class Patience:
    """Whether something is to be tried that has failed before: after three failures in a row it is left alone."""

    def __init__(self) -> None:
        self._failures = 0
        self._until = 0.0

    @property
    def is_over(self) -> bool:
        return time.monotonic() < self._until

    def succeeded(self) -> None:
        self._failures, self._until = 0, 0.0

    def failed(self) -> None:
        self._failures += 1
        if self._failures >= _FAILURES:
            self._until = time.monotonic() + min(2.0 ** min(self._failures - _FAILURES, 10), _LONGEST_PAUSE)
