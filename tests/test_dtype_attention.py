"""Attention over stores of each dtype: what they read as is exact, so that only float32 arithmetic is between the
result and the dense reference over those values. On every instruction set, with NaN wherever nothing was written."""

import numpy as np
import pytest
from attention_support import SETS, assert_close, check, expected, forced, paged, rows, shuffled_store
from dtype_reference import DTYPES, SCALED, encode, round_trip

import pagedkv

NARROW = [dtype for dtype in DTYPES if dtype != "float32"]


@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("dtype", NARROW)
class TestShapes:
    @pytest.mark.parametrize("head_dim", [1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 64, 80, 96, 100, 112, 128, 192, 256, 576])
    def test_head_dims(self, rng, dtype, head_dim):
        check(rng, [37], [1], 2, 4, head_dim, dtype=dtype)
        check(rng, [37], [9], 2, 4, head_dim, dtype=dtype)
        check(rng, [37], [33], 3, 1, head_dim, dtype=dtype)

    @pytest.mark.parametrize(("head_dim", "v_head_dim"), [(64, 128), (192, 128), (576, 512), (3, 1), (1, 9), (5, 7)])
    def test_another_width_of_v(self, rng, dtype, head_dim, v_head_dim):
        check(rng, [37], [1], 2, 3, head_dim, v_head_dim, dtype=dtype)
        check(rng, [37], [20], 1, 16, head_dim, v_head_dim, dtype=dtype)

    @pytest.mark.parametrize("group", [*range(1, 18), 71])
    @pytest.mark.parametrize("n_kv_heads", [1, 3])
    def test_groups(self, rng, dtype, group, n_kv_heads):
        check(rng, [29], [1], n_kv_heads, group, 24, dtype=dtype)
        check(rng, [29], [2], n_kv_heads, group, 13, dtype=dtype)

    @pytest.mark.parametrize("block_size", [1, 2, 3, 16, 48, 1024])
    def test_block_sizes(self, rng, dtype, block_size):
        check(rng, [131, 5], [2, 1], 2, 2, 16, block_size=block_size, dtype=dtype)
        check(rng, [131, 5], [60, 3], 2, 2, 17, block_size=block_size, dtype=dtype)

    @pytest.mark.parametrize("query_len", [1, 2, 3, 5, 6, 11, 12, 13, 47, 48, 49, 100, 150])
    def test_query_lens(self, rng, dtype, query_len):
        check(rng, [150], [query_len], 2, 2, 20, dtype=dtype)

    def test_ragged_batch(self, rng, dtype):
        check(rng, [300, 1, 40, 0, 17, 64], [1, 1, 40, 0, 0, 30], 2, 3, 32, dtype=dtype)

    def test_long_sequences_are_merged_from_parts(self, rng, dtype):
        check(rng, [1500], [1], 8, 2, 128, block_size=16, dtype=dtype)
        check(rng, [2500], [30], 1, 2, 64, block_size=16, dtype=dtype)
        check(rng, [1500], [3], 8, 2, 128, block_size=16, dtype=dtype, window=700, sinks=rows(rng, 16), softcap=4.0)

    @pytest.mark.parametrize("layer", [0, 2])
    def test_layers(self, rng, dtype, layer):
        store, caches, dense = paged(rng, [9, 4], 2, 7, n_layers=3, dtype=dtype)
        q = rows(rng, 2, 4, 7)
        got = pagedkv.paged_attention(q, store, caches, layer=layer, return_lse=True)
        assert_close(got, expected(q, dense, [1, 1], layer))

    def test_everything_together(self, rng, dtype):
        options = {"window": 31, "softcap": 3.0, "sinks": rows(rng, 6), "alibi_slopes": abs(rows(rng, 6)), "scale": 0.3}
        check(rng, [70, 9, 130], [1, 2, 77], 2, 3, 33, dtype=dtype, **options)
        check(rng, [70, 9, 130], [1, 2, 77], 2, 3, 33, dtype=dtype, causal=False, **options)

    @pytest.mark.parametrize("query_len", [1, 3, 40])
    def test_windows_edge_by_edge(self, rng, dtype, query_len):
        for window in [1, 2, 3, 7, 8, 9, 47, 48, 49, 59, 60, 61]:
            check(rng, [60], [query_len], 1, 2, 8, window=window, dtype=dtype)


@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("dtype", NARROW)
class TestNumbers:
    @pytest.mark.parametrize("query_len", [1, 3, 40])
    @pytest.mark.parametrize("side", "kv")
    def test_nan_reaches_whoever_sees_it_and_nobody_else(self, rng, dtype, query_len, side):
        k, v = rows(rng, 60, 2, 16), rows(rng, 60, 2, 16)
        at = 60 - query_len // 2 - 1
        (k if side == "k" else v)[at, 1, 3] = np.nan
        store, cache = self.stored(dtype, k, v)
        q = rows(rng, query_len, 4, 16)
        out = pagedkv.paged_attention(q, store, cache, query_lens=query_len)
        sees = np.arange(60 - query_len, 60) >= at
        hit = slice(None) if side == "k" or dtype in SCALED else 3  # with a scale the whole head is NaN
        assert np.isnan(out[sees, 2:, hit]).all()
        assert np.isnan(out).sum() == np.isnan(out[sees, 2:, hit]).sum()

    def stored(self, dtype, k, v):
        n, n_heads, head_dim = k.shape
        store = pagedkv.PagedKvStore(4, -(-n // 4), n_heads, head_dim, v_head_dim=v.shape[2], dtype=dtype, debug=True)
        cache = pagedkv.PagedKvCache()
        cache.append_contiguous(store, k, v, n)
        return store, cache

    @pytest.mark.parametrize("query_len", [1, 5, 30])
    @pytest.mark.parametrize("head_dim", [33, 64, 80, 100, 128])
    def test_groups_of_very_different_sizes(self, rng, dtype, query_len, head_dim):
        """A scale that is taken from another group is seen at once, in K by the weights and in V by the sums."""
        sizes = (2.0 ** rng.integers(-6, 7, (50, 3, -(-head_dim // 16)))).repeat(16, axis=-1)[..., :head_dim]
        k, v = (np.float32(rows(rng, 50, 3, head_dim) * sizes * size) for size in (0.1, 1))
        store, cache = self.stored(dtype, k, v)
        q = rows(rng, query_len, 6, head_dim)
        got = pagedkv.paged_attention(q, store, cache, query_lens=query_len, return_lse=True)
        want = expected(q, [(round_trip(dtype, k)[None], round_trip(dtype, v)[None])], [query_len])
        np.testing.assert_allclose(got[0], want[0], rtol=1e-4, atol=1e-4 * np.abs(v).max())
        np.testing.assert_allclose(got[1], want[1], rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("query_len", [1, 30])
    @pytest.mark.parametrize("k_size", [1e-6, 1e-3, 1.0])
    @pytest.mark.parametrize("v_size", [1e-3, 1.0, 1e4])
    def test_sizes(self, rng, dtype, query_len, k_size, v_size):
        """Rows that are small (float16's subnormals) or large, each of its own size; errors are relative to V's."""
        sizes = 10.0 ** rng.uniform(-1, 0, (60, 2, 1))
        k, v = (np.float32(rows(rng, 60, 2, 20) * sizes * size) for size in (k_size, v_size))
        store, cache = self.stored(dtype, k, v)
        q = rows(rng, query_len, 4, 20) / np.float32(k_size)
        out, lse = pagedkv.paged_attention(q, store, cache, query_lens=query_len, return_lse=True)
        want, want_lse = expected(q, [(round_trip(dtype, k)[None], round_trip(dtype, v)[None])], [query_len])
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5 * np.abs(v).max())
        np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("query_len", [1, 30])
    def test_heads_and_rows_of_very_different_sizes(self, rng, dtype, query_len):
        """A scale that is taken from another row or head is seen at once."""
        exponent = {"float16": 6, "int8": 10}.get(dtype, 30)
        sizes = 2.0 ** rng.integers(-exponent, exponent + 1, (50, 3, 1))
        k, v = rows(rng, 50, 3, 24), np.float32(rows(rng, 50, 3, 24) * sizes)
        store, cache = self.stored(dtype, k, v)
        q = rows(rng, query_len, 6, 24)
        out = pagedkv.paged_attention(q, store, cache, query_lens=query_len)
        for i in range(query_len):  # relative to the largest value that each query and head sees
            want, _ = expected(q[i:i + 1], [(encode(dtype, k[:51 - query_len + i]).decode()[None],
                                             encode(dtype, v[:51 - query_len + i]).decode()[None])], [1])
            most = np.abs(v[:51 - query_len + i]).max(axis=(0, 2)).repeat(2)[:, None]
            assert (np.abs(out[i] - want[0]) <= 1e-5 * most).all()


@pytest.mark.parametrize("dtype", DTYPES)
class TestSameBits:
    @pytest.mark.parametrize("query_lens", [[1, 1, 1], [1, 0, 300], [12, 50, 1]])
    @pytest.mark.parametrize("head_dim", [33, 64])
    def test_any_number_of_threads(self, rng, dtype, query_lens, head_dim):
        store, caches, _ = paged(rng, [1700, 60, 900], 4, head_dim, block_size=16, dtype=dtype)
        q = rows(rng, sum(query_lens), 8, head_dim)
        results = [pagedkv.paged_attention(q, store, caches, query_lens=query_lens, return_lse=True, n_threads=n)
                   for n in (1, 2, 3)]
        for out, lse in results[1:]:
            np.testing.assert_array_equal(out, results[0][0])
            np.testing.assert_array_equal(lse, results[0][1])

    @pytest.mark.parametrize("query_len", [1, 7, 60])
    def test_in_a_step_and_after_it(self, rng, dtype, query_len):
        store = shuffled_store(rng, 60, 2, 20, dtype=dtype, n_layers=2)
        caches = [pagedkv.PagedKvCache() for _ in range(2)]
        for cache, n in zip(caches, (41, 6), strict=True):
            cache.append_contiguous(store, rows(rng, 2, n, 40), rows(rng, 2, n, 40), n)
        k, v = rows(rng, 2, 2 * query_len, 2, 20), rows(rng, 2, 2 * query_len, 2, 20)
        q = rows(rng, 2 * query_len, 4, 20)
        attended = []
        with pagedkv.Step(store, caches, query_len) as step:
            for layer in (0, 1):
                step.write(layer, k[layer], v[layer])
                attended.append(step.attend(layer, q))
        for layer in (0, 1):
            after = pagedkv.paged_attention(q, store, caches, layer=layer, query_lens=query_len)
            np.testing.assert_array_equal(attended[layer], after)

    def test_instruction_sets_agree(self, rng, dtype):
        """Not to the bit: they add in different orders."""
        store, caches, _ = paged(rng, [700, 33], 2, 67, block_size=16, dtype=dtype)
        q = rows(rng, 41, 6, 67)
        results = []
        for simd in SETS:
            with forced(simd):
                results.append(pagedkv.paged_attention(q, store, caches, query_lens=[40, 1], return_lse=True))
        for result in results[1:]:
            assert_close(result, results[0])


class TestCpuInfo:
    def test_what_was_found_and_chosen(self):
        info = pagedkv.cpu_info()
        assert info == pagedkv.cpu_info()
        assert info.simd in info.available
        assert list(info.available) == SETS
        assert all(isinstance(name, str) and name for name in (*info.available, *info.features))
        assert info.num_threads == pagedkv.get_num_threads()
        assert info.simd in repr(info)

    def test_it_follows_what_is_forced(self):
        for simd in SETS:
            with forced(simd):
                assert pagedkv.cpu_info().simd == simd

    def test_it_cannot_be_changed(self):
        info = pagedkv.cpu_info()
        with pytest.raises((AttributeError, TypeError)):
            info.simd = "none"
        assert isinstance(hash(info), int)
