"""Segments: files that records are appended to, by one process each, and an index beside each; docs/records.md.

A record is in the segment before it is in the index, and what neither names is no record: whoever is killed while it
writes leaves a tail that nobody looks at. Nothing here is trusted: what is read from a segment is compared by `fetch`.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pagedkv.tiers.keys import HEADER_BYTES
from pagedkv.tiers.records import Record, encode_description, head_is_whole, read_header

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

CAN_LOCK = fcntl is not None
VERSION = 1
_START = struct.Struct("<8sIIQ")  # magic, version, 0, most bytes of the segment
_SEGMENT, _INDEX = b"\x93PKVSEG\n", b"\x93PKVIDX\n"
START_BYTES = _START.size  # 24
_ENTRY = struct.Struct("<QQQQII32s32s32sII")
ENTRY_BYTES = _ENTRY.size  # 144
NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}")  # when it was begun, and chance
_FILE = re.compile(rf"({NAME.pattern})\.(seg|idx|new)")
_MOST_PIECES = min(1024, os.sysconf("SC_IOV_MAX")) if hasattr(os, "sysconf") else 16


def start_of(limit: int) -> bytes:
    """What a segment begins with."""
    return _START.pack(_SEGMENT, VERSION, 0, limit)


def is_start(start: bytes) -> bool:
    """Whether a file begins as a segment does."""
    return len(start) == START_BYTES and start[:12] == _SEGMENT + VERSION.to_bytes(4, "little")


def version_of_start(start: bytes) -> int | None:
    """The version that it says, if it is a segment's of any."""
    return _START.unpack(start)[1] if len(start) == START_BYTES and start[:8] == _SEGMENT else None


class Place(NamedTuple):
    """Where a record is in its segment, and what eviction wants to know of it: an entry of the index."""

    offset: int
    nbytes: int
    first_position: int
    time: int
    n_tokens: int
    group: int
    key: bytes
    parent: bytes
    root: bytes
    is_windowed: int  # 1 where layers have a window: then such a chunk is of use without most that come before it

    @property
    def is_description(self) -> bool:
        """Of a key space; all others are chunks."""
        return self.n_tokens == 0


class Descriptor:
    """An open file, closed when nobody refers to it any more: a thread reads on while another forgets the segment."""

    def __init__(self, path: str, flags: int) -> None:
        self.fd = -1
        self.fd = os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o644)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class OpenFiles:
    """Some segments, open for reading: those that were used last."""

    def __init__(self, most: int = 64) -> None:
        self.most = most
        self.files: dict[str, Descriptor] = {}

    def open(self, path: str) -> Descriptor:
        """OSError where it cannot be."""
        file = self.files.pop(path, None) or Descriptor(path, os.O_RDONLY)
        while len(self.files) >= self.most:
            del self.files[next(iter(self.files))]
        self.files[path] = file
        return file


# --- bytes in and out ----------------------------------------------------------------------------------


def _left(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """The buffers without their first bytes."""
    for i, buffer in enumerate(buffers):
        if done < buffer.nbytes:
            return [buffer[done:] if done else buffer, *buffers[i + 1 :]]
        done -= buffer.nbytes
    return []


def write_all(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write buffers one after another; OSError where not all of it could be: a full disk writes a part first."""
    for start in range(0, len(buffers), _MOST_PIECES):
        rest: Sequence[memoryview] = buffers[start : start + _MOST_PIECES]
        wanted = sum(buffer.nbytes for buffer in rest)
        while wanted:
            n = os.pwritev(fd, rest, offset)
            offset, wanted = offset + n, wanted - n
            rest = _left(rest, n) if wanted else ()


def read_all(fd: int, buffers: Sequence[memoryview], offset: int) -> bool:
    """Fill buffers one after another; False where the file ends before."""
    for start in range(0, len(buffers), _MOST_PIECES):
        rest: Sequence[memoryview] = buffers[start : start + _MOST_PIECES]
        wanted = sum(buffer.nbytes for buffer in rest)
        while wanted:
            n = os.preadv(fd, rest, offset)
            if n == 0:
                return False
            offset, wanted = offset + n, wanted - n
            rest = _left(rest, n) if wanted else ()
    return True


def is_locked(fd: int) -> bool:
    """Whether another process, or another one of our files, writes there now."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    unlock(fd)
    return False


def lock(fd: int, wait: bool = False) -> bool:
    """Become the one who writes there, until the descriptor is closed; False where somebody else is."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def unlock(fd: int) -> None:
    """Let others."""
    fcntl.flock(fd, fcntl.LOCK_UN)


# --- one segment ---------------------------------------------------------------------------------------


class Segment:
    """What is known of a segment: places of records, from its index as far as that goes, and then from itself."""

    def __init__(self, folder: str, name: str, files: OpenFiles) -> None:
        self.name = name
        self.files = files
        self.path = os.path.join(folder, f"{name}.seg")
        self.index_path = os.path.join(folder, f"{name}.idx")
        self.places: dict[bytes, Place] = {}
        self.limit = 0  # bytes that its writer goes up to
        self.end = START_BYTES  # of the last record that is known
        self.index_end = START_BYTES  # of the last entry that was read
        self.index_nbytes = 0
        self.nbytes = 0  # on disk, both files
        self.used = 0.0  # when we used a record of it last, as far as the file's time of change says so
        self.used_by_others = 0.0  # what else that has said
        self.checked = -1  # size of the file up to which it was looked at for records behind the index

    def open(self) -> Descriptor:
        """For reading; OSError where it cannot be."""
        return self.files.open(self.path)

    def update(self) -> list[Place]:
        """Read what is new; returns it. OSError where a file cannot be read."""
        if not self.limit:
            start = os.pread(self.open().fd, START_BYTES, 0)
            if not is_start(start):
                return []
            self.limit = max(_START.unpack(start)[3], START_BYTES)
        status = os.stat(self.path)
        found = self._read_index(status.st_size)
        # Behind the index: what was written by one who was killed before he said so.
        is_more = self.end + HEADER_BYTES <= status.st_size != self.checked
        if is_more and not is_locked(self.open().fd):
            found += self._scan(status.st_size)
            self.checked = status.st_size
        for place in found:
            self.places[place.key] = place
        self.nbytes = status.st_size + self.index_nbytes
        self._see_use(status.st_mtime)
        return found

    def _see_use(self, changed: float) -> None:
        if changed > self.used + 0.01:
            self.used_by_others = changed

    def may_have_more(self, files: dict[str, os.DirEntry[str]]) -> bool:
        """Whether `update` could find something, by the sizes of the files; sees whether others have used it."""
        try:
            status = files["seg"].stat()
            index_size = files["idx"].stat().st_size if "idx" in files else 0
        except OSError:
            return True
        self._see_use(status.st_mtime)
        self.nbytes = status.st_size + index_size
        is_new = index_size != self.index_nbytes
        return is_new or not self.limit or (status.st_size > self.end and status.st_size != self.checked)

    def _read_index(self, size: int) -> list[Place]:
        try:
            with open(self.index_path, "rb") as file:
                self.index_nbytes = os.fstat(file.fileno()).st_size
                if file.read(START_BYTES)[:12] != _INDEX + VERSION.to_bytes(4, "little"):
                    return []
                file.seek(self.index_end)
                data = file.read()
        except FileNotFoundError:  # then the segment itself is read
            return []
        found, end, view = [], self.end, memoryview(data)
        for start in range(0, len(data) - ENTRY_BYTES + 1, ENTRY_BYTES):
            entry = view[start : start + ENTRY_BYTES]
            *values, crc = _ENTRY.unpack(entry)
            place = Place(*values)
            # An entry that is wrong, and all behind it, is none: then the segment itself is read.
            if zlib.crc32(entry[:-4]) != crc or place.offset != end or place.offset + place.nbytes > size:
                break
            end = place.offset + place.nbytes
            found.append(place)
        self.end = end
        self.index_end += len(found) * ENTRY_BYTES
        return found

    def _scan(self, size: int) -> list[Place]:
        """The records behind the last one that is known, by their headers."""
        found = []
        for place in scan(self.open().fd, self.end, size):
            self.end = place.offset + place.nbytes
            found.append(place)
        return found

    def remove(self) -> bool:
        """Unlink both files, if nobody writes there; whether it is gone now."""
        try:
            file = Descriptor(self.path, os.O_RDONLY)
        except FileNotFoundError:
            file = None
        if file is not None:
            if not lock(file.fd):
                return False
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.index_path)
        return True


def scan(fd: int, start: int, size: int) -> Iterator[Place]:
    """The records of a segment by their headers, until there is none."""
    while start + HEADER_BYTES <= size:
        head = os.pread(fd, HEADER_BYTES, start)
        header = read_header(head)
        if header is None or start + header.nbytes > size:
            return
        if not head_is_whole(head + os.pread(fd, 8 * header.n_tokens, start + HEADER_BYTES)):
            return
        yield Place(
            start, header.nbytes, header.first_position, header.time, header.n_tokens, header.group,
            header.key, header.parent, header.root, header.window > 0,
        )  # fmt: skip
        start += header.nbytes


class Writer:
    """The end of a segment that is ours: nobody else appends to it, or removes it, until this object goes."""

    def __init__(self, segment: Segment, file: Descriptor, index: Descriptor) -> None:
        self.segment = segment
        self.file = file
        self.index = index

    @classmethod
    def begin(cls, folder: str, limit: int, files: OpenFiles) -> Writer:
        """A new segment. It has its name when it is locked, so that nobody takes it for one of the dead."""
        segment = Segment(folder, f"{time.time_ns():016x}-{secrets.token_hex(8)}", files)
        unnamed = segment.path.removesuffix("seg") + "new"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            index = Descriptor(segment.index_path, flags)
            file = Descriptor(unnamed, flags)
            lock(file.fd)
            write_all(index.fd, [memoryview(_START.pack(_INDEX, VERSION, 0, limit))], 0)
            write_all(file.fd, [memoryview(start_of(limit))], 0)
            os.rename(unnamed, segment.path)
        except BaseException:
            for path in (unnamed, segment.path, segment.index_path):
                with contextlib.suppress(OSError):
                    os.unlink(path)
            raise
        segment.limit = limit
        segment.index_nbytes = START_BYTES
        segment.nbytes = 2 * START_BYTES
        segment.used = time.time()
        return cls(segment, file, index)

    @classmethod
    def go_on(cls, segment: Segment) -> Writer | None:
        """With a segment that another process has ended well, and not filled; None where that is not so."""
        try:
            file = Descriptor(segment.path, os.O_RDWR)
            if not lock(file.fd):
                return None
            segment.update()
            index = Descriptor(segment.index_path, os.O_RDWR)
            status = os.fstat(file.fd)
            ends_well = status.st_size == segment.end and os.fstat(index.fd).st_size == segment.index_end
        except OSError:
            return None
        if not ends_well or status.st_nlink == 0 or not segment.limit:
            return None
        return cls(segment, file, index)

    def append(self, record: Record) -> list[Place]:
        """Write a record, and before the first one of a key space what that is; returns the places.

        OSError where it cannot be: then nothing was written that anybody finds.
        """
        segment, space = self.segment, record.chunk.space
        offset, now, written = segment.end, int(time.time()), []
        buffers: list[memoryview] = []
        if space.key not in segment.places:
            description = memoryview(encode_description(space))
            buffers.append(description)
            written.append(
                Place(offset, description.nbytes, 0, now, 0, space.format.group, space.key, bytes(32), space.key, 0)
            )
            offset += description.nbytes
        chunk = record.chunk
        place = Place(
            offset, record.nbytes, chunk.first_position, now, chunk.n_tokens, space.format.group,
            chunk.key, chunk.parent, space.key, space.format.window is not None,
        )  # fmt: skip
        written.append(place)
        try:
            write_all(self.file.fd, [*buffers, *record.buffers], segment.end)
            entries = b"".join(pack_entry(place) for place in written)
            write_all(self.index.fd, [memoryview(entries)], segment.index_end)
        except OSError:
            for file, end in ((self.index, segment.index_end), (self.file, segment.end)):
                with contextlib.suppress(OSError):  # no index names what is cut off
                    os.ftruncate(file.fd, end)
            raise
        segment.index_end += len(entries)
        segment.end = offset + record.nbytes
        segment.index_nbytes = segment.index_end
        segment.nbytes = segment.end + segment.index_end
        return written

    def needs(self, record: Record) -> int:
        """Bytes of both files that a record takes."""
        return record.nbytes + ENTRY_BYTES if record.chunk.space.key in self.segment.places else self.first(record)

    @staticmethod
    def first(record: Record) -> int:
        """The same of a key space's first record in a segment."""
        return record.nbytes + HEADER_BYTES + len(record.chunk.space.description) + 2 * ENTRY_BYTES

    def sync(self) -> None:
        """Have the system write it to the disk; OSError where that fails."""
        os.fdatasync(self.file.fd)
        os.fdatasync(self.index.fd)


def pack_entry(place: Place) -> bytes:
    """Its bytes in an index."""
    entry = _ENTRY.pack(*place, 0)[:-4]
    return entry + zlib.crc32(entry).to_bytes(4, "little")


def own_files(folder: str) -> dict[str, dict[str, os.DirEntry[str]]]:
    """Our files in a folder, by segment and by kind ("seg", "idx", "new"); no other is ever looked at."""
    found: dict[str, dict[str, os.DirEntry[str]]] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if match := _FILE.fullmatch(entry.name):
                found.setdefault(match[1], {})[match[2]] = entry
    return found
