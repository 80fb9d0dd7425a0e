"""vLLM on a CPU with the library's attention: a plugin, found by its entry point, in the place of vLLM's CPU backend.

All of vLLM that it touches is in this file. vLLM keeps its blocks, its tables and its scheduler; what changes hands is
two methods of an attention layer: the one that writes new rows into a layer's blocks, and the one that attends. Blocks
are ``[n_blocks, n_kv_heads, 2 * block_size, head_dim]``, K of a block and head and then V, with rows as they are, where
vLLM's own kernels pack them: so a layer is served by one of the two throughout.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import numpy as np
import torch

import pagedkv
from pagedkv import AttentionBatch

# What it was tried with.
VERSIONS = ("0.32.0",)
SWITCH = "PAGEDKV_VLLM"
_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def register() -> None:
    """Put `pagedkv` in the place of vLLM's attention on CPUs, where the environment has ``PAGEDKV_VLLM=1``.

    vLLM calls it in each of its processes, by the entry point ``vllm.general_plugins``. A version of vLLM that this
    file was not tried with, or a platform that is no CPU, keeps its own attention, and the log says so in one line.

    Notes
    -----
    Threads: vLLM calls it before it starts any.

    Examples
    --------
    >>> import os
    >>> from pagedkv.integrations.vllm import register
    >>> os.environ.pop("PAGEDKV_VLLM", None)
    >>> register()                                         # nothing was asked for: vLLM's own
    """
    if os.environ.get(SWITCH, "0") in ("", "0"):
        return
    from vllm.logger import init_logger
    from vllm.platforms import current_platform
    from vllm.version import __version__ as version

    # Its logger is set up for its own names.
    logger = init_logger("vllm.pagedkv")
    if version.partition("+")[0] not in VERSIONS:
        logger.warning("pagedkv: not tried with vLLM %s, only with %s; vLLM's own attention stays", version, *VERSIONS)
    elif not current_platform.is_cpu():
        logger.warning("pagedkv: attends on CPUs only; vLLM's own attention stays")
    else:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.PagedBackend")


def __getattr__(name: str) -> Any:
    """`PagedBackend`, made when vLLM asks for it: its classes are known only in a version that was tried."""
    if name == "PagedBackend":
        return _make_backend()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The same memory; bfloat16 as its bits."""
    array: np.ndarray[Any, Any] = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


@lru_cache(maxsize=1)
def _make_backend() -> type:
    from vllm.logger import init_logger
    from vllm.v1.attention.backend import AttentionType
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl, CPUAttentionMetadata

    logger = init_logger("vllm.pagedkv")

    class PagedImpl(CPUAttentionBackendImpl):
        """A layer's attention by `AttentionBatch`, and by vLLM's own where it is none of what that does."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            reason = self._find_reason()
            self._is_paged = reason is None
            self._writer: AttentionBatch | None = None
            self._blocks: tuple[int, np.ndarray[Any, Any] | None] = (0, None)
            if reason is None:
                pagedkv.use_openmp()  # here: in the process that computes
                logger.info_once("pagedkv: attends, with %s", pagedkv.cpu_info().simd)
            else:
                logger.warning_once("pagedkv: %s; layers of that kind keep vLLM's own attention", reason)

        def _find_reason(self) -> str | None:
            """What makes it no layer for `AttentionBatch`, or None."""
            if self.attn_type != AttentionType.DECODER:
                return f"attention of type {self.attn_type} reads no blocks of its own sequence"
            if self.kv_cache_dtype not in ("auto", *_NAMES.values()):
                return f"K and V in {self.kv_cache_dtype}"
            return None

        def _as_blocks(self, kv_cache: torch.Tensor) -> np.ndarray[Any, Any]:
            """[n_blocks, n_kv_heads, 2 * block_size, head_dim] of the layer: looked at once, it stays there."""
            place, blocks = self._blocks
            if blocks is None or place != kv_cache.data_ptr():
                n_blocks, n_heads, block_size, _ = kv_cache.size()
                blocks = _as_array(kv_cache.view(n_blocks, n_heads, 2 * block_size, -1))
                self._blocks = kv_cache.data_ptr(), blocks
            return blocks

        def do_kv_cache_update(
            self,
            layer: torch.nn.Module,
            key: torch.Tensor,
            value: torch.Tensor,
            kv_cache: torch.Tensor,
            slot_mapping: torch.Tensor,
        ) -> None:
            if not self._is_paged:
                super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
                return
            blocks, slots = self._as_blocks(kv_cache), slot_mapping.numpy()
            if self._writer is None:
                self._writer = AttentionBatch(
                    [], [], block_size=blocks.shape[2] // 2, layout="HND", dtype=_NAMES[kv_cache.dtype],
                    n_threads=torch.get_num_threads(),
                )
            k, v = (_as_array(rows[: len(slots)]) for rows in (key, value))
            if len(slots) and slots.min() < 0:  # rows that fill the batch up, and go nowhere
                k, v, slots = k[slots >= 0], v[slots >= 0], slots[slots >= 0]
            self._writer.write(blocks, None, k, v, slots)

        def forward(
            self,
            layer: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            kv_cache: torch.Tensor,
            attn_metadata: CPUAttentionMetadata | None,
            output: torch.Tensor,
            output_scale: torch.Tensor | None = None,
            output_block_scale: torch.Tensor | None = None,
        ) -> torch.Tensor:
            scaled = output_scale is not None or output_block_scale is not None  # which vLLM refuses itself
            if not self._is_paged or attn_metadata is None or scaled:
                given = (layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
                result: torch.Tensor = super().forward(*given)
                return result
            if attn_metadata.dynamic_causal is not None:
                raise NotImplementedError(f"pagedkv: only some sequences are causal; {SWITCH}=0 attends without it")
            blocks, n = self._as_blocks(kv_cache), attn_metadata.num_actual_tokens
            _batch_of(attn_metadata, blocks, kv_cache.dtype).attend(
                _as_array(query[:n]),
                blocks,
                scale=self.scale,
                window=self.sliding_window if self.sliding_window > 0 else None,
                softcap=self.logits_soft_cap if self.logits_soft_cap > 0 else None,
                sinks=None if self.sinks is None else self.sinks.detach().float().numpy(),
                alibi_slopes=None if self.alibi_slopes is None else self.alibi_slopes.numpy(),
                causal=bool(attn_metadata.causal),
                out=_as_array(output[:n]),
            )
            return output

    class PagedBackend(CPUAttentionBackend):
        @staticmethod
        def get_impl_cls() -> type[CPUAttentionBackendImpl]:
            return PagedImpl

    return PagedBackend


def _batch_of(attn_metadata: Any, blocks: np.ndarray[Any, Any], dtype: torch.dtype) -> AttentionBatch:
    """The batch of a step: made by the first of the layers that share tables, and kept with them."""
    batch: AttentionBatch | None = getattr(attn_metadata, "pagedkv_batch", None)
    if batch is None:
        seq_lens = attn_metadata.seq_lens.numpy()
        batch = AttentionBatch(
            attn_metadata.block_table.numpy()[: len(seq_lens)],
            seq_lens,
            np.diff(attn_metadata.query_start_loc.numpy()[: len(seq_lens) + 1]),
            block_size=blocks.shape[2] // 2,
            layout="HND",
            dtype=_NAMES[dtype],
            n_threads=torch.get_num_threads(),
        )
        attn_metadata.pagedkv_batch = batch
    return batch
