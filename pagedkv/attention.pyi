from collections.abc import Iterable, Sequence
from typing import Any, Literal, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from pagedkv.sequence import PagedKvCache
from pagedkv.store import PagedKvStore

_Floats = npt.NDArray[np.float32]

@overload
def paged_attention(
    q: npt.ArrayLike,
    store: PagedKvStore,
    caches: PagedKvCache | Iterable[PagedKvCache],
    *,
    layer: SupportsIndex = 0,
    query_lens: SupportsIndex | Sequence[SupportsIndex] | npt.NDArray[np.integer[Any]] | None = None,
    scale: float | None = None,
    window: SupportsIndex | None = None,
    softcap: float | None = None,
    sinks: npt.ArrayLike | None = None,
    alibi_slopes: npt.ArrayLike | None = None,
    causal: bool = True,
    out: _Floats | None = None,
    return_lse: Literal[False] = False,
    n_threads: SupportsIndex | None = None,
) -> _Floats: ...
@overload
def paged_attention(
    q: npt.ArrayLike,
    store: PagedKvStore,
    caches: PagedKvCache | Iterable[PagedKvCache],
    *,
    layer: SupportsIndex = 0,
    query_lens: SupportsIndex | Sequence[SupportsIndex] | npt.NDArray[np.integer[Any]] | None = None,
    scale: float | None = None,
    window: SupportsIndex | None = None,
    softcap: float | None = None,
    sinks: npt.ArrayLike | None = None,
    alibi_slopes: npt.ArrayLike | None = None,
    causal: bool = True,
    out: _Floats | None = None,
    return_lse: bool,
    n_threads: SupportsIndex | None = None,
) -> _Floats | tuple[_Floats, _Floats]: ...
@overload
def attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    scale: float | None = None,
    window: SupportsIndex | None = None,
    softcap: float | None = None,
    sinks: npt.ArrayLike | None = None,
    alibi_slopes: npt.ArrayLike | None = None,
    causal: bool = True,
    out: _Floats | None = None,
    return_lse: Literal[False] = False,
    n_threads: SupportsIndex | None = None,
) -> _Floats: ...
@overload
def attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    scale: float | None = None,
    window: SupportsIndex | None = None,
    softcap: float | None = None,
    sinks: npt.ArrayLike | None = None,
    alibi_slopes: npt.ArrayLike | None = None,
    causal: bool = True,
    out: _Floats | None = None,
    return_lse: bool,
    n_threads: SupportsIndex | None = None,
) -> _Floats | tuple[_Floats, _Floats]: ...
