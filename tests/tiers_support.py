"""Records as docs/records.md has them, read and keyed without the library; chunks with bytes that are known."""

import hashlib
import json
import struct
import zlib

import numpy as np

import pagedkv
from pagedkv.tiers import KeySpace, RecordFormat, encode, fetch, room_for

# --- from the page alone --------------------------------------------------------------------------------

RECORD = [
    ("magic", 0, 8), ("version", 8, 2), ("kind", 10, 2), ("group", 12, 4), ("first_position", 16, 8),
    ("payload_bytes", 24, 8), ("n_tokens", 32, 4), ("payload_crc", 36, 4), ("time", 40, 8), ("key", 48, 32),
    ("parent", 80, 32), ("root", 112, 32), ("digest", 144, 32), ("window", 176, 8),
    ("zeros", 184, 4), ("crc", 188, 4),
]  # fmt: skip
ENTRY = [
    ("offset", 0, 8), ("nbytes", 8, 8), ("first_position", 16, 8), ("time", 24, 8), ("n_tokens", 32, 4),
    ("group", 36, 4), ("key", 40, 32), ("parent", 72, 32), ("root", 104, 32), ("windowed", 136, 4), ("crc", 140, 4),
]  # fmt: skip
BYTES = {"magic", "key", "parent", "root", "digest", "zeros"}


def fields(data, layout):
    found = {name: data[start : start + n] for name, start, n in layout}
    return {name: v if name in BYTES else int.from_bytes(v, "little") for name, v in found.items()}


def read_record(data):
    """``(fields, token ids, payload, bytes of the record)`` of the record that `data` begins with, or None."""
    if len(data) < 192:
        return None
    found = fields(data, RECORD)
    n = found["n_tokens"]
    ids, payload = data[192 : 192 + 8 * n], data[192 + 8 * n : 192 + 8 * n + found["payload_bytes"]]
    right = (
        found["magic"] == bytes.fromhex("93504B565245430A")
        and found["version"] == 1
        and len(payload) == found["payload_bytes"]
        and found["zeros"] == bytes(4)
        and zlib.crc32(data[:188] + ids) == found["crc"]
        and zlib.crc32(payload) == found["payload_crc"]
    )
    return (found, list(struct.unpack(f"<{n}Q", ids)), payload, 192 + 8 * n + len(payload)) if right else None


def read_segment(path):
    """All records of a ``.seg``, and the entries of its ``.idx``."""
    data, index = path.read_bytes(), path.with_suffix(".idx").read_bytes()
    assert data[:16] == b"\x93PKVSEG\n" + struct.pack("<II", 1, 0)
    assert index[:16] == b"\x93PKVIDX\n" + struct.pack("<II", 1, 0)
    records, at = [], 24
    while (found := read_record(data[at:])) is not None:
        records.append((at, *found))
        at += found[-1]
    entries = []
    for start in range(24, len(index) - 143, 144):
        entry = index[start : start + 144]
        if zlib.crc32(entry[:140]) != int.from_bytes(entry[140:], "little"):
            break
        entries.append(fields(entry, ENTRY))
    return records, entries


def root_of(format_fields, model, namespace):
    text = json.dumps(format_fields, sort_keys=True, separators=(",", ":")).encode("ascii")
    parts = [(b"form", text), (b"modl", model)] + ([] if namespace is None else [(b"name", namespace)])
    description = b"".join(tag + struct.pack("<Q", len(part)) + part for tag, part in parts)
    return description, hashlib.sha256(description).digest()


def key_of(parent, tokens):
    return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}Q", *tokens)).digest()


# --- chunks whose bytes are known -------------------------------------------------------------------------


def space(model=b"a model", namespace=None, block_bytes=256, chunk_blocks=1):
    """Of blocks of 4 positions, and of so many bytes."""
    store = pagedkv.PagedKvStore(4, 2, 1, block_bytes // 32)
    return KeySpace(RecordFormat.of(store, chunk_blocks=chunk_blocks), model, namespace)


def payload(chunk):
    """The bytes that its record is to have: they follow from the key."""
    return np.random.default_rng(list(chunk.key)).bytes(chunk.payload_bytes)


def record(chunk):
    data = memoryview(payload(chunk))
    cut = len(data) // 3
    return encode(chunk, [data[:cut], data[cut:]])


def store(tier, chunks):
    return tier.store([record(chunk) for chunk in chunks])


def load(tier, chunks):
    """How many chunks come, of which every byte is right; and what was wrong with the next."""
    loaded = [bytearray(chunk.payload_bytes) for chunk in chunks]
    into = [
        room_for(chunk, [memoryview(data)[:10], memoryview(data)[10:]])
        for chunk, data in zip(chunks, loaded, strict=True)
    ]
    n, wrong = fetch(tier, chunks, into)
    for chunk, data in zip(chunks[:n], loaded, strict=False):
        assert data == payload(chunk), "a wrong block"
    return n, wrong


def find(tier, chunks):
    return tier.find([chunk.key for chunk in chunks])


def disk_use(folder):
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".seg", ".idx", ".new"))
