from collections.abc import Iterable
from types import EllipsisType, TracebackType
from typing import Literal, SupportsIndex, TypeAlias, overload

import numpy as np
import numpy.typing as npt
from typing_extensions import Self, disjoint_base

from pagedkv._arrays import _Flag, _Floats, _Ints, _Real, _StoredRows
from pagedkv._groups import _Groups, _Sequence
from pagedkv.sequence import PagedKvCache
from pagedkv.store import PagedKvStore

_Out: TypeAlias = npt.NDArray[np.float32]

@disjoint_base
class Step:
    @property
    def store(self) -> PagedKvStore | _Groups: ...
    @property
    def query_lens(self) -> tuple[int, ...]: ...
    @property
    def n_rows(self) -> int: ...
    @property
    def state(self) -> Literal["ready", "open", "committed", "rolled back"]: ...
    @property
    def unwritten_layers(self) -> tuple[int, ...]: ...
    @property
    def positions(self) -> npt.NDArray[np.int64]: ...
    @property
    def seq_lens(self) -> tuple[int, ...]: ...
    @property
    def new_blocks(self) -> int: ...
    def __new__(
        cls,
        store: PagedKvStore | _Groups,
        caches: PagedKvCache | _Sequence | Iterable[PagedKvCache | _Sequence],
        query_lens: SupportsIndex | _Ints = 1,
        *,
        n_threads: SupportsIndex | None = None,
    ) -> Self: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def write(self, layer: SupportsIndex, k: _StoredRows, v: _StoredRows) -> None: ...
    @overload
    def attend(
        self,
        layer: SupportsIndex,
        q: _Floats,
        *,
        scale: _Real | None = None,
        window: SupportsIndex | EllipsisType | None = ...,
        softcap: _Real | None = None,
        sinks: _Floats | None = None,
        alibi_slopes: _Floats | None = None,
        causal: _Flag = True,
        out: npt.NDArray[np.float32] | None = None,
        return_lse: Literal[False] = False,
    ) -> _Out: ...
    @overload
    def attend(
        self,
        layer: SupportsIndex,
        q: _Floats,
        *,
        scale: _Real | None = None,
        window: SupportsIndex | EllipsisType | None = ...,
        softcap: _Real | None = None,
        sinks: _Floats | None = None,
        alibi_slopes: _Floats | None = None,
        causal: _Flag = True,
        out: npt.NDArray[np.float32] | None = None,
        return_lse: Literal[True],
    ) -> tuple[_Out, _Out]: ...
    @overload
    def attend(
        self,
        layer: SupportsIndex,
        q: _Floats,
        *,
        scale: _Real | None = None,
        window: SupportsIndex | EllipsisType | None = ...,
        softcap: _Real | None = None,
        sinks: _Floats | None = None,
        alibi_slopes: _Floats | None = None,
        causal: _Flag = True,
        out: npt.NDArray[np.float32] | None = None,
        return_lse: _Flag,
    ) -> _Out | tuple[_Out, _Out]: ...
