"""The serving loop: one forward pass for everything that runs, step by step."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from pagedkv import PagedStoreExhausted
from pagedkv.demo.kv import ModelKv
from pagedkv.demo.model import F32, Gemma3
from pagedkv.demo.scheduler import Request, Scheduler


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
    peak_bytes : int
        The most K/V that was held at the end of a step.
    """

    def __init__(self, model: Gemma3, kv: ModelKv, scheduler: Scheduler, stop_tokens: set[int]) -> None:
        self.prefill = Work()
        self.decode = Work()
        self.peak_bytes = 0
        self._model = model
        self._kv = kv
        self._scheduler = scheduler
        self._stop_tokens = stop_tokens

    def step(self) -> list[tuple[Request, int]]:
        """Computes one step; returns the requests that got a token, and which. `is_done` says who has ended."""
        started = time.perf_counter()
        while True:
            batch = self._scheduler.plan()
            try:
                new_tokens = self._compute(batch)
                break
            except PagedStoreExhausted:
                if not self._scheduler.send_back():
                    raise
        self.peak_bytes = max(self.peak_bytes, self._kv.bytes_held)
        for request, _ in batch:
            request.kv.remember(request.tokens)
        for request, token in new_tokens:
            request.tokens.append(token)
            if token in self._stop_tokens or len(request.generated) == request.max_tokens:
                self._scheduler.finish(request)
        seconds = time.perf_counter() - started
        n_rows = sum(rows for _, rows in batch)
        if n_rows > len(batch):
            self.prefill.tokens += sum(rows for _, rows in batch if rows > 1)
            self.prefill.seconds += seconds
        else:
            self.decode.tokens += n_rows
            self.decode.seconds += seconds
        return new_tokens

    def _compute(self, batch: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """One forward pass. The tokens that follow are known before it commits; an exception changes nothing."""
        query_lens = [n_rows for _, n_rows in batch]
        tokens: list[int] = []
        positions, last_rows, asking = [], [], []
        for request, n_rows in batch:
            first = request.kv.seq_len
            tokens += request.tokens[first : first + n_rows]
            positions.append(np.arange(first, first + n_rows))
            if n_rows == request.n_pending:
                last_rows.append(len(tokens) - 1)
                asking.append(request)
        with self._kv.forward_pass([request.kv for request, _ in batch], query_lens) as attend:
            hidden: F32 = self._model.forward(tokens, np.concatenate(positions), attend)
            logits = self._model.logits(hidden[last_rows]) if asking else ()
            return [(request, request.choose(row)) for request, row in zip(asking, logits, strict=True)]
