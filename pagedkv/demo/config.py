"""The shape of a Gemma 3 model, from a GGUF file's metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedkv.demo.errors import ModelFileError
from pagedkv.demo.gguf_file import GgufFile
from pagedkv.shapes import LayerShape, layer_shapes

_ARCHITECTURE = "gemma3"
# Every sixth layer sees the whole context, if the file does not say otherwise.
_WINDOW_PATTERN = 6
# The one size whose attention is scaled by the width of a head's share of the model, not by head_dim.
_LAYERS_OF_27B = 62


@dataclass(frozen=True)
class Config:
    """The shape of a model."""

    vocabulary: int
    width: int
    feed_forward: int
    n_q_heads: int
    layers: tuple[LayerShape, ...]
    context_length: int
    norm_epsilon: float
    rope_base: float
    rope_base_windowed: float
    rope_scale: float

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def n_kv_heads(self) -> int:
        return self.layers[0].n_kv_heads

    @property
    def head_dim(self) -> int:
        return self.layers[0].head_dim

    @property
    def v_head_dim(self) -> int:
        return self.layers[0].v_head_dim

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
        head_dim = keys.integer("attention.key_length", max(1, width // n_q_heads))
        if head_dim % 2:
            raise ModelFileError(f"attention.key_length: expected an even number, got {head_dim}")
        shape = {
            "model_type": _ARCHITECTURE,
            "num_hidden_layers": keys.integer("block_count"),
            "num_attention_heads": n_q_heads,
            "num_key_value_heads": keys.integer("attention.head_count_kv", n_q_heads),
            "head_dim": head_dim,
            "v_head_dim": keys.integer("attention.value_length", head_dim),
            "sliding_window": keys.integer("attention.sliding_window"),
            **keys.pattern("attention.sliding_window_pattern"),
        }
        try:
            layers = layer_shapes(shape)
        except (ValueError, TypeError) as error:
            raise ModelFileError(f"{_ARCHITECTURE}: {error}") from error
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
            layers=layers,
            context_length=keys.integer("context_length"),
            norm_epsilon=keys.number("attention.layer_norm_rms_epsilon"),
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

    def pattern(self, name: str) -> dict[str, Any]:
        """Which layers have the window: a period, whose last layer sees all, or one flag a layer."""
        pattern = self.value(name, _WINDOW_PATTERN)
        if isinstance(pattern, np.ndarray) and len(pattern) == self.integer("block_count"):
            return {"layer_types": ["sliding_attention" if windowed else "full_attention" for windowed in pattern]}
        return {"sliding_window_pattern": self.integer(name, _WINDOW_PATTERN)}
