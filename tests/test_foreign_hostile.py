"""AttentionBatch: what it refuses, and arrays that change while it looks. Nothing is written before an error."""

import contextlib
import sys
import threading

import numpy as np
import pytest
from foreign_support import nhd
from hostile import Array
from test_changing_arguments import CHANGES

import pagedkv

# --- what is refused ---------------------------------------------------------------------------------

INT = np.int32


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (IndexError, r"block_tables: expected ids from 0 to 2147483647, got -1$", ([[0, -1]], [5])),
        (IndexError, r"block_tables: .* got 2147483648 for", (np.array([[2**31]]), [4])),
        (IndexError, r"block_tables: .* got -9223372036854775808 for", (np.array([[-(2**63)]]), [4])),
        (IndexError, r"block_tables: .* got -1 for block 1 of sequence 1", (np.array([[0, 1], [2, -1]], INT), [8, 5])),
        (
            ValueError,
            r"seq_lens\[0\]: expected at most the 4 positions of the 1 blocks in its table, got 5",
            ([[0]], [5]),
        ),
        (ValueError, r"seq_lens\[1\]: expected at most the 8 ", (np.zeros((2, 2), INT), [8, 9])),
        (ValueError, r"seq_lens\[1\]: expected an integer from 0 to", ([[0], [0]], [1, -1])),
        (ValueError, r"seq_lens\[1\]: expected an integer from 0 to", ([[0], [0]], np.array([1, -1]))),
        (ValueError, r"seq_lens\[0\]: expected an integer from 0 to", ([[0]], np.array([2**64 - 1], np.uint64))),
        (ValueError, r"query_lens\[0\]: expected at most the sequence's 3 positions, got 4", ([[0]], [3], [4])),
        (ValueError, r"query_lens\[1\]: expected at most", ([[0], [0]], [3, 0], 1)),
        (ValueError, r"query_lens: expected 1 integers, got 2", ([[0]], [3], [1, 1])),
        (ValueError, r"query_lens: expected an integer from 0", ([[0]], [3], -1)),
        (ValueError, r"block_tables: expected 1 tables, one for each of seq_lens, got 2", ([[0], [1]], [3])),
        (ValueError, r"block_tables: expected 1 tables, .* got int32 \[2, 1\]", (np.zeros((2, 1), INT), [3])),
        (
            ValueError,
            r"block_tables: expected integers \[n_seqs, max_blocks\], got int32 \[2\]",
            (np.zeros(2, INT), [3]),
        ),
        (TypeError, r"block_tables: expected integers .*, got float64", (np.zeros((1, 1)), [3])),
        (TypeError, r"block_tables: expected integers .*, got bool", (np.zeros((1, 1), bool), [3])),
        (TypeError, r"block_tables: expected integers .*, got None", (None, [3])),
        (TypeError, r"seq_lens: expected", ([[0]], 3)),
        (TypeError, r"seq_lens: expected", ([[0]], np.array([3.0]))),
        (TypeError, r"seq_lens: expected", ([[0]], "3")),
        (TypeError, r"seq_lens\[0\]: expected", ([[0]], [True])),
        (TypeError, r"seq_lens: expected", ([[0]], None)),
    ],
)
def test_a_batch_that_is_none(error, match, arguments):
    with pytest.raises(error, match=f"^{match}"):
        pagedkv.AttentionBatch(*arguments, block_size=4)


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (ValueError, "block_size: expected an integer from 1", {"block_size": 0}),
        (TypeError, "block_size: expected", {"block_size": 4.0}),
        (ValueError, "layout: expected 'NHD' or 'HND', got 'NDH'", {"layout": "NDH"}),
        (ValueError, "layout: expected", {"layout": None}),
        (ValueError, "dtype: expected", {"dtype": "int8"}),
        (ValueError, "dtype: expected", {"dtype": "float64"}),
        (ValueError, "n_threads: expected", {"n_threads": 0}),
        (ValueError, "block_tables: expected 1 tables, one for each of seq_lens, got 2", {"indptr": [0, 1, 1]}),
        (ValueError, r"indptr: expected at most the 1 ids", {"indptr": [0, 2]}),
        (ValueError, r"indptr: expected numbers that do not fall", {"indptr": [1, 0]}),
        (ValueError, r"indptr\[0\]: expected", {"indptr": [-1, 1]}),
        (ValueError, r"seq_lens\[0\]: expected at most the 0 positions", {"indptr": [1, 1]}),
        (TypeError, r"indptr: expected", {"indptr": np.array([0.0, 1.0])}),
    ],
)
def test_options_that_are_none(error, match, options):
    tables = [0] if "indptr" in options else [[0]]
    with pytest.raises(error, match=f"^{match}"):
        pagedkv.AttentionBatch(tables, [1], **{"block_size": 4, **options})


def good(**changes):
    blocks = nhd("float32", 4, 4, 2, 8, 8)
    blocks.k[...] = blocks.v[...] = 1
    arguments = {
        "q": np.ones((2, 4, 8), np.float32),
        "k_cache": blocks.k,
        "v_cache": blocks.v,
        "k": np.zeros((2, 2, 8), np.float32),
        "v": np.zeros((2, 2, 8), np.float32),
        "slots": None,
        "out": np.zeros((2, 4, 8), np.float32),
        **changes,
    }
    return arguments, pagedkv.AttentionBatch([[1, 3]], [6], [2], block_size=4)


def attend(batch, a, **options):
    return batch.attend(a["q"], a["k_cache"], a["v_cache"], out=a["out"], **options)


def write(batch, a):
    batch.write(a["k_cache"], a["v_cache"], a["k"], a["v"], a["slots"])


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def frozen(*shape):
    array = zeros(*shape)
    array.flags.writeable = False
    return array


def overlapping(*shape):
    return np.lib.stride_tricks.as_strided(zeros(1000), shape, (64, 32, 16, 4)[-len(shape) :])


ATTEND = [
    ("q", TypeError, zeros(2, 4, 8, dtype=float)), ("q", TypeError, zeros(2, 4, 8, dtype=np.uint16)),
    ("q", ValueError, zeros(3, 4, 8)), ("q", ValueError, zeros(2, 3, 8)), ("q", ValueError, zeros(2, 4, 7)),
    ("q", ValueError, zeros(2, 32)), ("q", ValueError, zeros(2, 4, 16)[:, :, ::2]), ("q", ValueError, zeros(2, 0, 8)),
    ("q", TypeError, None), ("q", TypeError, [[[0.0]]]),
    ("q", TypeError, zeros(2, 4, 8).astype(">f4")), ("q", ValueError, np.ma.masked_equal(zeros(2, 4, 8), 0)),
    ("k_cache", ValueError, zeros(4, 5, 2, 8)), ("k_cache", ValueError, zeros(4, 2, 4, 8)),
    ("k_cache", ValueError, zeros(4, 4, 16)),
    ("k_cache", ValueError, zeros(4, 4, 2, 16)[..., ::2]), ("k_cache", TypeError, zeros(4, 4, 2, 8, dtype=np.int8)),
    ("k_cache", ValueError, zeros(4, 4, 2, 8)[::-1]), ("k_cache", ValueError, zeros(4, 4, 0, 8)),
    ("k_cache", TypeError, None),
    ("v_cache", ValueError, zeros(5, 4, 2, 8)), ("v_cache", ValueError, zeros(4, 4, 3, 8)),
    ("v_cache", ValueError, zeros(4, 4, 2, 0)),
    ("v_cache", TypeError, zeros(4, 4, 2, 8, dtype=np.float16)),
    ("out", ValueError, zeros(2, 4, 7)), ("out", ValueError, frozen(2, 4, 8)),
    ("out", TypeError, zeros(2, 4, 8, dtype=int)),
    ("out", ValueError, overlapping(2, 4, 8)), ("out", TypeError, [[[0.0]]]), ("out", TypeError, Array(zeros(2, 4, 8))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "error", "value"), ATTEND)
def test_attend_refuses(name, error, value):
    arguments, batch = good(**{name: value})
    with pytest.raises(error, match=f"^{name}: expected"):
        attend(batch, arguments)
    if name != "out":
        assert not arguments["out"].any()


def test_one_array_that_is_none():
    for shape in ((4, 3, 4, 2, 8), (4, 4, 2, 7), (4, 12, 2, 8), (4, 2, 8, 2, 8)):
        arguments, batch = good(k_cache=zeros(*shape), v_cache=None)
        with pytest.raises(ValueError, match=r"^[kv]_cache: expected"):
            attend(batch, arguments)


WRITE = [
    ("k", ValueError, zeros(3, 2, 8)), ("k", ValueError, zeros(2, 1, 8)), ("k", ValueError, zeros(2, 16)),
    ("v", ValueError, zeros(2, 2, 9)), ("v", TypeError, zeros(2, 2, 8, dtype=np.int32)), ("v", TypeError, None),
    ("slots", ValueError, [3, 3]), ("slots", ValueError, [-1, 2]), ("slots", IndexError, [2, 16]),
    ("slots", TypeError, [0.5, 1]),
    ("slots", ValueError, np.array([3, 2**64 - 1], np.uint64)), ("slots", TypeError, np.array([0.0, 1.0])),
    ("k_cache", ValueError, frozen(4, 4, 2, 8)), ("k_cache", ValueError, overlapping(4, 4, 2, 8)),
    ("v_cache", ValueError, np.broadcast_to(zeros(8), (4, 4, 2, 8))), ("v_cache", TypeError, Array(zeros(4, 4, 2, 8))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "error", "value"), WRITE)
def test_write_refuses(name, error, value):
    arguments, batch = good(**{name: value})
    with pytest.raises(error, match=rf"^{name}(\[\d\])?: expected"):
        write(batch, arguments)
    for cache in ("k_cache", "v_cache"):
        if name != cache:
            assert (arguments[cache] == 1).all()


def test_two_rows_for_one_slot():
    """Also where they are far apart among many, and where two tables share the block that both write."""
    blocks = nhd("float32", 2000, 4, 1, 1, 1)
    batch, k = pagedkv.AttentionBatch([], [], block_size=4), zeros(8000, 1, 1)
    slots = np.random.default_rng(1).permutation(8000)
    batch.write(*blocks.arrays, k, k, slots)
    for i, j in ((0, 7999), (4000, 4001), (17, 6000)):
        twice = slots.copy()
        twice[j] = twice[i]
        with pytest.raises(ValueError, match=f"^slots: expected .* got {twice[i]} twice"):
            batch.write(*blocks.arrays, k + 1, k, twice)
    assert not blocks.k.any()
    batch = pagedkv.AttentionBatch([[5], [5]], [3, 3], block_size=4)
    for _ in range(2):
        with pytest.raises(ValueError, match="^slots: expected .* got 22 twice"):
            batch.write(*blocks.arrays, k[:2] + 1, k[:2])
    assert not blocks.k.any()


def test_a_block_that_the_arrays_do_not_have():
    batch = pagedkv.AttentionBatch([[1, 4]], [5], block_size=4)
    blocks, rows = nhd("float32", 4, 4, 2, 8, 8), zeros(1, 2, 8)
    match = "^block_tables: expected ids from 0 to 3, the blocks of k_cache, got 4 for block 1 of sequence 0"
    with pytest.raises(IndexError, match=match):
        batch.attend(rows, *blocks.arrays)
    with pytest.raises(IndexError, match=match):
        batch.write(*blocks.arrays, rows, rows)
    batch.attend(rows, *nhd("float32", 5, 4, 2, 8, 8).arrays)


def test_k_and_v_in_one_place(rng):
    arguments, batch = good()
    k_cache = arguments["k_cache"]
    whole = zeros(4, 4, 2, 16)
    for k, v in (
        (k_cache, k_cache),
        (whole[..., :8], whole[..., 4:12]),
        (whole.ravel()[:256].reshape(4, 4, 2, 8),) * 2,
    ):
        with pytest.raises(ValueError, match="^v_cache: expected values that are none of k_cache's"):
            write(batch, {**arguments, "k_cache": k, "v_cache": v})
    attend(batch, {**arguments, "v_cache": k_cache})  # to read them is nobody's harm
    with pytest.raises(ValueError, match="^k_cache: expected an array that does not overlap k"):
        write(batch, {**arguments, "k": k_cache[0, :2]})
    with pytest.raises(ValueError, match="^out: expected an array that does not overlap"):
        attend(batch, {**arguments, "out": k_cache.reshape(-1)[:64].reshape(2, 4, 8)})
    with pytest.raises(ValueError, match="^out: expected an array that does not overlap q"):
        attend(batch, {**arguments, "out": arguments["q"]})


def test_what_dtype_says_is_what_there_is():
    batch = pagedkv.AttentionBatch([[1]], [1], block_size=4, dtype="float16")
    blocks, q = nhd("float32", 4, 4, 2, 8, 8), zeros(1, 2, 8)
    with pytest.raises(TypeError, match="^k_cache: expected what dtype says, got float32"):
        batch.attend(q, *blocks.arrays)


# --- what changes meanwhile ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Setting the:DeprecationWarning")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_an_argument_that_changes_an_earlier_array(change):
    """Refused by name, or done where the bytes are all there."""
    names = {attend: ["q", "k_cache", "v_cache"], write: ["k_cache", "v_cache", "k", "v"]}
    for call in (attend, write):
        for i, changed in enumerate(names[call]):
            for view in (False, True):
                arguments, batch = good()
                owner = arguments[changed].copy()
                arguments[changed] = owner[...] if view else owner
                size, options = owner.size, {}

                def act(owner=owner):
                    with contextlib.suppress(AttributeError, TypeError, ValueError):
                        change(owner)

                if call is attend:
                    options = {"sinks": Array(np.ones(4, np.float32), act)}
                elif i + 1 < len(names[call]) and names[call][-1] != changed:
                    arguments["v"] = Array(arguments["v"], act)
                else:
                    arguments["slots"] = Array(np.array([0, 1]), act)
                try:
                    call(batch, arguments, **options)
                except (TypeError, ValueError) as error:
                    assert "expected" in str(error)  # noqa: PT017
                else:
                    assert owner.size >= size


def test_an_array_that_changes_the_table():
    for shape in ((2,), (0,), (1, 2)):
        tables = np.array([1, 3], np.int32)

        def resize(tables=tables, shape=shape):
            tables.resize(shape, refcheck=False)

        def make(tables=tables, resize=resize):
            return pagedkv.AttentionBatch(tables, [6], block_size=4, indptr=Array(np.array([0, 2]), resize))

        if shape == (2,):
            assert make().n_rows == 1
        else:
            with pytest.raises(ValueError, match="^(block_tables|indptr): expected"):
                make()


def test_a_batch_belongs_to_one_thread_at_a_time():
    """The methods of one that is in use raise, and leave it to who uses it."""
    arguments, batch = good()
    big = zeros(2, 4, 8)
    errors, want = [], attend(batch, arguments).copy()

    def use():
        for _ in range(300):
            try:
                got = batch.attend(
                    arguments["q"], arguments["k_cache"], arguments["v_cache"], window=1 + len(errors) % 7
                )
                assert got.shape == big.shape
            except RuntimeError as error:
                assert "batch: another call on it is running" in str(error)  # noqa: PT017
                errors.append(error)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (attend(batch, arguments) == want).all()


# --- tensors and buffers that somebody else frees ------------------------------------------------------


class OneCapsule:
    """A tensor that gives away the same capsule each time."""

    def __init__(self, array):
        self.capsule = array.__dlpack__()

    def __dlpack__(self, **options):
        return self.capsule

    def __dlpack_device__(self):
        return (1, 0)


def test_a_capsule_that_a_later_argument_takes_as_well():
    memory = np.zeros((1 << 21, 1, 8), np.float32)[:2]  # so large that it goes to the system
    memory[:] = 1
    queries = OneCapsule(memory)
    del memory
    k_cache, v_cache = np.ones((2, 4, 4, 1, 8), np.float32)

    class Thief:
        def __dlpack__(self, **options):
            with contextlib.suppress(ValueError, BufferError):
                np.from_dlpack(queries)  # and frees it
            return k_cache.__dlpack__()

    batch = pagedkv.AttentionBatch([[0], [1]], [4, 4], block_size=4)
    assert (batch.attend(queries, Thief(), v_cache) == 1).all()
    with pytest.raises(TypeError, match="^q: expected .* gives no tensor"):
        batch.attend(queries, k_cache, v_cache)  # there is nothing in it any more


def test_what_was_taken_from_a_capsule_is_freed():
    k_cache, v_cache, q = [np.ones((*shape, 1, 8), np.float32) for shape in ((4, 4), (4, 4), (1,))]
    counts = [sys.getrefcount(array) for array in (k_cache, v_cache, q)]
    batch = pagedkv.AttentionBatch([[0]], [4], block_size=4)
    for refused in (False, True):
        given = OneCapsule(k_cache), OneCapsule(v_cache[:, :2] if refused else v_cache), OneCapsule(q)
        with contextlib.suppress(ValueError):
            batch.attend(given[2], *given[:2])
        del given
    assert [sys.getrefcount(array) for array in (k_cache, v_cache, q)] == counts


def test_a_buffer_that_was_released_is_named():
    blocks, rows = np.ones((2, 4, 4, 1, 8), np.float32), np.ones((1, 1, 8), np.float32)
    batch = pagedkv.AttentionBatch([[0]], [4], block_size=4)
    gone = memoryview(bytearray(64))
    gone.release()
    for name, call in [
        ("k_cache", lambda: batch.write(gone, blocks[1], rows, rows)),
        ("v_cache", lambda: batch.write(blocks[0], gone, rows, rows)),
        ("k", lambda: batch.write(*blocks, gone, rows)),
        ("q", lambda: batch.attend(gone, *blocks)),
        ("out", lambda: batch.attend(rows, *blocks, out=gone)),
        ("k", lambda: pagedkv.PagedKvStore.from_arrays(gone, blocks)),
    ]:
        with pytest.raises(ValueError, match=f"^{name}: expected .* released memoryview"):
            call()
