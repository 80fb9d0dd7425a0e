from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Literal, SupportsIndex, overload

import numpy as np
import numpy.typing as npt
from typing_extensions import Self, disjoint_base

from pagedkv.sequence import PagedKvCache
from pagedkv.store import PagedKvStore

@disjoint_base
class Step:
    @property
    def store(self) -> PagedKvStore: ...
    @property
    def query_lens(self) -> tuple[int, ...]: ...
    @property
    def n_rows(self) -> int: ...
    @property
    def positions(self) -> npt.NDArray[np.int64]: ...
    @property
    def seq_lens(self) -> tuple[int, ...]: ...
    @property
    def new_blocks(self) -> int: ...
    def __new__(
        cls,
        store: PagedKvStore,
        caches: PagedKvCache | Iterable[PagedKvCache],
        query_lens: SupportsIndex | Sequence[SupportsIndex] | npt.NDArray[np.integer] = 1,
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
    def write(self, layer: SupportsIndex, k: npt.ArrayLike, v: npt.ArrayLike) -> None: ...
    @overload
    def attend(
        self,
        layer: SupportsIndex,
        q: npt.ArrayLike,
        *,
        scale: float | None = None,
        window: SupportsIndex | None = None,
        softcap: float | None = None,
        sinks: npt.ArrayLike | None = None,
        alibi_slopes: npt.ArrayLike | None = None,
        causal: bool = True,
        out: npt.NDArray[np.float32] | None = None,
        return_lse: Literal[False] = False,
    ) -> npt.NDArray[np.float32]: ...
    @overload
    def attend(
        self,
        layer: SupportsIndex,
        q: npt.ArrayLike,
        *,
        scale: float | None = None,
        window: SupportsIndex | None = None,
        softcap: float | None = None,
        sinks: npt.ArrayLike | None = None,
        alibi_slopes: npt.ArrayLike | None = None,
        causal: bool = True,
        out: npt.NDArray[np.float32] | None = None,
        return_lse: Literal[True],
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]: ...
