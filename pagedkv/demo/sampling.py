"""Choosing the next token from the logits of a position."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.demo.model import F32

# Colder than this nothing but the likeliest token is ever drawn, and float32 would overflow.
_COLDEST = 1e-5


def greedy(logits: F32) -> int:
    """The likeliest token."""
    return int(logits.argmax())


class Sampler:
    """Draws tokens at random, from a generator of its own: what else is in the batch makes no difference.

    Parameters
    ----------
    temperature
        What the logits are divided by: below 1 the likely get likelier. 0 is `greedy`.
    top_p
        Only the likeliest tokens are drawn, as few as together have this probability, and one at least.
    seed
        Of the generator: the same seed draws the same tokens. Without it they differ from run to run.
    """

    def __init__(self, temperature: float = 1.0, top_p: float = 1.0, seed: list[int] | int | None = None) -> None:
        self._temperature = temperature
        self._top_p = top_p
        self._random = np.random.default_rng(seed)

    def __call__(self, logits: F32) -> int:
        """A token of `logits`, [vocabulary]."""
        if self._temperature < _COLDEST:
            return greedy(logits)
        with np.errstate(under="ignore"):
            chances: F32 = np.exp((logits - logits.max()) / np.float32(self._temperature))
        tokens = None
        if self._top_p < 1:
            tokens = self._likeliest(chances)
            chances = chances[tokens]
        total = np.cumsum(chances, dtype=np.float64)
        # Above 0 and at most the total: a token without a chance is never found.
        place = int(np.searchsorted(total, (1 - self._random.random()) * total[-1]))
        return place if tokens is None else int(tokens[place])

    def _likeliest(self, chances: F32) -> NDArray[np.intp]:
        """The tokens to draw from, likeliest first."""
        total = chances.sum(dtype=np.float64)
        # All that are less likely than this have less than 1 - top_p together: most need not be sorted.
        least = min((1 - self._top_p) * total / len(chances), chances.max())
        few = np.flatnonzero(chances >= least)
        few = few[np.argsort(-chances[few], kind="stable")]
        enough = np.searchsorted(np.cumsum(chances[few], dtype=np.float64), self._top_p * total)
        return few[: enough + 1]
