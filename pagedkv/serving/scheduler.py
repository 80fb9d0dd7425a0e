"""Who computes what next: continuous batching over a fixed number of blocks.

Requests wait in a queue, run, and end. One is admitted when the stores have the blocks of its prompt, and starts
on what the prefix caches know of it: what running and ended requests with the same beginning have computed. When it
ends it gives its blocks back; the prefix caches hold them until somebody needs the room. When there are no blocks
left for the next step, the request that was admitted last is preempted: it goes back to the head of the queue, and
computes again what is no longer known by then. The oldest never is, so every request that fits alone ends.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal, SupportsIndex, cast

from pagedkv import PagedStoreExhausted, Waiting, plan_admission
from pagedkv._arrays import as_flag, as_size
from pagedkv._keys import Tokens, as_count, as_namespace, as_stop_tokens, as_token_ids
from pagedkv.serving.requests import Batch, Request
from pagedkv.serving.sequences import ForwardPass, ModelSequence
from pagedkv.serving.stores import ModelStores


@dataclass
class SchedulerCounts:
    """What a scheduler has done since its construction.

    Attributes
    ----------
    positions_computed : int
        Rows that went through the model.
    positions_reused : int
        Positions that were known when requests started.
    positions_missed : int
        Positions that were left to compute then.
    preemptions : int
        Times that a request had to give its blocks back and wait again.
    most_running : int
        The most requests that ran at once.

    Notes
    -----
    Threads: belongs to its scheduler's thread.

    Examples
    --------
    >>> from pagedkv.serving import LayerShape, ModelStores, Scheduler
    >>> Scheduler(ModelStores([LayerShape(None, 1, 4)], total_blocks=8)).counts
    SchedulerCounts(positions_computed=0, positions_reused=0, positions_missed=0, preemptions=0, most_running=0)
    """

    positions_computed: int = 0
    positions_reused: int = 0
    positions_missed: int = 0
    preemptions: int = 0
    most_running: int = 0


class Scheduler:
    """Queue, admission, and the steps of continuous batching.

    Parameters
    ----------
    stores : ModelStores
        May be used by others too, who may take blocks at any time.
    max_running : int, optional
        Requests that run at once at most.
    prefill_rows : int, optional
        Prompt tokens that one step computes at most, beside those that decode.
    share_prefixes : bool, optional
        Whether requests start on what is known of their tokens, and their own become known.

    Attributes
    ----------
    counts : SchedulerCounts
        What it has done so far.

    Raises
    ------
    TypeError, ValueError
        No stores; ``max_running`` or ``prefill_rows`` is no integer of at least 1.

    Notes
    -----
    Threads: belongs to one thread at a time. While it computes a step, requests may be submitted, and those that wait
    be cancelled.

    Examples
    --------
    >>> import numpy as np
    >>> from pagedkv.serving import LayerShape, ModelStores, Scheduler
    >>> scheduler = Scheduler(ModelStores([LayerShape(None, 1, 4)], total_blocks=8))
    >>> def compute(batch, running):
    ...     rows = np.ones((running.n_rows, 1, 4), np.float32)              # stands for the model
    ...     running.write(0, rows, rows)
    ...     return [9] * len(batch.asking)
    >>> request = scheduler.submit([5, 6, 7], max_new_tokens=2)
    >>> while not scheduler.is_idle:
    ...     ended = scheduler.step(compute)
    >>> request.generated, request.finish_reason
    ([9, 9], 'length')
    """

    def __init__(
        self, stores: ModelStores, *, max_running: int = 32, prefill_rows: int = 256, share_prefixes: bool = True
    ) -> None:
        if not isinstance(stores, ModelStores):
            raise TypeError(f"stores: expected a ModelStores, got {type(stores).__name__}")
        for name, value in (("max_running", max_running), ("prefill_rows", prefill_rows)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: expected a positive integer, got {value!r}")
        self.stores = stores
        self.counts = SchedulerCounts()
        self._max_running = max_running
        self._prefill_rows = prefill_rows
        self._share_prefixes = as_flag(share_prefixes, "share_prefixes")
        self._queue: deque[Request] = deque()
        self._running: list[Request] = []
        self._n_submitted = 0
        self._admits = True
        self._pass: ForwardPass | None = None  # the last one; open while it is computed

    @property
    def waiting(self) -> tuple[Request, ...]:
        """The one whose turn it is first."""
        return tuple(self._queue)

    @property
    def running(self) -> tuple[Request, ...]:
        """In the order of their admission."""
        return tuple(self._running)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self._queue and not self._running

    def check_fits(self, n_prompt: int, max_new_tokens: int) -> None:
        """Refuses a request that is empty, or larger than the stores.

        Parameters
        ----------
        n_prompt, max_new_tokens : int
            Tokens that it has, and the most that it may get.

        Raises
        ------
        TypeError, ValueError
            No integers; it could not run even if it were alone.
        """
        if as_count(n_prompt, "n_prompt") < 1:
            raise ValueError("the prompt has no tokens")
        as_size(max_new_tokens, "max_new_tokens", 1, sys.maxsize)
        # The last token that is generated is never computed itself.
        n_blocks = self.stores.blocks_for(n_prompt + max_new_tokens - 1)
        if n_blocks > self.stores.total_blocks:
            raise ValueError(
                f"{n_prompt} tokens and {max_new_tokens} new ones need {n_blocks} blocks of {self.stores.block_size}, "
                f"the stores have {self.stores.total_blocks}"
            )

    def submit(
        self,
        prompt: Tokens,
        max_new_tokens: int,
        *,
        stop_tokens: Iterable[SupportsIndex] = (),
        namespace: bytes | None = None,
    ) -> Request:
        """Queue a request. It ends with a stop token, with ``max_new_tokens``, or by `cancel`.

        Parameters
        ----------
        prompt : list, tuple, range or integer array ``[n]``
            Token ids, 0 to 2**63 - 1, one or more.
        max_new_tokens : int
            1 or more.
        stop_tokens : iterable of int, optional
            Token ids.
        namespace : bytes, optional
            Shares with requests of the same namespace only, as in `PrefixCache`.

        Returns
        -------
        Request

        Raises
        ------
        TypeError, ValueError
            An argument of a wrong kind; no tokens; more than the stores could hold even if it were alone.
        """
        tokens: list[int] = as_token_ids(prompt, "prompt").tolist()
        self.check_fits(len(tokens), max_new_tokens)
        n_new, stops, name = int(max_new_tokens), as_stop_tokens(stop_tokens), as_namespace(namespace)
        request = Request(self._n_submitted, tokens, n_new, ModelSequence(self.stores), stops, name)
        self._n_submitted += 1
        self._queue.append(request)
        return request

    def step(self, compute: Callable[[Batch, ForwardPass], Iterable[SupportsIndex]]) -> list[Request]:
        """Plan a forward pass, have it computed, and give the new tokens to their requests.

        Parameters
        ----------
        compute : callable
            ``compute(batch, running)`` writes and attends in all layers of the `ForwardPass` ``running``, and returns a
            token for each request of ``batch.asking``. An exception leaves all requests as they were before the pass.
            It is not called when there is nothing to compute.

        Returns
        -------
        list of Request
            Those that got a token, their ``tokens[-1]``. ``finish_reason`` says which of them have ended.

        Raises
        ------
        PagedStoreExhausted
            Others hold the blocks that a single request needs.
        TypeError, ValueError
            ``compute`` returned no token ids, or not as many as were asked for.
        RuntimeError
            ``compute`` did not write all layers, or has ended ``running``; a step is running.
        """
        if self._is_computing:
            raise RuntimeError("step: this scheduler is computing one")
        self._end_complete()
        if self.is_idle:
            return []
        batch, running = self._open()
        self._compute(batch, running, compute)
        self.counts.positions_computed += running.n_rows
        for request, n_rows in zip(batch.requests, batch.query_lens, strict=True):
            self._remember(request, n_rows)
            request.sequence.drop_unneeded()
        self._end_complete()
        return list(batch.asking)

    def cancel(self, request: Request) -> None:
        """End a request now, wherever it is. One that has ended stays as it is.

        Parameters
        ----------
        request : Request
            What `submit` returned.

        Raises
        ------
        TypeError, ValueError
            No request; one of another scheduler.
        RuntimeError
            It is running and a step is being computed.
        """
        if not isinstance(request, Request):
            raise TypeError(f"request: expected a Request, got {type(request).__name__}")
        if request in self._running:
            if self._is_computing:
                raise RuntimeError(f"request: {request!r} is being computed; cancel it when the step has returned")
        elif request not in self._queue:
            if request.finish_reason is None:
                raise ValueError(f"request: expected one of this scheduler, got {request!r}")
            return
        self._end(request, request.finish_reason or "cancelled")

    def close(self) -> None:
        """Cancel all requests. No request holds a block any more; what the prefix caches know stays known.

        Raises
        ------
        RuntimeError
            A step is being computed.
        """
        for request in (*self._running, *self._queue):
            self.cancel(request)

    # --- a step ---

    @property
    def _is_computing(self) -> bool:
        return self._pass is not None and self._pass.is_open

    def _plan(self) -> Batch:
        """Admits what fits, and says how many tokens of which request the next pass computes."""
        self._admit()
        rows = []
        rows_left = self._prefill_rows
        for request in self._running:
            n_rows = 1 if request.n_pending == 1 else min(request.n_pending, rows_left)
            if n_rows:
                rows.append((request, n_rows))
            if request.n_pending > 1:
                rows_left -= n_rows
        return Batch.of(rows)

    def _open(self) -> tuple[Batch, ForwardPass]:
        """The next batch that there are blocks for."""
        while True:
            batch = self._plan()
            try:
                return batch, ForwardPass(self.stores, [each.sequence for each in batch.requests], batch.query_lens)
            except PagedStoreExhausted:
                if not self._preempt():
                    raise

    def _compute(
        self, batch: Batch, running: ForwardPass, compute: Callable[[Batch, ForwardPass], Iterable[SupportsIndex]]
    ) -> None:
        """K and V of the batch and its tokens are there, or nothing is."""
        lengths = [len(request.tokens) for request in batch.asking]
        try:
            self._pass = running
            found = compute(batch, running)
            given = tuple(found) if isinstance(found, Iterator) else cast(Tokens, found)
            tokens: list[int] = as_token_ids(given, "compute").tolist()
            if len(tokens) != len(batch.asking):
                raise ValueError(f"compute: expected {len(batch.asking)} tokens, got {len(tokens)}")
            running.commit()
            for request, token in zip(batch.asking, tokens, strict=True):
                request.tokens.append(token)
        except BaseException:
            running._take_back()  # compute may have committed it
            for request, length in zip(batch.asking, lengths, strict=True):
                del request.tokens[length:]
            raise

    def _remember(self, request: Request, n_new: int) -> None:
        """What has been computed becomes known, whenever a block is full."""
        n = request.sequence.seq_len
        size = self.stores.block_size
        if self._share_prefixes and n // size > (n - n_new) // size:
            self.stores.prefixes.insert(request.tokens[:n], request.sequence, namespace=request.namespace)

    # --- who runs ---

    def _admit(self) -> None:
        if not self._admits:
            return
        for request in list(islice(self._queue, self._max_running - len(self._running))):
            if request not in self._running:  # an interrupt may have left it in both
                if self._is_about_to_be_known(request):
                    continue
                if not self._start(request):
                    break  # it keeps its turn: a smaller one behind it must not overtake for ever
                self._running.append(request)
            self._queue.remove(request)
        self.counts.most_running = max(self.counts.most_running, len(self._running))

    def _is_about_to_be_known(self, request: Request) -> bool:
        """Whether waiting for the prompts that are being computed spares it a block or more."""
        if not self._share_prefixes:
            return False
        size = self.stores.block_size
        n_promised = 0
        for other in self._running:
            if other.n_pending > 1 and other.namespace == request.namespace:
                n_whole = len(other.tokens) - len(other.tokens) % size
                n_common = min(_common_prefix(request.tokens, other.tokens), len(request.tokens) - 1)
                n_promised = max(n_promised, min(n_common, n_whole))
        if n_promised < size:
            return False
        return n_promised >= size + self.stores.prefixes.match(request.tokens, namespace=request.namespace)

    def _start(self, request: Request) -> bool:
        """Takes the blocks of what is to be computed; False if they are not free while others run."""
        sequence = request.sequence
        sequence.release()  # an interrupt may have left it with blocks
        try:
            n_reused = 0
            if self._share_prefixes:
                n_reused = self.stores.prefixes.attach(sequence, request.tokens, namespace=request.namespace)
                sequence.drop_unneeded()
            # Where nobody runs who could give back, the stores are asked: their refusal says what is missing.
            if self._running and not self._has_room(sequence, request.n_pending):
                sequence.release()
                return False
            sequence.reserve(request.n_pending, chunk=self._prefill_rows)
        except PagedStoreExhausted:  # or another thread was faster
            sequence.release()
            if not self._running:
                raise
            return False
        if request.n_reused is None:
            request.n_reused = n_reused
        self.counts.positions_reused += n_reused
        self.counts.positions_missed += request.n_pending
        return True

    def _has_room(self, sequence: ModelSequence, n_new: int) -> bool:
        """Whether so many positions more fit into all stores, with eviction."""
        for group, cache in zip(self.stores.groups, sequence.caches, strict=True):
            n_positions = cache.seq_len + group.shape.most_held(n_new, self._prefill_rows, self.stores.block_size)
            asked = Waiting(n_positions=n_positions, cache=cache)
            [answer] = plan_admission(group.store, [asked], prefix=group.prefix)
            if not answer.can_start:
                return False
        return True

    def _preempt(self) -> bool:
        """Makes room: the request admitted last gives its blocks back and waits again, at the head of the queue.

        Nobody is admitted then until a request ends, or two would push each other out in turn. False if a
        single request is running.
        """
        if len(self._running) < 2:
            return False
        # In this order: an interrupt in between leaves it in both places rather than in none.
        self._queue.appendleft(self._running[-1])
        self._running.pop().sequence.release()
        self._admits = False
        self.counts.preemptions += 1
        return True

    def _end(self, request: Request, reason: Literal["stop", "length", "cancelled"]) -> None:
        request.finish_reason = reason
        request.sequence.release()
        for place in (self._running, self._queue):
            if request in place:
                place.remove(request)
        self._admits = True

    def _end_complete(self) -> None:
        """Those that have their last token, and those that an interrupt left on their way out."""
        for request in self.running:
            if reason := request.finish_reason or request.end:
                self._end(request, reason)


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
