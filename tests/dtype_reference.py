"""What a store of each dtype keeps of float32 rows, and what they read as, in plain NumPy. Imports nothing of pagedkv.

Rows have a last axis of heads and values, ``[..., n_heads, head_dim]``: int8 has one scale for each head of a row.
"""

from dataclasses import dataclass

import numpy as np

DTYPES = ("float32", "float16", "bfloat16", "int8")
STORED = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8}
# Bits of rows that a store takes as they are, beside float32.
RAW = {"float16": np.float16, "bfloat16": np.uint16}


@dataclass
class Rows:
    """``values`` are ``[..., n_heads, head_dim]`` as they are stored, ``scales`` ``[..., n_heads]``, for int8 alone."""

    dtype: str
    values: np.ndarray
    scales: np.ndarray | None = None

    @classmethod
    def zeros(cls, dtype, *shape):
        scales = np.zeros(shape[:-1], np.float32) if dtype == "int8" else None
        return cls(dtype, np.zeros(shape, STORED[dtype]), scales)

    def __getitem__(self, index):
        return Rows(self.dtype, self.values[index], None if self.scales is None else self.scales[index])

    def __setitem__(self, index, other):
        self.values[index] = other.values
        if self.scales is not None:
            self.scales[index] = other.scales

    def decode(self):
        if self.dtype == "bfloat16":
            return (self.values.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            values = self.values.astype(np.float32)  # some CPUs report a signalling NaN
            if self.dtype == "int8":
                values *= self.scales[..., None]
        return values


def encode(dtype, rows):
    """float32 ``[..., n_heads, head_dim]`` as a store of that dtype keeps them."""
    rows = np.ascontiguousarray(rows)
    assert rows.dtype == np.float32
    if dtype == "float32":
        return Rows(dtype, rows.copy())
    if dtype == "float16":
        with np.errstate(over="ignore", invalid="ignore"):
            return Rows(dtype, rows.astype(np.float16))
    if dtype == "bfloat16":
        return Rows(dtype, to_bfloat16(rows))
    return Rows(dtype, *to_int8(rows))


def to_bfloat16(rows):
    """The upper half of the bits, rounded to nearest, ties to even; a NaN stays one."""
    bits = rows.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    quiet = bits >> 16 | 0x40
    return np.where(np.isnan(rows), quiet, rounded).astype(np.uint16)


def to_int8(rows):
    """Values and a scale a head: the largest magnitude is 127. A head with a value that is not finite reads as NaN."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        scales = np.abs(rows).max(axis=-1) / np.float32(127)
        # 127 times a scale that was rounded up may be beyond float32: then the next smaller one.
        beyond = np.isfinite(scales) & np.isinf(scales * np.float32(127))
        scales = np.where(beyond, np.nextafter(scales, np.float32(0)), scales)
        scales = np.where(np.isfinite(rows).all(axis=-1), scales, np.float32(np.nan)).astype(np.float32)
        quotients = np.rint(rows / scales[..., None])
    # A scale below the normal numbers is coarse, so that a quotient may be beyond 127.
    usable = (scales > 0)[..., None] & np.isfinite(quotients)
    return np.where(usable, np.clip(quotients, -127, 127), 0).astype(np.int8), scales


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


def nan_bits(bits):
    """Which bfloat16 are NaN."""
    return bits & 0x7FFF > 0x7F80


def assert_same_rows(values, scales, want):
    """``values [..., width]`` and ``scales [..., n_heads]`` of a store (None but for int8) are the Rows `want`."""
    expected = want.values.reshape(values.shape)
    assert values.dtype == expected.dtype
    same_values = values.tobytes() == expected.tobytes()
    if want.dtype == "float32":
        assert same_values
    elif want.dtype == "float16":
        assert_same(values, expected)
    elif want.dtype == "bfloat16":
        assert same_values or ((values == expected) | nan_bits(values) & nan_bits(expected)).all()
    else:
        assert_same(scales, want.scales.reshape(scales.shape))
        # What NaN is multiplied with does not matter.
        if not same_values:
            read = np.repeat(~np.isnan(want.scales), want.values.shape[-1], axis=-1).reshape(values.shape)
            assert np.array_equal(values[read], expected[read])
