"""merge_attention_states: two parts of a context are as one, against dense attention in float64."""

import numpy as np
import pytest
from dense_reference import dense_attention

import pagedkv


def rows(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def states(seed=0, n=5, heads=4, dim=7):
    return rows(seed, n, heads, dim), rows(seed + 1, n, heads)


@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("cuts", [(5,), (1,), (19,), (3, 4, 11)])
@pytest.mark.parametrize("dim", [1, 7, 64])
@pytest.mark.parametrize("size", [0.1, 1, 20])
def test_parts_are_as_one(cuts, dim, size):
    q, k, v = rows(0, 3, 6, 16) * np.float32(size), rows(1, 20, 2, 16), rows(2, 20, 2, dim)
    parts = [
        pagedkv.attention(q, k[first:end], v[first:end], causal=False, return_lse=True)
        for first, end in zip((0, *cuts), (*cuts, 20), strict=True)
    ]
    out, lse = parts[0]
    for part in parts[1:]:
        before = [array.copy() for array in (out, lse, *part)]
        merged = pagedkv.merge_attention_states(out, lse, *part)
        for array, copy in zip((out, lse, *part), before, strict=True):
            np.testing.assert_array_equal(array, copy)
        out, lse = merged
    want, want_lse = dense_attention(q, k, v, causal=False)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("simd")
def test_sums_that_no_float_holds():
    out_a, out_b = rows(0, 4, 1, 9), rows(1, 4, 1, 9)
    lse_a, lse_b = np.float32([[1000], [-1000], [-3e38], [3e38]]), np.float32([[1001], [-1000], [3e38], [3e38]])
    out, lse = pagedkv.merge_attention_states(out_a, lse_a, out_b, lse_b)
    weight = np.array([1 / (1 + np.e), 0.5, 0, 0.5])[:, None, None]
    np.testing.assert_allclose(out, weight * out_a + (1 - weight) * out_b, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse[:2, 0], [1000 + np.log(1 + np.e), -1000 + np.log(2)], rtol=1e-6)


def test_what_saw_nothing_weighs_nothing():
    (a, lse_a), (b, lse_b) = states(0), states(2)
    lse_a[0], lse_b[1], lse_a[2], lse_b[2] = -np.inf, -np.inf, -np.inf, -np.inf
    a[0], b[1], a[2], b[2] = np.nan, np.inf, np.nan, np.nan
    out, lse = pagedkv.merge_attention_states(a, lse_a, b, lse_b)
    np.testing.assert_array_equal(out[0], b[0])
    np.testing.assert_array_equal(out[1], a[1])
    np.testing.assert_array_equal(lse[:2], [lse_b[0], lse_a[1]])
    assert not out[2].any()
    assert (lse[2] == -np.inf).all()
    assert np.isfinite(out).all()


@pytest.mark.parametrize("side", ["a", "b"])
def test_nan_comes_out_where_it_went_in(side):
    given = {"a": states(0), "b": states(2)}
    given[side][1][1, 2] = np.nan
    given[side][0][3, 1, 4] = np.nan
    out, lse = pagedkv.merge_attention_states(*given["a"], *given["b"])
    assert np.isnan(out[1, 2]).all()
    assert np.isnan(lse[1, 2])
    assert np.isnan(out[3, 1, 4])
    assert np.isnan(out).sum() == 7 + 1
    assert np.isnan(lse).sum() == 1


@pytest.mark.parametrize("shape", [(0, 4, 7), (5, 0, 7), (5, 4, 0)])
def test_nothing_at_all(shape):
    out, lse = pagedkv.merge_attention_states(*(np.zeros(s, np.float32) for s in (shape, shape[:2], shape, shape[:2])))
    assert out.shape == shape
    assert lse.shape == shape[:2]


@pytest.mark.parametrize("name", ["out_a", "lse_a", "out_b", "lse_b"])
@pytest.mark.parametrize(("wrong", "error"), [
    (None, TypeError), ([1.0], TypeError), ("x", TypeError), (1.0, TypeError),
    (lambda x: x.astype(np.float64), TypeError), (lambda x: x.astype(np.float16), TypeError),
    (lambda x: x.astype(">f4"), TypeError), (lambda x: x[..., None], ValueError), (lambda x: x[0], ValueError),
    (lambda x: x[:-1], ValueError), (lambda x: x[:, :-1], ValueError),
    (lambda x: np.ma.array(x, mask=True), ValueError),
])
def test_what_is_no_state(name, wrong, error):
    given = dict(zip(("out_a", "lse_a", "out_b", "lse_b"), (*states(0), *states(2)), strict=True))
    given[name] = wrong(given[name]) if callable(wrong) else wrong
    with pytest.raises(error, match=r"^(out|lse)_[ab]: expected") as caught:
        pagedkv.merge_attention_states(**given)
    # Shapes are those of the first argument: where that one is wrong, the next does not go with it.
    assert str(caught.value).startswith(name) or (name == "out_a" and error is ValueError)


def test_strided_states():
    (a, lse_a), (b, lse_b) = states(0), states(2)
    want = pagedkv.merge_attention_states(a, lse_a, b, lse_b)
    others = np.asfortranarray(a), lse_a[::-1].copy()[::-1], b[:, ::-1].copy()[:, ::-1], lse_b
    got = pagedkv.merge_attention_states(*others)
    for array, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(array, expected)
