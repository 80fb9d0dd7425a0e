from collections.abc import Sequence
from typing import Any, Literal, Protocol, SupportsIndex, TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt
from typing_extensions import Self, disjoint_base

from pagedkv._arrays import _Flag, _Floats, _Ints, _Real
from pagedkv._tensors import _Values

class _HasArray(Protocol):
    def __array__(self) -> npt.NDArray[Any]: ...

_Tables: TypeAlias = npt.NDArray[np.integer[Any]] | Sequence[_Ints] | _Ints | _HasArray
_Counts: TypeAlias = _Ints | _HasArray
_Result = TypeVar("_Result", bound=_Values)
_Lse: TypeAlias = npt.NDArray[np.float32]

@disjoint_base
class AttentionBatch:
    @property
    def n_seqs(self) -> int: ...
    @property
    def n_rows(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def layout(self) -> str: ...
    @property
    def positions(self) -> npt.NDArray[np.int64]: ...
    @property
    def slots(self) -> npt.NDArray[np.int64]: ...
    def __new__(
        cls,
        block_tables: _Tables,
        seq_lens: _Counts,
        query_lens: SupportsIndex | _Counts = 1,
        *,
        block_size: SupportsIndex,
        indptr: _Counts | None = None,
        layout: Literal["NHD", "HND"] = "NHD",
        dtype: str | type[Any] | np.dtype[Any] | None = None,
        n_threads: SupportsIndex | None = None,
    ) -> Self: ...
    def write(
        self, k_cache: _Values, v_cache: _Values | None, k: _Values, v: _Values, slots: _Counts | None = None
    ) -> None: ...
    @overload
    def attend(
        self,
        q: _Values,
        k_cache: _Values,
        v_cache: _Values | None = None,
        *,
        scale: _Real | None = None,
        window: SupportsIndex | None = None,
        softcap: _Real | None = None,
        sinks: _Floats | None = None,
        alibi_slopes: _Floats | None = None,
        causal: _Flag = True,
        out: None = None,
        return_lse: Literal[False] = False,
    ) -> npt.NDArray[Any]: ...
    @overload
    def attend(
        self,
        q: _Values,
        k_cache: _Values,
        v_cache: _Values | None = None,
        *,
        scale: _Real | None = None,
        window: SupportsIndex | None = None,
        softcap: _Real | None = None,
        sinks: _Floats | None = None,
        alibi_slopes: _Floats | None = None,
        causal: _Flag = True,
        out: None = None,
        return_lse: Literal[True],
    ) -> tuple[npt.NDArray[Any], _Lse]: ...
    @overload
    def attend(
        self,
        q: _Values,
        k_cache: _Values,
        v_cache: _Values | None = None,
        *,
        scale: _Real | None = None,
        window: SupportsIndex | None = None,
        softcap: _Real | None = None,
        sinks: _Floats | None = None,
        alibi_slopes: _Floats | None = None,
        causal: _Flag = True,
        out: _Result,
        return_lse: Literal[False] = False,
    ) -> _Result: ...
    @overload
    def attend(
        self,
        q: _Values,
        k_cache: _Values,
        v_cache: _Values | None = None,
        *,
        scale: _Real | None = None,
        window: SupportsIndex | None = None,
        softcap: _Real | None = None,
        sinks: _Floats | None = None,
        alibi_slopes: _Floats | None = None,
        causal: _Flag = True,
        out: _Result,
        return_lse: Literal[True],
    ) -> tuple[_Result, _Lse]: ...
