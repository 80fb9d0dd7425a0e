"""Records: what a chunk of tokens left in one KV-cache group, as bytes that say of themselves what they are.

docs/records.md describes the bytes.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from pagedkv.tiers.arguments import as_chunk, as_list, as_memory
from pagedkv.tiers.keys import HEADER_BYTES, VERSION, Chunk, KeySpace

MAGIC = b"\x93PKVREC\n"
_HEADER = struct.Struct("<8sHHIQQIIQ32s32s32s32sQ4xI")
_SEALED = HEADER_BYTES - 4  # what the header's checksum covers of it; the token ids follow
MOST_BYTES = 2**40  # of a payload; a header that says more is none
DESCRIPTION = 0  # the kind of a record that says what a key space is; those of chunks are with them

_NOTHING = bytes(32)


class Header(NamedTuple):
    """The first 192 bytes of a record, read."""

    version: int
    kind: int
    group: int
    first_position: int
    payload_bytes: int
    n_tokens: int
    payload_crc: int
    time: int
    key: bytes
    parent: bytes
    root: bytes
    digest: bytes
    window: int  # 0 for none

    @property
    def nbytes(self) -> int:
        """Bytes of the whole record."""
        return HEADER_BYTES + 8 * self.n_tokens + self.payload_bytes


class Record(NamedTuple):
    """A record that is to be stored: where its bytes are. `encode` makes it.

    Attributes
    ----------
    chunk : Chunk
        What it is of.
    buffers : tuple of memoryview
        Its bytes: header and token ids, then the payload in as many pieces as were given. They are read, not kept.

    Notes
    -----
    Threads: it looks at memory that is somebody's, who leaves it as it is meanwhile.

    Examples
    --------
    >>> import pagedkv
    >>> from pagedkv.tiers import KeySpace, RecordFormat, encode
    >>> store = pagedkv.PagedKvStore(block_size=4, total_blocks=8, n_kv_heads=2, head_dim=4)
    >>> chunk = KeySpace(RecordFormat.of(store), b"a model").chunk([7, 8, 9])
    >>> record = encode(chunk, [memoryview(bytes(256))])                   # the bytes of a block
    >>> record.key == chunk.key, record.nbytes, len(record.tobytes())
    (True, 472, 472)
    """

    chunk: Chunk
    buffers: tuple[memoryview, ...]

    @property
    def key(self) -> bytes:
        """What it is asked for by, 32 bytes."""
        return self.chunk.key

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self.chunk.nbytes

    def tobytes(self) -> bytes:
        """All of it, copied."""
        return b"".join(self.buffers)


def encode(chunk: Chunk, payload: Sequence[memoryview]) -> Record:
    """The record of a chunk.

    Parameters
    ----------
    chunk : Chunk
        What the payload is of.
    payload : sequence of memoryview
        The stored bytes of its blocks, in pieces of any size, contiguous: together ``chunk.payload_bytes``.

    Returns
    -------
    Record

    Raises
    ------
    TypeError, ValueError
        No chunk; a payload of another length, or of no contiguous memory.

    Notes
    -----
    Threads: any number. Nobody writes into the payload until the record is stored: its checksum is taken here.

    Examples
    --------
    >>> import pagedkv
    >>> from pagedkv.tiers import KeySpace, RecordFormat, encode
    >>> store = pagedkv.PagedKvStore(block_size=4, total_blocks=8, n_kv_heads=2, head_dim=4)
    >>> [chunk] = KeySpace(RecordFormat.of(store, chunk_blocks=1), b"a model").chunks([5, 6, 7, 8])
    >>> with store.pieces(store.acquire(1)) as pieces:
    ...     record = encode(chunk, pieces.views)
    >>> record.nbytes                                                      # 192, 4 token ids, a block
    480
    """
    pieces = _payload_of(chunk, payload)
    head = _head(chunk.kind, chunk, crc32(pieces))
    return Record(chunk, (memoryview(head), *pieces))


def _payload_of(chunk: Chunk, payload: Sequence[memoryview]) -> list[memoryview]:
    n_wanted, pieces = as_chunk(chunk).payload_bytes, as_memory(payload, "payload")
    n_bytes = sum(piece.nbytes for piece in pieces)
    if n_bytes != n_wanted:
        raise ValueError(f"payload: expected {n_wanted} bytes, got {n_bytes}")
    return pieces


def as_records(records: Sequence[Record]) -> list[Record]:
    """Records as `encode` makes them: a segment is read by their lengths."""
    found = as_list(records, "records", "several records")
    for i, record in enumerate(found):
        if not isinstance(record, Record):
            raise TypeError(f"records[{i}]: expected a Record, got {type(record).__name__}")
        chunk = as_chunk(record.chunk, f"records[{i}].chunk")
        pieces = as_memory(record.buffers, f"records[{i}].buffers")
        n_bytes = sum(piece.nbytes for piece in pieces)
        if n_bytes != chunk.nbytes or pieces[0].nbytes != chunk.nbytes - chunk.payload_bytes:
            raise ValueError(f"records[{i}]: expected one that encode has made, got another one")
    return found


def encode_description(space: KeySpace) -> bytes:
    """The record that says what a key space is: its description is the payload, and its key that of the key space."""
    chunk = Chunk(space, space.key, _NOTHING, 0, b"", len(space.description))
    return _head(DESCRIPTION, chunk, zlib.crc32(space.description)) + space.description


def _head(kind: int, chunk: Chunk, payload_crc: int) -> bytes:
    space, ids = chunk.space, chunk.ids
    packed = _HEADER.pack(
        MAGIC, VERSION, kind, space.format.group, chunk.first_position, chunk.payload_bytes, len(ids) // 8, payload_crc,
        int(time.time()), chunk.key, chunk.parent, space.key, space.format.digest,
        space.format.window or 0, 0,
    )  # fmt: skip
    sealed = packed[:_SEALED]
    return sealed + zlib.crc32(ids, zlib.crc32(sealed)).to_bytes(4, "little") + ids


def crc32(pieces: Sequence[memoryview]) -> int:
    """Of all pieces in turn, as of one."""
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return crc


def read_header(head: bytes) -> Header | None:
    """What the first `HEADER_BYTES` say, if they are a header of this version; `head_is_whole` sees if it is right."""
    if len(head) < HEADER_BYTES:
        return None
    magic, *values, _ = _HEADER.unpack_from(head)
    header = Header(*values)
    if magic != MAGIC or header.version != VERSION or header.payload_bytes > MOST_BYTES:
        return None
    return header


def version_of(head: bytes) -> int | None:
    """The version that it says, if it is a record's header of any."""
    return Header(*_HEADER.unpack_from(head)[1:-1]).version if len(head) >= HEADER_BYTES and head[:8] == MAGIC else None


def head_is_whole(head: bytes | bytearray | memoryview) -> bool:
    """Whether the checksum of a header and its token ids holds."""
    view = memoryview(head)
    crc = zlib.crc32(view[HEADER_BYTES:], zlib.crc32(view[:_SEALED]))
    return bytes(view[_SEALED:HEADER_BYTES]) == crc.to_bytes(4, "little")


def room_for(chunk: Chunk, payload: Sequence[memoryview]) -> list[memoryview]:
    """Where to load a chunk's record to: memory for header and token ids, and then that of the payload.

    Parameters
    ----------
    chunk : Chunk
        What is to be loaded.
    payload : sequence of memoryview
        Writable, contiguous, together ``chunk.payload_bytes``.

    Returns
    -------
    list of memoryview

    Raises
    ------
    TypeError, ValueError
        No chunk; a payload of another length, or of no such memory.

    Notes
    -----
    Threads: any number, with memory of their own.

    Examples
    --------
    >>> import pagedkv
    >>> from pagedkv.tiers import KeySpace, RecordFormat, room_for
    >>> store = pagedkv.PagedKvStore(block_size=4, total_blocks=8, n_kv_heads=2, head_dim=4)
    >>> [chunk] = KeySpace(RecordFormat.of(store, chunk_blocks=1), b"a model").chunks([5, 6, 7, 8])
    >>> with store.fill(1) as filling:
    ...     [piece.nbytes for piece in room_for(chunk, filling.views)]     # header and token ids; K; V
    [224, 128, 128]
    """
    pieces = _payload_of(chunk, payload)
    if any(piece.readonly for piece in pieces):
        raise ValueError("payload: expected memory that can be written, got some that cannot")
    return [memoryview(bytearray(HEADER_BYTES + len(chunk.ids))), *pieces]


def what_is_wrong(chunk: Chunk, buffers: Sequence[memoryview]) -> str | None:
    """Why these bytes are not the record of a chunk; None if they are.

    Everything is compared: magic, version, both checksums, format, key and parent, and the token ids one by one.

    Parameters
    ----------
    chunk : Chunk
        What was asked for.
    buffers : sequence of memoryview
        What came: as `room_for` makes it, filled.

    Returns
    -------
    str or None
        The first field that differs.

    Raises
    ------
    TypeError, ValueError
        No chunk; buffers that are no contiguous memory.

    Notes
    -----
    Threads: any number.

    Examples
    --------
    >>> import pagedkv
    >>> from pagedkv.tiers import KeySpace, RecordFormat, encode, what_is_wrong
    >>> store = pagedkv.PagedKvStore(block_size=4, total_blocks=8, n_kv_heads=2, head_dim=4)
    >>> space = KeySpace(RecordFormat.of(store), b"a model")
    >>> record = encode(space.chunk([5, 6, 7, 8]), [memoryview(bytes(256))])
    >>> what_is_wrong(record.chunk, record.buffers), what_is_wrong(space.chunk([5, 6, 7, 9]), record.buffers)
    (None, 'key')
    """
    as_chunk(chunk)
    head, *payload = as_memory(buffers, "buffers") or [memoryview(b"")]
    if head.nbytes < HEADER_BYTES or bytes(head[:8]) != MAGIC:
        return "magic"
    _, *values, _ = _HEADER.unpack_from(head)
    header, space = Header(*values), chunk.space
    if header.version != VERSION:
        return "version"
    if head.nbytes != HEADER_BYTES + len(chunk.ids) or not head_is_whole(head):
        return "header checksum"
    wanted = Header(
        VERSION, chunk.kind, space.format.group, chunk.first_position, chunk.payload_bytes, chunk.n_tokens,
        header.payload_crc, header.time, chunk.key, chunk.parent, space.key, space.format.digest,
        space.format.window or 0,
    )  # fmt: skip
    for name, got, expected in zip(Header._fields, header, wanted, strict=True):
        if got != expected:
            return name
    if bytes(head[HEADER_BYTES:]) != chunk.ids:
        return "token ids"
    if sum(piece.nbytes for piece in payload) != chunk.payload_bytes or crc32(payload) != header.payload_crc:
        return "payload checksum"
    return None
