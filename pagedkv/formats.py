"""How a row of K or V is stored: a dtype of a store is an entry here, and its kernels (``_kernels/simd_dtypes.h``).

    [ head 0 | head 1 | ... | zeros up to where a scale may begin | scales of head 0 | scales of head 1 | ... ]

A row is the ``n_heads * head_dim`` values of one position; without scales it ends there. Scales are kept in the row, so
that whatever moves rows and blocks moves bytes, and asks no further.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

_DTypeName: TypeAlias = Literal["float32", "float16", "bfloat16", "int8"]


class Layout(NamedTuple):
    """Bytes of a row of so many heads, and where its parts are."""

    row_bytes: int
    head_bytes: int
    """Of a head's values."""
    scales: int
    """From the row's start to its scales; 0 where there are none."""
    scale_bytes: int
    """Of a head's scales."""


@dataclass(frozen=True)
class Format:
    """What a value is stored as."""

    name: _DTypeName
    """As users say it, and as simd.h lists its kernels."""
    stored: np.dtype[Any]
    """What NumPy sees of a value: where it has no such dtype, one of as many bytes that shows the bits."""
    scale: np.dtype[Any] | None = None
    """A value stands for itself times a scale of its head and row, which is this; None: for itself."""
    group: int | None = None
    """Values of a head that share a scale; None: all."""

    def layout(self, n_heads: int, head_dim: int) -> Layout:
        """Of Python's integers, which may be beyond any memory."""
        head_bytes = head_dim * self.stored.itemsize
        if self.scale is None:
            return Layout(n_heads * head_bytes, head_bytes, 0, 0)
        scale_bytes = -(-head_dim // (self.group or head_dim)) * self.scale.itemsize
        scales = -(-n_heads * head_bytes // self.scale.itemsize) * self.scale.itemsize
        # Rows follow one another: where one begins, a scale may.
        row_bytes = scales + n_heads * scale_bytes
        return Layout(row_bytes, head_bytes, scales, scale_bytes)


FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        Format("float32", np.dtype(np.float32)),
        Format("float16", np.dtype(np.float16)),
        Format("bfloat16", np.dtype(np.uint16)),
        Format("int8", np.dtype(np.int8), scale=np.dtype(np.float32)),
    )
}
DTYPES: tuple[_DTypeName, ...] = get_args(_DTypeName)
"""Their names; float32 first."""
