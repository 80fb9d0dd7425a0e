"""What is in a tier's folder, looked at from outside: for the command line. No tier is opened, none is disturbed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from pagedkv.tiers.files import check_folder
from pagedkv.tiers.keys import CHUNK, HEADER_BYTES, KeySpace
from pagedkv.tiers.records import DESCRIPTION, crc32, head_is_whole, read_header
from pagedkv.tiers.segments import START_BYTES, OpenFiles, Place, Segment, is_locked, own_files


@dataclass
class Contents:
    """What a tier has of one key space."""

    space: KeySpace | None  # None where its description cannot be read
    records: int = 0
    tokens: int = 0
    nbytes: int = 0
    oldest: int = 2**63
    newest: int = 0


class Checked(NamedTuple):
    """A segment, read from its beginning to its end."""

    name: str
    records: int
    wrong: list[str]
    left: int  # bytes behind the last record
    is_written: bool


def segments(path: str) -> Iterator[Segment]:
    """All that can be read; ValueError where it is no tier."""
    check_folder(path)
    files = OpenFiles()
    for name, kinds in sorted(own_files(path).items()):
        if "seg" in kinds:
            segment = Segment(path, name, files)
            try:
                segment.update()
            except FileNotFoundError:
                continue
            yield segment


def list_contents(path: str) -> list[Contents]:
    """What is there, by key space."""
    found: dict[bytes, Contents] = {}
    for segment in segments(path):
        for place in segment.places.values():
            if place.root not in found:
                found[place.root] = Contents(_space(segment, segment.places.get(place.root)))
            if not place.is_description:
                contents = found[place.root]
                contents.records += 1
                contents.tokens += place.n_tokens
                contents.nbytes += place.nbytes
                contents.oldest = min(contents.oldest, place.time)
                contents.newest = max(contents.newest, place.time)
    return list(found.values())


def _space(segment: Segment, place: Place | None) -> KeySpace | None:
    if place is None:
        return None
    text = os.pread(segment.open().fd, place.nbytes - HEADER_BYTES, place.offset + HEADER_BYTES)
    try:
        return KeySpace.parse(text)
    except ValueError:
        return None


def check_segments(path: str) -> Iterator[Checked]:
    """Read every byte, and compare it with its checksums and its key."""
    for segment in segments(path):
        fd, wrong, n, at = segment.open().fd, [], 0, START_BYTES
        written, size = is_locked(fd), os.fstat(fd).st_size
        while at < size:
            head = os.pread(fd, HEADER_BYTES, at)
            header = read_header(head)
            if header is None or at + header.nbytes > size:
                break
            head += os.pread(fd, 8 * header.n_tokens, at + HEADER_BYTES)
            if not head_is_whole(head):
                break
            payload = os.pread(fd, header.payload_bytes, at + len(head))
            seed = payload if header.kind == DESCRIPTION else header.parent + head[HEADER_BYTES:]
            if crc32([memoryview(payload)]) != header.payload_crc:
                wrong.append(f"at {at}: payload checksum")
            elif header.kind not in (DESCRIPTION, CHUNK) or sha256(seed).digest() != header.key:
                wrong.append(f"at {at}: key")
            n, at = n + (header.kind != DESCRIPTION), at + header.nbytes
        # What an index names is a record: behind a header that is wrong there are more.
        lost = sum(place.offset >= at and not place.is_description for place in segment.places.values())
        if lost:
            wrong.append(f"at {at}: header, and {lost} records from there on")
        yield Checked(segment.name, n, wrong, size - at, written)


def remove_segments(path: str) -> tuple[int, int, int]:
    """How many were removed, their bytes, and how many are left because a process writes there."""
    removed = n_bytes = left = 0
    for segment in segments(path):
        if segment.remove():
            removed, n_bytes = removed + 1, n_bytes + segment.nbytes
        else:
            left += 1
    return removed, n_bytes, left
