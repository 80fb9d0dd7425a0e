"""Records: their bytes, as docs/records.md has them, their keys, and that nothing else is taken for one."""

import hashlib
import struct
import sys

import numpy as np
import pytest
import tiers_support as support
from helpers import run_python

import pagedkv
from pagedkv.tiers import KeySpace, RecordFormat, encode, room_for, what_is_wrong

FORMAT = {
    "block_bytes": 192, "block_size": 4, "byte_order": sys.byteorder, "chunk_blocks": 2, "dtype": "float32", "group": 3,
    "head_dim": 4, "n_kv_heads": 1, "n_layers": 2, "record_version": 1, "v_head_dim": 2, "window": 12,
}  # fmt: skip


@pytest.fixture
def store():
    return pagedkv.PagedKvStore(4, 8, 1, 4, v_head_dim=2, n_layers=2)


@pytest.fixture
def space(store):
    return KeySpace(RecordFormat.of(store, window=12, group=3, chunk_blocks=2), b"model", b"tenant")


# --- keys ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", [None, b"", b"tenant"])
def test_keys_are_those_of_the_page(store, namespace):
    space = KeySpace(RecordFormat.of(store, window=12, group=3, chunk_blocks=2), b"model", namespace)
    description, root = support.root_of(FORMAT, b"model", namespace)
    assert (space.description, space.key) == (description, root)
    tokens = [5, 2**63 - 1, *range(100, 120)]
    chunks, parent = space.chunks(tokens), root
    assert len(chunks) == len(tokens) // 8
    for i, chunk in enumerate(chunks):
        assert (chunk.parent, chunk.first_position, chunk.n_tokens) == (parent, 8 * i, 8)
        parent = support.key_of(parent, tokens[8 * i : 8 * i + 8])
        assert chunk.key == parent
        assert chunk.payload_bytes == 2 * 192
    rest = space.chunk(tokens[16:19], chunks[-1])
    assert (rest.key, rest.first_position) == (support.key_of(parent, tokens[16:19]), 16)
    assert rest.payload_bytes == 192


def test_whatever_changes_the_bytes_or_the_tokens_changes_the_key(store):
    def spaces():
        for n, options in enumerate((
            {}, {"n_layers": 2}, {"v_head_dim": 2}, {"v_head_dim": 4, "dtype": "float16"}, {"dtype": "bfloat16"},
            {"dtype": "int8"},
        )):  # fmt: skip
            made = pagedkv.PagedKvStore(4, 8, 1, 4 if n else 2, **options)
            for window in (None, 1, 12):
                for group in (0, 1):
                    for blocks in (1, 2):
                        format = RecordFormat.of(made, window=window, group=group, chunk_blocks=blocks)
                        for model in (b"a", b"b", b"ab"):
                            for namespace in (None, b"", b"a", b"b"):
                                yield KeySpace(format, model, namespace)

    found = list(spaces())
    assert len({space.key for space in found}) == len(found)
    assert len({space.chunk([1]).key for space in found}) == len(found)
    one = found[0]
    prompts = [[1], [2], [1, 2], [2, 1], [1, 1], [0], [0, 0], [256], [2**40]]
    assert len({one.chunk(tokens).key for tokens in prompts}) == len(prompts)
    assert one.chunk([3], one.chunk([1])).key != one.chunk([3], one.chunk([2])).key


def test_keys_are_the_same_in_every_process(space):
    code = """
        import pagedkv
        from pagedkv.tiers import KeySpace, RecordFormat
        store = pagedkv.PagedKvStore(4, 8, 1, 4, v_head_dim=2, n_layers=2)
        space = KeySpace(RecordFormat.of(store, window=12, group=3, chunk_blocks=2), b"model", b"tenant")
        print(space.chunks(range(16))[1].key.hex())
    """
    for seed in ("1", "2"):
        assert run_python(code, PYTHONHASHSEED=seed).strip() == space.chunks(range(16))[1].key.hex()


@pytest.mark.parametrize(
    ("sizes", "options", "blocks"),
    [
        ((16, 4, 8, 128), {"n_layers": 4}, 2),  # 512 KiB a block
        ((16, 4, 8, 128), {"n_layers": 5}, 1),  # 640
        ((16, 4, 8, 128), {"n_layers": 80}, 1),  # 10 MiB
        ((16, 4, 1, 256), {"n_layers": 15}, 2),  # 480
        ((16, 4, 1, 256), {"n_layers": 3}, 8),
        ((16, 4, 1, 1), {}, 8192),
    ],
)
def test_a_chunk_takes_half_to_two_mib(sizes, options, blocks):
    format = RecordFormat.of(pagedkv.PagedKvStore(*sizes, **options))
    assert format.chunk_blocks == blocks
    assert 2**19 < format.chunk_blocks * format.block_bytes <= 2**21 or blocks == 1


def test_the_bytes_of_a_block_are_the_stores(any_store):
    pieces = any_store.acquire(1)
    with any_store.pieces(pieces) as shown:
        assert RecordFormat.of(any_store).block_bytes == shown.nbytes
    for dtype in ("float32", "float16", "bfloat16", "int8"):
        store = pagedkv.PagedKvStore(4, 8, 3, 5, v_head_dim=2, n_layers=2, dtype=dtype)
        with store.pieces(store.acquire(3)) as shown:
            assert RecordFormat.of(store).payload_bytes(9) == shown.nbytes


# --- bytes --------------------------------------------------------------------------------------------------


def test_a_plain_reader_reads_it(space):
    chunks = space.chunks(range(50, 66))
    chunks.append(space.chunk([7, 2**63 - 1], chunks[-1]))
    for chunk in chunks:
        found, tokens, payload, n_bytes = support.read_record(support.record(chunk).tobytes())
        assert tokens == list(struct.unpack(f"<{chunk.n_tokens}q", chunk.ids))
        assert payload == support.payload(chunk)
        assert n_bytes == chunk.nbytes == support.record(chunk).nbytes
        assert (found["kind"], found["group"], found["first_position"]) == (1, 3, chunk.first_position)
        assert found["window"] == 12
        assert (found["key"], found["parent"], found["root"]) == (chunk.key, chunk.parent, space.key)
        assert found["digest"] == hashlib.sha256(space.format.description).digest()
        assert found["time"] > 1.7e9


def test_the_library_reads_it_back(space):
    chunk = space.chunks(range(8))[0]
    data = memoryview(support.record(chunk).tobytes())
    head = data[: 192 + 64]
    assert what_is_wrong(chunk, [head, data[256:]]) is None
    assert what_is_wrong(chunk, [head, data[256:300], data[300:300], data[300:]]) is None


def test_no_bit_may_differ(space):
    chunk = space.chunks(range(8))[0]
    good = support.record(chunk).tobytes()
    for bit in range(8 * len(good)):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        view = memoryview(data)
        assert what_is_wrong(chunk, [view[:256], view[256:]]) is not None, bit


def test_another_ones_record_is_none(space, store):
    """Whole and right, but not what was asked for: of other tokens, another place, model, namespace, format."""
    chunk = space.chunks(range(8))[0]
    others = [
        space.chunks(range(1, 9))[0],
        space.chunk(range(8), chunk),
        KeySpace(space.format, b"other", b"tenant").chunks(range(8))[0],
        KeySpace(space.format, b"model").chunks(range(8))[0],
        KeySpace(RecordFormat.of(store, window=13, group=3, chunk_blocks=2), b"model", b"tenant").chunks(range(8))[0],
        KeySpace(RecordFormat.of(store, window=12, group=2, chunk_blocks=2), b"model", b"tenant").chunks(range(8))[0],
    ]
    for other in others:
        data = memoryview(support.record(other).tobytes())
        assert what_is_wrong(other, [data[:256], data[256:]]) is None
        assert what_is_wrong(chunk, [data[:256], data[256:]]) is not None
    shorter = memoryview(support.record(space.chunk(range(7))).tobytes())
    for cut in (0, 100, 192, 256, len(shorter)):
        assert what_is_wrong(chunk, [shorter[:cut], shorter[cut:]]) is not None


def test_a_forged_key_with_other_tokens_is_none(space):
    """Somebody's digests may collide: the token ids themselves are compared."""
    chunk, other = space.chunks(range(8))[0], space.chunks(range(1, 9))[0]
    forged = other._replace(key=chunk.key, parent=chunk.parent)
    data = memoryview(support.record(forged).tobytes())
    assert what_is_wrong(forged, [data[:256], data[256:]]) is None
    assert what_is_wrong(chunk, [data[:256], data[256:]]) == "token ids"


# --- descriptions -------------------------------------------------------------------------------------------


def test_a_description_is_read_back(space, store):
    for each in (space, KeySpace(RecordFormat.of(store), b"\0\xff", None), KeySpace(RecordFormat.of(store), b"a", b"")):
        assert KeySpace.parse(each.description) == each
    whole = len(KeySpace(space.format, b"model").description)  # without the namespace
    for n in set(range(len(space.description))) - {whole}:
        with pytest.raises(ValueError, match="expected"):
            KeySpace.parse(space.description[:n])
    empty = b"form" + bytes(8) + b"modl" + bytes(8)
    for bad in (b"", b"form", b"x" * 100, empty, b"form\xff" * 20, space.description * 2):
        with pytest.raises(ValueError, match="expected"):
            KeySpace.parse(bad)
    newer = space.description.replace(b'"record_version":1', b'"record_version":2')
    with pytest.raises(ValueError, match="record_version: expected 1, got 2"):
        KeySpace.parse(newer)


def test_what_differs_is_named_with_both_values(space, store):
    others = {
        "dtype": pagedkv.PagedKvStore(4, 8, 1, 4, v_head_dim=2, n_layers=2, dtype="int8"),
        "block_size": pagedkv.PagedKvStore(8, 8, 1, 4, v_head_dim=2, n_layers=2),
        "n_kv_heads": pagedkv.PagedKvStore(4, 8, 2, 4, v_head_dim=2, n_layers=2),
        "head_dim": pagedkv.PagedKvStore(4, 8, 1, 8, v_head_dim=2, n_layers=2),
        "v_head_dim": pagedkv.PagedKvStore(4, 8, 1, 4, v_head_dim=4, n_layers=2),
        "n_layers": pagedkv.PagedKvStore(4, 8, 1, 4, v_head_dim=2, n_layers=3),
    }
    for name, other in others.items():
        theirs = KeySpace(RecordFormat.of(other, window=12, group=3, chunk_blocks=2), b"model", b"tenant")
        wanted, got = getattr(store, name), getattr(other, name)
        with pytest.raises(ValueError, match=f"^{name}: expected {wanted!r}, as the store has, got {got!r}$"):
            space.check_same(theirs)
    format = space.format
    for theirs, name in (
        (KeySpace(RecordFormat.of(store, window=None, group=3, chunk_blocks=2), b"model", b"tenant"), "window"),
        (KeySpace(RecordFormat.of(store, window=12, group=1, chunk_blocks=2), b"model", b"tenant"), "group"),
        (KeySpace(RecordFormat.of(store, window=12, group=3, chunk_blocks=1), b"model", b"tenant"), "chunk_blocks"),
        (KeySpace(format, b"other", b"tenant"), "model"),
        (KeySpace(format, b"model"), "namespace"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            space.check_same(theirs)
    space.check_same(KeySpace(format, b"model", b"tenant"))


# --- bad input ----------------------------------------------------------------------------------------------


def test_bad_arguments_are_named(store, space):
    format, chunk = space.format, space.chunk([1])
    for error, name, call in (
        (TypeError, "store", lambda: RecordFormat.of(3)),
        (TypeError, "window", lambda: RecordFormat.of(store, window="3")),
        (ValueError, "window", lambda: RecordFormat.of(store, window=0)),
        (ValueError, "group", lambda: RecordFormat.of(store, group=-1)),
        (ValueError, "group", lambda: RecordFormat.of(store, group=2**16)),
        (ValueError, "chunk_blocks", lambda: RecordFormat.of(store, chunk_blocks=0)),
        (TypeError, "format", lambda: KeySpace(store, b"model")),
        (TypeError, "model", lambda: KeySpace(format)),
        (TypeError, "model", lambda: KeySpace(format, "model")),
        (ValueError, "model", lambda: KeySpace(format, b"")),
        (TypeError, "namespace", lambda: KeySpace(format, b"model", "tenant")),
        (TypeError, "tokens", lambda: space.chunks("text")),
        (ValueError, "tokens", lambda: space.chunks([-1])),
        (ValueError, "tokens", lambda: space.chunk([])),
        (TypeError, "after", lambda: space.chunk([1], b"key")),
        (ValueError, "after", lambda: space.chunk([1], KeySpace(format, b"other").chunk([1]))),
        (ValueError, "payload", lambda: encode(chunk, [])),
        (ValueError, "payload", lambda: encode(chunk, [memoryview(bytes(191))])),
        (ValueError, "payload", lambda: encode(chunk, [memoryview(bytes(384))[::2]])),
        (TypeError, "payload", lambda: encode(chunk, [3])),
        (ValueError, "payload", lambda: room_for(chunk, [memoryview(bytes(192))])),
        (ValueError, "payload", lambda: room_for(chunk, [memoryview(bytearray(193))])),
    ):  # fmt: skip
        with pytest.raises(error, match=rf"\b{name}\b"):
            call()


def test_a_model_is_its_bytes(space):
    class Other(bytes):
        def __eq__(self, other):
            return True

        __hash__ = bytes.__hash__

    made = KeySpace(space.format, Other(b"mine"), Other(b"name"))
    assert type(made.model) is bytes
    assert type(made.namespace) is bytes
    assert made.key == KeySpace(space.format, b"mine", b"name").key


def test_arrays_are_memory_too(space):
    chunk = space.chunk([1, 2])
    values = np.arange(48, dtype=np.float32)
    record = encode(chunk, [memoryview(values[:24]), memoryview(values[24:].reshape(2, 12))])
    assert support.read_record(record.tobytes())[2] == values.tobytes()
