"""paged_attention and attention against the dense float64 reference, on every instruction set of the machine."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from attention_support import SETS, assert_close, check, expected, forced, options, paged, rows
from dense_reference import dense_attention
from dtype_reference import DTYPES
from hypothesis import given, settings
from hypothesis import strategies as st

import pagedkv
from pagedkv._kernels import simd as kernels

# --- shapes ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("simd")
class TestShapes:
    @pytest.mark.parametrize("head_dim", [1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 64, 80, 96, 100, 112, 128, 192, 256, 576])
    def test_head_dims(self, rng, head_dim):
        check(rng, [37], [1], 2, 4, head_dim)
        check(rng, [37], [9], 2, 4, head_dim)

    @pytest.mark.parametrize(("head_dim", "v_head_dim"), [(64, 128), (192, 128), (576, 512), (3, 1), (1, 9)])
    def test_another_width_of_v(self, rng, head_dim, v_head_dim):
        check(rng, [37], [1], 2, 3, head_dim, v_head_dim)
        check(rng, [37], [11], 2, 3, head_dim, v_head_dim)

    @pytest.mark.parametrize("group", [*range(1, 18), 71])
    @pytest.mark.parametrize("n_kv_heads", [1, 3])
    def test_groups(self, rng, group, n_kv_heads):
        check(rng, [29], [1], n_kv_heads, group, 24)

    @pytest.mark.parametrize("block_size", [1, 2, 3, 16, 48, 64, 1024])
    def test_block_sizes(self, rng, block_size):
        check(rng, [131, 5], [2, 1], 2, 2, 16, block_size=block_size)
        check(rng, [131, 5], [60, 3], 2, 2, 16, block_size=block_size)

    @pytest.mark.parametrize("query_len", [1, 2, 3, 5, 6, 11, 12, 13, 47, 48, 49, 100, 150])
    def test_query_lens(self, rng, query_len):
        check(rng, [150], [query_len], 2, 2, 20)

    def test_ragged_batch(self, rng):
        check(rng, [300, 1, 40, 0, 17, 64], [1, 1, 40, 0, 0, 30], 2, 3, 32)

    def test_long_sequences_are_merged_from_parts(self, rng):
        check(rng, [1500], [1], 8, 2, 128, block_size=16)
        check(rng, [2500], [30], 1, 2, 64, block_size=16)
        check(rng, [1500], [3], 8, 2, 128, block_size=16, window=700, sinks=rows(rng, 16), softcap=4.0)

    def test_many_query_tiles(self, rng):
        check(rng, [700], [600], 1, 2, 8)

    @pytest.mark.parametrize("layer", [0, 2])
    def test_layers(self, rng, layer):
        store, caches, dense = paged(rng, [9, 4], 2, 8, n_layers=3)
        q = rows(rng, 2, 4, 8)
        got = pagedkv.paged_attention(q, store, caches, layer=layer, return_lse=True)
        assert_close(got, expected(q, dense, [1, 1], layer))


# --- options -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("simd")
class TestOptions:
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("query_len", [1, 4, 40])
    def test_windows_edge_by_edge(self, rng, causal, query_len):
        for window in [*range(1, 15), 47, 48, 49, 50, 51, 59, 60, 61, 1 << 60]:
            check(rng, [60], [query_len], 1, 2, 8, window=window, causal=causal)

    @pytest.mark.parametrize("query_len", [1, 30])
    @pytest.mark.parametrize("softcap", [0.5, 20.0, 1e30])
    def test_softcap(self, rng, query_len, softcap):
        check(rng, [70], [query_len], 2, 2, 16, softcap=softcap)

    @pytest.mark.parametrize("query_len", [1, 30])
    def test_sinks(self, rng, query_len):
        check(rng, [70], [query_len], 2, 2, 16, sinks=np.array([0, -3, 9, -np.inf], np.float32))

    @pytest.mark.parametrize("query_len", [1, 3, 30])
    @pytest.mark.parametrize("causal", [True, False])
    def test_alibi(self, rng, query_len, causal):
        slopes = np.array([0, 0.5, 0.25, 1], np.float32)
        check(rng, [70], [query_len], 2, 2, 16, alibi_slopes=slopes, causal=causal)

    @pytest.mark.parametrize("scale", [0.0, -0.5, 3, np.float32(0.1), 1e-30])
    def test_scale(self, rng, scale):
        check(rng, [70], [1], 2, 2, 16, scale=scale)
        check(rng, [70], [30], 2, 2, 16, scale=scale)

    def test_everything_together(self, rng):
        options = {"window": 31, "softcap": 3.0, "sinks": rows(rng, 6), "alibi_slopes": abs(rows(rng, 6)), "scale": 0.3}
        check(rng, [70, 9, 130], [1, 2, 77], 2, 3, 33, **options)
        check(rng, [70, 9, 130], [1, 2, 77], 2, 3, 33, causal=False, **options)

    def test_nothing_visible(self, rng):
        q = rows(rng, 3, 2, 8)
        none = np.empty((0, 1, 8), np.float32)
        out, lse = pagedkv.attention(q, none, none, causal=False, return_lse=True)
        assert not out.any()
        assert (lse == -np.inf).all()
        out, lse = pagedkv.attention(q, none, none, causal=False, return_lse=True, sinks=np.array([1, 2], np.float32))
        assert not out.any()
        np.testing.assert_array_equal(lse, [[1, 2]] * 3)
        k = rows(rng, 2, 1, 8)  # more queries than positions: the first stands 6 before the sequence
        assert_close(pagedkv.attention(rows(rng, 8, 2, 8) * 0, k, k, causal=False, window=3, return_lse=True),
                     dense_attention(np.zeros((8, 2, 8)), k, k, causal=False, window=3))


# --- numbers -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("simd")
class TestNumbers:
    @pytest.mark.parametrize("n", [1, 5, 30])
    def test_scores_that_overflow_hide_their_positions(self, rng, n):
        """-1e60 is -inf in float32. As if they were not there: zeros, not NaN, where no other position is left."""
        k, v = np.full((50, 1, 64), -1e30, np.float32), rows(rng, 50, 1, 64)
        q = np.full((n, 2, 64), 1e30, np.float32)
        out, lse = pagedkv.attention(q, k, v, return_lse=True)
        assert (out == 0).all()
        assert (lse == -np.inf).all()
        store = pagedkv.PagedKvStore(4, 13, 1, 64)
        cache = pagedkv.PagedKvCache()
        cache.append_contiguous(store, k, v, 50)
        out, lse = pagedkv.paged_attention(q, store, cache, query_lens=n, return_lse=True)
        assert (out == 0).all()
        assert (lse == -np.inf).all()
        out = pagedkv.attention(q, k, v, causal=False, softcap=5.0)  # which makes them all -5: the mean
        np.testing.assert_allclose(out, np.broadcast_to(v[:, 0].mean(0), out.shape), rtol=1e-4, atol=1e-5)
        k[7] = 0  # a score of 0: all that is left
        out, lse = pagedkv.attention(q, k, v, return_lse=True)
        np.testing.assert_array_equal(out, np.broadcast_to(v[7, 0], out.shape))
        assert (lse == 0).all()

    @pytest.mark.parametrize("query_len", [1, 30])
    @pytest.mark.parametrize("size", [1e-4, 1.0, 1e4, 1e8])
    def test_extreme_scores(self, rng, query_len, size):
        """Scores of +-size: no overflow, and where they are distinct the greatest takes all."""
        k = rng.choice([-1, 1], (80, 1, 4)).astype(np.float32)
        v, q = rows(rng, 80, 1, 4), rows(rng, query_len, 2, 4)
        q[..., 0], q[..., 1:] = size, 0  # one product a score, so that nothing is rounded
        assert_close(pagedkv.attention(q, k, v, scale=1.0, return_lse=True), dense_attention(q, k, v, scale=1.0))

    @pytest.mark.parametrize("query_len", [1, 3, 40])
    def test_nan_reaches_whoever_sees_it_and_nobody_else(self, rng, query_len):
        for which in "kv":
            q, k, v = rows(rng, query_len, 4, 16), rows(rng, 60, 2, 16), rows(rng, 60, 2, 16)
            at = 60 - query_len // 2 - 1
            (k if which == "k" else v)[at, 1] = np.nan
            out, lse = pagedkv.attention(q, k, v, return_lse=True)
            sees = np.arange(60 - query_len, 60) >= at
            assert np.isnan(out[sees, 2:]).all()
            assert not np.isnan(out[~sees]).any()
            assert not np.isnan(out[:, :2]).any()
            assert np.isnan(lse[sees, 2:]).all() == (which == "k")
            window, _ = pagedkv.attention(q, k, v, return_lse=True, window=5)
            assert not np.isnan(window[np.arange(60 - query_len, 60) - 5 >= at]).any()

    @pytest.mark.parametrize("query_len", [1, 30])
    def test_infinite_values(self, rng, query_len):
        q, k, v = rows(rng, query_len, 2, 16), rows(rng, 60, 1, 16), rows(rng, 60, 1, 16)
        v[3, 0, 5] = np.inf
        out = pagedkv.attention(q, k, v)
        assert (out[:, :, 5] == np.inf).all()
        assert np.isfinite(np.delete(out, 5, axis=2)).all()

    def test_exp(self, simd):
        x = -np.geomspace(1e-30, 87.3, 1 << 16, dtype=np.float32)
        got = x.copy()
        kernels.apply_exp(got)
        exact = np.exp(x.astype(np.float64))
        assert np.abs(got / exact - 1).max() < 1.5e-7
        special = np.zeros(32, np.float32)
        special[:5] = 0, -87.4, -1e4, -np.inf, np.nan
        kernels.apply_exp(special)
        np.testing.assert_array_equal(special[:5], [1, 0, 0, 0, np.nan])
        with pytest.raises(ValueError, match="multiple"):
            kernels.apply_exp(np.zeros(3, np.float32))

    def test_tanh(self, simd):
        """softcap 1 and one position: lse is the capped score."""
        x = np.concatenate([np.geomspace(1e-20, 100, 3000), np.linspace(0.6, 0.65, 500), [np.inf]]).astype(np.float32)
        x = np.concatenate([x, -x])
        k = np.ones((1, 1, 1), np.float32)
        _, lse = pagedkv.attention(x[None, :, None], k, k, scale=1.0, softcap=1.0, return_lse=True)
        assert np.abs(lse[0] / np.tanh(x.astype(np.float64)) - 1).max() < 3e-7


# --- the same bits -----------------------------------------------------------------------------------


class TestSameBits:
    @pytest.mark.parametrize("query_lens", [[1, 1, 1], [1, 0, 300], [12, 50, 1]])
    def test_any_number_of_threads(self, rng, query_lens):
        store, caches, _ = paged(rng, [1700, 3, 900], 4, 64, block_size=16)
        query_lens = [min(n, c.seq_len) for n, c in zip(query_lens, caches, strict=True)]
        q = rows(rng, sum(query_lens), 8, 64)
        results = [pagedkv.paged_attention(q, store, caches, query_lens=query_lens, return_lse=True, n_threads=n)
                   for n in (1, 2, 3, 8)]
        for out, lse in results[1:]:
            np.testing.assert_array_equal(out, results[0][0])
            np.testing.assert_array_equal(lse, results[0][1])

    def test_whatever_else_is_in_the_batch(self, rng):
        lengths, query_lens = [1700, 3, 900], [1, 3, 200]
        store, caches, _ = paged(rng, lengths, 4, 64, block_size=16)
        q = rows(rng, sum(query_lens), 8, 64)
        together = pagedkv.paged_attention(q, store, caches, query_lens=query_lens)
        row = 0
        for cache, n in zip(caches, query_lens, strict=True):
            alone = pagedkv.paged_attention(q[row:row + n], store, cache, query_lens=n)
            np.testing.assert_array_equal(alone, together[row:row + n])
            row += n

    def test_paged_and_contiguous(self, rng):
        store, caches, _ = paged(rng, [333], 2, 40, block_size=8)
        for n in (1, 100):
            q = rows(rng, n, 4, 40)
            flat = caches[0].to_contiguous(store)
            np.testing.assert_array_equal(pagedkv.paged_attention(q, store, caches, query_lens=n),
                                          pagedkv.attention(q, flat.k, flat.v))

    @pytest.mark.parametrize("forced", SETS)
    def test_forced_by_the_environment(self, forced):
        code = "from pagedkv._kernels import simd; print(simd.get_simd())"
        done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PAGEDKV_SIMD": forced},
                              capture_output=True, text=True, check=True)
        assert done.stdout.strip() == forced

    def test_a_set_that_does_not_exist(self):
        done = subprocess.run([sys.executable, "-c", "import pagedkv"], env={**os.environ, "PAGEDKV_SIMD": "mmx"},
                              capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "ValueError: PAGEDKV_SIMD: expected one of" in done.stderr.splitlines()[-1]


# --- random shapes -----------------------------------------------------------------------------------


@st.composite
def batches(draw):
    group, n_kv_heads = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(0, 90), min_size=0, max_size=4))
    query_lens = [draw(st.integers(0, n)) for n in lengths]
    shape = {"n_kv_heads": n_kv_heads, "group": group, "head_dim": draw(st.integers(1, 80)),
             "v_head_dim": draw(st.integers(1, 80)), "block_size": draw(st.integers(1, 20)),
             "dtype": draw(st.sampled_from(DTYPES))}
    simd, seed = draw(st.sampled_from(SETS)), draw(st.integers(0, 1 << 30))
    return lengths, query_lens, shape, draw(options(group * n_kv_heads)), simd, seed


@settings(max_examples=400)
@given(batches())
def test_random_batches(batch):
    lengths, query_lens, shape, options, simd, seed = batch
    with forced(simd):
        if lengths:
            check(np.random.default_rng(seed), lengths, query_lens, **shape, **options)


# --- arguments ---------------------------------------------------------------------------------------


class TestArguments:
    @pytest.fixture
    def batch(self, rng):
        store, caches, dense = paged(rng, [9, 6], 2, 8)
        return rows(rng, 2, 4, 8), store, caches, dense

    @pytest.mark.parametrize(("name", "value", "error"), [
        ("scale", np.nan, ValueError), ("scale", np.inf, ValueError), ("scale", 1e300, ValueError),
        ("scale", "1", TypeError), ("scale", True, TypeError), ("scale", 1j, TypeError), ("scale", 10**400, ValueError),
        ("window", 0, ValueError), ("window", -1, ValueError), ("window", 2.5, TypeError), ("window", True, TypeError),
        ("window", 2**63, ValueError), ("softcap", 0, ValueError), ("softcap", -1.0, ValueError),
        ("softcap", np.nan, ValueError), ("softcap", np.inf, ValueError), ("softcap", 1e-300, ValueError),
        ("softcap", "x", TypeError), ("softcap", False, TypeError),
        ("sinks", np.zeros(3, np.float32), ValueError), ("sinks", np.zeros(4), TypeError), ("sinks", 1.0, TypeError),
        ("sinks", np.zeros((4, 1), np.float32), ValueError),
        ("alibi_slopes", np.zeros(8, np.float32), ValueError), ("alibi_slopes", np.zeros(4, np.int32), TypeError),
        ("causal", None, TypeError), ("causal", 1, TypeError), ("causal", np.ones(2), TypeError),
        ("return_lse", None, TypeError), ("return_lse", "yes", TypeError),
        ("n_threads", 0, ValueError), ("n_threads", -1, ValueError), ("n_threads", 1.0, TypeError),
        ("n_threads", True, TypeError), ("n_threads", 10**6, ValueError),
        ("layer", 1, IndexError), ("layer", -1, IndexError), ("layer", None, TypeError), ("layer", True, TypeError),
        ("query_lens", [1], ValueError), ("query_lens", [1, 1, 1], ValueError), ("query_lens", [1, -1], ValueError),
        ("query_lens", [1, 7], ValueError), ("query_lens", [1, True], TypeError), ("query_lens", 2.0, TypeError),
        ("query_lens", "11", TypeError), ("query_lens", [1.0, 1.0], TypeError),
        ("query_lens", [2**62, 2**62], ValueError),
        ("out", np.zeros((2, 4, 8)), TypeError), ("out", np.zeros((2, 4, 7), np.float32), ValueError),
        ("out", np.zeros((2, 32), np.float32), ValueError), ("out", [[1.0]], TypeError), ("out", 3, TypeError),
        ("out", np.zeros((2, 4, 16), np.float32)[:, :, ::2], ValueError),
        ("out", np.zeros((2, 4, 8), np.float32)[::-1], ValueError),
        ("out", np.zeros((2, 4, 8), ">f4"), TypeError),
        ("out", np.zeros((8, 4, 2), np.float32).T, ValueError),
    ])
    def test_options(self, batch, name, value, error):
        q, store, caches, _ = batch
        with pytest.raises(error, match=f"^{name}"):
            pagedkv.paged_attention(q, store, caches, **{name: value})
        for cache in caches:  # and the guards are back
            cache.reserve(store, 1)

    @pytest.mark.parametrize(("q", "error"), [
        (None, TypeError), (1.0, TypeError), ("q", TypeError), (np.zeros((2, 4, 8)), TypeError),
        (np.zeros((2, 4, 8), ">f4"), TypeError), (np.zeros((2, 4, 7), np.float32), ValueError),
        (np.zeros((3, 4, 8), np.float32), ValueError), (np.zeros((2, 3, 8), np.float32), ValueError),
        (np.zeros((2, 0, 8), np.float32), ValueError), (np.zeros((2, 32), np.float32), ValueError),
        (np.zeros((1, 2, 4, 8), np.float32), ValueError), (np.zeros((2, 4, 8), bool), TypeError),
    ])
    def test_q(self, batch, q, error):
        _, store, caches, _ = batch
        with pytest.raises(error, match=r"^q: expected"):
            pagedkv.paged_attention(q, store, caches)

    def test_caches(self, batch):
        q, store, caches, _ = batch
        for bad in (None, [None, None], "ab", [caches[0], 1], {1: 2}):
            with pytest.raises(TypeError, match=r"^caches"):
                pagedkv.paged_attention(q, store, bad)
        with pytest.raises(TypeError):
            pagedkv.paged_attention(q, None, caches)
        other = pagedkv.PagedKvStore(4, 4, 2, 8)
        with pytest.raises(ValueError, match=r"^store"):
            pagedkv.paged_attention(q, other, caches)
        with pytest.raises(ValueError, match="query_lens"):
            pagedkv.paged_attention(q[:1], store, pagedkv.PagedKvCache())
        with pagedkv.Step(store, caches[:1]) as step:
            step.write(0, np.zeros((1, 16), np.float32), np.zeros((1, 16), np.float32))
            with pytest.raises(RuntimeError, match="in use"):
                pagedkv.paged_attention(q, store, caches)
        caches[1].reserve(store, 1)  # was never left locked

    def test_empty_batches(self, batch):
        _, store, caches, _ = batch
        q = np.empty((0, 4, 8), np.float32)
        for out, lse in (pagedkv.paged_attention(q, store, [], return_lse=True),
                         pagedkv.paged_attention(q, store, caches, query_lens=0, return_lse=True)):
            assert out.shape == (0, 4, 8)
            assert lse.shape == (0, 4)

    def test_the_same_cache_twice(self, batch):
        q, store, caches, dense = batch
        got = pagedkv.paged_attention(q, store, [caches[0]] * 2, return_lse=True)
        assert_close(got, expected(q, [dense[0]] * 2, [1, 1]))

    def test_strided_and_readonly_inputs_are_read_right(self, batch, rng):
        _, store, caches, dense = batch
        big = rows(rng, 4, 8, 16)
        for q in (big[::2, ::2, ::2], big[:2, :4, :8][::-1], np.asfortranarray(big[:2, :4, :8])):
            q.flags.writeable = False
            sinks = rows(rng, 8)[::2]
            got = pagedkv.paged_attention(q, store, caches, sinks=sinks, return_lse=True)
            assert_close(got, expected(q, dense, [1, 1], sinks=sinks))

    def test_out(self, batch):
        q, store, caches, _ = batch
        out = np.full((2, 4, 8), np.nan, np.float32)
        assert pagedkv.paged_attention(q, store, caches, out=out) is out
        np.testing.assert_array_equal(out, pagedkv.paged_attention(q, store, caches))
        readonly = out.copy()
        readonly.flags.writeable = False
        with pytest.raises(ValueError, match=r"^out"):
            pagedkv.paged_attention(q, store, caches, out=readonly)
        with pytest.raises(ValueError, match=r"^out: expected an array that does not overlap q"):
            pagedkv.paged_attention(q, store, caches, out=q)
        memory = np.zeros(2 * 4 * 8 + 8, np.float32)
        with pytest.raises(ValueError, match="overlap q"):
            pagedkv.paged_attention(memory[8:].reshape(2, 4, 8), store, caches, out=memory[:-8].reshape(2, 4, 8))
        with pytest.raises(ValueError, match="overlap sinks"):
            pagedkv.paged_attention(q, store, caches, out=memory[8:].reshape(2, 4, 8), sinks=memory[6:10])
        shifted = np.zeros(2 * 4 * 8 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(2, 4, 8)
        with pytest.raises(ValueError, match=r"^out"):
            pagedkv.paged_attention(q, store, caches, out=shifted)

    def test_dropped_positions(self, rng):
        store, caches, dense = paged(rng, [21, 6], 2, 8)
        q = rows(rng, 3, 4, 8)
        caches[0].drop_before(store, 14)  # gives back 0..11
        for window in (None, 9, 10, 1 << 60):
            with pytest.raises(ValueError, match=r"^window: sequence 0 .* dropped"):
                pagedkv.paged_attention(q, store, caches, query_lens=[2, 1], window=window)
        got = pagedkv.paged_attention(q, store, caches, query_lens=[2, 1], window=8, return_lse=True)
        assert_close(got, expected(q, dense, [2, 1], window=8))
        pagedkv.paged_attention(q[:1], store, caches, query_lens=[0, 1])

    def test_contiguous(self, rng):
        q, k, v = rows(rng, 3, 4, 8), rows(rng, 9, 2, 8), rows(rng, 9, 2, 5)
        want = dense_attention(q, k, v)
        assert_close(pagedkv.attention(q, k, v, return_lse=True), want)
        assert_close(pagedkv.attention(q, k.reshape(9, 16), v.reshape(9, 10), return_lse=True), want)
        assert_close(pagedkv.attention(q, np.asfortranarray(k), v[::-1][::-1], return_lse=True), want)
        none = np.empty((0, 16), np.float32)
        assert pagedkv.attention(q[:0], none, none).shape == (0, 4, 8)

    @pytest.mark.parametrize(("name", "value", "error"), [
        ("k", None, TypeError), ("k", np.zeros((9, 2, 8)), TypeError),
        ("k", np.zeros((9, 2, 7), np.float32), ValueError),
        ("k", np.zeros((9, 17), np.float32), ValueError), ("k", np.zeros((9, 4), np.float32), ValueError),
        ("k", np.zeros(9, np.float32), ValueError), ("v", np.zeros((8, 2, 8), np.float32), ValueError),
        ("v", np.zeros((9, 3, 8), np.float32), ValueError), ("v", np.zeros((9, 15), np.float32), ValueError),
        ("v", np.zeros((9, 0), np.float32), ValueError), ("v", 1, TypeError),
        ("q", np.zeros((10, 4, 8), np.float32), ValueError), ("q", np.zeros((3, 3, 8), np.float32), ValueError),
        ("q", np.zeros((3, 32), np.float32), ValueError), ("q", None, TypeError),
        ("q", np.zeros((3, 4, 0), np.float32), ValueError),
    ])
    def test_contiguous_arguments(self, name, value, error):
        arguments = {"q": np.zeros((3, 4, 8), np.float32), "k": np.zeros((9, 2, 8), np.float32),
                     "v": np.zeros((9, 2, 8), np.float32), name: value}
        wrong = "k" if name == "q" and value is not None and value.shape[-1] == 0 else name
        with pytest.raises(error, match=f"^{wrong}: expected"):
            pagedkv.attention(**arguments)

    def test_contiguous_out_overlaps(self, rng):
        k = rows(rng, 9, 2, 8)
        q = rows(rng, 3, 2, 8)
        for name in "kv":
            arrays = {"k": k, "v": k.copy()} if name == "k" else {"k": k.copy(), "v": k}
            with pytest.raises(ValueError, match=f"^out: .*overlap {name}"):
                pagedkv.attention(q, **arrays, out=k[:3])
