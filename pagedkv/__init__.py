"""A paged KV cache for LLM inference on CPU.

Keys and values of many sequences live in shared fixed-size blocks; a sequence is a block table and a length, and
attention reads straight through the tables. Each name below has a page of its own: ``help(pagedkv.Step)``.

- Blocks and sequences: `PagedKvStore`, `PagedKvCache`; contiguous ones, to compare with: `KvCache`, `KvBlockPool`.
- A forward pass of a batch, all of it or none: `Step`. Attention without one: `paged_attention`, `attention`;
  over two sets of positions, of what each gave: `merge_attention_states`.
- Attention over blocks that somebody else manages: `AttentionBatch`.
- Models whose layers need several stores, over one budget of bytes: `ModelStores`, with a `LayerGroup` for each
  `LayerShape`, and `ModelSequence`. `Step` and `reorder` take them as they take a store.
- Beginnings computed once: `PrefixCache`, `PrefixHandle`, `KnownBlock`; what they learn and forget: `PrefixEvents`,
  `PrefixEvent`. Forks: `PagedKvCache.clone`, `reorder`.
- Blocks as they are stored: `PagedKvStore.pieces` with `BlockPieces`, `PagedKvStore.fill` with `BlockFilling`.
- Who can start, and how far a sequence can go: `plan_admission` with `PendingRequest` and `Admission`, `room_for` with
  `Room`.
- Looking at it: `PagedKvStore.block_map` with `BlockMap`, `StoreStats`, `GroupStats`, `PrefixStats`, `cpu_info` with
  `CpuInfo`.
- Threads: `get_num_threads`, `set_num_threads`, `use_openmp`.
- Errors: `PagedKvError`, `PagedStoreExhausted`, `KvPoolExhausted`. Whatever raises has changed nothing.

Modules of their own: `pagedkv.serving`, continuous batching; `pagedkv.shapes`, a model's layers from its configuration;
`pagedkv.integrations.transformers`, `pagedkv.integrations.torch` and `pagedkv.integrations.vllm`. The command
``python -m pagedkv`` shows what the machine and the library can do. The folder ``docs`` beside this file has a page a
subject, from serving to the design of the package.

Examples
--------
>>> import numpy as np, pagedkv
>>> store = pagedkv.PagedKvStore(block_size=16, total_blocks=64, n_kv_heads=2, head_dim=8)
>>> cache = pagedkv.PagedKvCache()
>>> rows = np.ones((20, 2, 8), np.float32)
>>> with pagedkv.Step(store, [cache], 20) as step:       # a prompt of 20 tokens, one layer
...     step.write(0, rows, rows)
...     out = step.attend(0, np.ones((20, 4, 8), np.float32))
>>> cache.seq_len, store.free_block_count, out.shape
(20, 62, (20, 4, 8))
"""

from pagedkv.admission import Admission, PendingRequest, Room, plan_admission, room_for
from pagedkv.attention import attention, merge_attention_states, paged_attention
from pagedkv.beams import reorder
from pagedkv.contiguous import KvBlockPool, KvCache
from pagedkv.cpu import CpuInfo, cpu_info
from pagedkv.errors import KvPoolExhausted, PagedKvError, PagedStoreExhausted
from pagedkv.events import PrefixEvents
from pagedkv.foreign import AttentionBatch
from pagedkv.groups import LayerGroup, ModelSequence, ModelStores
from pagedkv.pieces import BlockFilling, BlockPieces
from pagedkv.prefix import PrefixCache, PrefixHandle
from pagedkv.sequence import PagedKvCache
from pagedkv.shapes import LayerShape
from pagedkv.stats import GroupStats, KnownBlock, PrefixEvent, PrefixStats, StoreStats
from pagedkv.step import Step
from pagedkv.store import PagedKvStore
from pagedkv.threads import get_num_threads, set_num_threads, use_openmp
from pagedkv.viz import BlockMap

__version__ = "0.1.0"

__all__ = [
    "Admission",
    "AttentionBatch",
    "BlockFilling",
    "BlockMap",
    "BlockPieces",
    "CpuInfo",
    "GroupStats",
    "KnownBlock",
    "KvBlockPool",
    "KvCache",
    "KvPoolExhausted",
    "LayerGroup",
    "LayerShape",
    "ModelSequence",
    "ModelStores",
    "PagedKvCache",
    "PagedKvError",
    "PagedKvStore",
    "PagedStoreExhausted",
    "PendingRequest",
    "PrefixCache",
    "PrefixEvent",
    "PrefixEvents",
    "PrefixHandle",
    "PrefixStats",
    "Room",
    "Step",
    "StoreStats",
    "attention",
    "cpu_info",
    "get_num_threads",
    "merge_attention_states",
    "paged_attention",
    "plan_admission",
    "reorder",
    "room_for",
    "set_num_threads",
    "use_openmp",
]
