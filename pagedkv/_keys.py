"""What the caller gave as a key, and with it: token ids, namespaces, numbers, checked. Errors name the argument."""

from __future__ import annotations

import math
import operator
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from pagedkv._arrays import as_naturals, as_ndarray, as_size


class HasIntegers(Protocol):
    """A tensor of token ids, say."""

    def __array__(self) -> npt.NDArray[np.integer[Any]]: ...


Tokens: TypeAlias = Sequence[SupportsIndex] | npt.NDArray[np.integer[Any]] | HasIntegers


def as_token_ids(tokens: Tokens, name: str = "tokens") -> npt.NDArray[np.int64]:
    """Token ids as C-contiguous int64 ``[n]``, little-endian, so that their bytes are a key on any machine.

    They are the caller's no longer: what was checked here is what is used, whoever writes into the argument meanwhile.
    """
    expected = "a list, tuple or array of integers"
    if isinstance(tokens, (str, bytes, bytearray)):
        raise TypeError(f"{name}: expected {expected}, got {type(tokens).__name__}")
    if isinstance(tokens, Sequence) and not isinstance(tokens, (memoryview, array)):
        return _from_items(tuple(tokens), name)
    given = as_ndarray(tokens, name, expected)
    if given.ndim == 0:
        raise TypeError(f"{name}: expected {expected}, got {type(tokens).__name__}")
    if given.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, got {given.dtype} {list(given.shape)}")
    if given.dtype.kind == "O":
        return _from_items(tuple(given.tolist()), name)
    if given.dtype.kind not in "iu":
        raise ValueError(f"{name}: expected integers, got {given.dtype} {list(given.shape)}")
    return as_naturals(given, name).astype("<i8", copy=False)


def _from_items(items: tuple[Any, ...], name: str) -> npt.NDArray[np.int64]:
    if not set(map(type, items)) <= {int}:
        for item in items:
            if isinstance(item, (bool, np.bool_)) or not hasattr(item, "__index__"):
                raise ValueError(f"{name}: expected integers, got one of type {type(item).__name__}")
        whole: list[int] = []
        try:
            for item in items:  # not by map: it takes a StopIteration of __index__ for the end
                whole.append(operator.index(item))
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # the caller's own code did
                raise
            raise ValueError(f"{name}: expected integers, got an array among them: {error}") from None
        items = tuple(whole)
    try:
        ids = np.array(items, dtype="<i8")
    except OverflowError:
        raise ValueError(f"{name}: expected ids from 0 to 2**63 - 1, got one outside of 64 bits") from None
    if ids.size and ids.min() < 0:
        raise ValueError(f"{name}: expected ids from 0 to 2**63 - 1, got {ids.min()}")
    return ids


def as_stop_tokens(stop_tokens: Iterable[SupportsIndex]) -> frozenset[int]:
    """Any integers: one that is no token's id ends nothing."""
    if isinstance(stop_tokens, (str, bytes, bytearray)) or not isinstance(stop_tokens, Iterable):
        raise TypeError(f"stop_tokens: expected several token ids, got {type(stop_tokens).__name__}")
    return frozenset([as_size(token, "stop_tokens", -sys.maxsize, sys.maxsize) for token in stop_tokens])


def as_namespace(namespace: bytes | None) -> bytes | None:
    if namespace is None or type(namespace) is bytes:
        return namespace
    if not issubclass(type(namespace), bytes):
        raise TypeError(f"namespace: expected bytes or None, got {type(namespace).__name__}")
    # A subclass may compare, and turn itself into bytes, as it likes: these are its bytes, whatever it says they are.
    return bytes.__getitem__(namespace, slice(None))


def as_count(value: SupportsIndex, name: str) -> int:
    return as_size(value, name, 0, sys.maxsize)


def as_ttl(ttl: float | None) -> float | None:
    if ttl is None:
        return None
    if isinstance(ttl, (bool, np.bool_)) or not isinstance(ttl, (int, float, np.integer, np.floating)):
        raise TypeError(f"ttl: expected seconds or None, got {type(ttl).__name__}")
    try:
        seconds = float(ttl)
    except OverflowError:  # an int; the others have one already
        raise ValueError("ttl: expected seconds in the range of a float, got an integer beyond it") from None
    if math.isnan(seconds) or seconds <= 0:
        raise ValueError(f"ttl: expected more than 0 seconds, got {seconds}")
    return seconds


def as_share(value: float, name: str) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}: expected a number from 0 to 1, got {type(value).__name__}")
    if not 0 <= value <= 1:
        raise ValueError(f"{name}: expected a number from 0 to 1, got {value}")
    return float(value)
