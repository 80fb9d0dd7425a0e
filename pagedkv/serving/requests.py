"""What a scheduler is given, and what it makes of it: requests, and batches of their rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pagedkv.serving.sequences import ModelSequence


class Request:
    """A prompt, and what it is continued with. `Scheduler.submit` makes it.

    Attributes
    ----------
    number : int
        Its place among all that the scheduler was given.
    tokens : list of int
        The prompt, then what was generated.
    n_prompt, max_new_tokens : int
        Tokens of the prompt, and the most that are generated.
    stop_tokens : frozenset of int
        End it.
    namespace : bytes or None
        In which it shares.
    sequence : ModelSequence
        The K/V of the tokens that are computed so far.
    n_reused : int or None
        Positions that were known when it first started.
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
        prompt: list[int],
        max_new_tokens: int,
        sequence: ModelSequence,
        stop_tokens: frozenset[int],
        namespace: bytes | None,
    ) -> None:
        self.number = number
        self.tokens = prompt
        self.n_prompt = len(self.tokens)
        self.max_new_tokens = max_new_tokens
        self.stop_tokens = stop_tokens
        self.namespace = namespace
        self.sequence = sequence
        self.n_reused: int | None = None
        self.finish_reason: Literal["stop", "length", "cancelled"] | None = None

    @property
    def generated(self) -> list[int]:
        """The tokens that were found so far."""
        return self.tokens[self.n_prompt :]

    @property
    def n_pending(self) -> int:
        """Tokens whose K/V is still to be computed; 1 while decoding."""
        return len(self.tokens) - self.sequence.seq_len

    @property
    def end(self) -> Literal["stop", "length"] | None:
        """What its last token ends it with, if it does."""
        if len(self.tokens) > self.n_prompt and self.tokens[-1] in self.stop_tokens:
            return "stop"
        return "length" if len(self.tokens) - self.n_prompt >= self.max_new_tokens else None

    def __repr__(self) -> str:
        state = self.finish_reason or f"{self.n_pending} pending"
        return f"Request({self.number}, {self.n_prompt}+{len(self.tokens) - self.n_prompt} tokens, {state})"


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
    asking : tuple of Request
        Those that get a token from this pass, since it computes the last of what they have.
    asking_rows : list of int
        The rows whose logits say it.

    Notes
    -----
    Threads: belongs to its scheduler's thread.

    Examples
    --------
    >>> from pagedkv.serving import Batch, LayerShape, ModelStores, Scheduler
    >>> scheduler = Scheduler(ModelStores([LayerShape(None, 1, 4)], total_blocks=8))
    >>> batch = Batch.of([(scheduler.submit([5, 6, 7], max_new_tokens=4), 2)])
    >>> batch.token_ids, batch.positions, batch.asking           # the third token is left for the next pass
    ([5, 6], [0, 1], ())
    """

    requests: tuple[Request, ...]
    query_lens: tuple[int, ...]
    token_ids: list[int]
    positions: list[int]
    asking: tuple[Request, ...]
    asking_rows: list[int]

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
        rows = tuple(rows)
        token_ids: list[int] = []
        positions: list[int] = []
        asking, asking_rows = [], []
        for request, n_rows in rows:
            first = request.sequence.seq_len
            token_ids += request.tokens[first : first + n_rows]
            positions += range(first, first + n_rows)
            if n_rows == request.n_pending:
                asking.append(request)
                asking_rows.append(len(token_ids) - 1)
        requests, query_lens = tuple(request for request, _ in rows), tuple(n_rows for _, n_rows in rows)
        return cls(requests, query_lens, token_ids, positions, tuple(asking), asking_rows)
