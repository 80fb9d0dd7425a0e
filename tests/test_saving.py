"""Saved files: sequences come back bit by bit, from the whole file or not at all; nothing else changes."""

import os
import random

import numpy as np
import pytest
import tiers_support as support
from helpers import append, cache_state, run_python, scrambled, store_state, stored

import pagedkv
from pagedkv.tiers import restore_sequence, save_sequence

DTYPES = ["float32", "float16", "bfloat16", "int8"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "saved"


def make(dtype="float32", blocks=64, n_layers=3, **options):
    return pagedkv.PagedKvStore(4, blocks, 2, 6, v_head_dim=5, n_layers=n_layers, dtype=dtype, **options)


def sequence(store, n):
    """Rows of arbitrary bits, where the dtype takes them."""
    cache = pagedkv.PagedKvCache()
    k = scrambled(1, store.n_layers * n * store.k_width).reshape(store.n_layers, n, -1)
    v = scrambled(7, store.n_layers * n * store.v_width).reshape(store.n_layers, n, -1)
    if store.dtype != "float32":
        k, v = (np.random.default_rng(n).standard_normal(x.shape, np.float32) for x in (k, v))
    cache.append_contiguous(store, k, v, n)
    return cache


def bits(store, cache):
    """All that is stored of a sequence's readable rows, of all layers."""
    found = []
    for layer in range(store.n_layers):
        for i in range(cache.first_position, cache.seq_len):
            block, row = int(cache.block_table[i // store.block_size]), i % store.block_size
            found.append(store.k_row(block, row, layer).tobytes() + store.v_row(block, row, layer).tobytes())
            if store.dtype == "int8":
                scales = store.k_scales(block, layer)[row], store.v_scales(block, layer)[row]
                found.append(scales[0].tobytes() + scales[1].tobytes())
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 3, 4, 5, 37])
def test_a_sequence_comes_back_bit_by_bit(path, dtype, n):
    store, tokens = make(dtype), [*range(100, 100 + n - 1), 2**63 - 1]
    cache = sequence(store, n)
    cache.reserve(store, n + 20)  # what is only reserved is left out
    before = store_state(store), cache_state(cache)
    saved = save_sequence(path, tokens, cache, model=b"m")
    assert (store_state(store), cache_state(cache)) == before
    assert saved.tokens == n
    assert saved.nbytes == path.stat().st_size
    other = make(dtype, blocks=20)
    other.acquire(3)
    again, [copy] = restore_sequence(path, other, model=b"m")
    assert again.tolist() == tokens
    assert (copy.seq_len, copy.capacity, copy.first_position) == (n, -(-n // 4) * 4, 0)
    assert bits(other, copy) == bits(store, cache)
    append(other, copy, 3)  # it goes on
    copy.release(other)
    assert other.free_block_count == 17
    other.check()


def test_rows_that_nobody_wrote_are_not_in_the_file(path):
    store = make()
    secret = sequence(store, 8)
    held = b"".join(bits(store, secret))
    secret.release(store)
    cache = pagedkv.PagedKvCache()
    append(store, cache, 1)  # the rest of the block is as the other sequence left it
    save_sequence(path, [1], cache, model=b"m")
    data = path.read_bytes()
    row = store.k_width * 4
    assert not any(held[i : i + row] in data for i in range(0, len(held) - row, row))


def test_with_a_window_what_was_dropped_is_left_out(path):
    stores = [make(), make("int8", n_layers=2)]
    caches = [sequence(store, 30) for store in stores]
    caches[1].drop_before(stores[1], 21)
    tokens = list(range(30))
    saved = save_sequence(path, tokens, caches, model=b"m", windows=[None, 10], namespace=b"t")
    size = [store.nbytes // store.total_blocks for store in stores]
    assert 8 * size[0] + 3 * size[1] < saved.nbytes < 8 * size[0] + 3 * size[1] + 8000
    others = [make(blocks=8), make("int8", n_layers=2, blocks=3)]
    again, copies = restore_sequence(path, others, model=b"m", windows=[None, 10], namespace=b"t")
    assert again.tolist() == tokens
    for store, cache, other, copy in zip(stores, caches, others, copies, strict=True):
        assert (copy.seq_len, copy.first_position) == (30, cache.first_position)
        assert bits(other, copy) == bits(store, cache)
        append(other, copy, 2)
    with pytest.raises(ValueError, match="^tokens: expected none left behind by layers without a window"):
        save_sequence(path, tokens, caches, model=b"m")


def test_the_file_is_that_of_the_page(path):
    store = make()
    cache = sequence(store, 10)
    save_sequence(path, range(10), cache, model=b"m", namespace=b"n")
    data, at, found = path.read_bytes(), 24, []
    while at < len(data):
        found.append(support.read_record(data[at:]))
        at += found[-1][-1]
    assert [record[0]["kind"] for record in found] == [0, 1]
    assert found[1][1] == list(range(10))
    with store.pieces(cache.block_table.tolist()) as pieces:
        n = pieces.nbytes
        assert found[1][2][: 2 * n // 3] == b"".join(pieces.views)[: 2 * n // 3]


def test_the_same_in_another_process(path):
    store = make("int8")
    cache = sequence(store, 21)
    save_sequence(path, range(21), cache, model=b"m")
    code = f"""
        import pagedkv
        from pagedkv.tiers import restore_sequence
        store = pagedkv.PagedKvStore(4, 8, 2, 6, v_head_dim=5, n_layers=3, dtype="int8")
        tokens, [cache] = restore_sequence({str(path)!r}, store, model=b"m")
        assert tokens.tolist() == list(range(21))
        with store.pieces(cache.block_table.tolist()[:5]) as pieces:
            print(b"".join(pieces.views).hex())
    """
    with store.pieces(cache.block_table.tolist()[:5]) as pieces:
        expected = b"".join(pieces.views).hex()
    assert run_python(code, PYTHONHASHSEED="77").strip() == expected


# --- files that are not whole ---------------------------------------------------------------------------------


def refused(path, store, error, match, **options):
    before = store_state(store)
    with pytest.raises(error, match=match):
        restore_sequence(path, store, **{"model": b"m", **options})
    assert store_state(store)[:2] == before[:2]
    assert store.free_block_count == before[3]
    store.check()


def test_no_bit_may_differ_and_no_byte_be_missing(path):
    store, rng = make(n_layers=1), random.Random(1)
    save_sequence(path, range(10), sequence(store, 10), model=b"m")
    good = path.read_bytes()
    for _ in range(400):
        data, bit = bytearray(good), rng.randrange(8 * len(good))
        if 128 <= bit < 192:
            continue  # how large a tier's segment may grow: of no meaning here
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        refused(path, store, ValueError, "expected")
    for n in rng.sample(range(len(good)), 100):
        path.write_bytes(good[:n])
        refused(path, store, ValueError, "expected")
    path.write_bytes(good + b"x")
    refused(path, store, ValueError, "^path: expected a whole file")


def test_another_format_or_model_is_named(path):
    store = make()
    save_sequence(path, range(10), sequence(store, 10), model=b"m")
    for name, wanted, got, other in (
        ("dtype", "int8", "float32", make("int8")),
        ("n_layers", 2, 3, make(n_layers=2)),
        ("block_size", 8, 4, pagedkv.PagedKvStore(8, 64, 2, 6, v_head_dim=5, n_layers=3)),
        ("n_kv_heads", 1, 2, pagedkv.PagedKvStore(4, 64, 1, 6, v_head_dim=5, n_layers=3)),
        ("head_dim", 7, 6, pagedkv.PagedKvStore(4, 64, 2, 7, v_head_dim=5, n_layers=3)),
        ("v_head_dim", 6, 5, pagedkv.PagedKvStore(4, 64, 2, 6, n_layers=3)),
    ):
        refused(path, other, ValueError, f"^{name}: expected {wanted!r}, as the store has, got {got!r}$")
    refused(path, store, ValueError, "^model: expected b'other', got b'm'$", model=b"other")
    refused(path, store, ValueError, "^namespace: expected b'x', got None$", namespace=b"x")
    refused(path, store, ValueError, "^window: expected 8", windows=[8])
    with pytest.raises(ValueError, match="^stores: expected one for each of 1 groups, as the file has, got 2"):
        restore_sequence(path, [store, store], model=b"m")
    data = path.read_bytes()
    path.write_bytes(data[:32] + b"\x02" + data[33:])
    refused(path, store, ValueError, "^record_version: expected 1, got 2")
    path.write_bytes(b"\x93PKVSEG\n\x02" + data[9:])
    refused(path, store, ValueError, "^version: expected 1, got 2")
    path.write_bytes(b"a letter to my aunt")
    refused(path, store, ValueError, "^path: expected a saved file")


def test_less_room_than_it_takes(path):
    store = make()
    save_sequence(path, range(40), sequence(store, 40), model=b"m")
    small = make(blocks=9)
    refused(path, small, pagedkv.PagedStoreExhausted, "needed")
    assert small.free_block_count == 9


# --- while it is written ---------------------------------------------------------------------------------------


def test_an_interrupt_leaves_the_old_file(path, tmp_path):
    store = pagedkv.PagedKvStore(4, 512, 64, 32, n_layers=4)  # a block is a quarter of a MiB
    cache, calls = pagedkv.PagedKvCache(), []
    append(store, cache, 64)
    path.write_bytes(b"old")

    def stop(done, total):
        calls.append((done, total))
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_sequence(path, range(64), cache, model=b"m", progress=stop)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["saved"]
    save_sequence(path, range(64), cache, model=b"m", progress=lambda *both: calls.append(both))
    assert calls[-1][0] == path.stat().st_size
    assert os.listdir(tmp_path) == ["saved"]
    other, calls[:] = pagedkv.PagedKvStore(4, 512, 64, 32, n_layers=4), []
    with pytest.raises(KeyboardInterrupt):
        restore_sequence(path, other, model=b"m", progress=stop)
    assert other.free_block_count == 512
    other.check()


def test_where_nothing_can_be_written(path, tmp_path, monkeypatch):
    store = make()
    cache = sequence(store, 10)
    with pytest.raises(FileNotFoundError):
        save_sequence(tmp_path / "no" / "folder", range(10), cache, model=b"m")
    monkeypatch.setattr(os, "pwritev", lambda *rest: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        save_sequence(path, range(10), cache, model=b"m")
    assert os.listdir(tmp_path) == []


def test_bad_arguments_are_named(path):
    store = make()
    cache = sequence(store, 10)
    good = {"model": b"m"}
    for error, name, call in (
        (TypeError, "path", lambda: save_sequence(3, range(10), cache, **good)),
        (TypeError, "model", lambda: save_sequence(path, range(10), cache, model="m")),
        (ValueError, "model", lambda: save_sequence(path, range(10), cache, model=b"")),
        (TypeError, "tokens", lambda: save_sequence(path, "x", cache, **good)),
        (ValueError, r"caches\[0\]", lambda: save_sequence(path, range(9), cache, **good)),
        (ValueError, r"caches\[0\]", lambda: save_sequence(path, [], pagedkv.PagedKvCache(), **good)),
        (TypeError, r"caches\[0\]", lambda: save_sequence(path, range(10), [store], **good)),
        (ValueError, "windows", lambda: save_sequence(path, range(10), cache, windows=[], **good)),
        (TypeError, "namespace", lambda: save_sequence(path, range(10), cache, namespace="x", **good)),
        (TypeError, "path", lambda: restore_sequence(3, store, **good)),
        (TypeError, r"stores\[0\]", lambda: restore_sequence(path, [cache], **good)),
    ):
        with pytest.raises(error, match=f"^{name}: expected"):
            call()
    assert not path.exists()
    for call in (
        lambda: save_sequence(path.parent, range(10), cache, **good),
        lambda: restore_sequence(path.parent, store, **good),
    ):
        with pytest.raises(ValueError, match="^path: expected a file, got a folder"):
            call()
    with pytest.raises(FileNotFoundError):
        restore_sequence(path, store, **good)


def test_a_models_sequence(path):
    shapes = [pagedkv.LayerShape(None, 1, 4), pagedkv.LayerShape(8, 1, 4)]
    stores, rng = pagedkv.ModelStores(shapes, total_blocks=16, block_size=4), np.random.default_rng(1)
    given, step_sizes = pagedkv.ModelSequence(stores), (14, 4, 1)
    rows = rng.standard_normal((2, 2, sum(step_sizes), 4), np.float32)
    for n in step_sizes:
        start = given.seq_len
        with pagedkv.Step(stores, given, n) as step:
            for layer in range(2):
                step.write(layer, *rows[layer, :, start : start + n])
        given.drop_unneeded()
    saved = save_sequence(path, range(19), given, model=b"m")
    other = pagedkv.ModelStores(shapes, total_blocks=16, block_size=4)
    tokens, caches = restore_sequence(path, other, model=b"m")
    again = pagedkv.ModelSequence(other, caches)
    assert (tokens.tolist(), again.seq_len, saved.tokens) == ([*range(19)], 19, 19)
    assert [cache.first_position for cache in again.caches] == [cache.first_position for cache in given.caches]
    assert again.caches[1].first_position == 12
    q, new = np.ones((1, 1, 4), np.float32), np.ones((1, 4), np.float32)
    found = []
    for each, sequence in ((stores, given), (other, again)):
        with pagedkv.Step(each, sequence, 1) as step:
            for layer in range(2):
                step.write(layer, new, new)
                found.append(step.attend(layer, q).copy())
    np.testing.assert_array_equal(found[:2], found[2:])
    with pytest.raises(ValueError, match="^window: expected None, as the store has, got 8"):
        restore_sequence(path, other, model=b"m", windows=[None, None])
    again.release()
    other.check()


def test_stored_is_what_the_helpers_show(path):
    """The bits that are compared here are those that other tests know."""
    store = make("int8", n_layers=1)
    cache = sequence(store, 9)
    values, scales = stored(store, cache, "k")
    found = bits(store, cache)
    assert b"".join(found[::2])[: store.k_width] == values[0].tobytes()
    assert found[1][: scales[0].nbytes] == scales[0].tobytes()
