"""A GGUF file: its metadata, and its tensors as float32.

The header is parsed here, in one pass with every bound checked: a vocabulary of 262144 pieces is read in
a second, and a damaged file gives one clear message. What the quantised bytes mean is the `gguf` package's
business.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from pagedkv.demo.errors import ModelFileError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MOST_DIMENSIONS = 4

# Dequantising works on temporaries of the size of its input: keep them inside the caches.
_ELEMENTS_AT_ONCE = 1 << 17


class Tensor(NamedTuple):
    """Where a tensor's bytes lie. `shape` is row-major: the last dimension is contiguous."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    n_bytes: int


class GgufFile:
    """A parsed GGUF file of format version 2 or 3, little-endian.

    Parameters
    ----------
    data
        The whole file: bytes, or a memory map.

    Raises
    ------
    ModelFileError
        Not a GGUF file, an unknown version, a damaged header, or tensors that reach past the end.
    """

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]

    def __init__(self, data: bytes | mmap.mmap) -> None:
        if data[:4] != b"GGUF":
            raise ModelFileError("not a GGUF file")
        self._data = data
        reader = _HeaderReader(data, 4)
        try:
            version = reader.scalar("I")
            if version not in _VERSIONS:
                order = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
                raise ModelFileError(f"GGUF files of this kind are not supported: {order}")
            n_tensors, n_entries = reader.scalar("Q"), reader.scalar("Q")
            self.metadata = dict(reader.entry() for _ in range(n_entries))
            placed = [reader.tensor() for _ in range(n_tensors)]
        except (struct.error, ValueError, OverflowError) as error:
            raise ModelFileError("the GGUF header is truncated or damaged") from error
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelFileError(f"general.alignment: expected a positive integer, got {alignment!r}")
        start = -(-reader.offset // alignment) * alignment
        self.tensors = {name: tensor._replace(offset=start + tensor.offset) for name, tensor in placed}
        for name, tensor in self.tensors.items():
            if tensor.offset + tensor.n_bytes > len(data):
                raise ModelFileError(f"the file is truncated: tensor {name} reaches past its end")

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GgufFile:
        """Maps and parses the file at `path`. An unreadable path is a `ModelFileError` as well."""
        try:
            if not Path(path).exists():
                raise ModelFileError("no such file")
            if not Path(path).is_file():
                raise ModelFileError("not a regular file")
            with open(path, "rb") as file:
                empty = os.fstat(file.fileno()).st_size == 0
                data = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelFileError(error.strerror or str(error)) from error
        return cls(data)

    def sha256(self) -> bytes:
        """Of all its bytes, in hexadecimal digits."""
        return sha256(self._data).hexdigest().encode()

    def read_into(
        self,
        name: str,
        out: NDArray[np.float32],
        advance: Callable[[int], object] = lambda n_bytes: None,
        rows: slice = slice(None),
    ) -> None:
        """Dequantises tensor `name`, a vector or a matrix, into `out`.

        Parameters
        ----------
        out
            float32, any strides, of exactly the shape of what is read.
        advance
            Called with the number of file bytes that have been read, as they are.
        rows
            Which rows of a matrix to read; all of them by default.

        Raises
        ------
        ModelFileError
            No such tensor, another shape, or a quantisation that the `gguf` package cannot undo.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelFileError(f"tensor {name} is missing")
        n_rows = tensor.shape[0] if len(tensor.shape) > 1 else 1  # a vector is a matrix of one row
        data = np.frombuffer(self._data, np.uint8, tensor.n_bytes, tensor.offset).reshape(n_rows, -1)[rows]
        shape = (len(data), *tensor.shape[1:]) if len(tensor.shape) > 1 else tensor.shape
        if shape != out.shape:
            raise ModelFileError(f"tensor {name}: expected shape {list(out.shape)}, got {list(shape)}")
        target = out.reshape(-1, out.shape[-1])
        rows_at_once = max(1, _ELEMENTS_AT_ONCE // out.shape[-1])
        for first in range(0, len(data), rows_at_once):
            part = data[first : first + rows_at_once]
            try:
                target[first : first + rows_at_once] = dequantize(part, tensor.kind)
            except NotImplementedError as error:
                raise ModelFileError(f"tensor {name}: cannot dequantise {tensor.kind.name}") from error
            advance(part.nbytes)


class _HeaderReader:
    """A cursor over the header. Reading past the end raises struct.error or ValueError."""

    def __init__(self, data: bytes | mmap.mmap, offset: int) -> None:
        self._data = data
        self.offset = offset

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self.offset)
        self.offset += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        start = self.offset + 8
        self.offset = start + self.scalar("Q")
        if self.offset > len(self._data):
            raise ValueError("a string reaches past the end")
        return self._data[start : self.offset].decode("utf-8")

    def entry(self) -> tuple[str, Any]:
        """One key with its value. Arrays of numbers come as NumPy arrays, of strings as lists."""
        key, kind = self.string(), self.scalar("I")
        if kind != _ARRAY:
            return key, self._value(kind)
        kind, length = self.scalar("I"), self.scalar("Q")
        if kind == _STRING:
            return key, [self.string() for _ in range(length)]
        values = np.frombuffer(self._data, np.dtype("<" + self._code(kind)), length, self.offset)
        self.offset += values.nbytes
        return key, values

    def tensor(self) -> tuple[str, Tensor]:
        """One tensor's name and place; its offset is still relative to the data section."""
        name, n_dimensions = self.string(), self.scalar("I")
        if not 1 <= n_dimensions <= _MOST_DIMENSIONS:
            raise ValueError("a tensor's number of dimensions is out of range")
        shape = tuple(reversed([self.scalar("Q") for _ in range(n_dimensions)]))
        raw_kind, offset = self.scalar("I"), self.scalar("Q")
        try:
            kind = GGMLQuantizationType(raw_kind)
        except ValueError as error:
            raise ModelFileError(f"tensor {name}: unknown type {raw_kind}") from error
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block_elements:
            raise ModelFileError(f"tensor {name}: shape {list(shape)} does not fit the type {kind.name}")
        return name, Tensor(shape, kind, offset, math.prod(shape) // block_elements * block_bytes)

    def _value(self, kind: int) -> Any:
        return self.string() if kind == _STRING else self.scalar(self._code(kind))

    def _code(self, kind: int) -> str:
        code = _SCALARS.get(kind)
        if code is None:
            raise ValueError("a metadata value has an unknown type")
        return code
