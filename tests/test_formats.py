"""One description of a row's format: what it says of bytes, and that stores, kernels and tests have the same dtypes."""

import dtype_reference
import numpy as np
import pytest
from dtype_reference import DTYPES, SCALED, STORED, assert_same_rows, encode
from dtype_support import make, normal
from helpers import WAYS, refused, stored

import pagedkv
from pagedkv.formats import FORMATS, Format

LAYERS, HEADS, K_DIM, V_DIM = 2, 3, 5, 2  # an int8 row has a byte between values and scales


def test_the_same_dtypes_everywhere():
    assert pagedkv.formats.DTYPES == tuple(FORMATS) == DTYPES == tuple(dtype_reference.KINDS)
    for name, format in FORMATS.items():
        assert format.name == name
        assert format.stored == STORED[name]
        assert (format.scale is not None) == (name in SCALED)
        assert pagedkv.PagedKvStore(1, 1, 1, 1, dtype=name).dtype == name  # it has kernels


@pytest.mark.parametrize(
    ("format", "n_heads", "head_dim", "layout"),
    [
        # row_bytes, of a head's values, where its scales begin, of a head's scales
        (FORMATS["float32"], 3, 5, (60, 20, 0, 0)),
        (FORMATS["bfloat16"], 3, 5, (30, 10, 0, 0)),
        (FORMATS["int8"], 3, 5, (16 + 6, 5, 16, 2)),
        (FORMATS["int8"], 8, 128, (1024 + 64, 128, 1024, 8)),
        (FORMATS["int8"], 1, 80, (80 + 6, 80, 80, 6)),
        (FORMATS["int8"], 1, 33, (34 + 4, 33, 34, 4)),
        (Format("int8", np.dtype("i1"), np.dtype("f4"), group=16), 3, 17, (52 + 3 * 8, 17, 52, 8)),
        (FORMATS["float32"], 2**62, 2**62, (2**126, 2**64, 0, 0)),
    ],
)
def test_layouts(format, n_heads, head_dim, layout):
    assert format.layout(n_heads, head_dim) == layout


@pytest.mark.parametrize(
    ("head_dim", "width"),
    [(1, 0), (8, 0), (15, 0), (24, 0), (33, 0), (16, 16), (48, 16), (80, 16), (96, 32), (64, 64), (128, 128), (192, 64),
     (256, 256), (512, 512), (576, 64), (1024, 1024), (2048, 1024), (3 * 4096, 1024), (2**62, 1024)],
)
def test_how_many_neighbours_are_turned_together(head_dim, width):
    assert FORMATS["int8"].turn_width(head_dim) == width
    assert dtype_reference.turn_width(head_dim) == max(width, 1)
    assert FORMATS["float16"].turn_width(head_dim) == 0


def test_a_description_says_all_that_decides_what_bytes_mean():
    found = [format.description for format in FORMATS.values()]
    assert found == ["float32", "float16", "bfloat16", "int8/32*float16/turned"]
    assert Format("int8", np.dtype("i1"), np.dtype("f4"), group=16).description == "int8/16*float32"


# --- rows as they are stored -----------------------------------------------------------------------------


def given(dtype, rows):
    """Rows ``[..., heads, dim]`` as a caller has them who has read them from a store: values, or values and scales."""
    kept = encode(dtype, rows)
    values = kept.values.reshape(*rows.shape[:-2], -1)
    return (values, kept.scales) if dtype in SCALED else values


def taken(dtype, way, n=6):
    """A store that was given rows as they are stored, and those rows."""
    store = make(dtype, n_kv_heads=HEADS, head_dim=K_DIM, v_head_dim=V_DIM)
    cache = pagedkv.PagedKvCache()
    k, v = normal(0, n, HEADS, K_DIM), normal(1, n, HEADS, V_DIM)
    if way.__name__ == "by_push" and dtype in SCALED:
        for i in range(n):
            cache.push(store, given(dtype, k[i]), given(dtype, v[i]))
    elif dtype in SCALED:
        way_of_pairs(way)(store, cache, given(dtype, k), given(dtype, v), n)
    else:
        way(store, cache, given(dtype, k), given(dtype, v))
    return store, cache, k, v


def way_of_pairs(way):
    def by_append(store, cache, k, v, n):
        cache.append_contiguous(store, k, v, n)

    def by_step(store, cache, k, v, n):
        with pagedkv.Step(store, cache, n) as step:
            step.write(0, k, v)

    return {"by_append": by_append, "by_step": by_step}[way.__name__]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_stored_rows_are_taken_as_they_are(dtype, way):
    store, cache, k, v = taken(dtype, way)
    for side, rows in (("k", k), ("v", v)):
        values, scales = stored(store, cache, side)
        assert_same_rows(values, scales, encode(dtype, rows))
        assert values.tobytes() == encode(dtype, rows).values.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_block_shows_goes_into_another_store_bit_for_bit(dtype):
    """Several layers, by the views of the block, by the bytes of its pieces."""
    shape = {"n_kv_heads": HEADS, "head_dim": K_DIM, "v_head_dim": V_DIM, "n_layers": LAYERS}
    store, other = make(dtype, **shape), make(dtype, **shape)
    cache, by_views, by_bytes = (pagedkv.PagedKvCache() for _ in range(3))
    cache.append_contiguous(store, normal(0, LAYERS, 4, HEADS, K_DIM), normal(1, LAYERS, 4, HEADS, V_DIM), 4)
    [block] = cache.block_table.tolist()

    def shown(side):
        values = np.stack([getattr(store, f"{side}_block")(block, layer) for layer in range(LAYERS)])
        if dtype not in SCALED:
            return values
        return values, np.stack([getattr(store, f"{side}_scales")(block, layer) for layer in range(LAYERS)])

    by_views.append_contiguous(other, shown("k"), shown("v"), 4)
    with store.pieces([block]) as pieces:
        raw = [np.stack([np.frombuffer(view, np.uint8).reshape(4, -1) for view in pieces.views[i::2]]) for i in (0, 1)]
    by_bytes.append_contiguous(other, raw[0][:, :3], raw[1][:, :3], 3)  # a block that was part-full
    by_bytes.push(other, raw[0][:, 3], raw[1][:, 3])
    with store.pieces([block]) as want:
        for got in (by_views, by_bytes):
            with other.pieces(got.block_table) as pieces:
                assert b"".join(pieces.views) == b"".join(want.views)


def test_stored_rows_of_a_store_itself():
    """Views of its own memory, which the write may overlap."""
    store, cache, k, v = taken("int8", WAYS[0], n=4)
    [block] = cache.block_table.tolist()
    pair = [(getattr(store, f"{side}_block")(block), getattr(store, f"{side}_scales")(block)) for side in "kv"]
    cache.append_contiguous(store, *pair, 4)
    for side, rows in (("k", k), ("v", v)):
        values, scales = stored(store, cache, side)
        assert_same_rows(values, scales, encode("int8", np.concatenate([rows, rows])))


values, scales = np.ones((6, 15), np.int8), np.ones((6, 3, 1), np.float16)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (values, TypeError),
        ((values,), TypeError),
        ((values, scales, scales), TypeError),
        ([values, scales], TypeError),
        ((values, None), TypeError),
        ((None, scales), TypeError),
        ((values.astype(np.uint8), scales), TypeError),
        ((values.astype(np.float32), scales), TypeError),
        ((values, scales.astype(np.float64)), TypeError),
        ((values, scales.astype(np.float32)), TypeError),
        ((values, scales.astype(">f2")), TypeError),
        ((scales, values), TypeError),
        ((values[:5], scales), ValueError),
        ((values, scales[:5]), ValueError),
        ((values[:, :14], scales), ValueError),
        ((values, scales[:, :2]), ValueError),
        ((values, scales[:, 0]), ValueError),
        ((values.T, scales.T), ValueError),
        (np.zeros((6, 21), np.uint8), TypeError),
        (np.zeros((6, 15), np.uint8), TypeError),
        (np.zeros((6, 22), np.int8), TypeError),
    ],
)
def test_what_is_no_stored_int8_row(wrong, error):
    store, cache, _, v = taken("int8", WAYS[0])
    good = given("int8", v)
    with refused(error, "k: expected float32 [6, 15], or int8 [6, 15] and float16 [6, 3, 1], got", store, cache):
        cache.append_contiguous(store, wrong, good, 6)


def test_masked_scales():
    store, cache, _, v = taken("int8", WAYS[0])
    with refused(ValueError, "k: expected an array without masked values", store, cache):
        cache.append_contiguous(store, (values, np.ma.array(scales, mask=True)), given("int8", v), 6)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype not in SCALED])
def test_a_pair_for_a_store_without_scales(dtype):
    store, cache, k, v = taken(dtype, WAYS[0])
    with refused(TypeError, "v: expected float32", store, cache):
        cache.append_contiguous(store, k, (v, v), 6)


def test_scales_whose_reading_changes_the_values():
    """They are looked at when nobody's code runs any more."""
    store, cache, _, v = taken("int8", WAYS[0])
    changing = np.ones((6, 15), np.int8)

    class Scales:
        def __array__(self):
            changing.resize((1, 15), refcheck=False)
            return scales

    with refused(ValueError, "k: expected float32 [6, 15]", store, cache):
        cache.append_contiguous(store, (changing, Scales()), given("int8", v), 6)

    whole = np.ones((12, 15), np.int8)
    part = whole[6:]

    class Gone:
        def __array__(self):
            whole.resize((1, 15), refcheck=False)
            return scales

    with refused(ValueError, "k: expected float32 [6, 15]", store, cache):
        cache.append_contiguous(store, (part, Gone()), given("int8", v), 6)
