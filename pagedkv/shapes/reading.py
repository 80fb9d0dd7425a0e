"""A model's shapes, from its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pagedkv.shapes.families import ALL_WINDOWED, FOREIGN, FULL
from pagedkv.shapes.fields import Fields, open_config
from pagedkv.shapes.layers import LayerShape, ModelShapes

if TYPE_CHECKING:
    _LatentForm = Literal["absorbed", "split", "expanded"]

_FORMS = ("absorbed", "split", "expanded")
_MOST_LAYERS = 1 << 16


def layer_shapes(config: object, *, latent: _LatentForm = "absorbed") -> tuple[LayerShape, ...]:
    """The shape of each layer of a decoder in which every layer keeps its own K/V: what `ModelStores` takes.

    Parameters
    ----------
    config : dict, path or configuration
        The model's, in any form that `model_shapes` takes.
    latent : "absorbed", "split" or "expanded", optional
        How layers of latent attention are kept, see `model_shapes`.

    Returns
    -------
    tuple of LayerShape

    Raises
    ------
    ValueError, TypeError, OSError
        As for `model_shapes`; layers that use the K/V of others.

    Notes
    -----
    Threads: a pure function.

    Examples
    --------
    >>> from pagedkv import ModelStores
    >>> from pagedkv.shapes import layer_shapes
    >>> config = {"model_type": "mistral", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    ...           "hidden_size": 64, "sliding_window": 32}
    >>> ModelStores(layer_shapes(config), total_blocks=8)
    ModelStores(2 layers of window 32; 8 of 8 blocks free)
    """
    shapes = model_shapes(config, latent=latent)
    for layer, source in enumerate(shapes.sources):
        if source != layer:
            raise ValueError(
                f"config: expected layers with K/V of their own, got layer {layer} of {shapes.name} that shares those "
                f"of layer {source}"
            )
    return shapes.layers


def model_shapes(config: object, *, latent: _LatentForm = "absorbed") -> ModelShapes:
    """What a decoder keeps of every position, from its configuration.

    It reads the fields that transformers and the models' authors have for layers, heads, widths, windows, and layers
    that share K/V; where there is a ``text_config``, that one. Nothing of transformers is imported.

    Parameters
    ----------
    config : dict, path or configuration
        The fields themselves; a ``config.json``, or the folder with one; an object with the fields as attributes.
    latent : "absorbed", "split" or "expanded", optional
        How layers of latent attention (DeepSeek's) are kept. "absorbed" is for queries that have taken in the
        expansion: K is latent and rotary part together, V the latent. "split" has nothing twice, and is what
        transformers' caches hold: the latent as K, the rotary part as V. "expanded" has K and V of every query head.

    Returns
    -------
    ModelShapes

    Raises
    ------
    ValueError, TypeError
        A field that is missing, of another type, out of range, or at odds with another one; layers that keep something
        else than K and V of positions (linear, chunked or indexed attention); no decoder. The field or the layer is
        named.
    OSError
        There is no such file.

    Notes
    -----
    Threads: a pure function.

    Examples
    --------
    >>> from pagedkv.shapes import model_shapes
    >>> config = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128,
    ...           "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    >>> for latent in ("absorbed", "split", "expanded"):
    ...     shape = model_shapes(config, latent=latent).layers[0]
    ...     print(shape.n_kv_heads, shape.head_dim, shape.v_head_dim)
    1 576 512
    1 512 64
    128 192 128
    """
    if latent not in _FORMS:
        raise ValueError(f"latent: expected one of {', '.join(_FORMS)}, got {latent!r}")
    fields = open_config(config)
    n_layers = _count_layers(fields)
    kinds, layers = [], []
    for layer in range(n_layers):
        own = fields.layer(layer, n_layers)
        kind, said_by = _kind(own, layer)
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"{said_by}: layer {layer} of {fields.name} is {kind!r}, which a store cannot hold")
        kinds.append(kind)
        layers.append(LayerShape(own.window(kind), *_heads(own, kind == "sliding_attention", latent)))
    longest = (fields.integer(name, default=0) for name in ("max_position_embeddings", "n_positions", "max_seq_len"))
    sources = _sources(fields, kinds)
    is_latent = bool(fields.layer(0, n_layers).get("kv_lora_rank"))
    return ModelShapes(fields.name, tuple(layers), sources, next(filter(None, longest), None), is_latent)


def window_of(config: object, layer: int) -> int | None:
    """The window of one layer, whatever the others of its model are.

    Parameters
    ----------
    config : dict, path or configuration
        The model's, in any form that `model_shapes` takes.
    layer : int
        From 0.

    Returns
    -------
    int or None
        Positions that a query sees, itself included; None: all, or it is no attention over a window.

    Raises
    ------
    ValueError, TypeError, OSError
        As for `model_shapes`, of the fields that windows depend on.

    Notes
    -----
    Threads: a pure function.

    Examples
    --------
    >>> from pagedkv.shapes import window_of
    >>> [window_of({"model_type": "gemma2", "sliding_window": 4096}, layer) for layer in range(3)]
    [4096, None, 4096]
    """
    own = open_config(config).layer(layer)
    return own.window(_kind(own, layer)[0])


def _count_layers(fields: Fields) -> int:
    if fields.family == "longcat_flash":  # each has attention twice
        return 2 * fields.integer("num_layers", most=_MOST_LAYERS)
    return fields.integer("num_hidden_layers", "n_layer", "n_layers", "num_layers", most=_MOST_LAYERS)


def _kind(own: Fields, layer: int) -> tuple[str, str]:
    """What a layer is, and the field that says so."""
    if (kind := own.of_layers("layer_types")) is not None:
        if not isinstance(kind, str):
            raise TypeError(f"layer_types: expected names, got {kind!r}")
        if kind == "sliding_attention" and own.get("use_sliding_window") is False:
            raise ValueError(f"use_sliding_window: false, and layer {layer} of layer_types is {kind!r}")
        return {"attention": "full_attention"}.get(kind, kind), "layer_types"
    for name, foreign in FOREIGN.items():
        if own.get(name):
            return foreign, name
    return "sliding_attention" if _has_window(own, layer) else "full_attention", "sliding_window"


def _has_window(own: Fields, layer: int) -> bool:
    if (pattern := own.of_layers("hybrid_layer_pattern")) is not None:
        return bool(pattern)
    is_qwen = own.family.startswith("qwen")  # whose windows are off unless they are switched on
    if own.window_size() is None or not own.flag("use_sliding_window", not is_qwen):
        return False
    if is_qwen:
        return layer >= own.integer("max_window_layers")
    if own.family == "mimo_v2_flash":
        return layer > 0 and (layer + 1) % 6 > 0
    every, index = FULL.get(own.family, (0, 0))
    if own.get("sliding_window_pattern") is not None:
        every = own.integer("sliding_window_pattern")
        index = every - 1
    if not every and own.is_mapping and own.family not in ALL_WINDOWED:
        raise ValueError(f"layer_types: expected which layers of {own.name} have the sliding_window, got none")
    return not every or layer % every != index


def _heads(own: Fields, is_windowed: bool, latent: _LatentForm) -> tuple[int, int, int]:
    """How many K/V heads a layer has, and the widths of K and V."""
    n_heads = own.integer("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
    if own.get("kv_lora_rank"):
        rank, rotary = own.integer("kv_lora_rank"), own.integer("qk_rope_head_dim")
        if latent == "expanded":
            return n_heads, own.integer("qk_nope_head_dim") + rotary, own.integer("v_head_dim")
        return (1, rank, rotary) if latent == "split" else (1, rank + rotary, rank)
    n_kv_heads = _count_kv_heads(own, n_heads)
    head_dim = own.integer("head_dim", "kv_channels", "dim_head", default=0)
    if not head_dim:
        width = own.integer("hidden_size", "n_embd", "n_embed", "d_model", default=0)
        if not width:
            raise ValueError(f"config: expected head_dim or hidden_size, got none in that of {own.name}")
        if width % n_heads:
            raise ValueError(f"hidden_size: expected a multiple of the {n_heads} num_attention_heads, got {width}")
        head_dim = width // n_heads
    v_head_dim = own.integer("v_head_dim", default=head_dim)
    if is_windowed:
        twice = 2 if own.family == "mimo_v2_flash" else 1
        n_kv_heads = own.integer("swa_num_key_value_heads", default=twice * n_kv_heads)
        head_dim = own.integer("swa_head_dim", default=head_dim)
        v_head_dim = own.integer("swa_v_head_dim", default=v_head_dim)
    elif own.get("global_head_dim") and own.get("per_layer_config") is None:
        head_dim = v_head_dim = own.integer("global_head_dim")
        if own.flag("attention_k_eq_v"):
            n_kv_heads = own.integer("num_global_key_value_heads", default=n_kv_heads)
    if n_heads % n_kv_heads:
        raise ValueError(f"num_key_value_heads: expected a divisor of {n_heads} num_attention_heads, got {n_kv_heads}")
    return n_kv_heads, head_dim, v_head_dim


def _count_kv_heads(own: Fields, n_heads: int) -> int:
    if own.family in ("falcon", "gpt_bigcode") and not own.flag("new_decoder_architecture"):  # whatever the others say
        return 1 if own.flag("multi_query", True) else n_heads
    shared = Fields(own.get("attn_config"), own.name).integer("kv_n_heads", default=0)
    default = shared or (1 if own.flag("multi_query") else n_heads)
    return own.integer("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", default=default)


def _sources(fields: Fields, kinds: list[str]) -> tuple[int, ...]:
    """Whose K/V each layer attends to: the last ones of some models, to those of the last of their kind before them."""
    n_shared = fields.integer("num_kv_shared_layers", default=0)
    modes = fields.get("kv_sharing_modes") or ()
    if not isinstance(modes, (list, tuple)):
        raise TypeError(f"kv_sharing_modes: expected a list, got {modes!r:.60}")
    if not n_shared and "reuse" in modes:
        raise ValueError(f"kv_sharing_modes: layers of {fields.name} share K/V in a way that is not supported")
    first = len(kinds) - n_shared
    last = {kind: layer for layer, kind in enumerate(kinds[: max(0, first)])}
    if missing := set(kinds) - set(last):
        raise ValueError(f"num_kv_shared_layers: expected a {min(missing)} layer before the last {n_shared}, got none")
    return tuple(layer if layer < first else last[kind] for layer, kind in enumerate(kinds))
