"""What prefix caches know, in a saved file: path after path of tokens, each as far as every group has it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from types import EllipsisType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagedkv import PrefixCache
from pagedkv._keys import as_namespace
from pagedkv.stats import with_field_docs
from pagedkv.tiers.arguments import as_list, as_progress
from pagedkv.tiers.keys import Chunk, KeySpace, RecordFormat
from pagedkv.tiers.records import DESCRIPTION, encode_description
from pagedkv.tiers.saving import FileReader, FileWriter, Path, Progress, Saved, extend
from pagedkv.tiers.segments import START_BYTES

_Ids = npt.NDArray[np.int64]


@with_field_docs
class Restored(NamedTuple):
    """What `restore_prefixes` returns: a named tuple.

    Attributes
    ----------
    tokens : int
        Token positions that were restored, of the first group.
    records : int
        Chunks that were restored, of all groups.
    nbytes : int
        Their bytes.
    ended : str or None
        Why not all were: what was wrong with the next one, or "no room". None if they were.

    Examples
    --------
    >>> from pagedkv.tiers import Restored
    >>> Restored(16, 1, 4096, None).ended is None
    True
    """

    tokens: int
    records: int
    nbytes: int
    ended: str | None


def save_prefixes(
    path: str | os.PathLike[str],
    prefixes: PrefixCache | Sequence[PrefixCache],
    *,
    model: bytes,
    namespace: bytes | EllipsisType | None = ...,
    progress: Progress | None = None,
) -> Saved:
    """Write what prefix caches know to a file, as it is stored. It is no use of the blocks.

    Of layers with a window that is written which the next query at the end of each path sees. The file is replaced at
    once: a crash leaves the old one or the new one.

    Parameters
    ----------
    path : str or os.PathLike
        The file.
    prefixes : PrefixCache or sequence of PrefixCache
        One, of a store or of a model's, or one for each KV-cache group in their order. One without a window says which
        paths there are; if all have one, those are written whose beginning is still known.
    model : bytes
        Whatever tells this model's K and V from any other's: weights, adapter, revision. Not empty.
    namespace : bytes or None, optional
        All of them without it; None is one of its own.
    progress : callable, optional
        Called with bytes done, and bytes known to come, after each chunk. What it raises ends the work.

    Returns
    -------
    Saved

    Raises
    ------
    TypeError, ValueError
        An argument of a wrong kind.
    OSError
        The file cannot be written. What was there is as it was.

    Notes
    -----
    Threads: any number may use the prefix caches meanwhile. What they evict before its turn is left out.

    Examples
    --------
    >>> import os, tempfile, numpy as np, pagedkv
    >>> from pagedkv.tiers import restore_prefixes, save_prefixes
    >>> store, cache = pagedkv.PagedKvStore(4, 8, n_kv_heads=1, head_dim=2), pagedkv.PagedKvCache()
    >>> cache.append_contiguous(store, *np.ones((2, 8, 2), np.float32), 8)
    >>> prefixes = pagedkv.PrefixCache(store)
    >>> blocks = prefixes.insert(range(8), cache)
    >>> again = pagedkv.PrefixCache(pagedkv.PagedKvStore(4, 8, n_kv_heads=1, head_dim=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = save_prefixes(os.path.join(folder, "a"), prefixes, model=b"a model")
    ...     restored = restore_prefixes(os.path.join(folder, "a"), again, model=b"a model")
    >>> restored.tokens, again.match(range(9))
    (8, 8)
    """
    several = _as_several(prefixes)
    formats = _formats(several)
    lead = next((prefix for prefix in several if prefix.window is None), several[0])
    names: set[bytes | None] = set()
    wanted = namespace if isinstance(namespace, EllipsisType) else as_namespace(namespace)
    paths = [(name, ids) for name, ids in _paths(lead) if wanted in (..., name)]
    names = {name for name, _ in paths}
    spaces = {name: [KeySpace(format, model, name) for format in formats] for name in sorted(names, key=repr)}
    KeySpace(formats[0], model)  # or a wrong model would do where nothing is known
    with FileWriter(path, progress) as file:
        for of_name in spaces.values():
            for space in of_name:
                file.write([memoryview(encode_description(space))])
        for name, ids in paths:
            for space, prefix in zip(spaces[name], several, strict=True):
                blocks = hold(prefix, ids, name)
                try:
                    if any(block >= 0 for block in blocks):
                        file.add(space, prefix.store, ids[: len(blocks) * prefix.store.block_size], blocks)
                finally:
                    prefix.store.release([block for block in blocks if block >= 0])
    return file.result()


def _as_several(prefixes: PrefixCache | Sequence[PrefixCache]) -> list[PrefixCache]:
    if isinstance(prefixes, PrefixCache):
        return list(prefixes.groups)
    several = as_list(prefixes, "prefixes", "a prefix cache or several")
    for i, prefix in enumerate(several):
        if not isinstance(prefix, PrefixCache):
            raise TypeError(f"prefixes[{i}]: expected a PrefixCache, got {type(prefix).__name__}")
    if not several:
        raise ValueError("prefixes: expected one at least, got none")
    return several


def _formats(prefixes: Sequence[PrefixCache]) -> list[RecordFormat]:
    return [RecordFormat.of(prefix.store, window=prefix.window, group=i) for i, prefix in enumerate(prefixes)]


def _paths(prefixes: PrefixCache) -> list[tuple[bytes | None, _Ids]]:
    """The tokens of all that is known and that nothing known goes on from, by namespace."""
    known = {(block.namespace, block.id): (block.parent, block.tokens) for block in prefixes.walk()}
    inner = {(name, parent) for (name, _), (parent, _) in known.items()}
    found = []
    for name, id in known:
        if (name, id) in inner:
            continue
        parts = []
        while (name, id) in known:
            id, tokens = known[name, id]
            parts.append(tokens)
        if id == 0:  # all of it is known, from the first token on
            found.append((name, np.concatenate(parts[::-1])))
    return found


def hold(prefixes: PrefixCache, ids: _Ids, name: bytes | None) -> list[int]:
    """The blocks of the longest beginning of these tokens that is known, retained; -1 for what a window left behind.

    It may be evicted while we ask: only what is known still when we hold it is right.
    """
    asked, store = np.append(ids, 0), prefixes.store
    while True:
        blocks: list[int] = prefixes.match_blocks(asked, namespace=name).tolist()
        held = [block for block in blocks if block >= 0]
        try:
            store.retain(held)
        except ValueError:  # one is free meanwhile
            continue
        if prefixes.match_blocks(asked, namespace=name).tolist() == blocks:
            return blocks
        store.release(held)


def restore_prefixes(
    path: str | os.PathLike[str],
    prefixes: PrefixCache | Sequence[PrefixCache],
    *,
    model: bytes,
    namespace: bytes | EllipsisType | None = ...,
    progress: Progress | None = None,
) -> Restored:
    """Have prefix caches know what `save_prefixes` wrote: chunk after chunk, until one is wrong or there is no room.

    Where room is short, it evicts as a new request would. What is known already stays as it is.

    Parameters
    ----------
    path : str or os.PathLike
        The file.
    prefixes : PrefixCache or sequence of PrefixCache
        One, of a store or of a model's, or one for each KV-cache group in their order.
    model : bytes
        What it was saved under.
    namespace : bytes or None, optional
        Only this one of those that were saved.
    progress : callable, optional
        Called with bytes done and bytes in all after each chunk. What it raises ends the work; what is known stays.

    Returns
    -------
    Restored

    Raises
    ------
    ValueError
        The file is none, or one of another format or model: it names the field and both values. Nothing was changed.
    TypeError, OSError
        An argument of a wrong kind; the file cannot be read.

    Notes
    -----
    Threads: any number may use the prefix caches meanwhile.

    Examples
    --------
    >>> import os, tempfile, pagedkv
    >>> from pagedkv.tiers import restore_prefixes, save_prefixes
    >>> prefixes = pagedkv.PrefixCache(pagedkv.PagedKvStore(4, 8, n_kv_heads=1, head_dim=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = save_prefixes(os.path.join(folder, "a"), prefixes, model=b"a model")      # nothing is known
    ...     restore_prefixes(os.path.join(folder, "a"), prefixes, model=b"a model")
    Restored(tokens=0, records=0, nbytes=0, ended=None)
    """
    several, progress = _as_several(prefixes), as_progress(progress)
    wanted = namespace if isinstance(namespace, EllipsisType) else as_namespace(namespace)
    formats = _formats(several)
    KeySpace(formats[0], model)  # or a wrong model would do for a file that has nothing
    file = FileReader(path)
    for space in file.spaces.values():
        group = space.format.group
        if group >= len(several):
            raise ValueError(f"prefixes: expected one for each group of the file, {group + 1}, got {len(several)}")
        KeySpace(formats[group], model, space.namespace).check_same(space)
    runs: dict[bytes, _Run] = {}
    tokens = records = n_bytes = 0
    ended: str | None = None
    at = START_BYTES
    try:
        for at, header, head in file.headers():
            file_space = file.spaces.get(header.root)
            if file_space is None and header.kind != DESCRIPTION:
                ended = "root"
                break
            if header.kind == DESCRIPTION or file_space is None or wanted not in (..., file_space.namespace):
                at += header.nbytes
                continue
            run = runs.setdefault(header.root, _Run(several[file_space.format.group], file_space))
            if not run.goes_on_from(header.parent):
                ended = "no room"
                break
            ended = extend(file, at, header, head, run.path, file_space)
            if ended is not None:
                break
            chunk = run.learn()
            if chunk.payload_bytes:
                records, n_bytes = records + 1, n_bytes + header.nbytes
                tokens += chunk.n_tokens if file_space.format.group == 0 else 0
            at += header.nbytes
            if progress:
                progress(at, file.size)
        else:
            ended = None if at == file.size else "length"
    finally:
        for run in runs.values():
            run.end()
    return Restored(tokens, records, n_bytes, ended)


class _Run:
    """Chunks of one key space that follow one another: a path, which becomes known when another one begins."""

    def __init__(self, prefixes: PrefixCache, space: KeySpace) -> None:
        self.prefixes, self.space = prefixes, space
        self.chunks: dict[bytes, Chunk] = {}
        self.path = Path(prefixes.store)

    def learn(self) -> Chunk:
        chunk = self.path.chunk
        assert chunk is not None
        self.chunks[chunk.key] = chunk
        return chunk

    def goes_on_from(self, parent: bytes) -> bool:
        """Whether the path ends there now; False where what comes before is no longer known."""
        if self.path.chunk is not None and self.path.chunk.key == parent:
            return True
        self.end()
        before = self.chunks.get(parent)
        if before is None:
            return parent == self.space.key
        ids = self._tokens(before)
        blocks = hold(self.prefixes, ids, self.space.namespace)
        self.path.n_left = sum(block < 0 for block in blocks)
        self.path.blocks = blocks[self.path.n_left :]
        self.path.chunk = before
        if len(blocks) * self.prefixes.store.block_size == len(ids):
            return True
        self.path.release()
        return False

    def _tokens(self, chunk: Chunk) -> _Ids:
        return np.frombuffer(b"".join(reversed(list(self._back(chunk)))), "<i8").astype(np.int64)

    def _back(self, chunk: Chunk | None) -> Iterator[bytes]:
        while chunk is not None:
            yield chunk.ids
            chunk = self.chunks.get(chunk.parent)

    def end(self) -> None:
        """What the path holds is known from now on."""
        path, self.path = self.path, Path(self.prefixes.store)
        try:
            if path.chunk is not None and path.blocks:
                ids = self._tokens(path.chunk)
                cache = path.sequence(len(ids))
                self.prefixes.insert(ids, cache, namespace=self.space.namespace)
                cache.release(self.prefixes.store)
        finally:
            path.release()
