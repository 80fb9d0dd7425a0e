"""The shape of a Gemma 3 model, from a GGUF file's metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedkv.demo.errors import ModelFileError
from pagedkv.demo.gguf_file import GgufFile

_ARCHITECTURE = "gemma3"
# Every sixth layer sees the whole context, if the file does not say otherwise.
_WINDOW_PATTERN = 6
# The one size whose attention is scaled by the width of a head's share of the model, not by head_dim.
_LAYERS_OF_27B = 62


@dataclass(frozen=True)
class Config:
    """The shape of a model. `windows` has one entry a layer: positions it sees, or None for all of them."""

    vocabulary: int
    width: int
    feed_forward: int
    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    v_head_dim: int
    context_length: int
    norm_epsilon: float
    windows: tuple[int | None, ...]
    rope_base: float
    rope_base_windowed: float
    rope_scale: float

    @property
    def n_layers(self) -> int:
        return len(self.windows)

    @property
    def attention_scale(self) -> float:
        share = self.width // self.n_q_heads if self.n_layers == _LAYERS_OF_27B else self.head_dim
        return 1.0 / math.sqrt(share)

    @classmethod
    def from_file(cls, file: GgufFile) -> Config:
        """Reads the keys `gemma3.*`. ModelFileError names the one that is missing or makes no sense."""
        architecture = file.metadata.get("general.architecture")
        if architecture != _ARCHITECTURE:
            raise ModelFileError(f"architecture: expected {_ARCHITECTURE!r}, got {architecture!r}")
        keys = _Keys(file.metadata)
        width, n_q_heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
        n_kv_heads = keys.integer("attention.head_count_kv", n_q_heads)
        head_dim = keys.integer("attention.key_length", max(1, width // n_q_heads))
        if n_q_heads % n_kv_heads:
            raise ModelFileError(f"{n_q_heads} query heads cannot share {n_kv_heads} key heads evenly")
        if head_dim % 2:
            raise ModelFileError(f"attention.key_length: expected an even number, got {head_dim}")
        embedding = file.tensors.get("token_embd.weight")
        if embedding is None:
            raise ModelFileError("tensor token_embd.weight is missing")
        scaling = keys.value("rope.scaling.type", "none")
        if scaling not in ("none", "linear"):
            raise ModelFileError(f"rope.scaling.type: expected 'none' or 'linear', got {scaling!r}")
        return cls(
            vocabulary=embedding.shape[0],
            width=width,
            feed_forward=keys.integer("feed_forward_length"),
            n_q_heads=n_q_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            v_head_dim=keys.integer("attention.value_length", head_dim),
            context_length=keys.integer("context_length"),
            norm_epsilon=keys.number("attention.layer_norm_rms_epsilon"),
            windows=_windows(keys),
            rope_base=keys.number("rope.freq_base", 1e6),
            rope_base_windowed=keys.number("rope.freq_base_swa", 1e4),
            rope_scale=keys.number("rope.scaling.factor", 1.0) if scaling == "linear" else 1.0,
        )


class _Keys:
    """The metadata keys of the architecture, checked."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def value(self, name: str, default: Any = None) -> Any:
        value = self._metadata.get(f"{_ARCHITECTURE}.{name}", default)
        if value is None:
            raise ModelFileError(f"{_ARCHITECTURE}.{name} is missing")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.value(name, default)
        if not isinstance(value, int) or not 0 < value < 1 << 24:
            raise ModelFileError(f"{_ARCHITECTURE}.{name}: expected a positive integer, got {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.value(name, default)
        if not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ModelFileError(f"{_ARCHITECTURE}.{name}: expected a positive number, got {value!r}")
        return float(value)


def _windows(keys: _Keys) -> tuple[int | None, ...]:
    """The window of every layer. The pattern is a period (its last layer sees all) or one flag a layer."""
    n_layers, window = keys.integer("block_count"), keys.integer("attention.sliding_window")
    pattern = keys.value("attention.sliding_window_pattern", _WINDOW_PATTERN)
    if isinstance(pattern, int) and pattern > 0:
        return tuple(None if layer % pattern == pattern - 1 else window for layer in range(n_layers))
    if isinstance(pattern, np.ndarray) and len(pattern) == n_layers:
        return tuple(window if windowed else None for windowed in pattern.tolist())
    raise ModelFileError(f"{_ARCHITECTURE}.attention.sliding_window_pattern: got {pattern!r}")
