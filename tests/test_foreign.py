"""AttentionBatch: attention over blocks of somebody else, against the dense reference; writing."""

import numpy as np
import pytest
from dtype_reference import encode, round_trip
from foreign_support import APART, CLOSE, DTYPES, LAYOUTS, RAW, case, given, hnd, in_rows, nan, nhd, read, stacked
from hostile import Array
from hypothesis import given as drawn
from hypothesis import strategies as st

import pagedkv

every_layout = pytest.mark.parametrize("make", LAYOUTS, ids=lambda make: make.__name__)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def assert_close(got, want, dtype="float32", kv="float32"):
    """As close as the dtype of the result allows; what comes out of 16-bit K and V is exact in float32 terms."""
    np.testing.assert_allclose(got, want, rtol=CLOSE[dtype], atol=CLOSE[dtype])


# --- reading -----------------------------------------------------------------------------------------


@every_layout
@every_dtype
@pytest.mark.parametrize("q_dtype", DTYPES)
def test_every_layout_and_dtype(rng, make, dtype, q_dtype):
    """Decode, prefill and a sequence that asks nothing, in one batch."""
    c = case(rng, make, dtype, [9, 33, 6, 70, 0], [1, 20, 0, 3, 0])
    batch = c.batch(dtype=None if "bfloat16" not in (dtype, q_dtype) else dtype)
    q = given(q_dtype, c.q)
    if q_dtype == "bfloat16" and dtype != "bfloat16":
        with pytest.raises(TypeError, match="^q: expected .* got uint16 .*bfloat16 where dtype="):
            batch.attend(q, *c.blocks.arrays)
        q = OnlyDlpackBits(q)
    out, lse = batch.attend(q, *c.blocks.arrays, return_lse=True)
    want_out, want_lse = c.expected(round_trip(q_dtype, c.q))
    assert out.dtype == RAW[q_dtype]
    assert lse.dtype == np.float32
    assert_close(read(q_dtype, out), want_out, q_dtype)
    assert_close(lse, want_lse)


@every_dtype
def test_out_in_each_dtype(rng, dtype):
    c = case(rng, nhd, "bfloat16", [9, 33], [1, 5])
    room = np.zeros((6, 3, 4, 9), RAW[dtype])
    out = room[:, 1, :, :8]  # strided, with values between that stay
    got = c.batch().attend(c.q, *c.blocks.arrays, out=out)
    assert got is out
    assert_close(read(dtype, out), c.expected()[0], dtype)
    out[...] = 0
    assert not room.any()


@pytest.mark.parametrize("make", APART, ids=lambda make: make.__name__)
@every_dtype
def test_heads_of_v_have_a_width_of_their_own(rng, make, dtype):
    c = case(rng, make, dtype, [40, 9], [1, 9], dim=24, v_dim=5, heads=3, group=1)
    assert_close(c.batch().attend(c.q, *c.blocks.arrays), c.expected()[0])


OPTIONS = {
    "scale": {"scale": 0.7},
    "window": {"window": 7},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": np.linspace(-2, 2, 4, dtype=np.float32)},
    "alibi": {"alibi_slopes": np.linspace(0.1, 0.5, 4, dtype=np.float32)},
    "not causal": {"causal": False},
    "not causal, window": {"causal": False, "window": 5},
    "all": {
        "scale": 0.5,
        "window": 11,
        "softcap": 2.0,
        "sinks": np.ones(4, np.float32),
        "alibi_slopes": np.full(4, 0.25, np.float32),
    },
}


@every_layout
@every_dtype
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(rng, make, dtype, name):
    c = case(rng, make, dtype, [9, 50, 23], [1, 20, 2])
    got = c.batch().attend(c.q, *c.blocks.arrays, return_lse=True, **OPTIONS[name])
    for g, want in zip(got, c.expected(**OPTIONS[name]), strict=True):
        assert_close(g, want)


@pytest.mark.parametrize("make", [nhd, hnd, in_rows], ids=lambda make: make.__name__)
@pytest.mark.parametrize("size", [1, 16, 33])
def test_long_sequences_in_parts(rng, make, size):
    """Long enough for several tasks and for panels, with heads as wide as models have them."""
    c = case(rng, make, "float16", [3000, 1700, 400], [1, 2, 400], size=size, heads=2, group=4, dim=64)
    for n_threads in (1, 3):
        got = c.batch(n_threads=n_threads).attend(c.q, *c.blocks.arrays)
        assert_close(got, c.expected()[0], "float16")
        if n_threads == 1:
            alone = got
    assert got.tobytes() == alone.tobytes()


@every_layout
def test_tables_that_begin_alike_are_computed_once(rng, make):
    c = case(rng, make, "float32", [300, 310, 290, 305], [1, 1, 2, 1], dim=64, heads=4, common=64)
    batch = c.batch()
    got = batch.attend(c.q, *c.blocks.arrays)
    assert_close(got, c.expected()[0])
    # Alone, each gives what it gives in the batch but for rounding, and not to the bit: the tile was shared.
    row, differs = 0, False
    for i, n in enumerate(c.query_lens):
        one = pagedkv.AttentionBatch(c.tables[i : i + 1], [c.seq_lens[i]], [n], block_size=4, layout=c.blocks.layout)
        alone = one.attend(c.q[row : row + n], *c.blocks.arrays)
        assert_close(alone, got[row : row + n])
        differs = differs or alone.tobytes() != got[row : row + n].tobytes()
        row += n
    assert differs


@drawn(st.data())
def test_any_batch(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    size, n = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 5))
    seq_lens = [data.draw(st.integers(0, 80)) for _ in range(n)]
    query_lens = [data.draw(st.integers(0, min(seq_len, 12))) for seq_len in seq_lens]
    make = data.draw(st.sampled_from(LAYOUTS))
    dtype = data.draw(st.sampled_from(DTYPES))
    common = data.draw(st.integers(0, min([-(-length // size) for length in seq_lens], default=0)))
    heads, group, dim = (data.draw(st.integers(1, most)) for most in (4, 4, 20))
    c = case(rng, make, dtype, seq_lens, query_lens, size=size, heads=heads, group=group, dim=dim, common=common)
    window = data.draw(st.none() | st.integers(1, 90))
    if n:
        got = c.batch().attend(c.q, *c.blocks.arrays, window=window, causal=data.draw(st.booleans()) or True)
        assert_close(got, c.expected(window=window)[0], dtype)
    else:
        got = c.batch().attend(c.q, *c.blocks.arrays)
        assert got.shape == c.q.shape


def test_it_is_what_a_store_computes(rng):
    """The same kernels over the same bytes: the same bits as `paged_attention`."""
    store = pagedkv.PagedKvStore(16, 64, 2, 32, n_layers=2, debug=True)
    caches = [pagedkv.PagedKvCache() for _ in range(3)]
    for cache, n in zip(caches, (100, 7, 300), strict=True):
        k, v = rng.standard_normal((2, 2, n, 64), dtype=np.float32)
        cache.append_contiguous(store, k, v, n)
    q = rng.standard_normal((9, 8, 32), dtype=np.float32)
    tables = [cache.block_table.tolist() for cache in caches]
    batch = pagedkv.AttentionBatch(tables, [100, 7, 300], [1, 7, 1], block_size=16)
    for layer in range(2):
        k_blocks, v_blocks = nan("float32", 2, 64, 16, 2, 32)
        for block in {block for table in tables for block in table}:
            k_blocks[block] = store.k_block(block, layer).reshape(16, 2, 32)
            v_blocks[block] = store.v_block(block, layer).reshape(16, 2, 32)
        want = pagedkv.paged_attention(q, store, caches, layer=layer, query_lens=[1, 7, 1])
        assert batch.attend(q, k_blocks, v_blocks).tobytes() == want.tobytes()


# --- tables and lengths ------------------------------------------------------------------------------


def test_tables_in_every_spelling(rng):
    c = case(rng, nhd, "float32", [9, 33, 6], [1, 2, 3])
    want = c.batch().attend(c.q, *c.blocks.arrays)
    needs = [-(-n // 4) for n in c.seq_lens]
    lists = [c.tables[i, :need].tolist() for i, need in enumerate(needs)]
    flat, indptr = np.concatenate(lists).astype(np.int32), np.cumsum([0, *needs])
    wide = np.full((3, 40), -1, np.int64)
    wide[:, 5 : 5 + 2 * c.tables.shape[1] : 2] = c.tables
    for tables, ends in (
        (lists, None),
        (tuple(map(tuple, lists)), None),
        (c.tables.astype(np.int64), None),
        (c.tables.astype(">i4"), None),
        (wide[:, 5 : 5 + 2 * c.tables.shape[1] : 2], None),
        (np.asfortranarray(c.tables), None),
        (Array(c.tables), None),
        (memoryview(c.tables), None),
        (flat, indptr),
        (flat.tolist(), indptr.tolist()),
        (flat.astype(np.uint16), indptr),
        (np.repeat(flat, 2)[::2], Array(indptr)),
    ):
        for lens, queries in (
            (c.seq_lens, c.query_lens),
            (tuple(c.seq_lens), np.array(c.query_lens, np.int32)),
            (np.array(c.seq_lens, np.uint8), memoryview(np.array(c.query_lens))),
        ):
            batch = pagedkv.AttentionBatch(tables, lens, queries, block_size=4, indptr=ends)
            assert batch.attend(c.q, *c.blocks.arrays).tobytes() == want.tobytes()
            assert (batch.n_seqs, batch.n_rows, batch.block_size, batch.layout) == (3, 6, 4, "NHD")


def test_positions_and_slots():
    batch = pagedkv.AttentionBatch([[7, 2], [5]], [6, 3], [3, 1], block_size=4)
    assert batch.positions.tolist() == [3, 4, 5, 2]
    assert batch.slots.tolist() == [31, 8, 9, 22]
    assert batch.positions.dtype == batch.slots.dtype == np.int64
    assert "n_seqs=2" in repr(batch)
    assert pagedkv.AttentionBatch(np.zeros((2, 1), np.int32), [4, 4], block_size=4).n_rows == 2


def test_tables_may_change_once_the_batch_is_made(rng):
    c = case(rng, nhd, "float32", [9, 33], [1, 2])
    lens, queries = np.array(c.seq_lens), np.array(c.query_lens)
    batch = pagedkv.AttentionBatch(c.tables, lens, queries, block_size=4)
    want = c.expected()[0]
    c.tables[...], lens[...], queries[...] = -1, 10**9, -5
    assert_close(batch.attend(c.q, *c.blocks.arrays), want)


# --- writing -----------------------------------------------------------------------------------------


@every_layout
@every_dtype
@pytest.mark.parametrize("row_dtype", DTYPES)
def test_rows_are_written_where_their_slots_are(rng, make, dtype, row_dtype):
    blocks = make(dtype, 6, 4, 2, 8, 8)
    batch = pagedkv.AttentionBatch([], [], block_size=4, layout=blocks.layout, dtype=dtype)
    slots = rng.permutation(24)[:11]
    k, v = (rng.standard_normal((11, 2, 8), dtype=np.float32) for _ in range(2))
    rows = [given(row_dtype, x) for x in (k, v)]
    if row_dtype == "bfloat16" and dtype != "bfloat16":
        rows = [OnlyDlpackBits(x) for x in rows]
    before = blocks.k.copy(), blocks.v.copy()
    for owner in blocks.owners:
        owner[...] = given(dtype, np.full(owner.shape, 3.0))
        blocks.k[...], blocks.v[...] = before
    batch.write(*blocks.arrays, *rows, slots)
    for got, was, x in zip((blocks.k, blocks.v), before, (k, v), strict=True):
        was[slots // 4, slots % 4] = encode(dtype, round_trip(row_dtype, x)).values
        assert got.tobytes() == was.tobytes()
    for owner in blocks.owners:  # nothing between the heads was touched
        blocks.k[...], blocks.v[...] = (given(dtype, np.full(x.shape, 3.0)) for x in before)
        assert (owner == given(dtype, np.float32([3.0]))[0]).all()


@every_layout
def test_without_slots_rows_go_where_the_tables_say(rng, make):
    c = case(rng, make, "float32", [9, 33, 6], [1, 20, 0])
    old_k, old_v = c.blocks.k.copy(), c.blocks.v.copy()
    batch = c.batch()
    k, v = (rng.standard_normal((21, 2, 8), dtype=np.float32) for _ in range(2))
    for _ in range(2):  # of the next layer
        c.blocks.k[...], c.blocks.v[...] = old_k, old_v
        batch.write(*c.blocks.arrays, k, v)
        for got, was, x in ((c.blocks.k, old_k, k), (c.blocks.v, old_v, v)):
            want = was.copy()
            want[batch.slots // 4, batch.slots % 4] = x
            assert got.tobytes() == want.tobytes()


def test_many_rows_by_several_threads(rng):
    blocks = hnd("float16", 300, 16, 4, 64, 64)
    k, v = (rng.standard_normal((4800, 4, 64), dtype=np.float32) for _ in range(2))
    slots = rng.permutation(4800)
    pagedkv.AttentionBatch([], [], block_size=16, layout="HND", n_threads=4).write(*blocks.arrays, k, v, slots)
    assert (blocks.k[slots // 16, slots % 16] == k.astype(np.float16)).all()
    assert (blocks.v[slots // 16, slots % 16] == v.astype(np.float16)).all()


def test_strided_rows_of_one_projection(rng):
    """q, k and v as views of one array, as models make them."""
    qkv = rng.standard_normal((3, 8, 8), dtype=np.float32)
    q, k, v = qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]
    blocks = stacked("float32", 2, 4, 2, 8, 8)
    batch = pagedkv.AttentionBatch([[1]], [3], [3], block_size=4)
    batch.write(*blocks.arrays, k, v)
    got = batch.attend(q, *blocks.arrays)
    assert_close(got, pagedkv.attention(q.copy(), k.copy(), v.copy()))


# --- bfloat16, tensors ---------------------------------------------------------------------------------


class OnlyDlpackBits:
    """A tensor of bfloat16 in a library that NumPy knows nothing of: a DLPack capsule of code 4, made by hand."""

    def __init__(self, bits, code=4, device=1, lanes=1):
        import ctypes

        class Tensor(ctypes.Structure):
            _fields_ = [
                ("data", ctypes.c_void_p),
                ("device", ctypes.c_int32),
                ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8),
                ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16),
                ("shape", ctypes.c_void_p),
                ("strides", ctypes.c_void_p),
                ("offset", ctypes.c_uint64),
                ("context", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p),
            ]

        n = bits.ndim
        self.shape = (ctypes.c_int64 * n)(*bits.shape)
        self.strides = (ctypes.c_int64 * n)(*(s // bits.itemsize for s in bits.strides))
        self.bits = bits
        self.tensor = Tensor(
            bits.ctypes.data - 6,
            device,
            0,
            n,
            code,
            8 * bits.itemsize,
            lanes,
            ctypes.addressof(self.shape),
            ctypes.addressof(self.strides),
            6,
            None,
            None,
        )
        self.make = ctypes.pythonapi.PyCapsule_New
        self.make.restype, self.make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self.address = ctypes.addressof(self.tensor)

    def __dlpack__(self, **options):
        return self.make(self.address, b"dltensor", None)


def test_tensors_of_other_devices_and_types(rng):
    c = case(rng, nhd, "bfloat16", [9], [1])
    batch = c.batch()
    bits = given("bfloat16", c.q)
    want = batch.attend(bits, *c.blocks.arrays)
    assert batch.attend(OnlyDlpackBits(bits), *c.blocks.arrays).tobytes() == want.tobytes()
    for code, device, lanes, error in (
        (1, 1, 1, TypeError),
        (4, 2, 1, ValueError),
        (4, 1, 2, TypeError),
        (0, 1, 1, TypeError),
    ):
        with pytest.raises(error, match="^q: expected .* got OnlyDlpackBits"):
            batch.attend(OnlyDlpackBits(bits, code, device, lanes), *c.blocks.arrays)
    for capsule in (None, 3):
        liar = type("Liar", (), {"__dlpack__": lambda self, capsule=capsule: capsule})()
        with pytest.raises(TypeError, match="^q: expected .* gives no tensor"):
            batch.attend(liar, *c.blocks.arrays)


def test_arrays_of_ml_dtypes(rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    c = case(rng, hnd, "bfloat16", [9, 40], [1, 3])
    arrays = [array.view(ml_dtypes.bfloat16) for array in c.blocks.arrays]
    batch = c.batch(dtype=None)
    q = c.q.astype(ml_dtypes.bfloat16)
    got = batch.attend(q, *arrays)
    assert got.dtype == ml_dtypes.bfloat16
    assert_close(got.astype(np.float32), c.expected(q.astype(np.float32))[0], "bfloat16")
    out = np.empty_like(q)
    assert batch.attend(q, *arrays, out=out) is out
    assert out.tobytes() == got.tobytes()
    k = np.ones((4, 2, 8), ml_dtypes.bfloat16)
    batch.write(*arrays, k, k)
    assert (arrays[0].swapaxes(1, 2)[batch.slots // 4, batch.slots % 4] == 1).all()


@every_dtype
def test_tensors_of_torch(rng, dtype):
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    k_cache, v_cache = torch.zeros(2, 8, 4, 2, 8, dtype=kind)
    batch = pagedkv.AttentionBatch(
        torch.tensor([[3, 5, 0], [2, -1, -1]], dtype=torch.int32),
        torch.tensor([9, 3], dtype=torch.int32),
        torch.tensor([9, 1]),
        block_size=4,
    )
    qkv = torch.randn(10, 8, 8, dtype=kind)
    q, k, v = qkv.split([4, 2, 2], dim=1)
    batch.write(k_cache, v_cache, k, v, torch.from_numpy(batch.slots))
    assert torch.equal(k_cache.flatten(0, 1)[torch.from_numpy(batch.slots)], k)
    out = torch.empty(10, 4, 8, dtype=kind)
    assert batch.attend(q, k_cache, v_cache, out=out) is out
    k_rows, v_rows = (
        torch.stack([cache[3], cache[5], cache[0]]).flatten(0, 1)[:9].float() for cache in (k_cache, v_cache)
    )
    want = torch.nn.functional.scaled_dot_product_attention(
        q[:9].float().transpose(0, 1), k_rows.transpose(0, 1), v_rows.transpose(0, 1), is_causal=True, enable_gqa=True
    ).transpose(0, 1)
    assert_close(out[:9].float().numpy(), want.numpy(), dtype)
    with pytest.raises(TypeError, match="^q: expected .* got Tensor: .*grad"):
        batch.attend(torch.zeros(10, 4, 8, requires_grad=True), k_cache, v_cache)
    with pytest.raises(TypeError, match="^q: expected .* got Tensor of 3 axes"):
        batch.attend(q.double(), k_cache, v_cache)
