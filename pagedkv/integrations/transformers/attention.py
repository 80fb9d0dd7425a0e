"""The attention function ``pagedkv``: transformers' attention interface, answered from the block tables.

A cache of ours hands its layer on in the place of the keys (`PagedKeys`), and this function then writes the
new rows and attends to everything through the tables. Without such a cache it attends to the keys and values
that it is given. Masks are understood as far as they say what the kernels compute: causal, a sliding
window, and padding on the left. Everything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, Protocol

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sliding_window_overlay

import pagedkv
from pagedkv.integrations.torch import as_rows, as_tensor
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


class PagedKeys(torch.Tensor):
    """The new keys of a layer, with the way to the older ones; only the attention function ``pagedkv`` reads it.

    To anybody else these would look like all keys that there are, so whatever else is done with it is refused.
    """

    source: RowSource
    layer: int
    rows: torch.Tensor
    is_written: bool

    @staticmethod
    def of(rows: torch.Tensor, source: RowSource, layer: int) -> PagedKeys:
        keys = torch.Tensor._make_subclass(PagedKeys, rows.detach())
        keys.source, keys.layer, keys.rows, keys.is_written = source, layer, rows, False
        return keys

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise TypeError(
            f"the model's attention reads the keys itself ({getattr(func, '__name__', func)}) and not through "
            f'the attention interface; use it with attn_implementation="sdpa" or "eager" instead of "{NAME}"'
        )

    def __repr__(self, **_: Any) -> str:
        return f"PagedKeys(layer={self.layer})"


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
    """The mask that `paged_attention_forward` gets: None, or ``[batch, positions]`` where there is padding."""
    if not _is_causal(mask_function):
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
    return attention_mask


def _is_causal(function: Callable[..., Any]) -> bool:
    """Whether a mask function of transformers is the causal one, or that and a sliding window."""
    if function is causal_mask_function:
        return True
    if not isinstance(function, FunctionType) or function.__closure__ is None:
        return False
    parts = function.__closure__[0].cell_contents
    if function.__qualname__ != "and_masks.<locals>.and_mask" or not isinstance(parts, tuple):
        return False
    window = sliding_window_overlay(1).__code__
    others = [part for part in parts if part is not causal_mask_function]
    return len(others) < len(parts) and all(getattr(part, "__code__", None) is window for part in others)


def count_padding(mask: torch.Tensor | None, batch: int, n_positions: int) -> list[int]:
    """How many positions at the beginning of each row are padding.

    Raises
    ------
    ValueError
        Padding that is not on the left, or a mask of another shape.
    """
    if mask is None:
        return [0] * batch
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


def _refuse_unsupported(
    module: torch.nn.Module, query: torch.Tensor, dropout: float, is_causal: bool | None, others: dict[str, Any]
) -> None:
    def refuse(what: str) -> None:
        raise ValueError(f'attn_implementation "{NAME}": {what} not supported; use "sdpa" or "eager"')

    if dropout:
        refuse("dropout is")
    if torch.is_grad_enabled() and query.requires_grad:
        refuse("gradients are (run under torch.no_grad() or torch.inference_mode())")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        refuse("attention that is not causal is")
    if others.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
        refuse("attention weights (output_attentions) are")
    for name in ("position_bias", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k"):
        if others.get(name) is not None:
            refuse(f"{name} is")


def register() -> None:
    """Makes the attention function known to transformers under the name ``pagedkv``."""
    AttentionInterface.register(NAME, paged_attention_forward)
    AttentionMaskInterface.register(NAME, paged_mask)
