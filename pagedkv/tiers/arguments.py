"""What callers and other people's tiers gave, checked. Errors name the argument, what was expected, and what came."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from pagedkv.tiers.keys import Chunk, KeySpace

_T = TypeVar("_T")
_KEY_BYTES = 32


def as_list(items: Sequence[_T], name: str, expected: str) -> list[_T]:
    """The items; text, bytes and dicts are none."""
    if isinstance(items, (str, bytes, bytearray, memoryview, dict, type)) or not hasattr(items, "__iter__"):
        raise TypeError(f"{name}: expected {expected}, got {type(items).__name__}")
    return list(items)


def as_keys(keys: Sequence[bytes]) -> list[bytes]:
    """Of records, 32 bytes each."""
    found = as_list(keys, "keys", "several keys")
    if not set(map(type, found)) <= {bytes}:
        wrong = next(key for key in found if type(key) is not bytes)
        raise TypeError(f"keys: expected bytes, got one of type {type(wrong).__name__}")
    if not set(map(len, found)) <= {_KEY_BYTES}:
        n_wrong = next(len(key) for key in found if len(key) != _KEY_BYTES)
        raise ValueError(f"keys: expected {_KEY_BYTES} bytes each, got one of {n_wrong}")
    return found


def as_chunk(chunk: Chunk, name: str = "chunk") -> Chunk:
    """One whose fields are what they have to be, whoever made it."""
    if not isinstance(chunk, Chunk):
        raise TypeError(f"{name}: expected a Chunk, got {type(chunk).__name__}")
    space, key, parent, first_position, ids, payload_bytes = chunk
    is_one = (
        isinstance(space, KeySpace)
        and all(type(each) is bytes and len(each) == _KEY_BYTES for each in (key, parent))
        and all(type(each) is int and 0 <= each < 2**63 for each in (first_position, payload_bytes))
        and type(ids) is bytes
        and len(ids) % 8 == 0
        and len(ids) < 2**34
    )
    if not is_one:
        raise ValueError(f"{name}: expected one that a KeySpace has made, got another one")
    return chunk


def as_memory(pieces: Sequence[memoryview], name: str) -> list[memoryview]:
    """The pieces themselves where they are plain bytes: what was made of one may keep it in use."""
    views = []
    for piece in as_list(pieces, name, "several memoryviews"):
        if type(piece) is memoryview and piece.format == "B" and piece.ndim == 1 and piece.c_contiguous:
            views.append(piece)
            continue
        try:
            view = memoryview(piece)
        except TypeError:
            raise TypeError(f"{name}: expected memoryviews, got one of type {type(piece).__name__}") from None
        if not view.c_contiguous:
            raise ValueError(f"{name}: expected contiguous memory, got some with gaps")
        views.append(view.cast("B"))
    return views


def as_rooms(into: Sequence[Sequence[memoryview]], n: int, what: str) -> list[list[memoryview]]:
    """Where so many records go."""
    rooms = as_list(into, "into", "a list of memoryviews for each")
    if len(rooms) != n:
        raise ValueError(f"into: expected room for {n} {what}, got {len(rooms)}")
    found = [as_memory(room, f"into[{i}]") for i, room in enumerate(rooms)]
    for i, room in enumerate(found):
        if any(piece.readonly for piece in room):
            raise ValueError(f"into[{i}]: expected memory that can be written, got some that cannot")
    return found


def as_path(path: str | os.PathLike[str]) -> str:
    """A file's or a folder's name, as text."""
    if not isinstance(path, (str, os.PathLike)) or not isinstance(name := os.fspath(path), str):
        raise TypeError(f"path: expected a str or os.PathLike, got {type(path).__name__}")
    if "\0" in name:
        raise ValueError("path: expected one without a null character, got one with it")
    if not name:
        raise ValueError("path: expected one of a character at least, got none")
    return name


def as_progress(progress: Callable[[int, int], object] | None) -> Callable[[int, int], object] | None:
    """Something to call, or nothing."""
    if progress is not None and not callable(progress):
        raise TypeError(f"progress: expected a callable or None, got {type(progress).__name__}")
    return progress


def as_seconds(seconds: float, name: str) -> float:
    """Above 0; ``math.inf`` for ever."""
    if isinstance(seconds, (bool, np.bool_)) or not isinstance(seconds, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}: expected seconds, got {type(seconds).__name__}")
    if not seconds > 0:
        raise ValueError(f"{name}: expected more than 0 seconds, got {seconds}")
    try:
        return float(seconds)
    except OverflowError:
        return math.inf


def check_tier(tier: Any) -> None:
    """Whether it has what is asked of one."""
    for name in ("find", "load", "store", "remove"):
        if not callable(getattr(tier, name, None)):
            raise TypeError(f"tier: expected one with a method {name}, got {type(tier).__name__}")


def within(n: object, most: int) -> int:
    """What a tier has answered, made one of the answers that there are; TypeError where it was no number."""
    return min(max(operator.index(n), 0), most)  # type: ignore[arg-type]
