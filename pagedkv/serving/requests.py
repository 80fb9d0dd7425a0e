"""What a scheduler is given, and what it makes of it: requests, and batches of their rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from pagedkv import ModelSequence, PrefixHandle
from pagedkv.serving.loading import Coming
from pagedkv.serving.tokens import TokenIds


class Request:
    """A prompt, and what it is continued with. `Scheduler.submit` makes it.

    Attributes
    ----------
    number : int
        Its place among all that the scheduler was given.
    tokens : TokenIds
        The prompt, then what was generated: to be read like a list.
    n_prompt, max_new_tokens : int
        Tokens of the prompt, and the most that are generated.
    stop_tokens : frozenset of int
        End it.
    namespace : bytes or None
        In which it shares.
    sequence : ModelSequence
        The K/V of the tokens that are computed so far.
    num_cached_tokens : int or None
        Positions that were known when it first started.
    n_loaded : int
        Those of them that a tier has brought.
    finish_reason : None, "stop", "length" or "cancelled"
        None as long as it waits or runs.

    Notes
    -----
    Threads: belongs to its scheduler's thread.

    Examples
    --------
    >>> from pagedkv.serving import LayerShape, ModelStores, Scheduler
    >>> scheduler = Scheduler(ModelStores([LayerShape(None, 1, 4)], total_blocks=8))
    >>> scheduler.submit([5, 6, 7], max_new_tokens=4)
    Request(0, 3+0 tokens, 3 pending)
    """

    def __init__(
        self,
        number: int,
        tokens: TokenIds,
        max_new_tokens: int,
        sequence: ModelSequence,
        stop_tokens: frozenset[int],
        namespace: bytes | None,
    ) -> None:
        self.number = number
        self.tokens = tokens
        self.n_prompt = len(self.tokens)
        self.max_new_tokens = max_new_tokens
        self.stop_tokens = stop_tokens
        self.namespace = namespace
        self.sequence = sequence
        self.num_cached_tokens: int | None = None
        self.n_loaded = 0
        self.finish_reason: Literal["stop", "length", "cancelled"] | None = None
        self._handle = PrefixHandle()  # how far the prefix cache has been told of its sequence
        self._coming: Coming | None = None  # from a tier
        self._awaited: tuple[Request, int] | None = None  # who computes its first so many tokens

    @property
    def generated(self) -> list[int]:
        """The tokens that were found so far."""
        return self.tokens[self.n_prompt :]

    @property
    def n_generated(self) -> int:
        """How many these are."""
        return len(self.tokens) - self.n_prompt

    @property
    def n_pending(self) -> int:
        """Tokens whose K/V is still to be computed; 1 while decoding."""
        return self.tokens._n - self.sequence.seq_len

    @property
    def end(self) -> Literal["stop", "length"] | None:
        """What its last token ends it with, if it does."""
        n_generated = self.tokens._n - self.n_prompt
        if n_generated and self.stop_tokens and self.tokens[-1] in self.stop_tokens:
            return "stop"
        return "length" if n_generated >= self.max_new_tokens else None

    @property
    def _ids(self) -> npt.NDArray[np.int64]:
        return self.tokens._ids[: self.tokens._n]

    def _release(self) -> None:
        """Gives its blocks back; what it computes from now on begins anew."""
        self._handle = PrefixHandle()
        self.sequence.release()

    def __repr__(self) -> str:
        state = self.finish_reason or f"{self.n_pending} pending"
        return f"Request({self.number}, {self.n_prompt}+{self.n_generated} tokens, {state})"


@dataclass(frozen=True)
class Batch:
    """What one forward pass computes: rows of all requests, one after the other. `Scheduler.step` makes it.

    Attributes
    ----------
    requests : tuple of Request
        Whose rows they are, in order.
    query_lens : tuple of int
        Rows of each; 1 for those that decode.
    token_ids, positions : list of int
        Of every row.
    sampled : tuple of Request
        Those that get a token from this pass, since it computes the last of what they have.
    logits_indices : list of int
        The rows of the batch whose logits it is taken from.

    Notes
    -----
    Threads: belongs to its scheduler's thread.

    Examples
    --------
    >>> from pagedkv.serving import Batch, LayerShape, ModelStores, Scheduler
    >>> scheduler = Scheduler(ModelStores([LayerShape(None, 1, 4)], total_blocks=8))
    >>> batch = Batch.of([(scheduler.submit([5, 6, 7], max_new_tokens=4), 2)])
    >>> batch.token_ids, batch.positions, batch.sampled          # the third token is left for the next pass
    ([5, 6], [0, 1], ())
    """

    requests: tuple[Request, ...]
    query_lens: tuple[int, ...]
    token_ids: list[int]
    positions: list[int]
    sampled: tuple[Request, ...]
    logits_indices: list[int]

    @classmethod
    def of(cls, rows: Iterable[tuple[Request, int]]) -> Batch:
        """The next so many tokens of each request.

        Parameters
        ----------
        rows : iterable of (Request, int)
            Requests, and how many of their pending tokens.

        Returns
        -------
        Batch

        Raises
        ------
        TypeError
            No such pairs.
        """
        requests, query_lens = [], []
        token_ids: list[int] = []
        positions: list[int] = []
        sampled, logits_indices = [], []
        for request, n_rows in rows:
            tokens, first = request.tokens, request.sequence.seq_len
            requests.append(request)
            query_lens.append(n_rows)
            token_ids += tokens._ids[first : min(first + n_rows, tokens._n)].tolist()
            positions += range(first, first + n_rows)
            if first + n_rows == tokens._n:
                sampled.append(request)
                logits_indices.append(len(token_ids) - 1)
        return cls(tuple(requests), tuple(query_lens), token_ids, positions, tuple(sampled), logits_indices)
