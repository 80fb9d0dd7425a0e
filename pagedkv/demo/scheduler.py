"""Who computes what next: continuous batching over a fixed number of blocks.

Requests wait in a queue, run, and end. A request is admitted when the store has the blocks of its
prompt beyond what a running request lends or the stores remember, and gives back everything when it ends.
Running requests take further blocks as they grow;
when there are none left, the one that was admitted last goes back to the head of the queue and
will compute its K/V again. The oldest is never sent back, and `submit` refuses what would not fit
even alone: so everything that is submitted ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagedkv.demo.errors import RequestRefused
from pagedkv.demo.kv import ModelKv, SequenceKv
from pagedkv.demo.model import F32
from pagedkv.demo.sampling import greedy


class Request:
    """A prompt, and what it is continued with.

    Attributes
    ----------
    tokens : list[int]
        The prompt, then what has been generated.
    max_tokens : int
        How many tokens are generated at most.
    kv : SequenceKv
        The K/V of the tokens that are computed so far.
    choose : callable
        Finds the next token from its logits, [vocabulary].
    n_known : int or None
        Positions that needed no computing when it was first admitted.
    is_done : bool
    """

    def __init__(
        self, prompt: Sequence[int], max_tokens: int, kv: SequenceKv, choose: Callable[[F32], int] = greedy
    ) -> None:
        self.tokens = list(prompt)
        self.max_tokens = max_tokens
        self.kv = kv
        self.choose = choose
        self.n_known: int | None = None
        self.is_done = False
        self._n_prompt = len(prompt)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self._n_prompt :]

    @property
    def n_pending(self) -> int:
        """Tokens whose K/V is still to be computed; 1 while decoding."""
        return len(self.tokens) - self.kv.seq_len


@dataclass
class SchedulerCounts:
    """What the scheduler has done since its construction."""

    blocks_shared: int = 0
    positions_shared: int = 0
    positions_to_compute: int = 0
    sent_back: int = 0
    most_running: int = 0


class Scheduler:
    """Queue, admission and the plan of every step.

    Parameters
    ----------
    kv
        The stores.
    share
        Whether a request starts on the blocks of a running one that begins with the same tokens, or on what the
        stores remember.
    prefill_rows
        Tokens of prompts that one step computes at most, beside those that decode.
    """

    def __init__(self, kv: ModelKv, *, share: bool = True, prefill_rows: int = 256) -> None:
        self.counts = SchedulerCounts()
        self._kv = kv
        self._share = share
        self._prefill_rows = prefill_rows
        self._queue: deque[Request] = deque()
        self._running: list[Request] = []
        self._admits = True

    def submit(self, prompt: Sequence[int], max_tokens: int, choose: Callable[[F32], int] = greedy) -> Request:
        """Queues a request. `RequestRefused` if the stores could not hold it even alone."""
        self.check(prompt, max_tokens)
        request = Request(prompt, max_tokens, SequenceKv(self._kv), choose)
        self._queue.append(request)
        return request

    def check(self, prompt: Sequence[int], max_tokens: int) -> None:
        """`RequestRefused` if the stores could not hold such a request even alone. Any thread may ask."""
        if not prompt:
            raise RequestRefused("the prompt has no tokens")
        # The last token that is generated is never computed itself.
        n_positions = len(prompt) + max_tokens - 1
        if not self._kv.could_hold(n_positions):
            raise RequestRefused(
                f"{len(prompt)} prompt tokens and {max_tokens} new ones need {self._kv.blocks_for(n_positions)} blocks"
                f" of {self._kv.block_size}, the store has {self._kv.n_blocks}"
            )

    @property
    def running(self) -> tuple[Request, ...]:
        """In the order of admission."""
        return tuple(self._running)

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        return len(self._queue)

    @property
    def is_idle(self) -> bool:
        return not self._queue and not self._running

    def plan(self) -> list[tuple[Request, int]]:
        """Admits what fits, and says how many tokens of which request the next step computes."""
        self._admit()
        # Only now: a request admitted in this step may have started on what the windows leave behind.
        for request in self._running:
            request.kv.drop_unneeded()
        batch = []
        prefill_left = self._prefill_rows
        for request in self._running:
            if request.n_pending == 1:
                batch.append((request, 1))
            elif prefill_left:
                n_rows = min(request.n_pending, prefill_left)
                prefill_left -= n_rows
                batch.append((request, n_rows))
        return batch

    def send_back(self) -> bool:
        """Makes room: the request admitted last gives its blocks back and queues again, at the head.

        Nobody is admitted then until a request ends, or two would push each other out in turn.
        False if a single request is running, whose blocks are all there are.
        """
        if len(self._running) < 2:
            return False
        request = self._running.pop()
        request.kv.release()
        self._queue.appendleft(request)
        self._admits = False
        self.counts.sent_back += 1
        return True

    def finish(self, request: Request) -> None:
        """Ends a request and gives its blocks back, whether it runs, waits or has ended before."""
        if request.is_done:
            return
        request.is_done = True
        request.kv.release()
        (self._running if request in self._running else self._queue).remove(request)
        self._admits = True

    def close(self) -> None:
        """Drops all requests and what is remembered; every block is free again."""
        for request in self._running:
            request.kv.release()
        self._running.clear()
        self._queue.clear()
        self._kv.forget()

    def _admit(self) -> None:
        for request in list(self._queue) if self._admits else []:
            lender, n_shared = self._find_lender(request) if self._share else (None, 0)
            n_known = self._kv.match(request.tokens) if self._share else 0
            n_blocks = 0
            if lender is None or n_known >= n_shared:
                n_blocks = request.kv.attach(request.tokens, n_known) if n_known else 0
            elif n_shared > lender.kv.seq_len:
                continue  # the lender is about to compute it: look again after the step
            else:
                n_blocks = request.kv.borrow(lender.kv, n_shared)
            if not request.kv.can_reserve(request.n_pending):
                request.kv.release()
                break  # it keeps its turn: a smaller one behind it must not overtake for ever
            self.counts.blocks_shared += n_blocks
            self.counts.positions_shared += request.kv.seq_len
            self.counts.positions_to_compute += request.n_pending
            if request.n_known is None:
                request.n_known = request.kv.seq_len
            request.kv.reserve(request.n_pending)
            self._queue.remove(request)
            self._running.append(request)
        self.counts.most_running = max(self.counts.most_running, len(self._running))

    def _find_lender(self, request: Request) -> tuple[Request | None, int]:
        """The running request with the longest common beginning, in whole blocks, that can lend it now or soon."""
        lender, n_shared = None, 0
        for other in self._running:
            # One token at least is left to compute, for its logits.
            n_common = min(_common_prefix(request.tokens, other.tokens), len(request.tokens) - 1)
            n_whole = n_common - n_common % self._kv.block_size
            if n_whole > n_shared and (n_whole > other.kv.seq_len or other.kv.can_lend(n_whole)):
                lender, n_shared = other, n_whole
        return lender, n_shared


def _common_prefix(a: list[int], b: list[int]) -> int:
    """How many tokens at the beginning are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
