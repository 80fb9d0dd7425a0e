"""Stores of fewer bytes: what they are, what they take and refuse, and that every method works on them."""

import numpy as np
import pytest
from dtype_reference import DTYPES, RAW, SCALED, STORED, assert_same, encode
from dtype_support import assert_reads, filled, make, normal
from helpers import WAYS, refused, stored, undone

import pagedkv

NARROW = [dtype for dtype in DTYPES if dtype != "float32"]
ODD_SHAPES = [(1, 1), (2, 3), (3, 5), (1, 64), (2, 80), (1, 96), (3, 112), (8, 128), (1, 192), (1, 256), (5, 7)]


# --- which, and how large ----------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "name"), [
    *((dtype, dtype) for dtype in DTYPES), ("f4", "float32"),
    (np.float32, "float32"), (np.float16, "float16"), (np.int8, "int8"),
    (np.dtype("float32"), "float32"), (np.dtype("float16"), "float16"), (np.dtype("int8"), "int8"),
])
def test_spellings(given, name):
    store = make(given)
    assert store.dtype == name
    assert type(store.dtype) is str


def test_the_bfloat16_of_ml_dtypes():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    assert make(bfloat16).dtype == "bfloat16"
    assert make(np.dtype(bfloat16)).dtype == "bfloat16"


@pytest.mark.parametrize("given", [
    "float64", "float", "double", "float8", "nonsense", "int16", "uint8", "uint16", ">f2", ">f4", "bf16 ", "", "INT8",
    np.int32, np.float64, np.uint16, np.bool_, np.complex64, None, 16, object(), [], [("a", "f4")], ["float16"],
    ("f2", (2,)), "f2,f2", "\0",
])
def test_everything_else_is_refused(given):
    with pytest.raises(ValueError, match="^dtype: expected"):
        make(given)
    with pytest.raises(ValueError, match="^dtype: expected"):
        pagedkv.PagedKvStore.from_bytes(1 << 20, 4, 2, 3, dtype=given)


def row_bytes(dtype, n_heads, head_dim):
    n_bytes = n_heads * head_dim * np.dtype(STORED[dtype]).itemsize
    return -(-n_bytes // 2) * 2 + 2 * n_heads * -(-head_dim // 32) if dtype in SCALED else n_bytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_heads", "head_dim", "v_head_dim"), [(2, 3, 5), (1, 1, 1), (8, 128, 128), (1, 576, 512)])
def test_bytes(dtype, n_heads, head_dim, v_head_dim):
    options = {"n_kv_heads": n_heads, "head_dim": head_dim, "v_head_dim": v_head_dim, "n_layers": 3}
    store = make(dtype, **options)
    block = 3 * 4 * (row_bytes(dtype, n_heads, head_dim) + row_bytes(dtype, n_heads, v_head_dim))
    assert store.nbytes == store.stats().nbytes == 16 * block
    assert (store.k_width, store.v_width) == (n_heads * head_dim, n_heads * v_head_dim)
    for budget, n_blocks in ((block, 1), (7 * block - 1, 6), (7 * block, 7)):
        sized = pagedkv.PagedKvStore.from_bytes(budget, 4, dtype=dtype, **options)
        assert (sized.total_blocks, sized.nbytes, sized.dtype) == (n_blocks, n_blocks * block, dtype)
    with pytest.raises(ValueError, match=f"budget_bytes: expected at least {block}"):
        pagedkv.PagedKvStore.from_bytes(block - 1, 4, dtype=dtype, **options)


# --- views -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_heads", "head_dim"), ODD_SHAPES)
def test_views_are_what_is_stored(dtype, n_heads, head_dim):
    options = {"n_kv_heads": n_heads, "head_dim": head_dim, "v_head_dim": head_dim + 1, "n_layers": 2}
    store, cache, k, v = filled(dtype, 11, **options)
    assert_reads(store, cache, k, v)
    block = int(cache.block_table[1])
    for side, width in (("k", store.k_width), ("v", store.v_width)):
        views = [getattr(store, f"{side}_row")(block, 1, 1), getattr(store, f"{side}_block")(block, 1)]
        assert [view.shape for view in views] == [(width,), (4, width)]
        for view in views:
            assert view.dtype == STORED[dtype]
            assert not view.flags.writeable
            assert not view.flags.owndata
            with pytest.raises(ValueError, match="read-only"):
                view[0] = 0
            with pytest.raises(ValueError, match="WRITEABLE"):
                view.flags.writeable = True
        np.testing.assert_array_equal(views[0], views[1][1])
        assert np.shares_memory(*views)


def test_scales():
    store, cache, k, v = filled("int8", 7, n_layers=2, v_head_dim=67)
    block = int(cache.block_table[0])
    for view, rows in ((store.k_scales, k), (store.v_scales, v)):
        for layer in (0, 1):
            scales = view(block, layer)
            groups = [rows[layer, :4, :, first : first + 32] for first in range(0, rows.shape[-1], 32)]
            most = np.stack([np.abs(group).max(axis=-1) for group in groups], axis=-1)
            assert scales.shape == most.shape == (4, 2, len(groups))
            assert_same(scales, (most / np.float32(127)).astype(np.float16))  # heads of odd width are not turned
            with pytest.raises(ValueError, match="read-only"):
                scales[0, 0, 0] = 1
            with pytest.raises(ValueError, match="WRITEABLE"):
                scales.flags.writeable = True
        assert_same(view(block), view(block, 0))
        assert_same(view(block, layer=1), view(block, 1))


@pytest.mark.parametrize(("head_dim", "v_head_dim", "turned"), [
    (128, 128, (128, 128)), (192, 80, (64, 16)), (12, 100, (0, 0)), (4096, 24, (1024, 0)),
])
def test_repr_says_what_is_turned_together(head_dim, v_head_dim, turned):
    shape = {"head_dim": head_dim, "v_head_dim": v_head_dim}
    assert f"dtype='int8', turned={turned}, free" in repr(make("int8", **shape))
    assert "turned" not in repr(make("float16", **shape))


def test_scales_are_views_that_follow_their_block():
    store, cache, _, _ = filled("int8", 4)
    block = int(cache.block_table[0])
    scales = store.k_scales(block)
    before = scales.copy()
    cache.truncate(store, 3)
    cache.push(store, np.full(6, 254, np.float32), np.zeros(6, np.float32))
    np.testing.assert_array_equal(scales[3], [[2], [2]])
    np.testing.assert_array_equal(scales[:3], before[:3])


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype not in SCALED])
def test_only_some_have_scales(dtype):
    store, cache, _, _ = filled(dtype, 4)
    for view in (store.k_scales, store.v_scales):
        with pytest.raises(ValueError, match="^dtype: expected one that has scales"):
            view(int(cache.block_table[0]))


@pytest.mark.parametrize(("arguments", "error", "named"), [
    ((16,), IndexError, "id"), ((-1,), IndexError, "id"), ((2**70,), IndexError, "id"), ((None,), TypeError, "id"),
    ((1.0,), TypeError, "id"), ((True,), TypeError, "id"), (("0",), TypeError, "id"),
    ((0, 2), IndexError, "layer"), ((0, -1), IndexError, "layer"), ((0, None), TypeError, "layer"),
    ((0, True), TypeError, "layer"), ((9,), ValueError, "id"),
])
def test_scales_of_what_is_not_there(arguments, error, named):
    store, cache, _, _ = filled("int8", 4, n_layers=2)
    for view in (store.k_scales, store.v_scales):
        with refused(error, named, store, cache):
            view(*arguments)


# --- rows that are taken, and rows that are not ------------------------------------------------------


@pytest.mark.parametrize("write", WAYS)
def test_rows_of_ml_dtypes_bfloat16(write):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    store = make("bfloat16")
    k, v = normal(0, 5, 6).astype(bfloat16), normal(1, 5, 6).astype(bfloat16)
    cache = pagedkv.PagedKvCache()
    write(store, cache, k, v)
    assert stored(store, cache, "k")[0].tobytes() == k.tobytes()
    assert stored(store, cache, "v")[0].tobytes() == v.tobytes()
    for dtype in ("float32", "float16", "int8"):
        other, empty = make(dtype), pagedkv.PagedKvCache()
        with undone(other, empty), pytest.raises(TypeError, match="expected float32"):
            write(other, empty, k, v)


FOREIGN = ["f8", ">f4", ">f2", ">u2", "f2", "u2", "i2", "i1", "u1", "i4", "u4", "?", "c8", "O", "S2", "V2", "M8[s]"]


@pytest.mark.parametrize(("dtype", "given"), [
    (dtype, given) for dtype in DTYPES for given in FOREIGN if np.dtype(given) != RAW.get(dtype)
])
@pytest.mark.parametrize("write", WAYS)
def test_rows_of_any_other_kind_are_refused(dtype, given, write):
    kind = np.dtype(given)
    store, cache, _, _ = filled(dtype, 5)
    good, bad = np.ones((2, 6), np.float32), np.zeros((2, 6), kind)
    name = "_step" if write.__name__ == "by_push" else ""
    for k, v, named in ((bad, good, f"k{name}"), (good, bad, f"v{name}")):
        with undone(store, cache), pytest.raises(TypeError, match=f"^{named}: expected"):
            write(store, cache, k, v)


@pytest.mark.parametrize("dtype", RAW)
@pytest.mark.parametrize("write", WAYS)
@pytest.mark.parametrize("spelling", ["fortran", "reversed", "gaps", "read-only", "misaligned"])
def test_raw_rows_in_any_memory_order(dtype, write, spelling):
    k, v = (encode(dtype, normal(seed, 9, 6)).values for seed in (0, 1))
    store, cache = make(dtype), pagedkv.PagedKvCache()
    write(store, cache, respelled(k, spelling), respelled(v, spelling))
    assert stored(store, cache, "k")[0].tobytes() == k.tobytes()
    assert stored(store, cache, "v")[0].tobytes() == v.tobytes()


def respelled(array, spelling):
    if spelling == "fortran":
        return np.asfortranarray(array)
    if spelling == "reversed":
        return array[::-1, ::-1].copy()[::-1, ::-1]
    if spelling == "gaps":
        wide = np.zeros((len(array), 3 * array.shape[1]), array.dtype)
        wide[:, ::3] = array
        return wide[:, ::3]
    if spelling == "misaligned":
        memory = np.zeros(array.nbytes + 1, np.uint8)[1:]
        moved = memory.view(array.dtype).reshape(array.shape)
        moved[...] = array
        return moved
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_float32_rows_at_any_address(dtype, offset):
    rows = normal(0, 7, 2, 3)
    memory = np.zeros(rows.nbytes + offset, np.uint8)[offset:]
    moved = memory.view(np.float32).reshape(rows.shape)
    moved[...] = rows
    store, cache = make(dtype), pagedkv.PagedKvCache()
    cache.append_contiguous(store, moved, moved, 7)
    assert_reads(store, cache, rows[None], rows[None])


@pytest.mark.parametrize("dtype", RAW)
@pytest.mark.parametrize("shape", [(5,), (7,), (2, 4), (3, 2), (2, 3, 1), ()])
def test_raw_rows_of_a_wrong_shape(dtype, shape):
    store, cache, _, _ = filled(dtype, 5)
    with refused(ValueError, "k_step", store, cache):
        cache.push(store, np.zeros(shape, RAW[dtype]), np.zeros(6, RAW[dtype]))


def test_float16_rows_beside_float32_rows():
    """K and V are looked at one by one: each may be either."""
    store, cache = make("float16"), pagedkv.PagedKvCache()
    k, v = normal(0, 5, 2, 3), normal(1, 5, 2, 3)
    cache.append_contiguous(store, k.astype(np.float16), v, 5)
    cache.append_contiguous(store, k, v.astype(np.float16), 5)
    assert_reads(store, cache, np.tile(k, (2, 1, 1))[None], np.tile(v, (2, 1, 1))[None])


def test_contiguous_caches_stay_float32():
    cache = pagedkv.KvCache(2, 3)
    for bad in (np.zeros(6, np.float16), np.zeros(6, np.uint16), np.zeros(6, np.int8)):
        with pytest.raises(TypeError, match="k_step: expected float32"):
            cache.push(bad, np.zeros(6, np.float32))
    for dtype in DTYPES:
        store, paged, _, _ = filled(dtype, 5)
        assert paged.to_contiguous(store, out=cache) is cache
        assert cache.k.dtype == cache.v.dtype == np.float32
    with pytest.raises(TypeError, match="dtype"):
        pagedkv.KvCache(2, 3, dtype="float16")



@pytest.mark.parametrize("n", [3, 60_000], ids=["few", "streamed"])
def test_equal_int8_rows_are_equal_bytes(n):
    """Between the values and the scales of a row lies nothing by chance: blocks may be compared and summed up."""
    k = np.random.default_rng(0).standard_normal((n, 33), dtype=np.float32)
    seen = []
    for before in 1.0, 7.0:
        store = pagedkv.PagedKvStore(16, -(-n // 16), 1, 33, dtype="int8", debug=before == 7.0)
        cache = pagedkv.PagedKvCache()
        cache.append_contiguous(store, k * np.float32(before), k, n)
        cache.truncate(store, 0)
        cache.append_contiguous(store, k, k, n)
        rows = store.k_block(int(cache.block_table[0]))
        whole = np.lib.stride_tricks.as_strided(rows.view(np.uint8), (min(n, 16), rows.strides[0]))
        assert rows.strides[0] == 34 + 4
        seen.append(whole.tobytes())
    assert seen[0] == seen[1]
