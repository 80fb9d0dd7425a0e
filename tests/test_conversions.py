"""Every conversion, bit by bit: float32 rows to what a store keeps, and what it keeps to what is read.

Exhaustive where there are few enough values; compared with NumPy's own conversions or integer arithmetic
(`dtype_reference`), on every instruction set of the machine.
"""

import numpy as np
import pytest
from dtype_reference import RAW, Rows, assert_same, assert_same_rows, encode
from helpers import WAYS, by_append, stored

import pagedkv

ALL_BITS = np.arange(1 << 16, dtype=np.uint16)

pytestmark = pytest.mark.usefixtures("simd")


def check_rows(dtype, rows, write, want=None):
    """rows ``[n, n_heads, head_dim]``, written as K and upside down as V, are stored and read as `want`."""
    n, n_heads, head_dim = rows.shape
    want = encode(dtype, rows) if want is None else want
    store = pagedkv.PagedKvStore(16, -(-n // 16), n_heads, head_dim, dtype=dtype, debug=True)
    cache = pagedkv.PagedKvCache()
    write(store, cache, rows, rows[::-1])
    contiguous = cache.to_contiguous(store)
    for side, expected in (("k", want), ("v", want[::-1])):
        assert_same_rows(*stored(store, cache, side), expected)
        assert_same(getattr(contiguous, side), expected.decode().reshape(n, -1))
    return store, cache


def in_rows(values, n_heads, head_dim):
    """All values, in as many rows as they fill; the last row is filled up from the front."""
    width = n_heads * head_dim
    return np.resize(values, -(-len(values) // width) * width).reshape(-1, n_heads, head_dim)


# --- values ------------------------------------------------------------------------------------------


def float16_cases():
    """Every float16, every tie between two of them and its float32 neighbours on both sides; and where it overflows."""
    values = np.sort(ALL_BITS.view(np.float16)[np.isfinite(ALL_BITS.view(np.float16))]).astype(np.float32)
    ties = (values[:-1] + values[1:]) / 2
    edges = np.float32([65504, 65519.996, 65520, 65520.004, 65536, 1e38, np.inf])
    beside = [np.nextafter(ties, np.float32(side)) for side in (-np.inf, np.inf)]
    return np.concatenate([values, ties, *beside, edges, -edges])


def bfloat16_cases():
    """Every upper half of a float32, with lower halves below, at and above a tie: NaN and infinities too."""
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return (ALL_BITS.astype(np.uint32)[:, None] << 16 | lower).view(np.float32).ravel()


def special_cases():
    """NaN of either sign with every single bit of payload, zeros, and the smallest numbers."""
    nans = np.uint32(0x7F800000) | np.uint32(1) << np.arange(23, dtype=np.uint32)
    bits = np.concatenate([nans, nans | np.uint32(1 << 31), np.arange(4, dtype=np.uint32), np.uint32([0x80000000])])
    return bits.view(np.float32)


def random_bits(n):
    return np.random.default_rng(0).integers(0, 1 << 32, n, dtype=np.uint32).view(np.float32)


CASES = {"float16": float16_cases, "bfloat16": bfloat16_cases}


# --- float16 and bfloat16 ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", RAW)
class TestHalves:
    @pytest.mark.parametrize(("n_heads", "head_dim"), [(1, 64), (3, 7), (2, 33)])
    def test_float32_is_rounded_to_the_nearest(self, dtype, n_heads, head_dim):
        values = np.concatenate([CASES[dtype](), special_cases(), random_bits(1 << 16)])
        check_rows(dtype, in_rows(values, n_heads, head_dim), by_append)

    @pytest.mark.parametrize("write", WAYS)
    @pytest.mark.parametrize("head_dim", [64, 13])
    def test_in_every_way(self, dtype, write, head_dim):
        values = np.concatenate([special_cases(), CASES[dtype]()[::17], random_bits(1 << 12)])
        check_rows(dtype, in_rows(values, 2, head_dim), write)

    @pytest.mark.parametrize("write", WAYS)
    @pytest.mark.parametrize("head_dim", [64, 13])
    def test_all_bits_are_taken_as_they_are_and_read_exactly(self, dtype, write, head_dim):
        raw = in_rows(ALL_BITS, 1, head_dim).view(RAW[dtype])
        store, cache = check_rows(dtype, raw, write, want=Rows(dtype, raw))
        values, _ = stored(store, cache, "k")
        assert values.tobytes() == raw.tobytes()  # whatever a NaN carries

    @pytest.mark.parametrize("head_dim", [1, 7, 64, 256])
    def test_all_bits_of_v_through_attention(self, dtype, head_dim):
        """A sequence of one position: its weight is 1, and the output is the row."""
        v = in_rows(ALL_BITS, -(-len(ALL_BITS) // head_dim), head_dim).view(RAW[dtype])
        n_heads = v.shape[1]
        store = pagedkv.PagedKvStore(1, 1, n_heads, 1, v_head_dim=head_dim, dtype=dtype)
        cache = pagedkv.PagedKvCache()
        cache.push(store, np.zeros(n_heads, RAW[dtype]), v[0])
        want = Rows(dtype, v[0]).decode()
        for group in (1, 4):
            out = pagedkv.paged_attention(np.ones((1, n_heads * group, 1), np.float32), store, cache)
            np.testing.assert_array_equal(out[0], np.repeat(want, group, axis=0))

    @pytest.mark.parametrize("head_dim", [7, 64])
    def test_all_bits_of_v_through_a_prefill(self, dtype, head_dim):
        """Each query sees itself alone, and nothing of its neighbours, be they NaN."""
        v = in_rows(ALL_BITS, 1, head_dim).view(RAW[dtype])
        store = pagedkv.PagedKvStore(16, -(-len(v) // 16), 1, 8, v_head_dim=head_dim, dtype=dtype)
        cache = pagedkv.PagedKvCache()
        cache.append_contiguous(store, np.ones((len(v), 8), RAW[dtype]), v, len(v))
        out = pagedkv.paged_attention(np.ones((len(v), 1, 8), np.float32), store, cache, query_lens=len(v), window=1)
        np.testing.assert_array_equal(out, Rows(dtype, v).decode())

    @pytest.mark.parametrize("head_dim", [1, 5, 64])
    def test_all_finite_bits_of_k_through_attention(self, dtype, head_dim):
        """A query that is one-hot picks a value of K, and the logarithm of the sum over one position is that value."""
        finite = ALL_BITS[np.isfinite(Rows(dtype, ALL_BITS.view(RAW[dtype])).decode())]
        k = in_rows(finite, -(-len(finite) // head_dim), head_dim).view(RAW[dtype])
        n_heads = k.shape[1]
        store = pagedkv.PagedKvStore(1, 1, n_heads, head_dim, v_head_dim=1, dtype=dtype)
        cache = pagedkv.PagedKvCache()
        cache.push(store, k[0], np.zeros(n_heads, RAW[dtype]))
        q = np.tile(np.eye(head_dim, dtype=np.float32), (n_heads, 1))[None]
        _, lse = pagedkv.paged_attention(q, store, cache, scale=1.0, return_lse=True)
        np.testing.assert_array_equal(lse[0], Rows(dtype, k).decode().ravel())

    def test_bits_of_k_that_are_not_finite(self, dtype):
        bits = ALL_BITS[~np.isfinite(Rows(dtype, ALL_BITS.view(RAW[dtype])).decode())]
        nan = np.isnan(Rows(dtype, bits.view(RAW[dtype])).decode())
        store = pagedkv.PagedKvStore(1, 1, len(bits), 1, dtype=dtype)
        cache = pagedkv.PagedKvCache()
        cache.push(store, bits.view(RAW[dtype]), np.zeros(len(bits), RAW[dtype]))
        out = pagedkv.paged_attention(np.ones((1, len(bits), 1), np.float32), store, cache)
        assert np.isnan(out[0, nan]).all()


# --- int8 --------------------------------------------------------------------------------------------


def heads_of_many_sizes(n_rows, n_heads, head_dim, seed=0):
    """Normal values; each head of each row of its own size, from 1e-36 to 1e36."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.uniform(-36, 36, (n_rows, n_heads, 1))
    return (rng.standard_normal((n_rows, n_heads, head_dim)) * sizes).astype(np.float32)


class TestInt8:
    @pytest.mark.parametrize("head_dim", [1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 64, 80, 96, 112, 128, 192, 256, 576])
    @pytest.mark.parametrize("n_heads", [1, 3])
    def test_a_scale_for_each_row_and_head(self, n_heads, head_dim):
        check_rows("int8", heads_of_many_sizes(67, n_heads, head_dim), by_append)

    @pytest.mark.parametrize("write", WAYS)
    @pytest.mark.parametrize("head_dim", [3, 64])
    def test_in_every_way(self, write, head_dim):
        check_rows("int8", heads_of_many_sizes(50, 3, head_dim), write)

    @pytest.mark.parametrize("exponent", [-130, -100, -1, 0, 1, 100, 120])
    def test_ties_go_to_the_even(self, exponent):
        """A largest magnitude of 127 times a power of two: the scale is that power, and ties are exact."""
        halves = np.arange(-254, 255, dtype=np.float32) / 2
        near = np.concatenate([halves, np.nextafter(halves, np.float32(-200)), np.nextafter(halves, np.float32(200))])
        heads = in_rows(near[np.abs(near) <= 127], 2, 15)
        heads = np.concatenate([heads, np.full((*heads.shape[:2], 1), 127, np.float32)], axis=2)
        rows = np.ldexp(heads, exponent)
        store, cache = check_rows("int8", rows, by_append)
        _, scales = stored(store, cache, "k")
        assert (scales == np.float32(2.0**exponent)).all()

    @pytest.mark.parametrize("sign", [1, -1])
    @pytest.mark.parametrize("at", [0, 1, 7, 8, 31, 36])
    def test_the_largest_magnitude_may_stand_anywhere(self, sign, at):
        rows = np.random.default_rng(at).uniform(-1, 1, (5, 2, 37)).astype(np.float32)
        rows[:, 0, at] = 3 * sign
        store, cache = check_rows("int8", rows, by_append)
        values, _ = stored(store, cache, "k")
        assert (values[:, at] == 127 * sign).all()

    @pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("head_dim", [1, 5, 37, 64])
    def test_a_value_that_is_not_finite_makes_its_head_nan_and_no_other(self, head_dim, bad):
        rows = np.random.default_rng(0).standard_normal((head_dim, 3, head_dim)).astype(np.float32)
        rows[np.arange(head_dim), 1, np.arange(head_dim)] = bad  # each place in turn
        store, cache = check_rows("int8", rows, by_append)
        read = cache.to_contiguous(store).k.reshape(rows.shape)
        assert np.isnan(read[:, 1]).all()
        assert np.isfinite(read[:, [0, 2]]).all()

    def test_nan_beside_infinity(self):
        check_rows("int8", np.float32([[[np.nan, np.inf, 1, 2]], [[np.inf, np.nan, 1, 2]]]), by_append)

    def test_zeros(self):
        store, cache = check_rows("int8", np.float32([[[0, -0.0, 0]], [[0, 0, 0]]]), by_append)
        assert not cache.to_contiguous(store).k.any()
        assert not stored(store, cache, "k")[1].any()

    def test_the_smallest_and_the_largest_numbers(self):
        """Scales that are subnormal or zero are coarse: a quotient beyond 127 must not wrap around."""
        tiny = np.arange(1, 3000, dtype=np.uint32).view(np.float32)
        rows = np.stack([tiny, -tiny, tiny[::-1], np.full_like(tiny, tiny[0])], axis=1)[:, None]
        check_rows("int8", rows, by_append)
        largest = np.finfo(np.float32).max
        check_rows("int8", np.float32([[[largest, 1, -largest / 2]], [[-largest, largest, 0]]]), by_append)

    @pytest.mark.parametrize("size", [3.4028235e38, 3.4028233e38, 3.39e38, 3.4e38])
    def test_a_finite_row_reads_as_finite(self, size):
        """127 times its scale must not overflow, for a scale that is rounded."""
        rows = np.full((4, 1, 37), size, np.float32)
        rows[:, :, 1::2] *= -1
        rows[1:, :, 5] = 0
        store, cache = check_rows("int8", rows, by_append)
        got = cache.to_contiguous(store).k
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, rows.reshape(4, 37), rtol=1e-6)

    @pytest.mark.parametrize("head_dim", [1, 4, 37, 64])
    def test_scales_of_arbitrary_bits(self, head_dim):
        values = random_bits(1 << 16)
        check_rows("int8", in_rows(values[np.isfinite(values)], 2, head_dim), by_append)

    @pytest.mark.parametrize("head_dim", [3, 64, 128])
    def test_the_error_is_at_most_half_a_scale(self, head_dim):
        rows = heads_of_many_sizes(200, 2, head_dim)
        store = pagedkv.PagedKvStore(16, 16, 2, head_dim, dtype="int8")
        cache = pagedkv.PagedKvCache()
        by_append(store, cache, rows, rows)
        error = np.abs(cache.to_contiguous(store).k.reshape(rows.shape).astype(np.float64) - rows).max(axis=-1)
        assert (error <= np.abs(rows).max(axis=-1) / 127 * 0.500001).all()

    @pytest.mark.parametrize("query_len", [1, 3, 40])
    def test_all_values_through_attention(self, query_len):
        """Each query sees itself alone: the output is its row of V. Heads of scale 1 hold all 255 values."""
        values = np.arange(-127, 128, dtype=np.float32)
        v = np.stack([values, values[::-1] * 2**-20, values * np.float32(0.3)])[None].repeat(query_len, axis=0)
        store = pagedkv.PagedKvStore(4, 10, 3, 5, v_head_dim=255, dtype="int8")
        cache = pagedkv.PagedKvCache()
        by_append(store, cache, np.ones((query_len, 3, 5), np.float32), v)
        q = np.ones((query_len, 3, 5), np.float32)
        out = pagedkv.paged_attention(q, store, cache, query_lens=query_len, window=1)
        np.testing.assert_allclose(out, encode("int8", v).decode(), rtol=1.2e-7, atol=0)

    @pytest.mark.parametrize("head_dim", [1, 3, 64])
    def test_all_values_of_k_through_attention(self, head_dim):
        values = np.concatenate([np.arange(-127, 128, dtype=np.float32), np.float32([0])])
        k = in_rows(values, -(-len(values) // head_dim), head_dim)[0] * np.float32(0.37)
        n_heads = len(k)
        store = pagedkv.PagedKvStore(1, 1, n_heads, head_dim, v_head_dim=1, dtype="int8")
        cache = pagedkv.PagedKvCache()
        cache.push(store, k, np.zeros((n_heads, 1), np.float32))
        q = np.tile(np.eye(head_dim, dtype=np.float32), (n_heads, 1))[None]
        _, lse = pagedkv.paged_attention(q, store, cache, scale=1.0, return_lse=True)
        np.testing.assert_allclose(lse[0], encode("int8", k).decode().ravel(), rtol=2.4e-7, atol=0)
