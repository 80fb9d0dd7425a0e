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


def heads_of_many_sizes(n_rows, n_heads, head_dim, seed=0, decades=3):
    """Normal values; each head of each row of its own size, a power of ten from minus to plus so many decades."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.uniform(-decades, decades, (n_rows, n_heads, 1))
    return (rng.standard_normal((n_rows, n_heads, head_dim)) * sizes).astype(np.float32)


def hadamard(width):
    """The orthonormal matrix, as Sylvester built it."""
    matrix = np.ones((1, 1))
    while len(matrix) < width:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    return matrix / np.sqrt(width)


class TestTurning:
    @pytest.mark.parametrize(("head_dim", "width"), [
        (16, 16), (32, 32), (48, 16), (64, 64), (80, 16), (128, 128), (192, 64), (256, 256), (576, 64),
        (1024, 1024), (2048, 1024),
    ])
    @pytest.mark.parametrize("n_heads", [1, 3])
    def test_what_is_stored_is_the_head_times_a_hadamard_matrix(self, n_heads, head_dim, width):
        """Each unit vector has a row of the matrix: all of one magnitude, stored as +-127 times its 127th part."""
        matrix = hadamard(width)
        for at in range(0, head_dim, max(1, head_dim // 37)):
            rows = np.zeros((1, n_heads, head_dim), np.float32)
            rows[0, -1, at] = 1
            store, cache = check_rows("int8", rows, by_append)
            values, scales = stored(store, cache, "k")
            want = np.zeros(head_dim)
            want[at - at % width : at - at % width + width] = np.sign(matrix[at % width])
            assert (values[0].reshape(n_heads, head_dim)[-1] == 127 * want).all()
            assert not values[0, : -head_dim].any()
            block = slice(at // 32, max(at // width * width + width, at + 1) // 32)
            np.testing.assert_allclose(np.float64(scales[0, -1, block]), 1 / np.sqrt(width) / 127, rtol=2**-11)

    @pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256, 576, 2048])
    def test_of_normal_values(self, head_dim):
        rows = heads_of_many_sizes(20, 2, head_dim)
        store, cache = check_rows("int8", rows, by_append)
        values, scales = stored(store, cache, "k")
        width = head_dim & -head_dim if head_dim < 2048 else 1024
        turned = np.float64(rows).reshape(20, 2, -1, width) @ hadamard(width)
        kept = values.reshape(20, 2, head_dim) * np.float64(scales.repeat(32, axis=-1)[..., :head_dim])
        error = np.abs(kept - turned.reshape(rows.shape)) / np.float64(scales.repeat(32, axis=-1)[..., :head_dim])
        assert error.max() < 0.5001

    @pytest.mark.parametrize("head_dim", [1, 2, 3, 5, 8, 12, 15, 24, 33, 37])
    def test_heads_that_no_power_of_two_divides_are_stored_as_they_come(self, head_dim):
        rows = np.zeros((1, 1, head_dim), np.float32)
        rows[0, 0, head_dim // 2] = 1
        store, cache = check_rows("int8", rows, by_append)
        assert stored(store, cache, "k")[0].tolist() == [[127 if i == head_dim // 2 else 0 for i in range(head_dim)]]

    def test_one_value_far_greater_than_the_others_does_not_swallow_them(self):
        rows = np.random.default_rng(0).standard_normal((50, 1, 128)).astype(np.float32)
        rows[:, 0, 7] = 100
        store, cache = check_rows("int8", rows, by_append)
        error = cache.to_contiguous(store).k.reshape(rows.shape) - rows
        assert np.sqrt(np.square(error[:, 0, np.arange(128) != 7]).mean()) < 0.05  # else 100 / 127 / sqrt(12): 0.23


class TestInt8:
    @pytest.mark.parametrize("head_dim", [
        1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 48, 64, 80, 96, 100, 112, 128, 192, 256, 512, 576, 1024,
        1040, 2048, 3000,
    ])
    @pytest.mark.parametrize("n_heads", [1, 3])
    def test_a_scale_for_each_group(self, n_heads, head_dim):
        check_rows("int8", heads_of_many_sizes(67, n_heads, head_dim), by_append)

    @pytest.mark.parametrize("write", WAYS)
    @pytest.mark.parametrize("head_dim", [3, 33, 64])
    def test_in_every_way(self, write, head_dim):
        check_rows("int8", heads_of_many_sizes(50, 3, head_dim), write)

    @pytest.mark.parametrize("head_dim", [5, 37, 64, 80])
    def test_sizes_that_no_float16_scale_has(self, head_dim):
        """Beyond it NaN, below it coarse, and further below zero."""
        check_rows("int8", heads_of_many_sizes(300, 3, head_dim, decades=36), by_append)

    @pytest.mark.parametrize("exponent", [-14, -10, -1, 0, 1, 9])
    def test_ties_go_to_the_even(self, exponent):
        """A largest magnitude of 127 times a power of two: the scale is that power, and ties are exact."""
        halves = np.arange(-254, 255, dtype=np.float32) / 2
        near = np.concatenate([halves, np.nextafter(halves, np.float32(-200)), np.nextafter(halves, np.float32(200))])
        heads = in_rows(near[np.abs(near) <= 127], 2, 14)
        heads = np.concatenate([heads, np.full((*heads.shape[:2], 1), 127, np.float32)], axis=2)
        rows = np.ldexp(heads, exponent)
        store, cache = check_rows("int8", rows, by_append)
        values, scales = stored(store, cache, "k")
        assert (scales == np.float16(2.0**exponent)).all()
        assert (values == np.rint(heads).reshape(values.shape)).all()

    @pytest.mark.parametrize("sign", [1, -1])
    @pytest.mark.parametrize("at", [0, 1, 7, 8, 15, 16, 30, 31, 32, 36])
    def test_the_largest_magnitude_may_stand_anywhere(self, sign, at):
        rows = np.random.default_rng(at).uniform(-1, 1, (5, 2, 37)).astype(np.float32)
        rows[:, 0, at] = 3 * sign
        store, cache = check_rows("int8", rows, by_append)
        values, scales = stored(store, cache, "k")
        assert (values[:, at] == 127 * sign).all()
        assert (scales[:, 0, at // 32] > 0.02).all()
        assert (scales[:, 0, 1 - at // 32] < 0.01).all()

    @pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf, 3e38])
    @pytest.mark.parametrize(("head_dim", "spoiled"), [
        (1, 1), (5, 5), (37, 32), (67, 32), (64, 64), (80, 32), (192, 64),
    ])
    def test_what_is_not_finite_makes_its_group_nan_and_no_other(self, head_dim, spoiled, bad):
        """And of heads that are turned what was turned with it."""
        rows = np.random.default_rng(0).standard_normal((head_dim, 3, head_dim)).astype(np.float32)
        rows[np.arange(head_dim), 1, np.arange(head_dim)] = bad  # each place in turn
        store, cache = check_rows("int8", rows, by_append)
        read = cache.to_contiguous(store).k.reshape(rows.shape)
        same = np.arange(head_dim)[:, None] // spoiled == np.arange(head_dim)[None] // spoiled
        if head_dim == 80:  # of two heads of 16 that share a scale, one is turned into NaN, and one is beside it
            assert np.isnan(read[:, 1][same]).all()
        else:
            assert (np.isnan(read[:, 1]) == same).all()
        assert np.isfinite(read[:, 1][~same]).all()
        assert np.isfinite(read[:, [0, 2]]).all()

    def test_nan_beside_infinity(self):
        check_rows("int8", np.float32([[[np.nan, np.inf, 1, 2]], [[np.inf, np.nan, 1, 2]]]), by_append)

    def test_zeros(self):
        store, cache = check_rows("int8", np.float32([[[0, -0.0, 0]], [[0, 0, 0]]]), by_append)
        assert not cache.to_contiguous(store).k.any()
        assert not stored(store, cache, "k")[1].any()

    @pytest.mark.parametrize("step", [1, 1 << 14])
    def test_the_smallest_numbers(self, step):
        """Scales that are subnormal or zero are coarse: a quotient beyond 127 must not wrap around."""
        bits = np.arange(1, 3000, dtype=np.uint32) * np.uint32(step) + np.uint32(0x34000000 * (step > 1))
        tiny = bits.view(np.float32)
        rows = np.stack([tiny, -tiny, tiny[::-1], np.full_like(tiny, tiny[0])], axis=1)[:, None]
        check_rows("int8", rows, by_append)
        check_rows("int8", in_rows(tiny, 1, 33), by_append)

    @pytest.mark.parametrize("head_dim", [37, 64])
    def test_the_largest_numbers(self, head_dim):
        """127 times the largest float16, and then NaN. Turned, a head with one value has an eighth of it everywhere."""
        rows = np.zeros((3, 1, head_dim), np.float32)
        rows[:, 0, 0] = np.float32([127 * 65504, 127 * 65519.9, 127 * 65520.1]) * np.float32(8 if head_dim == 64 else 1)
        store, cache = check_rows("int8", rows, by_append)
        got = cache.to_contiguous(store).k
        assert np.isnan(got[2, :32]).all()
        np.testing.assert_allclose(got[:2], rows[:2, 0], rtol=1e-3, atol=1)

    @pytest.mark.parametrize("head_dim", [1, 4, 37, 64])
    def test_scales_of_arbitrary_bits(self, head_dim):
        check_rows("int8", in_rows(random_bits(1 << 16), 2, head_dim), by_append)

    @pytest.mark.parametrize("head_dim", [3, 37, 100])
    def test_the_error_is_at_most_half_a_scale(self, head_dim):
        rows = heads_of_many_sizes(200, 2, head_dim)
        store = pagedkv.PagedKvStore(16, 16, 2, head_dim, dtype="int8")
        cache = pagedkv.PagedKvCache()
        by_append(store, cache, rows, rows)
        error = np.abs(cache.to_contiguous(store).k.reshape(rows.shape).astype(np.float64) - rows).max(axis=-1)
        assert (error <= np.abs(rows).max(axis=-1) / 127 * 0.5005).all()

    @pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
    def test_the_error_of_a_turned_head_is_as_small_in_sum(self, head_dim):
        """Turning keeps lengths: the error is as long as it was, of sqrt(head_dim) times half a scale at the most."""
        rows = heads_of_many_sizes(200, 2, head_dim)
        store = pagedkv.PagedKvStore(16, 16, 2, head_dim, dtype="int8")
        cache = pagedkv.PagedKvCache()
        by_append(store, cache, rows, rows)
        error = np.linalg.norm(cache.to_contiguous(store).k.reshape(rows.shape).astype(np.float64) - rows, axis=-1)
        scales = np.float64(np.concatenate([store.k_scales(block) for block in cache.block_table.tolist()])[:200])
        assert (error <= 0.501 * np.sqrt((scales**2).sum(axis=-1) * 32)).all()

    @pytest.mark.parametrize("query_len", [1, 3, 40])
    @pytest.mark.parametrize("head_dim", [255, 256])
    def test_all_values_through_attention(self, query_len, head_dim):
        """Each query sees itself alone: the output is its row of V. Heads of scale 1 hold all 255 values."""
        values = np.resize(np.arange(-127, 128, dtype=np.float32), head_dim)
        v = np.stack([values, values[::-1] * 2**-10, values * np.float32(0.3)])[None].repeat(query_len, axis=0)
        store = pagedkv.PagedKvStore(4, 10, 3, 5, v_head_dim=head_dim, dtype="int8")
        cache = pagedkv.PagedKvCache()
        by_append(store, cache, np.ones((query_len, 3, 5), np.float32), v)
        q = np.ones((query_len, 3, 5), np.float32)
        out = pagedkv.paged_attention(q, store, cache, query_lens=query_len, window=1)
        want = encode("int8", v).decode()
        # What is not turned back is exact but for the last multiplication.
        atol = 0 if head_dim == 255 else 5e-7 * np.abs(want).max(axis=(0, 2), keepdims=True)
        assert (np.abs(out - want) <= 1.2e-7 * np.abs(want) + atol).all()

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
        np.testing.assert_allclose(lse[0], encode("int8", k).decode().ravel(), rtol=2.4e-7,
                                   atol=2e-5 if head_dim == 64 else 0)  # q is turned, too
