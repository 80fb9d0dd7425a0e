"""What a store of each dtype keeps of float32 rows, and what they read as, in plain NumPy. Imports nothing of pagedkv.

Rows have a last axis of heads and values, ``[..., n_heads, head_dim]``; int8 has a scale for each 32 values of a head,
which it turns first.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass
class Rows:
    """``values`` are ``[..., n_heads, head_dim]`` as stored; ``scales``, if any, ``[..., n_heads, groups]``."""

    dtype: str
    values: np.ndarray
    scales: np.ndarray | None = None

    @classmethod
    def zeros(cls, dtype, *shape):
        scales = np.zeros((*shape[:-1], -(-shape[-1] // GROUP)), np.float16) if dtype in SCALED else None
        return cls(dtype, np.zeros(shape, STORED[dtype]), scales)

    def __getitem__(self, index):
        return Rows(self.dtype, self.values[index], None if self.scales is None else self.scales[index])

    def __setitem__(self, index, other):
        self.values[index] = other.values
        if self.scales is not None:
            self.scales[index] = other.scales

    def decode(self):
        parts = [self.values] if self.scales is None else [self.values, self.scales]
        return KINDS[self.dtype].decode(*parts)


def encode(dtype, rows):
    """float32 ``[..., n_heads, head_dim]`` as a store of that dtype keeps them."""
    rows = np.ascontiguousarray(rows)
    assert rows.dtype == np.float32
    parts = KINDS[dtype].encode(rows)
    return Rows(dtype, *parts) if dtype in SCALED else Rows(dtype, parts)


def to_floats(values):
    with np.errstate(invalid="ignore"):  # some CPUs report a signalling NaN
        return values.astype(np.float32)


def to_float16(rows):
    with np.errstate(over="ignore", invalid="ignore"):
        return rows.astype(np.float16)


def from_bfloat16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(rows):
    """The upper half of the bits, rounded to nearest, ties to even; a NaN stays one."""
    bits = rows.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    quiet = bits >> 16 | 0x40
    return np.where(np.isnan(rows), quiet, rounded).astype(np.uint16)


# --- int8 --------------------------------------------------------------------------------------------

GROUP = 32


def turn_width(head_dim):
    """Values of a head that are turned together: the largest power of two in it, 16 to 1024, or none, which is 1."""
    width = min(head_dim & -head_dim, 1024)
    return width if width >= 16 else 1


def turn(rows):
    """Heads ``[..., head_dim]`` times Hadamard matrices / sqrt(width): what is 1, 2, 4, ... apart added, subtracted."""
    width = turn_width(rows.shape[-1])
    turned, apart = rows.reshape(rows.size // width, width), 1
    with np.errstate(over="ignore", invalid="ignore"):
        while apart < width:
            pairs = turned.reshape(len(turned), width // (2 * apart), 2, apart)
            a, b = pairs[:, :, 0], pairs[:, :, 1]
            turned = np.stack([a + b, a - b], axis=2).reshape(-1, width)
            apart *= 2
        turned = turned.reshape(rows.shape) * np.float32(1 / np.sqrt(width))
    assert turned.dtype == np.float32
    return turned


def in_groups(heads):
    """``[..., groups, 32]``, the last one filled with zeros."""
    padding = -heads.shape[-1] % GROUP
    return np.pad(heads, [(0, 0)] * (heads.ndim - 1) + [(0, padding)]).reshape(
        *heads.shape[:-1], (heads.shape[-1] + padding) // GROUP, GROUP
    )


def to_int8(rows):
    """Values, a float16 for each 32 of them: about its greatest magnitude / 127, or NaN where that is not finite."""
    groups = in_groups(turn(rows))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        scales = (np.abs(groups).max(axis=-1) / np.float32(127)).astype(np.float16)
        fine = np.isfinite(groups).all(axis=-1) & np.isfinite(scales)
        inverse = np.where(fine & (scales > 0), 1 / scales.astype(np.float32), np.float32(0))
        # A scale below the normal numbers is coarse, so that a quotient may be beyond 127.
        values = np.clip(np.rint(groups * inverse[..., None]), -127, 127)
    values = np.where(fine[..., None], values, 0).astype(np.int8)
    flat = values.reshape(*rows.shape[:-1], values.shape[-2] * GROUP)[..., : rows.shape[-1]]
    return flat, np.where(fine, scales, np.float16(np.nan))


def scale_groups(values, scales):
    """float32 of int8 ``[..., head_dim]`` as they are stored: not turned back."""
    with np.errstate(over="ignore", invalid="ignore"):
        factors = scales.astype(np.float32).repeat(GROUP, axis=-1)[..., : values.shape[-1]]
        return values.astype(np.float32) * factors


def from_int8(values, scales):
    return turn(scale_groups(values, scales))


@dataclass(frozen=True)
class Kind:
    """What NumPy sees of a value; float32 rows as such values, or as values and scales; and these as floats."""

    stored: type
    encode: Callable
    decode: Callable = to_floats
    scaled: bool = False


KINDS = {
    "float32": Kind(np.float32, np.copy),
    "float16": Kind(np.float16, to_float16),
    "bfloat16": Kind(np.uint16, to_bfloat16, from_bfloat16),
    "int8": Kind(np.int8, to_int8, from_int8, scaled=True),
}
DTYPES = tuple(KINDS)
STORED = {dtype: kind.stored for dtype, kind in KINDS.items()}
SCALED = {dtype for dtype, kind in KINDS.items() if kind.scaled}
# Bits of rows that a store takes as they are, beside float32.
RAW = {dtype: kind for dtype, kind in STORED.items() if dtype not in SCALED and dtype != "float32"}


def round_trip(dtype, rows):
    """What rows written to a store of that dtype read as."""
    return encode(dtype, rows).decode()


def assert_same(got, want):
    """Floats of equal bits, or NaN for NaN: what a conversion leaves in a NaN is nobody's promise."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if got.tobytes() == want.tobytes():
        return
    bits = f"u{got.dtype.itemsize}"
    equal = np.ascontiguousarray(got).view(bits) == np.ascontiguousarray(want).view(bits)
    wrong = ~(equal | np.isnan(got) & np.isnan(want))
    assert not wrong.any(), f"{wrong.sum()} differ: got {got[wrong][:5]}, expected {want[wrong][:5]}"


def assert_same_rows(values, scales, want):
    """``values [..., width]`` and ``scales [..., n_heads, groups]`` of a store, or None, are the Rows `want`."""
    expected = want.values.reshape(values.shape)
    assert values.dtype == expected.dtype
    if values.tobytes() == expected.tobytes() and want.scales is None:
        return
    if want.scales is None:  # or NaN for NaN
        assert want.dtype != "float32"
        floats = [KINDS[want.dtype].decode(side) for side in (values, expected)]
        assert ((values == expected) | np.isnan(floats[0]) & np.isnan(floats[1])).all()
        return
    assert_same(scales, want.scales.reshape(scales.shape))
    # What NaN is multiplied with does not matter.
    read = np.repeat(~np.isnan(want.scales), GROUP, axis=-1)[..., : want.values.shape[-1]].reshape(values.shape)
    assert np.array_equal(values[read], expected[read])
