"""What records are asked for by: formats of what a store keeps, chunks of prompts, and their keys; docs/records.md.

A key is the same in every process and on every machine.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from hashlib import sha256
from typing import NamedTuple, SupportsIndex

from pagedkv import PagedKvStore
from pagedkv._arrays import as_size
from pagedkv._keys import Tokens, as_namespace, as_token_ids
from pagedkv.formats import DTYPES, FORMATS

VERSION = 1  # of records
HEADER_BYTES = 192  # of a record, before its token ids
CHUNK, LEFT_BEHIND = 1, 2  # kinds of records

_DTYPE_OF = {format.description: name for name, format in FORMATS.items()}
_MAX = 2**31 - 1
_PREFERRED_BYTES = 2**20
_MOST_BYTES = 2**40  # of a block


@dataclass(frozen=True)
class RecordFormat:
    """All that decides which bytes a chunk of tokens leaves in a store: those who agree can read each other's records.

    Attributes
    ----------
    block_size : int
        Positions of a block.
    n_layers, n_kv_heads, head_dim, v_head_dim : int
        As of the `PagedKvStore`.
    dtype : str
        The name of the store's dtype. `description` says with it how groups are scaled, and whether heads are turned.
    block_bytes : int
        Bytes of a block: K and V of all layers, with scales.
    chunk_blocks : int
        Blocks of a whole chunk.
    window : int or None
        Positions that a query of these layers sees, itself included; None sees all.
    group : int
        Which of the model's KV-cache groups it is.

    Raises
    ------
    TypeError, ValueError
        A field of a wrong kind, or out of range.

    Examples
    --------
    >>> import pagedkv
    >>> from pagedkv.tiers import RecordFormat
    >>> store = pagedkv.PagedKvStore(block_size=16, total_blocks=64, n_kv_heads=8, head_dim=128, n_layers=4)
    >>> format = RecordFormat.of(store)
    >>> format.block_bytes // 1024, format.chunk_blocks, format.chunk_tokens      # a chunk takes 1 MiB
    (512, 2, 32)
    """

    block_size: int
    n_layers: int
    n_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    block_bytes: int
    chunk_blocks: int
    window: int | None = None
    group: int = 0

    def __post_init__(self) -> None:
        for name in ("block_size", "n_layers", "n_kv_heads", "head_dim", "v_head_dim", "chunk_blocks"):
            object.__setattr__(self, name, as_size(getattr(self, name), name, 1, _MAX))
        if not isinstance(self.dtype, str):
            raise TypeError(f"dtype: expected a str, got {type(self.dtype).__name__}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {self.dtype[:40]!r}")
        object.__setattr__(self, "block_bytes", as_size(self.block_bytes, "block_bytes", 1, _MOST_BYTES))
        if self.window is not None:
            object.__setattr__(self, "window", as_size(self.window, "window", 1, sys.maxsize))
        object.__setattr__(self, "group", as_size(self.group, "group", 0, 2**16 - 1))

    @classmethod
    def of(
        cls,
        store: PagedKvStore,
        *,
        window: SupportsIndex | None = None,
        group: SupportsIndex = 0,
        chunk_blocks: SupportsIndex | None = None,
    ) -> RecordFormat:
        """The format of what a store keeps.

        Parameters
        ----------
        store : PagedKvStore
            Holds the layers of one KV-cache group.
        window : int, optional
            Positions that a query of these layers sees, itself included, from 1. None sees all.
        group : int, optional
            Which of a model's groups it is, from 0 to 65535.
        chunk_blocks : int, optional
            Blocks of a chunk, from 1. By default as many, a power of two, as make a payload of above 0.5 and at most
            1 MiB; one where a block is larger.

        Returns
        -------
        RecordFormat

        Raises
        ------
        TypeError, ValueError
            An argument of a wrong kind, or out of range.
        """
        if not isinstance(store, PagedKvStore):
            raise TypeError(f"store: expected a PagedKvStore, got {type(store).__name__}")
        block_bytes = store.nbytes // store.total_blocks
        blocks = 1
        while blocks * 2 * block_bytes <= _PREFERRED_BYTES:
            blocks *= 2
        return cls(
            store.block_size,
            store.n_layers,
            store.n_kv_heads,
            store.head_dim,
            store.v_head_dim,
            str(store.dtype),
            block_bytes,
            blocks if chunk_blocks is None else as_size(chunk_blocks, "chunk_blocks", 1, _MAX),
            None if window is None else as_size(window, "window", 1, sys.maxsize),
            as_size(group, "group", 0, 2**16 - 1),
        )

    @property
    def chunk_tokens(self) -> int:
        """Positions of a whole chunk."""
        return self.chunk_blocks * self.block_size

    @cached_property
    def description(self) -> bytes:
        """All of it as JSON in ASCII, names sorted, without spaces."""
        stored = FORMATS[self.dtype].description
        named = {**asdict(self), "dtype": stored, "byte_order": sys.byteorder, "record_version": VERSION}
        return json.dumps(named, sort_keys=True, separators=(",", ":")).encode()

    @cached_property
    def digest(self) -> bytes:
        """sha256 of the description, 32 bytes."""
        return sha256(self.description).digest()

    def payload_bytes(self, n_tokens: SupportsIndex) -> int:
        """Bytes of the blocks that so many positions take.

        Parameters
        ----------
        n_tokens : int
            From 0.

        Returns
        -------
        int

        Raises
        ------
        TypeError, ValueError
            No such number.
        """
        return -(-as_size(n_tokens, "n_tokens", 0, sys.maxsize) // self.block_size) * self.block_bytes


@dataclass(frozen=True)
class KeySpace:
    """What the keys of all records of one format, model and namespace begin with. Key spaces have no key in common.

    Parameters
    ----------
    format : RecordFormat
        What is stored, and how.
    model : bytes
        Whatever tells this model's K and V from any other's: weights, adapter, revision. Not empty.
    namespace : bytes or None
        None is one of its own, apart from ``b""``.

    Raises
    ------
    TypeError, ValueError
        An argument of a wrong kind, an empty ``model``.

    Examples
    --------
    >>> import pagedkv
    >>> from pagedkv.tiers import KeySpace, RecordFormat
    >>> store = pagedkv.PagedKvStore(block_size=4, total_blocks=8, n_kv_heads=2, head_dim=4)
    >>> format = RecordFormat.of(store, chunk_blocks=2)
    >>> first, second = KeySpace(format, b"a model").chunks(range(20))            # 16 tokens in chunks, 4 are left
    >>> first.first_position, second.first_position, second.parent == first.key
    (0, 8, True)
    >>> KeySpace(format, b"another").chunks(range(20))[0].key == first.key
    False
    """

    format: RecordFormat
    model: bytes
    namespace: bytes | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.format, RecordFormat):
            raise TypeError(f"format: expected a RecordFormat, got {type(self.format).__name__}")
        if not isinstance(self.model, bytes):
            raise TypeError(f"model: expected bytes, got {type(self.model).__name__}")
        if not self.model:
            raise ValueError('model: expected bytes that tell the model from all others, got b""')
        object.__setattr__(self, "model", bytes.__getitem__(self.model, slice(None)))
        object.__setattr__(self, "namespace", as_namespace(self.namespace))

    @cached_property
    def description(self) -> bytes:
        """The fields, each with a tag of four letters and its length before it; what `key` is the sha256 of."""
        parts = [(b"form", self.format.description), (b"modl", self.model)]
        if self.namespace is not None:
            parts.append((b"name", self.namespace))
        return b"".join(tag + len(field).to_bytes(8, "little") + field for tag, field in parts)

    @cached_property
    def key(self) -> bytes:
        """The parent of every first chunk, 32 bytes."""
        return sha256(self.description).digest()

    def chunks(self, tokens: Tokens) -> list[Chunk]:
        """The whole chunks of a prompt, from its first token on.

        Parameters
        ----------
        tokens : list, tuple, range or integer array ``[n]``
            Token ids, 0 to 2**63 - 1.

        Returns
        -------
        list of Chunk
            ``n // format.chunk_tokens`` of them.

        Raises
        ------
        TypeError, ValueError
            ``tokens`` of a wrong kind.
        """
        data = as_token_ids(tokens).tobytes()
        n_bytes = self.format.chunk_tokens * 8
        payload = self.format.chunk_blocks * self.format.block_bytes
        found, parent = [], self.key
        for start in range(0, len(data) - n_bytes + 1, n_bytes):
            ids = data[start : start + n_bytes]
            key = sha256(parent + ids).digest()
            found.append(Chunk(self, key, parent, start // 8, ids, payload))
            parent = key
        return found

    def chunk(self, tokens: Tokens, after: Chunk | None = None) -> Chunk:
        """A chunk of any length, such as the rest of a sequence.

        Parameters
        ----------
        tokens : list, tuple, range or integer array ``[n]``
            Its own token ids, one at least.
        after : Chunk, optional
            The one before it; without, it is the first.

        Returns
        -------
        Chunk

        Raises
        ------
        TypeError, ValueError
            ``tokens`` of a wrong kind or empty; ``after`` of another key space.
        """
        ids = as_token_ids(tokens).tobytes()
        if not ids:
            raise ValueError("tokens: expected one at least, got none")
        if after is not None and not isinstance(after, Chunk):
            raise TypeError(f"after: expected a Chunk, got {type(after).__name__}")
        if after is not None and after.space != self:
            raise ValueError("after: expected a chunk of this key space, got one of another")
        parent, start = (after.key, after.first_position + after.n_tokens) if after else (self.key, 0)
        return Chunk(self, sha256(parent + ids).digest(), parent, start, ids, self.format.payload_bytes(len(ids) // 8))

    def left_behind(self, tokens: Tokens) -> Chunk:
        """A first chunk without a payload: tokens whose K/V a window has left behind, in a saved file.

        Parameters
        ----------
        tokens : list, tuple, range or integer array ``[n]``
            A whole number of blocks, one at least.

        Returns
        -------
        Chunk

        Raises
        ------
        TypeError, ValueError
            ``tokens`` of a wrong kind; a format without a window.
        """
        if self.format.window is None:
            raise ValueError("tokens: expected none left behind by layers without a window, got some")
        chunk = self.chunk(tokens)
        if chunk.n_tokens % self.format.block_size:
            raise ValueError(f"tokens: expected blocks of {self.format.block_size}, got {chunk.n_tokens} tokens")
        return chunk._replace(payload_bytes=0)

    def check_same(self, other: KeySpace) -> None:
        """Whether another one's records can be read.

        Parameters
        ----------
        other : KeySpace
            Of a file, say.

        Raises
        ------
        TypeError
            No key space.
        ValueError
            They differ; it names the first field that does, and both values.
        """
        if not isinstance(other, KeySpace):
            raise TypeError(f"other: expected a KeySpace, got {type(other).__name__}")
        for field in fields(RecordFormat):
            wanted, got = getattr(self.format, field.name), getattr(other.format, field.name)
            if wanted != got:
                raise ValueError(f"{field.name}: expected {wanted!r}, as the store has, got {got!r}")
        for name in ("model", "namespace"):
            wanted, got = getattr(self, name), getattr(other, name)
            if wanted != got:
                raise ValueError(f"{name}: expected {wanted!r}, got {got!r}")

    @classmethod
    def parse(cls, description: bytes) -> KeySpace:
        """The key space that a description is of.

        Parameters
        ----------
        description : bytes
            As `KeySpace.description` makes it.

        Returns
        -------
        KeySpace

        Raises
        ------
        TypeError
            No bytes.
        ValueError
            It is none, or one of another version or byte order; names what differs.
        """
        if not isinstance(description, (bytes, bytearray, memoryview)):
            raise TypeError(f"description: expected bytes, got {type(description).__name__}")
        parts, rest = {}, bytes(description)
        while rest:
            n = int.from_bytes(rest[4:12], "little")
            parts[rest[:4]], rest = rest[12 : 12 + n], rest[12 + n :]
        try:
            named = json.loads(parts[b"form"])
            for name, wanted in (("record_version", VERSION), ("byte_order", sys.byteorder)):
                if (got := named.pop(name)) != wanted:
                    raise ValueError(f"{name}: expected {wanted}, got {str(got)[:40]}")
            stored = named.pop("dtype")
            if stored not in _DTYPE_OF:
                raise ValueError(f"dtype: expected one of {', '.join(_DTYPE_OF)}, got {str(stored)[:40]}")
            space = cls(RecordFormat(dtype=_DTYPE_OF[stored], **named), parts[b"modl"], parts.get(b"name"))
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError, RecursionError, json.JSONDecodeError):
            raise ValueError("description: expected one of a key space, got other bytes") from None
        if space.description != description:
            raise ValueError("description: expected one of a key space, got other bytes")
        return space


class Chunk(NamedTuple):
    """Some tokens of a prompt, after all that come before them: what a record is asked for by. `KeySpace` makes it.

    Attributes
    ----------
    space : KeySpace
        Its format, model and namespace.
    key : bytes
        sha256 of ``parent + ids``, 32 bytes.
    parent : bytes
        The key of the chunk before it, or the key space's.
    first_position : int
        Of its first token.
    ids : bytes
        The token ids as little-endian int64.
    payload_bytes : int
        Bytes of its blocks.

    Examples
    --------
    >>> import pagedkv
    >>> from pagedkv.tiers import KeySpace, RecordFormat
    >>> store = pagedkv.PagedKvStore(block_size=4, total_blocks=8, n_kv_heads=2, head_dim=4)
    >>> chunk = KeySpace(RecordFormat.of(store), b"a model").chunk([7, 8, 9])
    >>> chunk.n_tokens, chunk.first_position, chunk.payload_bytes
    (3, 0, 256)
    """

    space: KeySpace
    key: bytes
    parent: bytes
    first_position: int
    ids: bytes
    payload_bytes: int

    @property
    def kind(self) -> int:
        """What the header says: 2 of a chunk without a payload, which a window has left behind, 1 of all others."""
        return CHUNK if self.payload_bytes else LEFT_BEHIND

    @property
    def n_tokens(self) -> int:
        """How many tokens they are."""
        return len(self.ids) // 8

    @property
    def nbytes(self) -> int:
        """Bytes of its record: header, token ids and payload."""
        return HEADER_BYTES + len(self.ids) + self.payload_bytes
