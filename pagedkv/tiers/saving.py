"""Saved files: what prefix caches know, or one sequence, written at once and read back.

    save     the descriptions, then path after path of tokens, chunk by chunk; a chunk that several share comes once
    restore  verified chunks go into fresh blocks, out of sight; a path of them becomes known when it ends
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pagedkv import ModelSequence, ModelStores, PagedKvCache, PagedKvStore, PagedStoreExhausted
from pagedkv._arrays import as_size
from pagedkv._keys import Tokens, as_token_ids
from pagedkv.stats import with_field_docs
from pagedkv.tiers.arguments import as_list, as_path, as_progress
from pagedkv.tiers.keys import HEADER_BYTES, LEFT_BEHIND, VERSION, Chunk, KeySpace, RecordFormat
from pagedkv.tiers.records import (
    DESCRIPTION,
    Header,
    crc32,
    encode,
    encode_description,
    head_is_whole,
    read_header,
    room_for,
    version_of,
    what_is_wrong,
)
from pagedkv.tiers.segments import (
    START_BYTES,
    Descriptor,
    is_start,
    read_all,
    start_of,
    version_of_start,
    write_all,
)

Progress: TypeAlias = Callable[[int, int], object]
_Ids: TypeAlias = npt.NDArray[np.int64]


@with_field_docs
class Saved(NamedTuple):
    """What `save_sequence` and `save_prefixes` return: a named tuple.

    Attributes
    ----------
    tokens : int
        Token positions of all paths, of one group; what paths have in common counts once for each chunk.
    records : int
        Chunks that were written, of all groups.
    nbytes : int
        Bytes of the file.

    Examples
    --------
    >>> from pagedkv.tiers import Saved
    >>> Saved(16, 1, 4096).records
    1
    """

    tokens: int
    records: int
    nbytes: int


# --- writing -------------------------------------------------------------------------------------------


class FileWriter:
    """A file that is there as a whole, or not: under another name until it is on the disk."""

    def __init__(self, path: str | os.PathLike[str], progress: Progress | None) -> None:
        self.path = os.path.abspath(_as_file(path))
        self.temporary = f"{self.path}.{secrets.token_hex(8)}.tmp"
        self.progress = as_progress(progress)
        self.end = START_BYTES
        self.total = 0
        self.tokens = self.records = 0
        self.seen: set[tuple[bytes, int]] = set()

    def __enter__(self) -> FileWriter:
        self.file = Descriptor(self.temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        try:
            if kind is None:
                write_all(self.file.fd, [memoryview(start_of(self.end))], 0)
                os.fsync(self.file.fd)
                os.replace(self.temporary, self.path)
                if os.name == "posix":
                    folder = Descriptor(os.path.dirname(self.path), os.O_RDONLY)
                    os.fsync(folder.fd)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(self.temporary)

    def write(self, buffers: Sequence[memoryview]) -> None:
        write_all(self.file.fd, buffers, self.end)
        self.end += sum(buffer.nbytes for buffer in buffers)
        if self.progress:
            self.progress(self.end, max(self.total, self.end))

    def add(self, space: KeySpace, store: PagedKvStore, ids: _Ids, blocks: Sequence[int]) -> None:
        """A path: the K/V of these tokens, in these blocks, of which the first may be -1."""
        size, before = store.block_size, None
        n_left = sum(block < 0 for block in blocks)
        if n_left:
            before = space.left_behind(ids[: n_left * size])
            self._add(before, ())
        for start in range(n_left, len(blocks), space.format.chunk_blocks):
            end = min(start + space.format.chunk_blocks, len(blocks))
            chunk = space.chunk(ids[start * size : end * size], before)
            if (chunk.key, chunk.kind) not in self.seen:
                with store.pieces(list(blocks[start:end])) as pieces:
                    n_last = chunk.n_tokens - (end - start - 1) * size
                    self._add(chunk, _whole_rows(pieces.views, 2 * store.n_layers, n_last, size))
            before = chunk

    def _add(self, chunk: Chunk, payload: Sequence[memoryview]) -> None:
        if (chunk.key, chunk.kind) in self.seen:
            return
        self.write(encode(chunk, payload).buffers)
        self.seen.add((chunk.key, chunk.kind))
        self.records += chunk.kind != LEFT_BEHIND
        self.tokens += chunk.n_tokens if chunk.space.format.group == 0 else 0

    def result(self) -> Saved:
        return Saved(self.tokens, self.records, self.end)


def _whole_rows(views: Sequence[memoryview], n_pieces: int, n_rows: int, block_size: int) -> list[memoryview]:
    """The pieces of some blocks, with zeros for the rows of the last block that nobody has written."""
    found = list(views)
    if n_rows < block_size:
        for i in range(len(found) - n_pieces, len(found)):
            view = found[i]
            n_bytes = view.nbytes // block_size * n_rows
            found[i] = memoryview(bytes(view[:n_bytes]) + bytes(view.nbytes - n_bytes))
    return found


def save_sequence(
    path: str | os.PathLike[str],
    tokens: Tokens,
    caches: ModelSequence | PagedKvCache | Sequence[PagedKvCache],
    *,
    model: bytes,
    windows: Sequence[int | None] | None = None,
    namespace: bytes | None = None,
    progress: Progress | None = None,
) -> Saved:
    """Write a sequence to a file: its tokens and their K/V, as it is stored.

    Blocks that are only reserved are left out, and so is what a window has dropped. The file is replaced at once: a
    crash leaves the old one or the new one.

    Parameters
    ----------
    path : str or os.PathLike
        The file.
    tokens : list, tuple, range or integer array ``[seq_len]``
        What the positions were computed from.
    caches : ModelSequence, PagedKvCache or sequence of PagedKvCache
        The sequence, or one for each KV-cache group, in their order. All are of ``seq_len`` positions, one at least.
    model : bytes
        Whatever tells this model's K and V from any other's: weights, adapter, revision. Not empty.
    windows : sequence of int or None, optional
        Positions that a query of each group sees. By default all, and those of its stores for a `ModelSequence`.
    namespace : bytes, optional
        A part of the keys. None is one of its own.
    progress : callable, optional
        Called with bytes done, and bytes known to come, after each chunk. What it raises ends the work.

    Returns
    -------
    Saved

    Raises
    ------
    TypeError, ValueError
        An argument of a wrong kind; as many tokens as positions are expected.
    OSError
        The file cannot be written. What was there is as it was.

    Notes
    -----
    Threads: as for any use of the sequence.

    Examples
    --------
    >>> import os, tempfile, numpy as np, pagedkv
    >>> from pagedkv.tiers import restore_sequence, save_sequence
    >>> store, cache = pagedkv.PagedKvStore(4, 8, n_kv_heads=1, head_dim=2), pagedkv.PagedKvCache()
    >>> cache.append_contiguous(store, *np.ones((2, 6, 2), np.float32), 6)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = save_sequence(os.path.join(folder, "a"), range(6), cache, model=b"a model")
    ...     tokens, [again] = restore_sequence(os.path.join(folder, "a"), store, model=b"a model")
    >>> tokens.tolist(), again.seq_len
    ([0, 1, 2, 3, 4, 5], 6)
    """
    ids = as_token_ids(tokens)
    several: list[PagedKvCache]
    if isinstance(caches, ModelSequence):
        several = list(caches.caches)
        windows = [group.window for group in caches.stores.groups] if windows is None else windows
    elif isinstance(caches, PagedKvCache):
        several = [caches]
    else:
        several = as_list(caches, "caches", "a sequence or several")
    stores: list[PagedKvStore] = []
    for i, cache in enumerate(several):
        if not isinstance(cache, PagedKvCache):
            raise TypeError(f"caches[{i}]: expected a PagedKvCache, got {type(cache).__name__}")
        if cache.store is None or cache.seq_len != len(ids) or not len(ids):
            raise ValueError(f"caches[{i}]: expected one of {max(len(ids), 1)} positions, got {cache!r}")
        stores.append(cache.store)
    if not several:
        raise ValueError("caches: expected one at least, got none")
    spaces = _spaces(stores, model, namespace, windows)
    with FileWriter(path, progress) as file:
        file.total = sum(len(ids) * space.format.block_bytes // space.format.block_size for space in spaces)
        for space in spaces:
            file.write([memoryview(encode_description(space))])
        for space, store, cache in zip(spaces, stores, several, strict=True):
            table = cache.block_table.tolist()
            file.add(space, store, ids, table[: -(-len(ids) // store.block_size)])
    return file.result()


def _spaces(
    stores: Sequence[PagedKvStore], model: bytes, namespace: bytes | None, windows: Sequence[int | None] | None
) -> list[KeySpace]:
    sights = [None] * len(stores) if windows is None else as_list(windows, "windows", "one for each group")
    if len(sights) != len(stores):
        raise ValueError(f"windows: expected one for each of {len(stores)} groups, got {len(sights)}")
    sights = [None if n is None else as_size(n, f"windows[{i}]", 1, sys.maxsize) for i, n in enumerate(sights)]
    return [
        KeySpace(RecordFormat.of(store, window=window, group=group), model, namespace)
        for group, (store, window) in enumerate(zip(stores, sights, strict=True))
    ]


# --- reading -------------------------------------------------------------------------------------------


class FileReader:
    """A saved file: what it is of, and its chunks in turn."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = _as_file(path)
        self.file = Descriptor(self.path, os.O_RDONLY)
        self.size = os.fstat(self.file.fd).st_size
        start = os.pread(self.file.fd, START_BYTES, 0)
        if not is_start(start):
            version = version_of_start(start)
            if version is not None:
                raise ValueError(f"version: expected 1, got {version}, of {self.path}")
            raise ValueError(f"path: expected a saved file, got another one: {self.path}")
        version = version_of(os.pread(self.file.fd, HEADER_BYTES, START_BYTES))
        if version not in (None, VERSION):
            raise ValueError(f"record_version: expected {VERSION}, got {version}, in {self.path}")
        self.spaces: dict[bytes, KeySpace] = {}
        for at, header, head in self.headers():
            if header.kind == DESCRIPTION:
                text = os.pread(self.file.fd, header.payload_bytes, at + HEADER_BYTES)
                if head_is_whole(head) and crc32([memoryview(text)]) == header.payload_crc:
                    self.spaces[header.key] = KeySpace.parse(text)

    def headers(self) -> Iterator[tuple[int, Header, bytes]]:
        """Offset, header, and header with token ids of each record, until there is none."""
        at = START_BYTES
        while at < self.size:
            head = os.pread(self.file.fd, HEADER_BYTES, at)
            header = read_header(head)
            if header is None or at + header.nbytes > self.size:
                return
            yield at, header, head + os.pread(self.file.fd, 8 * header.n_tokens, at + HEADER_BYTES)
            at += header.nbytes

    def load(self, at: int, chunk: Chunk, views: Sequence[memoryview]) -> str | None:
        """Read a record into the memory of its payload; what is wrong with it."""
        into = room_for(chunk, views)
        if not read_all(self.file.fd, into, at):
            return "length"
        return what_is_wrong(chunk, into)


class Path:
    """Chunks that follow one another, in blocks that are held: a path of tokens."""

    def __init__(self, store: PagedKvStore) -> None:
        self.store = store
        self.blocks: list[int] = []
        self.n_left = 0  # blocks that are not there
        self.chunk: Chunk | None = None  # the last one

    def extend(self, chunk: Chunk, load: Callable[[Sequence[memoryview]], str | None]) -> str | None:
        """One more chunk; what is wrong with it, and then nothing was changed."""
        if chunk.kind == LEFT_BEHIND:
            self.n_left = chunk.n_tokens // self.store.block_size
            self.chunk = chunk
            return load(())
        n_blocks = chunk.payload_bytes // chunk.space.format.block_bytes
        try:
            filling = self.store.fill(n_blocks)
        except PagedStoreExhausted:
            return "no room"
        try:
            wrong = load(filling.views)
            if wrong is None:
                filling.commit()
                self.blocks += filling.ids
                self.chunk = chunk
        finally:
            filling.release()
        return wrong

    def sequence(self, n_tokens: int) -> PagedKvCache:
        """Takes the blocks over."""
        cache, size = PagedKvCache(), self.store.block_size
        table = [-1] * self.n_left + self.blocks
        cache.adopt_blocks(table, len(table) * size, size, store=self.store, first_position=self.n_left * size)
        self.blocks = []
        cache.truncate(self.store, n_tokens)
        return cache

    def release(self) -> None:
        blocks, self.blocks = self.blocks, []
        self.store.release(blocks)


def restore_sequence(
    path: str | os.PathLike[str],
    stores: ModelStores | PagedKvStore | Sequence[PagedKvStore],
    *,
    model: bytes,
    windows: Sequence[int | None] | None = None,
    namespace: bytes | None = None,
    progress: Progress | None = None,
) -> tuple[npt.NDArray[np.int64], list[PagedKvCache]]:
    """Read a sequence from a file that `save_sequence` wrote, all of it, into fresh blocks.

    Parameters
    ----------
    path : str or os.PathLike
        The file.
    stores : ModelStores, PagedKvStore or sequence of PagedKvStore
        Where to: a model's, or one for each KV-cache group, in their order.
    model : bytes
        What it was saved under.
    windows : sequence of int or None, optional
        As they were when it was saved: None sees all. By default those of `ModelStores`, and None for others.
    namespace : bytes, optional
        What it was saved under.
    progress : callable, optional
        Called with bytes done and bytes in all after each chunk. What it raises ends the work.

    Returns
    -------
    tokens : int64 array ``[seq_len]``
        What the positions were computed from.
    caches : list of PagedKvCache
        The sequence, one for each store. It goes on from there.

    Raises
    ------
    ValueError
        The file is none, or not whole, or one of another format or model: it names the field and both values.
    PagedStoreExhausted
        A store has too few blocks.
    TypeError, OSError
        An argument of a wrong kind; the file cannot be read. Whatever is raised, the stores are as they were.

    Notes
    -----
    Threads: any number, from files and into stores.

    Examples
    --------
    >>> import os, tempfile, numpy as np, pagedkv
    >>> from pagedkv.tiers import restore_sequence, save_sequence
    >>> store, cache = pagedkv.PagedKvStore(4, 8, n_kv_heads=1, head_dim=2), pagedkv.PagedKvCache()
    >>> cache.append_contiguous(store, *np.ones((2, 6, 2), np.float32), 6)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = save_sequence(os.path.join(folder, "a"), range(6), cache, model=b"a model")
    ...     try:
    ...         restore_sequence(os.path.join(folder, "a"), store, model=b"another")
    ...     except ValueError as error:
    ...         print(error)
    model: expected b'another', got b'a model'
    """
    several: list[PagedKvStore]
    if isinstance(stores, ModelStores):
        several = list(stores.stores)
        windows = [group.window for group in stores.groups] if windows is None else windows
    elif isinstance(stores, PagedKvStore):
        several = [stores]
    else:
        several = as_list(stores, "stores", "a store or several")
    for i, store in enumerate(several):
        if not isinstance(store, PagedKvStore):
            raise TypeError(f"stores[{i}]: expected a PagedKvStore, got {type(store).__name__}")
    if not several:
        raise ValueError("stores: expected one at least, got none")
    progress, spaces = as_progress(progress), _spaces(several, model, namespace, windows)
    file = FileReader(path)
    _check_groups(file, spaces)
    paths, ids, end = [Path(store) for store in several], [b""] * len(several), START_BYTES
    try:
        for at, header, head in file.headers():
            if header.kind == DESCRIPTION:
                continue
            if header.root not in file.spaces:
                raise ValueError(f"path: expected a whole file, got one with a wrong root: {file.path}")
            group = file.spaces[header.root].format.group
            own = paths[group]
            wrong = extend(file, at, header, head, own, spaces[group])
            if wrong == "no room":
                needed = header.payload_bytes // spaces[group].format.block_bytes
                raise PagedStoreExhausted(needed, own.store.free_block_count, own.store.total_blocks)
            if wrong is not None:
                raise ValueError(f"path: expected a whole file, got one with a wrong {wrong}: {file.path}")
            ids[group] += head[HEADER_BYTES:]
            if progress:
                progress(at + header.nbytes, file.size)
            end = at + header.nbytes
        if end != file.size or len(set(ids)) != 1:
            raise ValueError(f"path: expected a whole file, got one that is cut off: {file.path}")
        tokens = np.frombuffer(ids[0], "<i8").astype(np.int64)
        return tokens, [own.sequence(len(tokens)) for own in paths]
    finally:
        for own in paths:
            own.release()


def extend(file: FileReader, at: int, header: Header, head: bytes, own: Path, space: KeySpace) -> str | None:
    """What is wrong with the record there as the next one of a path."""
    if not head_is_whole(head):
        return "header checksum"
    ids = np.frombuffer(head[HEADER_BYTES:], "<i8")
    try:
        chunk = space.left_behind(ids) if header.kind == LEFT_BEHIND else space.chunk(ids, own.chunk)
    except ValueError:
        return "token ids"
    return own.extend(chunk, lambda views: file.load(at, chunk, views))


def _check_groups(file: FileReader, spaces: Sequence[KeySpace]) -> None:
    found = {space.format.group: space for space in file.spaces.values()}
    if len(found) != len(spaces) or set(found) != set(range(len(spaces))):
        raise ValueError(f"stores: expected one for each of {len(found)} groups, as the file has, got {len(spaces)}")
    for space in spaces:
        space.check_same(found[space.format.group])


def _as_file(path: str | os.PathLike[str]) -> str:
    name = as_path(path)
    if os.path.isdir(name):
        raise ValueError(f"path: expected a file, got a folder: {name}")
    return name
