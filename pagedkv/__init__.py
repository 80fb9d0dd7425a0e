"""A paged KV cache for LLM inference on CPU.

Keys and values of many sequences live in shared fixed-size blocks (`PagedKvStore`); a sequence is
a block table and a length (`PagedKvCache`). `paged_attention` attends straight through the tables,
and `Step` makes one forward pass of a batch a transaction.
"""

from pagedkv.admission import Admission, Room, Waiting, plan_admission, room_for
from pagedkv.attention import attention, paged_attention
from pagedkv.beams import reorder
from pagedkv.contiguous import KvBlockPool, KvCache
from pagedkv.cpu import CpuInfo, cpu_info
from pagedkv.errors import KvPoolExhausted, PagedKvError, PagedStoreExhausted
from pagedkv.prefix import PrefixCache
from pagedkv.sequence import PagedKvCache
from pagedkv.stats import PrefixStats, StoreStats
from pagedkv.step import Step
from pagedkv.store import PagedKvStore
from pagedkv.threads import get_num_threads, set_num_threads
from pagedkv.viz import BlockMap

__version__ = "0.1.0"

__all__ = [
    "Admission",
    "BlockMap",
    "CpuInfo",
    "KvBlockPool",
    "KvCache",
    "KvPoolExhausted",
    "PagedKvCache",
    "PagedKvError",
    "PagedKvStore",
    "PagedStoreExhausted",
    "PrefixCache",
    "PrefixStats",
    "Room",
    "Step",
    "StoreStats",
    "Waiting",
    "attention",
    "cpu_info",
    "get_num_threads",
    "paged_attention",
    "plan_admission",
    "reorder",
    "room_for",
    "set_num_threads",
]
