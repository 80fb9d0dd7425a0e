"""The check: every prompt alone, through contiguous caches, has to give the same tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pagedkv import KvCache, attention
from pagedkv.demo.engine import Work
from pagedkv.demo.model import F32, Gemma3


class Mismatch(NamedTuple):
    """Where two continuations part.

    The token number `place` is `got`, alone it is `expected`. `margin` is how far apart the two logits are:
    1e-4 and below is rounding, not an error.
    """

    place: int
    expected: int
    got: int
    margin: float


class ContiguousKv:
    """One sequence's K/V in a private `KvCache` a layer; its `attend` is what `Gemma3.forward` calls."""

    def __init__(self, model: Gemma3) -> None:
        self._config = config = model.config
        self._caches = [
            KvCache(config.n_kv_heads, config.head_dim, v_head_dim=config.v_head_dim) for _ in range(config.n_layers)
        ]

    def attend(self, layer: int, q: F32, k: F32, v: F32) -> F32:
        cache = self._caches[layer]
        cache.extend(k, v)
        window, scale = self._config.layers[layer].window, self._config.attention_scale
        out: F32 = attention(q, cache.k, cache.v, scale=scale, window=window)
        return out


def compare(model: Gemma3, prompt: Sequence[int], generated: Sequence[int], decode: Work) -> Mismatch | None:
    """Decodes `prompt` alone and compares with `generated`. The time of the decoding steps is added to `decode`."""
    kv = ContiguousKv(model)
    tokens, first = list(prompt), 0
    for place, got in enumerate(generated):
        started = time.perf_counter()
        hidden = model.forward(tokens[first:], np.arange(first, len(tokens)), kv.attend)
        logits = model.logits(hidden[-1:])[0]
        expected = int(logits.argmax())
        if place > 0:
            decode.tokens += 1
            decode.seconds += time.perf_counter() - started
        if expected != got:
            return Mismatch(place, expected, got, float(logits[expected] - logits[got]))
        first = len(tokens)
        tokens.append(got)
    return None
