"""The attention function ``pagedkv``: transformers' attention interface, answered from the block tables.

A cache of ours hands its layer on in the place of the keys (`PagedKeys`), and this function then writes the
new rows and attends to everything through the tables. Without such a cache it attends to the keys and values
that it is given. Masks are understood as far as they say what the kernels compute: causal, a sliding
window, and padding on the left. Everything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

import pagedkv
from pagedkv.integrations.torch import as_rows, as_tensor
from pagedkv.integrations.transformers.private import is_causal, is_compiled, plain, records_attentions, running_model
from pagedkv.shapes import window_of

NAME = "pagedkv"


class RowSource(Protocol):
    """Whoever keeps the K/V that a `PagedKeys` stands for."""

    def window_of(self, layer: int) -> int | None:
        """The sliding window of a layer."""

    def attend(
        self,
        keys: PagedKeys,
        query: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Attention ``[batch, positions, n_q_heads, v_head_dim]`` of a layer's new rows over all that it holds."""


class _Handle(torch.Tensor):
    """A tensor that only the attention function ``pagedkv`` reads: to others it would look like something else."""

    what: str
    plain: torch.Tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _HARMLESS:
            return plain(func, *args, **(kwargs or {}))
        if is_compiled():
            raise TypeError(f'attn_implementation "{NAME}": expected a model that is not compiled; {_WAY_OUT}')
        model = running_model()
        who = "the model" if model is None else type(model).__name__
        raise TypeError(
            f'attn_implementation "{NAME}": {who} reads the {cls.what} '
            f"itself ({getattr(func, '__name__', func)}) and not through the attention interface; {_WAY_OUT}"
        )


class PagedKeys(_Handle):
    """The new keys of a layer, with the way to the older ones.

    To a model that reads them itself these would look like all keys that there are.
    """

    what = "keys"
    source: RowSource
    layer: int
    values: torch.Tensor  # that came with them
    is_attended: bool

    @staticmethod
    def of(rows: torch.Tensor, values: torch.Tensor, source: RowSource, layer: int) -> PagedKeys:
        keys = rows.detach().as_subclass(PagedKeys)
        keys.plain, keys.values, keys.source, keys.layer, keys.is_attended = rows, values, source, layer, False
        return keys

    def __repr__(self, **_: Any) -> str:
        return f"PagedKeys(layer={self.layer})"


class PaddingMask(_Handle):
    """``[batch, positions]``, zeros where there is padding, not a mask of four axes."""

    what = "mask"

    @staticmethod
    def of(mask: torch.Tensor) -> PaddingMask:
        handle = mask.as_subclass(PaddingMask)
        handle.plain = mask
        return handle

    def __repr__(self, **_: Any) -> str:
        return f"PaddingMask({self.plain.tolist()})"


_WAY_OUT = 'use attn_implementation="sdpa" or "eager"'
_HARMLESS = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.is_floating_point,
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad")),
}


# --- the mask -----------------------------------------------------------------------------------------


def paged_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """The mask that `paged_attention_forward` gets: None, or where there is padding."""
    if not is_causal(mask_function):
        raise ValueError(
            f'attn_implementation "{NAME}": expected a causal or sliding-window mask, got one of another pattern'
        )
    if kv_offset + kv_length != q_offset + q_length:
        raise ValueError(
            f'attn_implementation "{NAME}": expected a cache that ends with the new positions, at '
            f"{q_offset + q_length}, got one of {kv_offset + kv_length}: a static cache is not supported"
        )
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return PaddingMask.of(attention_mask)


def count_padding(mask: torch.Tensor | None, batch: int, n_positions: int) -> list[int]:
    """How many positions at the beginning of each row are padding.

    Raises
    ------
    ValueError
        Padding that is not on the left, or a mask of another shape.
    """
    if mask is None:
        return [0] * batch
    if isinstance(mask, PaddingMask):
        mask = mask.plain
    if mask.ndim != 2:
        raise ValueError(
            f"attention_mask: expected none, or [batch, positions] for padding on the left, got {list(mask.shape)}; "
            f'use attn_implementation="sdpa" or "eager" for other masks'
        )
    if mask.shape[0] != batch or mask.shape[1] < n_positions:
        raise ValueError(f"attention_mask: expected [{batch}, {n_positions}], got {list(mask.shape)}")
    seen = mask[:, mask.shape[1] - n_positions :].to(torch.bool)
    padding: list[int] = (n_positions - seen.sum(dim=1)).tolist()
    for row, n in enumerate(padding):
        if not bool(seen[row, n:].all()):
            raise ValueError(f"attention_mask: expected padding on the left only, got other zeros in row {row}")
    return padding


# --- the function -------------------------------------------------------------------------------------


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a layer, as transformers' attention interface asks for it.

    Parameters
    ----------
    module : torch.nn.Module
        The layer.
    query : ``[batch, n_q_heads, positions, head_dim]``
    key : `PagedKeys`, or ``[batch, n_kv_heads, all positions, head_dim]``
    value : ``[batch, n_kv_heads, positions, v_head_dim]``, of as many positions as ``key``
    attention_mask : None, or ``[batch, positions]``
        Zeros are padding, on the left only.
    scaling, sliding_window, softcap, s_aux
        The ``scale``, ``window``, ``softcap`` and ``sinks`` of `pagedkv.paged_attention`.

    Returns
    -------
    out : ``[batch, positions, n_q_heads, v_head_dim]``
        Zeros where a position is padding.
    None
        Attention weights are never there.

    Raises
    ------
    ValueError
        What the kernels do not compute: dropout, gradients, attention weights, other masks, a position bias.
    """
    _refuse_unsupported(module, query, dropout, is_causal, others)
    paged = key if isinstance(key, PagedKeys) else None
    layer_window = paged.source.window_of(paged.layer) if paged is not None else _window_of(module)
    if None not in (layer_window, sliding_window) and layer_window != sliding_window:
        raise ValueError(f"sliding_window: expected {layer_window}, as the configuration has it, got {sliding_window}")
    options = {
        "scale": None if scaling is None else float(scaling),
        "window": layer_window if sliding_window is None else sliding_window,
        "softcap": None if softcap is None else float(softcap),
        "sinks": None if s_aux is None else as_rows(s_aux.reshape(-1)),
    }
    if paged is not None:
        _check_values(module, paged, value)
        paged.is_attended = True
        return paged.source.attend(paged, query, value, attention_mask, options), None
    return _attend_contiguous(query, key, value, attention_mask, options), None


def _attend_contiguous(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, options: dict[str, Any]
) -> torch.Tensor:
    """Without a paged cache: row by row over the keys and values that came."""
    batch, n_q_heads, n_queries, _ = query.shape
    n_positions = key.shape[2]
    out = query.new_zeros((batch, n_queries, n_q_heads, value.shape[3]))
    for row, start in enumerate(count_padding(mask, batch, n_positions)):
        n = min(n_queries, n_positions - start)
        if n > 0:
            q, k, v = (as_rows(rows[row].transpose(0, 1)) for rows in (query, key, value))
            out[row, n_queries - n :] = as_tensor(pagedkv.attention(q[-n:], k[start:], v[start:], **options))
    return out


def _window_of(module: torch.nn.Module) -> int | None:
    """The sliding window that a layer has by its configuration."""
    layer = getattr(module, "layer_idx", None)
    config = getattr(module, "config", None)
    return None if layer is None or config is None else window_of(config, layer)


def _refuse(module: torch.nn.Module, what: str) -> NoReturn:
    raise ValueError(f'attn_implementation "{NAME}": {what} not supported, in {type(module).__name__}; {_WAY_OUT}')


def refuse_gradients(*tensors: torch.Tensor) -> None:
    """The past is kept as numbers: it would come back without what was done to get them."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            "cache: gradients do not go back through it; run under torch.no_grad() or torch.inference_mode(), or "
            "without a PagedCache"
        )


def _refuse_unsupported(
    module: torch.nn.Module, query: torch.Tensor, dropout: float, causal: bool | None, others: dict[str, Any]
) -> None:
    if dropout:
        _refuse(module, "dropout is")
    if torch.is_grad_enabled() and query.requires_grad:
        _refuse(module, "gradients are (run under torch.no_grad() or torch.inference_mode())")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        _refuse(module, "attention that is not causal is")
    configured = getattr(getattr(module, "config", None), "output_attentions", False)
    if others.get("output_attentions") or configured or records_attentions():
        _refuse(module, "attention weights (output_attentions) are")
    for name in ("position_bias", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k"):
        if others.get(name) is not None:
            _refuse(module, f"{name} is")


def _check_values(module: torch.nn.Module, keys: PagedKeys, value: torch.Tensor) -> None:
    """What was kept is what is attended to, and once: rows are in the blocks from then on."""
    kept = keys.values
    if value is not kept and (value.shape != kept.shape or not torch.equal(value, kept)):
        _refuse(module, "attention to other values than the cache was given is")
    if keys.is_attended:
        _refuse(module, "attention twice with the same keys is")


def register() -> None:
    """Makes the attention function known to transformers under the name ``pagedkv``."""
    AttentionInterface.register(NAME, paged_attention_forward)
    AttentionMaskInterface.register(NAME, paged_mask)
