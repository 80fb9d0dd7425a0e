"""The K/V of a model: groups of layers, from numbers or from a Hugging Face config.json."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from pagedkv.cli.common import CliError, read_json

_MOST = 2**31 - 1


class LayerGroup(NamedTuple):
    """Layers of one shape that see equally far back. They share a store."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None
    """Positions that a query sees, itself included; None: all."""


class ModelShape(NamedTuple):
    """What a model keeps of every position."""

    name: str
    groups: tuple[LayerGroup, ...]
    longest: int | None
    """Positions that the model was made for, where it is known."""


def load(path: str) -> ModelShape:
    """The shape that a config.json describes, or the one in that folder.

    Raises
    ------
    CliError
        It cannot be read, something is missing, or it has layers whose K/V a store cannot hold.
    """
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    value = read_json(path)
    if not isinstance(value, Mapping):
        raise CliError(f"{path}: expected a JSON object")
    try:
        return from_config(value)
    except ValueError as error:
        raise CliError(f"{path}: {error}") from None


def from_config(whole: Mapping[str, Any]) -> ModelShape:
    """The shape of a model, from its configuration as transformers writes it.

    Raises
    ------
    ValueError
        Something is missing, or it has layers whose K/V a store cannot hold.
    """
    text = whole.get("text_config")
    config = text if isinstance(text, Mapping) else whole
    name = str(config.get("model_type") or whole.get("model_type") or "model")
    n_layers = _integer(config, "num_hidden_layers", "n_layer", "num_layers")
    windows = _windows(config, name, n_layers)
    # The last layers of some models use the K/V of earlier ones.
    windows = windows[: n_layers - _integer(config, "num_kv_shared_layers", default=0)]

    if config.get("kv_lora_rank"):  # latent attention: one row for all heads, whose first part is V
        latent = _integer(config, "kv_lora_rank")
        full = swa = (1, latent + _integer(config, "qk_rope_head_dim"), latent)
    else:
        n_heads = _integer(config, "num_attention_heads", "n_head")
        one = 1 if config.get("multi_query") else n_heads
        n_kv_heads = _integer(config, "num_key_value_heads", "num_kv_heads", "n_head_kv", default=one)
        hidden = _integer(config, "hidden_size", "n_embd", "d_model", default=0)
        head_dim = _integer(config, "head_dim", default=hidden // n_heads)
        if head_dim < 1:
            raise ValueError("expected head_dim or hidden_size")
        swa = (n_kv_heads, head_dim, _integer(config, "v_head_dim", default=head_dim))
        global_dim = _integer(config, "global_head_dim", default=0)
        full = (
            _integer(config, "num_global_key_value_heads", default=n_kv_heads),
            global_dim or head_dim,
            global_dim or swa[2],
        )
    groups = [
        LayerGroup(windows.count(window), *(full if window is None else swa), window)
        for window in dict.fromkeys(windows)
        if window != 0
    ]
    if not groups:
        raise ValueError("no layer of it keeps K/V")
    longest = _integer(config, "max_position_embeddings", "n_positions", default=0)
    return ModelShape(name, tuple(groups), longest or None)


def _windows(config: Mapping[str, Any], name: str, n_layers: int) -> list[int | None]:
    """How far back each layer sees; 0: it keeps no K/V."""
    width = _integer(config, "sliding_window", default=0)
    types = config.get("layer_types")
    if isinstance(types, list) and types:
        if len(types) != n_layers:
            raise ValueError(f"layer_types: expected {n_layers} layers, got {len(types)}")
        known: dict[object, int | None] = {"full_attention": None, "linear_attention": 0, "mamba": 0, "conv": 0}
        if width:
            known["sliding_attention"] = width
        unknown = [kind for kind in types if not isinstance(kind, str) or kind not in known]
        if unknown == ["sliding_attention"] * len(unknown) and unknown:
            raise ValueError("sliding_window: expected an integer from 1, got none")
        if unknown:
            raise ValueError(f"layer_types: a store cannot hold {unknown[0]!r}")
        return [known[kind] for kind in types]
    # Qwen's windows are off unless they are switched on.
    if not width or not config.get("use_sliding_window", not name.startswith("qwen")):
        return [None] * n_layers
    if config.get("sliding_window_pattern"):  # Gemma 3: every so many'th layer is a full one
        pattern = _integer(config, "sliding_window_pattern")
        return [width if (layer + 1) % pattern else None for layer in range(n_layers)]
    if name == "gemma2":  # the first of every two
        return [width if layer % 2 == 0 else None for layer in range(n_layers)]
    if name.startswith("gemma3"):
        return [width if (layer + 1) % 6 else None for layer in range(n_layers)]
    # Qwen 2: the first ones are full.
    n_full = min(n_layers, _integer(config, "max_window_layers", default=0))
    return [None] * n_full + [width] * (n_layers - n_full)


def _integer(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The first of these that is there and not null; an integer from 0, or from 1 where there is no default."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        least = 1 if default is None else 0
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
            raise ValueError(f"{name}: expected an integer from {least} to {_MOST}, got {value!r}")
        return value
    if default is None:
        raise ValueError(f"expected {names[0]}")
    return default
