"""The model over a scheduler's batches: one forward pass for everything that runs, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pagedkv import Step
from pagedkv.demo.model import F32, Gemma3
from pagedkv.demo.sampling import greedy
from pagedkv.serving import Batch, Request, Scheduler
from pagedkv.tiers import TieredPrefixes


@dataclass
class Work:
    """Tokens and time of one kind of step."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Engine:
    """Computes whatever its scheduler has been given.

    Attributes
    ----------
    prefill : Work
        Steps that compute prompts, also those in which others decode meanwhile: prompt tokens.
    decode : Work
        Steps in which every request decodes: tokens generated.
    attention_seconds : float
    peak_blocks : list of int
        The most blocks of each store that sequences held.
    peak_bytes : int
        The most K/V that sequences held.
    """

    def __init__(
        self, model: Gemma3, scheduler: Scheduler, stop_tokens: Iterable[int], tiered: TieredPrefixes | None = None
    ) -> None:
        self.prefill = Work()
        self.decode = Work()
        self.attention_seconds = 0.0
        self.peak_blocks = [0 for _ in scheduler.stores.groups]
        self.peak_bytes = 0
        self._model = model
        self._scheduler = scheduler
        self._tiered = tiered
        self._stop_tokens = frozenset(stop_tokens)
        self._choosers: dict[Request, Callable[[F32], int]] = {}
        self._n_prefilled = self._n_decoded = 0  # rows of the batch that was computed last

    def submit(
        self, prompt: Sequence[int], max_tokens: int, choose: Callable[[F32], int] = greedy
    ) -> Request:
        """As `Scheduler.submit`; `choose` finds the next token from its logits, [vocabulary]."""
        request = self._scheduler.submit(prompt, max_tokens, stop_tokens=self._stop_tokens)
        self._choosers[request] = choose
        return request

    def step(self) -> list[Request]:
        """Computes one step; returns the requests that got a token, their last."""
        started = time.perf_counter()
        self._n_prefilled = self._n_decoded = 0  # unless something is computed
        sampled = self._scheduler.step(self._compute)
        seconds = time.perf_counter() - started
        for request in sampled:
            if request.finish_reason:
                del self._choosers[request]
        if self._n_prefilled:
            self.prefill.tokens += self._n_prefilled
            self.prefill.seconds += seconds
        elif self._n_decoded:
            self.decode.tokens += self._n_decoded
            self.decode.seconds += seconds
        return sampled

    def cancel(self, request: Request) -> None:
        """Ends a request and gives its blocks back, whether it runs, waits or has ended before."""
        self._scheduler.cancel(request)
        self._choosers.pop(request, None)

    def close(self) -> None:
        """Drops all requests and what is known, when the tier has stored it; every block is free again."""
        self._scheduler.close()
        if self._tiered is not None:
            self._tiered.close()
        self._scheduler.stores.prefixes.clear()
        self._choosers.clear()

    def _compute(self, batch: Batch, step: Step) -> list[int]:
        def attend(layer: int, q: F32, k: F32, v: F32) -> F32:
            started = time.perf_counter()
            step.write(layer, k, v)
            out: F32 = step.attend(layer, q, scale=self._model.config.attention_scale)
            self.attention_seconds += time.perf_counter() - started
            return out

        hidden: F32 = self._model.forward(batch.token_ids, np.array(batch.positions), attend)
        logits = self._model.logits(hidden[batch.logits_indices]) if batch.sampled else ()
        for request, n_rows in zip(batch.requests, batch.query_lens, strict=True):
            if n_rows > 1 or not request.n_generated:
                self._n_prefilled += n_rows
            else:
                self._n_decoded += n_rows
        stores = self._scheduler.stores
        in_use = [group.n_blocks_in_use for group in stores.groups]
        self.peak_blocks = list(map(max, self.peak_blocks, in_use))
        self.peak_bytes = max(self.peak_bytes, stores.nbytes_in_use)
        return [self._choosers[request](row) for request, row in zip(batch.sampled, logits, strict=True)]
