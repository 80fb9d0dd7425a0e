from collections.abc import Sequence
from typing import Any, Protocol, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import disjoint_base

from pagedkv.formats import DTYPES as DTYPES
from pagedkv.formats import FORMATS as FORMATS

# What callers give as arrays. `npt.ArrayLike` would let lists and float64 pass, which are refused. Tensors of other
# libraries come by __array__; an object that has __dlpack__ alone needs np.from_dlpack to be seen by a type checker.

class _HasFloats(Protocol):
    def __array__(self) -> npt.NDArray[np.float32]: ...

class _HasRows(Protocol):
    def __array__(self) -> npt.NDArray[np.float32 | np.float16 | np.uint16]: ...

_Floats: TypeAlias = npt.NDArray[np.float32] | memoryview[Any] | _HasFloats
_Rows: TypeAlias = npt.NDArray[np.float32 | np.float16 | np.uint16] | memoryview[Any] | _HasRows
# As stored, too: values and their scales; the bytes of whole rows.
_StoredRows: TypeAlias = _Rows | tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]] | npt.NDArray[np.uint8]
_Ints: TypeAlias = Sequence[SupportsIndex] | npt.NDArray[np.integer[Any]]
_BlockIds: TypeAlias = list[int] | tuple[SupportsIndex, ...] | range | npt.NDArray[np.integer[Any]]
_Real: TypeAlias = float | np.floating[Any]
_Flag: TypeAlias = bool | np.bool_

_Stored: TypeAlias = np.float32 | np.float16 | np.int8
_DType: TypeAlias = str | type[_Stored] | np.dtype[_Stored]

def make_layout(name: str, n_heads: int, head_dim: int) -> RowLayout: ...
def as_size(value: object, name: str, low: int, high: int) -> int: ...
def as_thread_count(value: object, name: str) -> int: ...
def as_flag(value: object, name: str) -> bool: ...
def as_ndarray(array: object, name: str, expected: str) -> npt.NDArray[Any]: ...
def as_naturals(array: object, name: str) -> npt.NDArray[np.int64]: ...

@disjoint_base
class RowLayout: ...
