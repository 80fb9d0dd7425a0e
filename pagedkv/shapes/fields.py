"""The fields of a configuration, wherever they come from, checked."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from pagedkv._arrays import as_size
from pagedkv.shapes.families import DECODERS_ALL_THE_SAME, DEFAULTS

_MOST = 2**31 - 1
# Where the decoder of a model of several parts is.
_INNER = ("text_config", "decoder", "generator", "thinker_config")


class Fields:
    """A configuration's fields, checked: all of them, or as a layer has them."""

    def __init__(self, config: object, name: str, n_layers: int | None = None, layer: int | None = None) -> None:
        self.config = config
        self.name = name
        self.family = name.removesuffix("_text")
        self.is_mapping = isinstance(config, Mapping)
        self._n_layers = n_layers
        self._layer = layer

    def get(self, name: str) -> Any:
        """None where it is null or not there."""
        return self.config.get(name) if isinstance(self.config, Mapping) else getattr(self.config, name, None)

    def layer(self, layer: int, n_layers: int | None = None) -> Fields:
        """The fields as a layer has them; lists have one value for each layer."""
        own, differing = self.config, self.get("per_layer_config")
        if isinstance(own, Mapping) and differing is not None:
            own = {**own, **_of_layer(differing, layer)}
        elif differing is not None:
            own = differing[layer]
        fields = Fields(own, self.name, n_layers, layer)
        if differing is not None and fields.get("skip"):
            raise ValueError(f"per_layer_config: layer {layer} skips {fields.get('skip')}, which is not supported")
        return fields

    def of_layers(self, name: str) -> Any:
        """The layer's entry of a list that has one for each; None where there is no such field."""
        values = self.get(name)
        if values is None or self._layer is None:
            return None
        if not isinstance(values, (list, tuple)):
            raise TypeError(f"{name}: expected a list, got {type(values).__name__}")
        if self._n_layers not in (None, len(values)):
            raise ValueError(f"{name}: expected {self._n_layers} layers, got {len(values)}")
        return values[self._layer]

    def integer(self, *names: str, default: int | None = None, most: int = _MOST) -> int:
        """What these names of one field say, from 1; with a default, 0 says that it is not there."""
        found = {}
        for name in names:
            value = self.get(name)
            value = self.of_layers(name) if isinstance(value, (list, tuple)) else value
            if value is not None:
                found[name] = as_size(value, name, 1 if default is None else 0, most)
        if len(set(found.values())) > 1:
            raise ValueError(f"{' and '.join(found)}: expected one number, got {[*found.values()]}")
        if not found and default is None:
            raise ValueError(f"config: expected {names[0]}, got none in that of {self.name}")
        return next(iter(found.values()), 0) or default or 0

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise TypeError(f"{name}: expected true or false, got {value!r}")
        return default if value is None else value

    def window_size(self) -> int | None:
        """The window of the layers that have one."""
        if self.family == "mimo_v2_flash" and self.get("sliding_window_size") is not None:
            return self.integer("sliding_window_size") + 1  # so many before the query
        return self.integer("sliding_window", default=0) or None

    def window(self, kind: str) -> int | None:
        if kind != "sliding_attention":
            return None
        size = self.window_size()
        if size is None:
            raise ValueError("sliding_window: expected an integer from 1, got none")
        return size


def _of_layer(differing: Any, layer: int) -> Mapping[str, Any]:
    """What differs in a layer; transformers pads their numbers: "05"."""
    try:
        own = {int(number): values for number, values in differing.items()}.get(layer, {})
    except (AttributeError, ValueError, TypeError):
        raise TypeError(f"per_layer_config: expected fields by number of layer, got {differing!r:.60}") from None
    if not isinstance(own, Mapping):
        raise TypeError(f"per_layer_config: expected the fields of layer {layer}, got {own!r:.60}")
    return own


def open_config(config: object) -> Fields:
    """The fields of the decoder."""
    if isinstance(config, (str, os.PathLike)):
        config = _read(config)
    elif not isinstance(config, Mapping) and not hasattr(config, "__dict__"):
        raise TypeError(f"config: expected a dict, a path or a configuration, got {type(config).__name__}")
    fields = Fields(config, "model")
    while True:
        fields = Fields(fields.config, str(fields.get("model_type") or fields.name))
        if fields.flag("is_encoder_decoder") or fields.get("encoder_layers"):
            raise ValueError(f"is_encoder_decoder: expected a decoder, got {fields.name}, an encoder and decoder")
        name, inner = next(((name, inner) for name in _INNER if (inner := fields.get(name)) is not None), ("", None))
        if inner is None:
            break
        if not isinstance(inner, Mapping) and not hasattr(inner, "__dict__"):
            raise TypeError(f"{name}: expected a configuration, got {type(inner).__name__}")
        fields = Fields(inner, fields.name)
    if fields.get("is_decoder") is False and fields.family not in DECODERS_ALL_THE_SAME:
        raise ValueError(f"is_decoder: expected a decoder, got {fields.name}, an encoder")
    if fields.get("use_bidirectional_attention") in (True, "all"):
        raise ValueError(f"use_bidirectional_attention: expected a decoder, got {fields.name} as an encoder")
    if isinstance(fields.config, Mapping):
        fields.config = {**DEFAULTS.get(fields.family, {}), **fields.config}
    return fields


def _read(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    with open(path, encoding="utf-8") as file:
        try:
            config = json.load(file)
        except (ValueError, RecursionError):
            raise ValueError(f"{os.fspath(path)}: is no JSON file") from None
    if not isinstance(config, Mapping):
        raise ValueError(f"{os.fspath(path)}: expected a JSON object, got {type(config).__name__}")
    return config
