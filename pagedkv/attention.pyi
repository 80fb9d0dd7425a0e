from collections.abc import Iterable
from typing import Literal, SupportsIndex, TypeAlias, overload

import numpy as np
import numpy.typing as npt
from typing_extensions import disjoint_base

from pagedkv._arrays import _Flag, _Floats, _Ints, _Real
from pagedkv.sequence import PagedKvCache
from pagedkv.store import PagedKvStore

_Out: TypeAlias = npt.NDArray[np.float32]

@overload
def paged_attention(
    q: _Floats,
    store: PagedKvStore,
    caches: PagedKvCache | Iterable[PagedKvCache],
    *,
    layer: SupportsIndex = 0,
    query_lens: SupportsIndex | _Ints | None = None,
    scale: _Real | None = None,
    window: SupportsIndex | None = None,
    softcap: _Real | None = None,
    sinks: _Floats | None = None,
    alibi_slopes: _Floats | None = None,
    causal: _Flag = True,
    out: npt.NDArray[np.float32] | None = None,
    return_lse: Literal[False] = False,
    n_threads: SupportsIndex | None = None,
) -> _Out: ...
@overload
def paged_attention(
    q: _Floats,
    store: PagedKvStore,
    caches: PagedKvCache | Iterable[PagedKvCache],
    *,
    layer: SupportsIndex = 0,
    query_lens: SupportsIndex | _Ints | None = None,
    scale: _Real | None = None,
    window: SupportsIndex | None = None,
    softcap: _Real | None = None,
    sinks: _Floats | None = None,
    alibi_slopes: _Floats | None = None,
    causal: _Flag = True,
    out: npt.NDArray[np.float32] | None = None,
    return_lse: Literal[True],
    n_threads: SupportsIndex | None = None,
) -> tuple[_Out, _Out]: ...
@overload
def paged_attention(
    q: _Floats,
    store: PagedKvStore,
    caches: PagedKvCache | Iterable[PagedKvCache],
    *,
    layer: SupportsIndex = 0,
    query_lens: SupportsIndex | _Ints | None = None,
    scale: _Real | None = None,
    window: SupportsIndex | None = None,
    softcap: _Real | None = None,
    sinks: _Floats | None = None,
    alibi_slopes: _Floats | None = None,
    causal: _Flag = True,
    out: npt.NDArray[np.float32] | None = None,
    return_lse: _Flag,
    n_threads: SupportsIndex | None = None,
) -> _Out | tuple[_Out, _Out]: ...
@overload
def attention(
    q: _Floats,
    k: _Floats,
    v: _Floats,
    *,
    scale: _Real | None = None,
    window: SupportsIndex | None = None,
    softcap: _Real | None = None,
    sinks: _Floats | None = None,
    alibi_slopes: _Floats | None = None,
    causal: _Flag = True,
    out: npt.NDArray[np.float32] | None = None,
    return_lse: Literal[False] = False,
    n_threads: SupportsIndex | None = None,
) -> _Out: ...
@overload
def attention(
    q: _Floats,
    k: _Floats,
    v: _Floats,
    *,
    scale: _Real | None = None,
    window: SupportsIndex | None = None,
    softcap: _Real | None = None,
    sinks: _Floats | None = None,
    alibi_slopes: _Floats | None = None,
    causal: _Flag = True,
    out: npt.NDArray[np.float32] | None = None,
    return_lse: Literal[True],
    n_threads: SupportsIndex | None = None,
) -> tuple[_Out, _Out]: ...
@overload
def attention(
    q: _Floats,
    k: _Floats,
    v: _Floats,
    *,
    scale: _Real | None = None,
    window: SupportsIndex | None = None,
    softcap: _Real | None = None,
    sinks: _Floats | None = None,
    alibi_slopes: _Floats | None = None,
    causal: _Flag = True,
    out: npt.NDArray[np.float32] | None = None,
    return_lse: _Flag,
    n_threads: SupportsIndex | None = None,
) -> _Out | tuple[_Out, _Out]: ...
def merge_attention_states(out_a: _Floats, lse_a: _Floats, out_b: _Floats, lse_b: _Floats) -> tuple[_Out, _Out]: ...

@disjoint_base
class Asked: ...  # not for Python: see attention.pxd
