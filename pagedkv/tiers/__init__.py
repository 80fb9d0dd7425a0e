"""K and V beyond the memory of a process: records of them, and tiers that keep records.

A *record* is what a chunk of tokens left in a KV-cache group, with all that tells whether it is what somebody asks for;
a *tier* keeps records by their keys. docs/records.md says what the bytes are.

Examples
--------
>>> import tempfile, pagedkv
>>> from pagedkv.tiers import FileTier, KeySpace, RecordFormat, encode, fetch, room_for
>>> store = pagedkv.PagedKvStore(block_size=4, total_blocks=8, n_kv_heads=2, head_dim=4)
>>> [chunk] = KeySpace(RecordFormat.of(store, chunk_blocks=1), b"a model").chunks([1, 2, 3, 4])
>>> with tempfile.TemporaryDirectory() as folder, FileTier(folder, max_bytes=2**30) as tier:
...     tier.store([encode(chunk, [memoryview(bytes(256))])])
...     fetch(tier, [chunk], [room_for(chunk, [memoryview(bytearray(256))])]).n
1
1
"""

from pagedkv.tiers.counts import TieredStats
from pagedkv.tiers.files import FileTier
from pagedkv.tiers.keys import Chunk, KeySpace, RecordFormat
from pagedkv.tiers.loading import Loaded, Loading
from pagedkv.tiers.records import Record, encode, room_for, what_is_wrong
from pagedkv.tiers.saving import Saved, restore_sequence, save_sequence
from pagedkv.tiers.saving_prefixes import Restored, restore_prefixes, save_prefixes
from pagedkv.tiers.tier import Fetched, Tier, TierStats, fetch
from pagedkv.tiers.tiered import TieredPrefixes

__all__ = [
    "Chunk",
    "Fetched",
    "FileTier",
    "KeySpace",
    "Loaded",
    "Loading",
    "Record",
    "RecordFormat",
    "Restored",
    "Saved",
    "Tier",
    "TierStats",
    "TieredPrefixes",
    "TieredStats",
    "encode",
    "fetch",
    "restore_prefixes",
    "restore_sequence",
    "room_for",
    "save_prefixes",
    "save_sequence",
    "what_is_wrong",
]
