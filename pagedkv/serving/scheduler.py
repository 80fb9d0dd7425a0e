"""Who computes what next: continuous batching over a fixed number of blocks.

Requests wait in a queue, run, and end. One is admitted when the stores have the blocks of its prompt, and starts
on what the prefix caches know of it: what running and ended requests with the same beginning have computed. When it
ends it gives its blocks back; the prefix caches hold them until somebody needs the room. When there are no blocks
left for the next step, the request that was admitted last is preempted: it goes back to the head of the queue, and
computes again what is no longer known by then. The oldest never is, so every request that fits alone ends.

An interrupt may come between any two instructions. Whoever holds blocks is among the running; a request that moves is
for a moment in two places rather than in none, and runs then. A pass is either taken back or carried out to its end,
which doing twice changes nothing: the next call begins with what an interrupt has left.
"""

from __future__ import annotations

import math
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from types import GeneratorType
from typing import Literal, SupportsIndex, cast

from pagedkv import ModelSequence, ModelStores, PagedStoreExhausted, Step
from pagedkv._arrays import as_flag, as_size
from pagedkv._keys import Tokens, as_count, as_namespace, as_share, as_stop_tokens, as_token_ids
from pagedkv.serving.admission import has_room, is_about_to_be_known
from pagedkv.serving.counts import SchedulerCounts
from pagedkv.serving.loading import Tiered, check_tiered
from pagedkv.serving.requests import Batch, Request
from pagedkv.serving.tokens import TokenIds

_POLL = 0.001  # seconds after which those that are loaded are looked at again, when nobody runs


class _Lent(Step):
    """A step that whoever computes it writes and attends, and its scheduler ends."""

    def commit(self) -> None:
        raise RuntimeError("step: its scheduler ends it, when compute has returned")

    rollback = commit


@dataclass(eq=False)
class _Pass:
    """A forward pass from its opening to its end."""

    batch: Batch
    step: _Lent
    n_computed: int  # `counts.positions_computed` before it
    unknown: list[tuple[Request, int]]  # whose new rows the prefix caches are still to be told of, the first one last
    computing: Generator[list[int], None, None] | None = None
    tokens: list[int] | None = None  # once they are there, it is carried out; before, it is taken back

    @property
    def is_computing(self) -> bool:
        """A generator knows by itself whether it runs, whatever interrupts it."""
        return isinstance(self.computing, GeneratorType) and self.computing.gi_running


class Scheduler:
    """Queue, admission, and the steps of continuous batching.

    Parameters
    ----------
    stores : ModelStores
        May be used by others too, who may take blocks at any time.
    max_running : int, optional
        Requests that run at once at most.
    max_prefill_tokens : int, optional
        Prompt tokens that one step computes at most, beside those that decode.
    share_prefixes : bool, optional
        Whether requests start on what is known of their tokens, and their own become known.
    watermark : float, optional
        The share of the stores' bytes, 0 to 1, that stays free or evictable when a request starts while others run:
        ``ceil(watermark * stores.total_blocks)`` blocks of each store. They grow into these, so that one that just fits
        is not preempted at its next block.
    tiered : TieredPrefixes, optional
        Of these stores' ``prefixes``. What a request begins with and memory does not know is loaded from its tier when
        its turn comes: it waits for that, until the deadline, while the others go on. What is computed is stored when
        the prompt is done, and when the request ends.

    Attributes
    ----------
    counts : SchedulerCounts
        What it has done so far.

    Raises
    ------
    TypeError, ValueError
        No stores; ``max_running`` or ``max_prefill_tokens`` is no integer of at least 1; ``watermark`` no number from 0
        to 1; ``tiered`` is of other stores, or prefixes are not shared.

    Notes
    -----
    Threads: belongs to one thread at a time. While it computes a step, requests may be submitted, and those that wait
    be cancelled.

    Examples
    --------
    >>> import numpy as np
    >>> from pagedkv.serving import LayerShape, ModelStores, Scheduler
    >>> scheduler = Scheduler(ModelStores([LayerShape(None, 1, 4)], total_blocks=8))
    >>> def compute(batch, step):
    ...     rows = np.ones((step.n_rows, 1, 4), np.float32)              # stands for the model
    ...     step.write(0, rows, rows)
    ...     return [9] * len(batch.sampled)
    >>> request = scheduler.submit([5, 6, 7], max_new_tokens=2)
    >>> while not scheduler.is_idle:
    ...     ended = scheduler.step(compute)
    >>> request.generated, request.finish_reason
    ([9, 9], 'length')
    """

    def __init__(
        self,
        stores: ModelStores,
        *,
        max_running: SupportsIndex = 32,
        max_prefill_tokens: SupportsIndex = 256,
        share_prefixes: bool = True,
        watermark: float = 0.01,
        tiered: Tiered | None = None,
    ) -> None:
        if not isinstance(stores, ModelStores):
            raise TypeError(f"stores: expected a ModelStores, got {type(stores).__name__}")
        self._watermark = as_share(watermark, "watermark")
        self.stores = stores
        self.counts = SchedulerCounts()
        self._max_running = as_size(max_running, "max_running", 1, sys.maxsize)
        self._max_prefill_tokens = as_size(max_prefill_tokens, "max_prefill_tokens", 1, sys.maxsize)
        self._share_prefixes = as_flag(share_prefixes, "share_prefixes")
        if tiered is not None:
            check_tiered(tiered, stores)
            if not self._share_prefixes:
                raise ValueError("tiered: expected None where prefixes are not shared, got one")
        self._tiered = tiered
        # Ordered sets: nothing that a step does depends on how many wait.
        self._queue: OrderedDict[Request, None] = OrderedDict()
        self._running: OrderedDict[Request, None] = OrderedDict()
        self._n_submitted = 0
        self._admits = True
        self._pass: _Pass | None = None  # the one that is computed, or that an interrupt has left

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

    def check_fits(self, n_prompt: SupportsIndex, max_new_tokens: SupportsIndex) -> None:
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
        n_tokens = as_count(n_prompt, "n_prompt")
        if n_tokens < 1:
            raise ValueError("the prompt has no tokens")
        n_new = as_size(max_new_tokens, "max_new_tokens", 1, sys.maxsize)
        # The last token that is generated is never computed itself.
        n_positions = min(n_tokens + n_new - 1, sys.maxsize)
        stores, chunk = self.stores, self._max_prefill_tokens
        if not stores.can_ever_fit(n_positions, chunk=chunk):
            n_blocks = stores.blocks_for(n_positions, chunk=chunk)
            n_most = max([store.total_blocks for store in stores.stores])
            needed = f"{n_blocks} blocks of {stores.block_size}, the stores have {n_most}"
            if n_blocks <= n_most:
                needed = f"{stores.bytes_for(n_positions, chunk=chunk)} bytes, the stores have {stores.nbytes}"
            raise ValueError(f"{n_tokens} tokens and {n_new} new ones need {needed}")

    def submit(
        self,
        prompt: Tokens,
        max_new_tokens: SupportsIndex,
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
        ids = as_token_ids(prompt, "prompt")
        n_new = as_size(max_new_tokens, "max_new_tokens", 1, sys.maxsize)
        self.check_fits(len(ids), n_new)
        stops, name = as_stop_tokens(stop_tokens), as_namespace(namespace)
        request = Request(self._n_submitted, TokenIds(ids), n_new, ModelSequence(self.stores), stops, name)
        self._n_submitted += 1
        self._queue[request] = None
        return request

    def step(self, compute: Callable[[Batch, Step], Iterable[SupportsIndex]]) -> list[Request]:
        """Plan a forward pass, have it computed, and give the new tokens to their requests.

        Parameters
        ----------
        compute : callable
            ``compute(batch, step)`` writes and attends in all layers of the open `pagedkv.Step` ``step``, and returns a
            token for each request of ``batch.sampled``. An exception leaves all requests as they were before the pass.
            It is not called when there is nothing to compute, or while all requests wait for a tier: then a step takes
            a millisecond, and is to be called again.

        Returns
        -------
        list of Request
            Those that got a token, their ``tokens[-1]``. ``finish_reason`` says which of them have ended.

        Raises
        ------
        PagedStoreExhausted
            Others hold the blocks that a single request needs.
        TypeError, ValueError
            ``compute`` returned no token ids, or not as many as were asked for. In stores with ``debug=True``: K or V
            that are not finite cannot be known; the tokens stay.
        RuntimeError
            ``compute`` did not write all layers, or wanted to end its step itself; a step is running.
        """
        if self._is_computing:
            raise RuntimeError("step: this scheduler is computing one")
        try:
            self._settle()
            opened = self._open()
            if opened is None:
                return []
            opened.computing = self._compute(opened, compute)
            [opened.tokens] = opened.computing
            self._settle()
        except BaseException:
            self._settle()
            raise
        return list(opened.batch.sampled)

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
        if not self._is_computing:
            self._settle()
        elif request in self._running:
            raise RuntimeError(f"request: {request!r} is being computed; cancel it when the step has returned")
        if request in self._running or request in self._queue:
            self._end(request, "cancelled")
        elif request.finish_reason is None:
            raise ValueError(f"request: expected one of this scheduler, got {request!r}")

    def close(self) -> None:
        """Cancel all requests. No request holds a block any more; what the prefix caches know stays known.

        Raises
        ------
        RuntimeError
            A step is being computed.
        """
        if self._is_computing:
            raise RuntimeError("close: a step is being computed")
        for request in (*self._running, *self._queue):
            self.cancel(request)

    # --- a step ---

    @property
    def _is_computing(self) -> bool:
        return self._pass is not None and self._pass.is_computing

    def _open(self) -> _Pass | None:
        """The next batch that there are blocks for, if there is one."""
        while True:
            self._admit()
            if not self._running:
                if self._tiered is not None and self._queue:
                    time.sleep(_POLL)
                return None
            batch = self._plan()
            step = _Lent(self.stores, [each.sequence for each in batch.requests], batch.query_lens)
            rows = list(zip(batch.requests, batch.query_lens, strict=True))
            # Known before it opens: an interrupt may leave it open.
            self._pass = _Pass(batch, step, self.counts.positions_computed, rows[::-1])
            try:
                step.__enter__()
                return self._pass
            except PagedStoreExhausted:
                if not self._preempt():
                    if self._tiered is None or not self._tiered.is_busy:
                        raise
                    self._pass = None
                    time.sleep(_POLL)
                    return None

    def _plan(self) -> Batch:
        """How many tokens of which request the next pass computes."""
        rows = []
        rows_left = self._max_prefill_tokens
        for request in self._running:
            n_rows = n_pending = request.n_pending
            if n_pending > 1:
                n_rows = min(n_pending, rows_left)
                rows_left -= n_rows
            if n_rows:
                rows.append((request, n_rows))
        return Batch.of(rows)

    def _compute(
        self, opened: _Pass, compute: Callable[[Batch, Step], Iterable[SupportsIndex]]
    ) -> Generator[list[int], None, None]:
        """Yields once, the tokens that were asked for, when K and V of the batch are written."""
        n_sampled = len(opened.batch.sampled)
        found = compute(opened.batch, opened.step)
        given = tuple(found) if isinstance(found, Iterator) else cast(Tokens, found)
        tokens: list[int] = as_token_ids(given, "compute").tolist()
        if len(tokens) != n_sampled:
            raise ValueError(f"compute: expected {n_sampled} tokens, got {len(tokens)}")
        if missing := opened.step.unwritten_layers:
            raise RuntimeError(f"compute: expected all layers to be written, {list(missing)} were not")
        yield tokens

    def _settle(self) -> None:
        """Ends what has begun: a pass that has its tokens is carried out, another one taken back."""
        last = self._pass
        if last is not None:
            if last.step.state == "open":
                (Step.rollback if last.tokens is None else Step.commit)(last.step)
            if last.step.state == "committed" and last.tokens is not None:
                self._carry_out(last, last.tokens)
            self._pass = None
        for request in [request for request in self._running if request.finish_reason is not None]:
            self._end(request, "cancelled")  # an interrupt came first

    def _carry_out(self, done: _Pass, tokens: list[int]) -> None:
        """What has been computed is counted, and known; the tokens go to their requests, of which some end."""
        batch, failure = done.batch, None
        self.counts.positions_computed = done.n_computed + done.step.n_rows
        for request, row, token in zip(batch.sampled, batch.logits_indices, tokens, strict=True):
            request.tokens._put(batch.positions[row] + 1, token)
        while done.unknown:  # each is tried once: one that fails must not be in the way of all that follows
            request, n_rows = done.unknown.pop()
            try:
                self._remember(request, n_rows)
            except Exception as error:
                failure = error
            request.sequence.drop_unneeded()
        if self._tiered is not None:
            for request in batch.sampled:
                self._store(request, self._tiered)
        for request in batch.sampled:
            if reason := request.end:
                self._end(request, reason)
        if failure is not None:
            raise failure

    def _remember(self, request: Request, n_new: int) -> None:
        """What has been computed becomes known, whenever a block is full."""
        sequence = request.sequence
        n = sequence.seq_len
        if self._share_prefixes and n % self.stores.block_size < n_new:
            ids, handle = request._ids[:n], request._handle
            self.stores.prefixes.insert(ids, sequence, namespace=request.namespace, handle=handle)

    def _store(self, request: Request, tiered: Tiered) -> None:
        """At the places where another request may go on: where it started, at its prompt's end, and at its own."""
        ends = [request.num_cached_tokens or 0, request.n_prompt] if request.n_generated == 1 else []
        for n in [*ends, request.sequence.seq_len] if request.end else ends:
            if n:
                tiered.store(request._ids[:n], namespace=request.namespace)

    # --- who runs ---

    def _admit(self) -> None:
        n_most = self._max_running - len(self._running)
        if not self._queue or n_most <= 0 or (self._running and not self._admits):
            return
        prefilling = [request for request in self._running if request.n_pending > 1]
        n_loading = 0  # blocks of each store for those that are loaded, or what comes would push out what has come
        for request in list(islice(self._queue, n_most)):
            # An interrupt may have left it in both, or when it was about to leave.
            if request not in self._running and request.finish_reason is None:
                if self._share_prefixes and is_about_to_be_known(self.stores, request, prefilling):
                    continue
                if self._tiered is not None:
                    if request._coming is None and not self._may_start(request, n_loading):
                        break
                    if self._is_loading(request, self._tiered):
                        n_loading += self.stores.blocks_for(len(request.tokens), chunk=self._max_prefill_tokens)
                        continue
                if not self._start(request, n_loading):
                    break  # it keeps its turn: a smaller one behind it must not overtake for ever
                if request.n_pending > 1:
                    prefilling.append(request)
            self._queue.pop(request, None)
        self.counts.most_running = max(self.counts.most_running, len(self._running))

    def _is_loading(self, request: Request, tiered: Tiered) -> bool:
        """Once for each request: what has failed, or come too late, is not tried again."""
        if request._coming is None:
            request._coming = tiered.load(request._ids, namespace=request.namespace)
        return not request._coming.is_done

    def _may_start(self, request: Request, n_loading: int) -> bool:
        """Whether there is room beside those that run, and those that are loaded; for one that is alone there is."""
        if not self._running and not n_loading:
            return True
        n_kept = math.ceil(self._watermark * self.stores.total_blocks) if self._running else 0
        n_kept = min(n_kept + n_loading, self.stores.total_blocks)
        return has_room(self.stores, request, self._max_prefill_tokens, self._share_prefixes, n_kept)

    def _start(self, request: Request, n_loading: int) -> bool:
        """Takes the blocks of what is to be computed; False if they are not free while others run or are loaded."""
        sequence, others = request.sequence, bool(self._running or n_loading)
        if not self._may_start(request, n_loading):
            return False
        if not others and not has_room(self.stores, request, self._max_prefill_tokens, self._share_prefixes, 0):
            if self._tiered is not None and self._tiered.is_busy:
                return False
            # Nobody runs who could give back. The stores are asked: their refusal says what is missing.
            sequence.reserve(request.n_pending, chunk=self._max_prefill_tokens)
            sequence.release()
        self._running[request] = None
        n_cached = 0
        try:
            if self._share_prefixes:
                n_cached = self.stores.prefixes.attach(sequence, request._ids, namespace=request.namespace)
                sequence.drop_unneeded()
            sequence.reserve(request.n_pending, chunk=self._max_prefill_tokens)
        except PagedStoreExhausted:  # another thread was faster
            sequence.release()
            del self._running[request]
            if not others:
                raise
            return False
        self._count_start(request, n_cached)
        return True

    def _count_start(self, request: Request, n_cached: int) -> None:
        counts = self.counts
        if request.num_cached_tokens is None:
            request.num_cached_tokens = n_cached
            counts.positions_reused += n_cached
            if request._coming is not None:
                request.n_loaded = min(request._coming.wait().tokens, n_cached)
                counts.positions_loaded += request.n_loaded
            counts.positions_missed += request.n_pending
        else:
            counts.positions_restored += n_cached
            counts.positions_recomputed += request.n_pending

    def _preempt(self) -> bool:
        """Makes room: the request admitted last gives its blocks back and waits again, at the head of the queue.

        Nobody is admitted then until a request ends, or two would push each other out in turn. False if a
        single request is running.
        """
        if len(self._running) < 2:
            return False
        request = next(reversed(self._running))
        self._queue[request] = None
        self._queue.move_to_end(request, last=False)
        request._release()
        del self._running[request]
        self._admits = False
        self.counts.preemptions += 1
        return True

    def _end(self, request: Request, reason: Literal["stop", "length", "cancelled"]) -> None:
        """Also one that an interrupt left on its way out: it ends as it was about to."""
        if request.finish_reason is None:
            request.finish_reason = reason
        self._admits = True
        if request._coming is not None:
            request._coming.cancel()
        request._release()
        self._queue.pop(request, None)
        self._running.pop(request, None)
