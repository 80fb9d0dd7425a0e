"""The thread that computes. The event loop hands it jobs; it calls back with text, piece by piece."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from pagedkv.demo.engine import Engine
from pagedkv.demo.model import F32
from pagedkv.demo.server.errors import ApiError, bad_request, engine_failed, shutting_down, too_many
from pagedkv.demo.server.metrics import Metrics
from pagedkv.demo.server.text import StoppingText
from pagedkv.serving import Request, Scheduler

_log = logging.getLogger(__name__)


class Piece(NamedTuple):
    """Text that follows what came before. `finish` comes with the last: "stop" or "length"."""

    text: str
    finish: str | None


class Job:
    """One continuation that a client waits for.

    Parameters
    ----------
    prompt, max_tokens, choose
        As `Engine.submit` takes them.
    text
        Turns its tokens into text.
    emit
        Called by the computing thread with every `Piece` as it comes, or with the `ApiError` that ends the job. Must
        not block, nor raise.

    Attributes
    ----------
    n_generated, n_known : int
        Tokens generated, and tokens of the prompt that needed no computing. Final when the last piece comes.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        choose: Callable[[F32], int],
        text: StoppingText,
        emit: Callable[[Piece | ApiError], None],
    ) -> None:
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.choose = choose
        self.text = text
        self.emit = emit
        self.n_generated = 0
        self.n_known = 0
        self.request: Request | None = None
        self.submitted = self.last_token = time.perf_counter()


class Worker:
    """Runs an engine in a thread of its own, as long as there is something to compute.

    `submit`, `cancel` and `stop` are called by one other thread, that of the event loop. The engine, its scheduler
    and the jobs it was handed belong to the computing thread.

    Parameters
    ----------
    most_waiting
        Jobs that may wait for their start; `submit` refuses more.
    """

    def __init__(
        self, engine: Engine, scheduler: Scheduler, stop_tokens: set[int], metrics: Metrics, most_waiting: int
    ) -> None:
        self.most_waiting = most_waiting
        self._engine = engine
        self._scheduler = scheduler
        self._stop_tokens = stop_tokens
        self._metrics = metrics
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open: set[Job] = set()  # submitted and not ended
        self._job_of: dict[Request, Job] = {}
        self._stopping = False
        self._mean_seconds = 1.0  # that a job takes
        self._thread = threading.Thread(target=self._run, name="pagedkv engine", daemon=True)

    # --- for the event loop ---

    @property
    def is_serving(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    def start(self) -> None:
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Hands over jobs, all or none.

        Raises
        ------
        ApiError
            429 if too many wait, 503 after `stop`; both say when to try again.
        """
        if not self.is_serving:
            raise shutting_down()
        n_running = len(self._scheduler.running)
        if len(self._open) - n_running + len(jobs) > self.most_waiting:
            # A place is free when the next of those that run has ended.
            seconds = math.ceil(self._mean_seconds / max(1, n_running))
            raise too_many(self.most_waiting, min(max(1, seconds), 60))
        self._open.update(jobs)
        if self._stopping:  # it has died meanwhile, and may not have seen these
            self._open.difference_update(jobs)
            raise shutting_down()
        for job in jobs:
            self._inbox.put(partial(self._accept, job))

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Takes jobs out of the next step, if they have not ended, and gives their blocks back."""
        for job in jobs:
            if job in self._open:
                self._inbox.put(partial(self._end, job, "cancelled"))

    def stop(self) -> None:
        """Ends all jobs with 503 after the step that is being computed; `join` waits for it."""
        self._stopping = True
        self._inbox.put(lambda: None)

    def join(self) -> None:
        """Returns when the thread has ended and all blocks are free."""
        if self._thread.ident is not None:
            self._thread.join()

    # --- the computing thread ---

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._read_inbox()
                if not self._stopping and not self._scheduler.is_idle:
                    self._step()
        finally:
            self._stopping = True
            for job in list(self._open):
                self._end(job, "shutdown", shutting_down())
            self._engine.close()

    def _read_inbox(self) -> None:
        """Does what was asked for; sleeps while there is nothing to compute."""
        if self._scheduler.is_idle:
            self._inbox.get()()
        while True:
            try:
                act = self._inbox.get_nowait()
            except queue.Empty:
                return
            act()

    def _accept(self, job: Job) -> None:
        try:
            job.request = self._engine.submit(job.prompt, job.max_tokens, job.choose)
        except ValueError as error:
            self._end(job, "refused", bad_request("prompt", str(error)))
        except Exception:
            _log.exception("a request cannot be queued")
            self._end(job, "failed", engine_failed())
        else:
            self._job_of[job.request] = job

    def _step(self) -> None:
        try:
            sampled = self._engine.step()
        except Exception:
            # The step has changed nothing, but who caused it is not known: all that were in it end.
            _log.exception("a step failed")
            for request in self._scheduler.running or tuple(self._job_of):
                self._end(self._job_of[request], "failed", engine_failed())
            return
        for request in sampled:
            self._add(self._job_of[request], request, request.tokens[-1])

    def _add(self, job: Job, request: Request, token: int) -> None:
        now = time.perf_counter()
        if job.n_generated == 0:
            job.n_known = request.num_cached_tokens or 0
            self._metrics.prompt_tokens.inc(len(job.prompt))
            self._metrics.first_token.observe(now - job.submitted)
        else:
            self._metrics.next_token.observe(now - job.last_token)
        self._metrics.generated_tokens.inc()
        job.last_token = now
        job.n_generated += 1

        at_end = token in self._stop_tokens
        text = "" if at_end else job.text.feed(token)
        if request.finish_reason and not job.text.stopped:
            text += job.text.finish()
        finish = "stop" if at_end or job.text.stopped else request.finish_reason
        if finish:
            self._mean_seconds += 0.1 * (now - job.submitted - self._mean_seconds)
            self._end(job, finish, Piece(text, finish))
        elif text:
            job.emit(Piece(text, None))

    def _end(self, job: Job, outcome: str, last: Piece | ApiError | None = None) -> None:
        """Ends a job that has not ended, wherever it is. When the client hears of it, its blocks are free."""
        if job not in self._open:
            return
        if job.request is not None:
            self._engine.cancel(job.request)
            self._job_of.pop(job.request, None)
        self._metrics.requests[outcome].inc()
        self._open.discard(job)
        if last is not None:
            job.emit(last)
