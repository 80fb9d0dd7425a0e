"""How a row of K or V is stored: a dtype of a store is an entry here, and its kernels (``_kernels/simd_dtypes.h``).

    [ head 0 | head 1 | ... | zeros up to where a scale may begin | scales of head 0 | scales of head 1 | ... ]

A row is the ``n_heads * head_dim`` values of one position; without scales it ends there. Scales are kept in the row, so
that whatever moves rows and blocks moves bytes, and asks no further.

A format may turn heads before it stores them: ``turn_width`` neighbours at a time are multiplied by an orthonormal
Hadamard matrix, which spreads a value that is far greater than the others over all of them. Queries are turned
alike, which leaves scores what they were, and what V adds up to is turned back; so is what is read.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

_DTypeName: TypeAlias = Literal["float32", "float16", "bfloat16", "int8"]

_TURNED_FROM, _TURNED_TO = 16, 1024
"""Values that are turned together: fewer gain little, and more have no room in the kernels' memory."""


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
    """A value stands for itself times the scale of its group, which is this; None: for itself."""
    group: int = 1
    """Values of a head that share a scale; the last ones of a head may be fewer. The kernels know one: SIMD_GROUP."""
    turned: bool = False
    """Whether heads are turned before they are stored."""

    @property
    def description(self) -> str:
        """The name, and all else that decides what bytes mean: ``int8/32*float16/turned``."""
        scales = [] if self.scale is None else [f"{self.group}*{self.scale}"]
        return "/".join([self.name, *scales, *(["turned"] if self.turned else [])])

    def turn_width(self, head_dim: int) -> int:
        """How many neighbours of a head are turned together; 0: it is stored as it comes."""
        width = min(head_dim & -head_dim, _TURNED_TO)  # the largest power of two in it
        return width if self.turned and width >= _TURNED_FROM else 0

    def layout(self, n_heads: int, head_dim: int) -> Layout:
        """Of Python's integers, which may be beyond any memory."""
        head_bytes = head_dim * self.stored.itemsize
        if self.scale is None:
            return Layout(n_heads * head_bytes, head_bytes, 0, 0)
        scale_bytes = -(-head_dim // self.group) * self.scale.itemsize
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
        Format("int8", np.dtype(np.int8), scale=np.dtype(np.float16), group=32, turned=True),
    )
}
DTYPES: tuple[_DTypeName, ...] = get_args(_DTypeName)
"""Their names; float32 first."""
