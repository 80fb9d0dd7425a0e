"""Who computes what next: continuous batching over a fixed number of blocks.

Requests wait in a queue, run, and end. One is admitted when the stores have the blocks of its prompt, and starts
on what another one with the same beginning has computed. When it ends it gives everything back: at once, or, if it is
the last that others in the queue could start on, when those have been admitted or the blocks are needed. When there
are no blocks left for the next step, the one that was admitted last goes back to the head of the queue and will
compute its K/V again; the oldest never does, so every request that fits alone ends.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from itertools import islice

from pagedkv import PagedStoreExhausted
from pagedkv.integrations.transformers.stores import PagedSequence, PagedStores


class Request:
    """A prompt, and what it is continued with.

    Attributes
    ----------
    number : int
        Its place among the prompts.
    tokens : list of int
        The prompt, then what was generated.
    n_prompt, max_new_tokens : int
    sequence : PagedSequence
        The K/V of the tokens that are computed so far.
    """

    def __init__(self, number: int, prompt: list[int], max_new_tokens: int, stores: PagedStores) -> None:
        self.number = number
        self.tokens = prompt
        self.n_prompt = len(prompt)
        self.max_new_tokens = max_new_tokens
        self.sequence = PagedSequence(stores)
        # Less than a block is not worth sharing, so those that share have this in common.
        self.head = tuple(prompt[: stores.block_size])

    @property
    def n_pending(self) -> int:
        """Tokens whose K/V is still to be computed; 1 while decoding."""
        return len(self.tokens) - self.sequence.seq_len

    @property
    def is_full(self) -> bool:
        return len(self.tokens) >= self.n_prompt + self.max_new_tokens


class Scheduler:
    """Queue, admission and the plan of every step.

    Parameters
    ----------
    requests
        Each fits into the stores alone.
    max_running
        Requests that run at once at most.
    prefill_rows
        Prompt tokens that one step computes at most, beside those that decode.
    share_prefixes
        Whether a request starts on what a running one has computed.
    """

    def __init__(
        self, requests: Iterable[Request], *, max_running: int, prefill_rows: int, share_prefixes: bool
    ) -> None:
        self._queue = deque(requests)
        self._running: list[Request] = []
        self._waiting = Counter(request.head for request in self._queue)
        self._ended: dict[tuple[int, ...], Request] = {}  # by head: the last one, while others wait that begin alike
        self._max_running = max_running
        self._prefill_rows = prefill_rows
        self._share_prefixes = share_prefixes
        self._admits = True

    @property
    def is_idle(self) -> bool:
        return not self._queue and not self._running

    def plan(self) -> list[tuple[Request, int]]:
        """Admits what fits, and says how many tokens of which request the next step computes.

        Raises
        ------
        PagedStoreExhausted
            Nothing runs, and others hold the blocks that the next request needs.
        """
        self._admit()
        # Only now: one that was just admitted may have started on what the windows leave behind.
        for request in self._running:
            request.sequence.drop_unneeded()
        batch = []
        rows_left = self._prefill_rows
        for request in self._running:
            if request.n_pending == 1:
                batch.append((request, 1))
            elif rows_left:
                n_rows = min(request.n_pending, rows_left)
                rows_left -= n_rows
                batch.append((request, n_rows))
        return batch

    def send_back(self) -> bool:
        """Makes room: the request admitted last gives its blocks back and waits again, at the head of the queue.

        Nobody is admitted then until a request ends, or two would push each other out in turn. False if a
        single request is running. What ended requests still hold goes first.
        """
        if self._forget_ended():
            return True
        if len(self._running) < 2:
            return False
        request = self._running.pop()
        request.sequence.release()
        self._queue.appendleft(request)
        self._waiting[request.head] += 1
        self._admits = False
        return True

    def finish(self, request: Request) -> None:
        """Ends a running request."""
        self._running.remove(request)
        to_release: Request | None = request
        self._admits = True
        if self._share_prefixes and self._waiting[request.head]:
            to_release = self._ended.get(request.head)
            self._ended[request.head] = request
        if to_release is not None:
            to_release.sequence.release()

    def close(self) -> None:
        """Ends everything; no request holds a block any more."""
        self._forget_ended()
        for request in self._running:
            request.sequence.release()
        self._running.clear()
        self._queue.clear()

    def _admit(self) -> None:
        if not self._admits:
            return
        for request in list(islice(self._queue, self._max_running - len(self._running))):
            lender, n_shared = self._find_lender(request)
            if lender is not None:
                if n_shared > lender.sequence.seq_len:
                    continue  # about to be computed: look again after the step
                request.sequence = lender.sequence.clone()
                request.sequence.truncate(n_shared)
            if not self._reserve(request):
                break  # it keeps its turn: a smaller one behind it must not overtake for ever
            self._queue.remove(request)
            self._running.append(request)
            self._waiting[request.head] -= 1
            if not self._waiting[request.head] and request.head in self._ended:
                self._ended.pop(request.head).sequence.release()

    def _reserve(self, request: Request) -> bool:
        """Takes the blocks of what is to be computed; False if they are not free while others run."""
        while True:
            try:
                request.sequence.reserve(request.n_pending, chunk=self._prefill_rows)
                return True
            except PagedStoreExhausted:
                if self._forget_ended():
                    continue
                request.sequence.release()
                if not self._running:
                    raise
                return False

    def _find_lender(self, request: Request) -> tuple[Request | None, int]:
        """The request with the longest common beginning that can lend it, now or soon; and how much."""
        lender, n_shared = None, len(request.head) - 1
        if self._share_prefixes:
            for other in (*self._running, *self._ended.values()):
                if other.head != request.head:
                    continue
                # One token at least is left to compute, for its logits.
                n_common = min(_common_prefix(request.tokens, other.tokens), len(request.tokens) - 1)
                is_there = n_common <= other.sequence.seq_len
                if n_common > n_shared and (not is_there or other.sequence.can_truncate_to(n_common)):
                    lender, n_shared = other, n_common
        return lender, n_shared

    def _forget_ended(self) -> bool:
        """Gives back what ended requests still hold; False if they hold nothing."""
        ended, self._ended = self._ended, {}
        for request in ended.values():
            request.sequence.release()
        return bool(ended)


def _common_prefix(a: list[int], b: list[int]) -> int:
    """How many tokens at the beginning are equal."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
