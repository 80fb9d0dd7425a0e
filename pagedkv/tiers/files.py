"""FileTier: records in a folder, for any number of processes at once.

    segments   what each process appends to, and reads of the others; segments.py
    index      by key: the segments that have it, the newest last
    eviction   of whole segments: that one whose loss is the least

The folder's format file is locked while somebody begins a segment, which is when room is made: so that what all of them
write together stays within ``max_bytes`` and one segment.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import SupportsIndex

from pagedkv._arrays import as_size
from pagedkv.tiers.arguments import as_keys, as_path, as_rooms
from pagedkv.tiers.eviction import by_loss
from pagedkv.tiers.records import Record, as_records
from pagedkv.tiers.segments import (
    CAN_LOCK,
    START_BYTES,
    Descriptor,
    OpenFiles,
    Place,
    Segment,
    Writer,
    is_locked,
    lock,
    own_files,
    read_all,
    unlock,
)
from pagedkv.tiers.tier import TierStats

FORMAT_FILE = "pagedkv-tier"
FORMAT = b"pagedkv tier 1\n"
_STALE = 1.0  # seconds after which other processes' records are looked for, if nothing misses before
_PATIENCE = 1.0  # seconds that a disk is left alone which took nothing
_ABANDONED = 60.0  # seconds after which half a segment is nobody's
_LEAST_SEGMENT, _MOST_SEGMENT = 2**24, 2**28


class FileTier:
    """A tier in a folder: what is stored there is found by every process that opens it, now and later.

    Each process appends to a segment of its own, and reads the others'. Where ``max_bytes`` would be passed, whole
    segments go: those whose records, and what follows them in their prompts, were not used for longest. A process may
    be killed at any moment, a disk be full, a file vanish: then something is missing, and `TierStats` counts it.

    Parameters
    ----------
    path : str or os.PathLike
        The folder. It is made if it is missing; one that has no format file of a tier has to be empty.
    max_bytes : int
        What it may take, with all processes together: it stays within this and one segment.
    segment_bytes : int, optional
        Where a segment ends, from 65536. By default a sixteenth of ``max_bytes``, but from 16 to 256 MiB.

    Attributes
    ----------
    path : str
        The folder.
    max_bytes : int
        As it was given.
    segment_bytes : int
        Where a segment ends.

    Raises
    ------
    TypeError
        An argument of a wrong kind.
    ValueError
        ``path`` is no folder, one with other files, or a tier of another version; ``max_bytes`` is less than a segment.
    OSError
        The folder cannot be made, or read.

    Notes
    -----
    Whoever may write to the folder may put wrong K/V into it. Without the permission to write, it is read alone.

    Threads: any number at once. After a fork, parent and child have a segment each.

    Examples
    --------
    >>> import tempfile, pagedkv
    >>> from pagedkv.tiers import FileTier, KeySpace, RecordFormat, encode
    >>> store = pagedkv.PagedKvStore(block_size=4, total_blocks=8, n_kv_heads=2, head_dim=4)
    >>> chunks = KeySpace(RecordFormat.of(store, chunk_blocks=1), b"a model").chunks(range(8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with FileTier(folder, max_bytes=2**30) as tier:
    ...         tier.store([encode(chunk, [memoryview(bytes(256))]) for chunk in chunks])
    ...     with FileTier(folder, max_bytes=2**30) as tier:                    # another process, another day
    ...         tier.find([chunk.key for chunk in chunks])
    2
    2
    """

    def __init__(
        self, path: str | os.PathLike[str], *, max_bytes: SupportsIndex, segment_bytes: SupportsIndex | None = None
    ) -> None:
        self.path = os.path.abspath(as_path(path))
        self.max_bytes = as_size(max_bytes, "max_bytes", 1, 2**62)
        if segment_bytes is None:
            self.segment_bytes = min(max(self.max_bytes // 16, _LEAST_SEGMENT), _MOST_SEGMENT)
        else:
            self.segment_bytes = as_size(segment_bytes, "segment_bytes", 2**16, 2**40)
        if self.max_bytes < self.segment_bytes:
            raise ValueError(
                f"max_bytes: expected at least a segment of {self.segment_bytes} bytes, got {self.max_bytes}"
            )
        if not CAN_LOCK:
            raise OSError("a FileTier needs a system with flock")
        open_folder(self.path)
        self._is_open = True
        self._counts: Counter[str] = Counter()
        self._seconds = {"load": 0.0, "store": 0.0}
        self._forget()
        with self._lock:
            self._refresh()
        _open_tiers.add(self)

    def _forget(self) -> None:
        """As if nothing had been read and written: so a fork's child begins, whatever other threads were doing."""
        self._lock = threading.Lock()  # what is known: held for short
        self._writing = threading.Lock()  # the own segment: held while the disk writes
        self._files = OpenFiles()
        self._segments: dict[str, Segment] = {}
        self._having: dict[bytes, list[Segment]] = {}
        self._last_use: dict[bytes, float] = {}
        self._whole = b""  # a record that is there, with all before it: the last one that was stored
        self._refreshed = -_STALE
        self._own: Writer | None = None
        self._refused_until = -_PATIENCE

    def __repr__(self) -> str:
        return f"FileTier({self.path!r}, max_bytes={self.max_bytes})"

    def __enter__(self) -> FileTier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- the protocol ---

    def find(self, keys: Sequence[bytes], /) -> int:
        """As `Tier.find`: how many of these keys are there, from the first on. Looks for what other processes stored.

        Parameters
        ----------
        keys : sequence of bytes
            Of the chunks of a prompt, in order, 32 bytes each.

        Returns
        -------
        int

        Raises
        ------
        TypeError, ValueError
            An argument of a wrong kind; the tier is closed.
        """
        keys = as_keys(keys)
        with self._lock:
            self._check_open()
            n = self._count(keys)
            if n < len(keys) or time.monotonic() - self._refreshed >= _STALE:
                self._refresh()
                n = self._count(keys)
            self._counts["hits"] += n
            self._counts["misses"] += len(keys) - n
            self._use(keys[:n])
        return n

    def load(self, keys: Sequence[bytes], into: Sequence[Sequence[memoryview]], /) -> int:
        """As `Tier.load`: read records, from the first key on, until one cannot be read.

        Parameters
        ----------
        keys : sequence of bytes
            What to read, 32 bytes each.
        into : sequence of sequences of memoryview
            For each key where its record's bytes go: together as long as the record.

        Returns
        -------
        int
            How many were read. `fetch` sees whether they are right.

        Raises
        ------
        TypeError, ValueError
            An argument of a wrong kind; the tier is closed.
        """
        keys = as_keys(keys)
        rooms = as_rooms(into, len(keys), "records")
        started, n, n_bytes = time.perf_counter(), 0, 0
        for key, buffers in zip(keys, rooms, strict=True):
            size = self._read(key, buffers)
            if not size:
                break
            n, n_bytes = n + 1, n_bytes + size
        with self._lock:
            self._counts["loaded"] += n
            self._counts["loaded_bytes"] += n_bytes
            self._seconds["load"] += time.perf_counter() - started
        return n

    def store(self, records: Sequence[Record], /) -> int:
        """As `Tier.store`: append what is not there yet.

        A chunk is refused while the one before it is not there, unless its layers have a window.

        Parameters
        ----------
        records : sequence of Record
            As `encode` makes them.

        Returns
        -------
        int
            How many are there now, from the first on; the others were refused.

        Raises
        ------
        TypeError, ValueError
            An argument of a wrong kind; the tier is closed.
        """
        records = as_records(records)
        started, n = time.perf_counter(), 0
        with self._writing:
            for record in records:
                with self._lock:
                    self._check_open()
                    is_there = record.key in self._having
                    if is_there:
                        self._use([record.key])
                if not is_there and not self._write(record):
                    break
                n += 1
        with self._lock:
            self._counts["refused"] += len(records) - n
            self._seconds["store"] += time.perf_counter() - started
        return n

    def remove(self, keys: Sequence[bytes], /) -> int:
        """As `Tier.remove`: forget what turned out to be wrong. A segment is not written to for it.

        Parameters
        ----------
        keys : sequence of bytes
            32 bytes each.

        Returns
        -------
        int
            How many were there.

        Raises
        ------
        TypeError, ValueError
            An argument of a wrong kind; the tier is closed.
        """
        keys = as_keys(keys)
        with self._lock:
            self._check_open()
            n = sum(self._drop_newest(key) for key in keys)
            self._counts["corrupt"] += n
        return n

    def stats(self) -> TierStats:
        """What was done so far, and what is there now: a `TierStats`."""
        with self._lock:
            names = ("hits", "misses", "loaded", "loaded_bytes", "stored", "stored_bytes", "refused", "corrupt")
            return TierStats(
                records=len(self._having),
                nbytes=sum(segment.nbytes for segment in self._segments.values()),
                max_bytes=self.max_bytes,
                load_seconds=self._seconds["load"],
                store_seconds=self._seconds["store"],
                **{name: self._counts[name] for name in (*names, "evicted", "errors")},
            )

    def close(self) -> None:
        """Write out what the system has not yet written, and close all files. Does nothing the second time."""
        with self._writing:
            self._end_own()
            with self._lock:
                self._is_open = False
                self._segments, self._having, self._last_use = {}, {}, {}
                self._files.files.clear()
        _open_tiers.discard(self)

    # --- reading; with the lock where nothing else is said ---

    def _check_open(self) -> None:
        if not self._is_open:
            raise ValueError("tier: expected an open one, got one that is closed")

    def _count(self, keys: Sequence[bytes]) -> int:
        n = 0
        for key in keys:
            if key not in self._having:
                break
            n += 1
        return n

    def _is_of_use(self, record: Record) -> bool:
        """Whether what comes before it is there too, or need not be."""
        key, root = record.chunk.parent, record.chunk.space.key
        if record.chunk.space.format.window is not None:
            return True
        while key not in (root, self._whole) and key in self._having:
            key = self._having[key][-1].places[key].parent
        return key in (root, self._whole)

    def _use(self, keys: Sequence[bytes]) -> None:
        """These are in use: other processes see it by the time of their segments' last change."""
        now = time.time()
        for key in keys:
            self._last_use[key] = now
            segment = self._having[key][-1]
            if now - segment.used > _STALE:
                segment.used = now
                with contextlib.suppress(OSError):
                    os.utime(segment.path, (now, now))

    def _read(self, key: bytes, buffers: Sequence[memoryview]) -> int:
        """The bytes of a record that were read, 0 if there were none. Without the lock while the disk reads."""
        size = sum(buffer.nbytes for buffer in buffers)
        while True:
            with self._lock:
                self._check_open()
                if key not in self._having:
                    return 0
                segment = self._having[key][-1]
                place = segment.places[key]
                if place.nbytes != size:
                    return 0
                try:
                    file = segment.open()
                except FileNotFoundError:
                    self._drop_segment(segment)
                    continue
                except OSError:
                    self._counts["errors"] += 1
                    return 0
            try:
                if read_all(file.fd, buffers, place.offset):
                    return size
            except OSError:
                with self._lock:
                    self._counts["errors"] += 1
            with self._lock:
                if self._is_open and key in self._having and self._having[key][-1] is segment:
                    self._drop_newest(key)
                    self._counts["corrupt"] += 1

    def _refresh(self) -> None:
        """Find what other processes have stored and removed since. What cannot be read is as if it were not there."""
        self._refreshed = time.monotonic()
        try:
            found = own_files(self.path)
        except OSError as error:
            self._counts["errors"] += not isinstance(error, FileNotFoundError)
            found = {}
        for name in self._segments.keys() - {name for name, kinds in found.items() if "seg" in kinds}:
            self._drop_segment(self._segments[name])
        own = self._own.segment if self._own else None
        for name, kinds in sorted(found.items()):
            if "seg" not in kinds:
                continue
            segment = self._segments.get(name)
            if segment is None:
                segment = self._segments[name] = Segment(self.path, name, self._files)
            if segment is own or not segment.may_have_more(kinds):
                continue
            try:
                self._learn(segment, segment.update())
            except FileNotFoundError:
                self._drop_segment(segment)
            except OSError:
                self._counts["errors"] += 1

    def _learn(self, segment: Segment, places: Sequence[Place]) -> None:
        for place in places:
            segment.places[place.key] = place
            if not place.is_description:
                having = self._having.setdefault(place.key, [])
                if segment not in having:
                    having.append(segment)

    def _drop_newest(self, key: bytes) -> bool:
        having, self._whole = self._having.get(key), b""
        if not having:
            return False
        having.pop().places.pop(key, None)
        if not having:
            del self._having[key]
            self._last_use.pop(key, None)
        return True

    def _drop_segment(self, segment: Segment) -> None:
        """It has gone."""
        self._whole = b""
        self._segments.pop(segment.name, None)
        for key in segment.places:
            having = self._having.get(key)
            if having and segment in having:
                having.remove(segment)
                if not having:
                    del self._having[key]
                    self._last_use.pop(key, None)
        if self._own and self._own.segment is segment:
            self._own = None

    # --- writing; by one thread at a time, and without the lock while the disk writes ---

    def _write(self, record: Record) -> bool:
        if time.monotonic() < self._refused_until:
            return False
        with self._lock:
            if not self._is_of_use(record):
                self._refresh()
                if not self._is_of_use(record):
                    return False
        try:
            before, writer = self._own, self._writer_for(record)
            with self._lock:  # what was to make room may have been what comes before it
                is_of_use = writer is before or self._is_of_use(record)
            places = writer.append(record) if writer and is_of_use else []
        except OSError:
            with self._lock:
                self._counts["errors"] += 1
            self._refused_until = time.monotonic() + _PATIENCE
            return False
        except BaseException:  # an interrupt: nobody knows how much was written
            self._own = None
            raise
        with self._lock:
            if not places or writer is None or self._own is not writer:
                return False
            self._learn(writer.segment, places)
            self._last_use[record.key] = time.time()
            self._whole = record.key
            self._counts["stored"] += 1
            self._counts["stored_bytes"] += record.nbytes
        return True

    def _writer_for(self, record: Record) -> Writer | None:
        """The own segment if it has room, or else another one; None where there is room for none."""
        writer = self._own
        needed = writer.needs(record) if writer else 0
        if writer and writer.segment.nbytes + needed <= self.segment_bytes:
            if time.monotonic() - self._refreshed >= _STALE:
                with self._lock:
                    self._refresh()  # it may have been removed
                writer = self._own
            if writer:
                return writer
        if 2 * START_BYTES + Writer.first(record) > self.segment_bytes:
            return None
        self._end_own()
        with locked_folder(self.path):
            if not self._make_room():
                return None
            writer = self._unfilled(record) or Writer.begin(self.path, self.segment_bytes, self._files)
            with self._lock:
                self._check_open()
                self._own = writer
                self._segments[writer.segment.name] = writer.segment
                self._learn(writer.segment, list(writer.segment.places.values()))
        return writer

    def _unfilled(self, record: Record) -> Writer | None:
        """One that another process has begun, and ended well: so that many short ones do not leave as many files."""
        with self._lock:
            for segment in self._segments.values():
                if segment.limit == self.segment_bytes and segment.nbytes + Writer.first(record) <= segment.limit // 2:
                    writer = Writer.go_on(segment)
                    if writer:
                        return writer
        return None

    def _end_own(self) -> None:
        """Another process may go on with it, or remove it."""
        writer, self._own = self._own, None
        if writer:
            try:
                writer.sync()
            except OSError:
                with self._lock:
                    self._counts["errors"] += 1

    def _make_room(self) -> bool:
        """Evict until what is there, and what all who write may still write, is within `max_bytes`."""
        self._clean()
        with self._lock:
            self._refresh()
        while True:
            with self._lock:
                segments = list(self._segments.values())
                written = {segment.name for segment in segments if self._is_written(segment)}
            taken = sum(max(s.nbytes, s.limit if s.name in written else 0) for s in segments)
            if taken <= self.max_bytes:
                return True
            with self._lock:
                known = {key: (where[-1].places[key], tuple(where)) for key, where in self._having.items()}
                last_use = self._last_use.copy()
            for segment in by_loss([s for s in segments if s.name not in written], known, last_use):
                if segment.remove():
                    with self._lock:
                        self._counts["evicted"] += sum(not place.is_description for place in segment.places.values())
                        self._drop_segment(segment)
                    break
            else:
                return False

    def _is_written(self, segment: Segment) -> bool:
        try:
            return is_locked(segment.open().fd)
        except OSError:
            return False

    def _clean(self) -> None:
        """What was left of segments that were never begun, or of which a half was removed."""
        now = time.time()
        with contextlib.suppress(OSError):
            for kinds in own_files(self.path).values():
                for kind, entry in kinds.items():
                    if "seg" not in kinds or kind == "new":
                        with contextlib.suppress(OSError):
                            if now - entry.stat().st_mtime > _ABANDONED:
                                os.unlink(entry.path)


# --- the folder ----------------------------------------------------------------------------------------


def open_folder(path: str) -> None:
    """See that a folder is a tier, or make one of it; ValueError where it is something else."""
    if os.path.lexists(path) and not os.path.isdir(path):
        raise ValueError(f"path: expected a folder, got something else: {path}")
    os.makedirs(path, exist_ok=True)
    marker = os.path.join(path, FORMAT_FILE)
    if not os.path.lexists(marker):
        others = [name for name in os.listdir(path) if not name.startswith(FORMAT_FILE)]
        if others:
            raise ValueError(f"path: expected a tier or an empty folder, got one with other files in it: {path}")
        temporary = f"{marker}.{os.getpid()}-{time.time_ns():x}"
        try:
            with open(temporary, "xb") as file:
                file.write(FORMAT)
            os.replace(temporary, marker)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
    check_folder(path)


def check_folder(path: str) -> None:
    """See that a folder is a tier; ValueError where it is not. Nothing is made or changed."""
    marker = os.path.join(path, FORMAT_FILE)
    try:
        with open(marker, "rb") as file:
            written = file.read(len(FORMAT) + 64)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"path: expected the folder of a tier, got one without a file {FORMAT_FILE}: {path}") from None
    except IsADirectoryError:
        written = b""
    if written != FORMAT:
        shown = written.partition(b"\n")[0].decode("ascii", "replace")
        raise ValueError(f"path: expected a {FORMAT.decode().strip()}, got {shown!r} in {marker}")


@contextlib.contextmanager
def locked_folder(path: str) -> Iterator[None]:
    """One at a time, of all processes."""
    file = Descriptor(os.path.join(path, FORMAT_FILE), os.O_RDWR)
    lock(file.fd, wait=True)
    try:
        yield
    finally:
        unlock(file.fd)


# --- forks ---------------------------------------------------------------------------------------------

_open_tiers: weakref.WeakSet[FileTier] = weakref.WeakSet()


def _after_fork() -> None:
    for tier in list(_open_tiers):
        tier._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
