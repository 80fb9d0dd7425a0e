"""Blocks as they are stored: read-only pieces of held ones, and fresh ones that are filled out of sight."""

import copy
import gc
import io
import os
import pickle
import threading
import weakref
import zlib

import numpy as np
import pytest
from dtype_reference import DTYPES, SCALED, STORED
from helpers import refused, unchanged, unsanitized
from proof_starved import can_starve, testcapi

import pagedkv


def make(dtype="float32", total_blocks=8, **options):
    """Odd widths, so that an int8 row has unused bytes: 3 * 5 and 3 * 2 values."""
    return pagedkv.PagedKvStore(4, total_blocks, 3, 5, n_layers=2, v_head_dim=2, dtype=dtype, **options)


def write(store, n, seed=0):
    """A sequence of n positions that nobody else has."""
    rng = np.random.default_rng(seed)
    cache = pagedkv.PagedKvCache()
    k, v = (rng.standard_normal((2, n, width), dtype=np.float32) for width in (15, 6))
    cache.append_contiguous(store, k, v, n)
    return cache


def row_bytes(dtype, head_dim):
    """What the manual says a row is: values, zeros up to a multiple of 2, scales."""
    values = 3 * head_dim * np.dtype(STORED[dtype]).itemsize
    return (values + 1) // 2 * 2 + 2 * 3 if dtype in SCALED else values


# --- reading -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_are_the_rows_block_by_block_layer_by_layer_k_and_v(dtype):
    store = make(dtype)
    cache = write(store, 12)
    ids = cache.block_table.tolist()[::-1]
    with store.pieces(ids) as pieces:
        views = pieces.views
        assert len(views) == 3 * 2 * 2
        assert pieces.nbytes == sum(view.nbytes for view in views) == 3 * store.nbytes // 8
        places = [(block, layer, side) for block in ids for layer in range(2) for side in "kv"]
        for view, (block, layer, side) in zip(views, places, strict=True):
            assert (view.readonly, view.format, view.ndim, view.c_contiguous) == (True, "B", 1, True)
            n_bytes = row_bytes(dtype, 5 if side == "k" else 2)
            rows = np.frombuffer(view, np.uint8).reshape(4, n_bytes)
            values = getattr(store, f"{side}_block")(block, layer)
            assert rows[:, : values[0].nbytes].tobytes() == values.tobytes()
            if dtype in SCALED:
                scales = getattr(store, f"{side}_scales")(block, layer)
                assert rows[:, -scales[0].nbytes :].tobytes() == scales.tobytes()
                assert not rows[:, values[0].nbytes : -scales[0].nbytes].any()
            del rows


def test_pieces_are_not_copies():
    store = make()
    cache = write(store, 4)
    [block] = cache.block_table.tolist()
    with store.pieces([block]) as pieces:
        addresses = [np.frombuffer(view, np.uint8).ctypes.data for view in pieces.views]
    rows = [view(block, layer) for layer in range(2) for view in (store.k_block, store.v_block)]
    assert addresses == [array.ctypes.data for array in rows]


def test_equal_rows_have_equal_checksums():
    """Also where one store's blocks held something else before."""
    sums = []
    for old in (b"\0", b"\xff"):
        store = make("int8")
        with store.fill(8) as filling:
            for view in filling.views:
                view[:] = old * len(view)
        store.release(filling.ids)
        cache = write(store, 8)
        with store.pieces(cache.block_table) as pieces:
            sums.append([zlib.crc32(view) for view in pieces.views])
    assert sums[0] == sums[1]
    assert len(set(sums[0])) == 8


def test_what_is_shown_is_held_and_stays_as_it_is():
    store = make()
    cache = write(store, 6)
    ids = cache.block_table.tolist()
    with store.pieces(ids) as pieces:
        assert [store.refcount(block) for block in ids] == [2, 2]
        before = b"".join(pieces.views)
        k, v = np.ones((2, 15), np.float32), np.ones((2, 6), np.float32)
        cache.push(store, k, v)  # into a copy: the block has another holder
        assert cache.block_table[1] != ids[1]
        cache.release(store)
        write(store, 20)
        assert b"".join(pieces.views) == before
        assert [store.refcount(block) for block in ids] == [1, 1]
    assert [store.refcount(block) for block in ids] == [0, 0]


def test_pieces_end_with_their_block():
    store = make()
    ids = store.acquire(2)
    with store.pieces(ids) as pieces:
        view = pieces.views[0]
    with pytest.raises(ValueError, match="released"):
        view[0]
    with pytest.raises(RuntimeError, match="pieces: expected open"):
        _ = pieces.views
    with pytest.raises(RuntimeError, match="pieces: expected open"):
        pieces.__enter__()
    pieces.release()
    assert pieces.nbytes == 0
    assert [store.refcount(block) for block in ids] == [1, 1]


@pytest.mark.parametrize("make_of", [lambda view: view[3:9], lambda view: np.frombuffer(view, np.uint8)])
def test_what_was_made_of_a_view_keeps_the_blocks(make_of):
    store = make()
    cache = write(store, 4)
    [block] = cache.block_table.tolist()
    with store.pieces([block]) as pieces:
        kept = make_of(pieces.views[0])
        right = bytes(kept)
    del pieces
    cache.release(store)
    write(store, 28)  # all others
    assert store.refcount(block) == 1
    assert bytes(kept) == right
    del kept
    assert store.refcount(block) == 0
    store.check()


def test_pieces_that_are_dropped_let_go():
    store = make()
    ids = store.acquire(3)
    pieces = store.pieces(ids)
    views = pieces.views
    assert [store.refcount(block) for block in ids] == [2] * 3
    del pieces
    assert [store.refcount(block) for block in ids] == [2] * 3
    del views
    assert [store.refcount(block) for block in ids] == [1] * 3


def test_views_outlive_their_store():
    store = make()
    cache = write(store, 4)
    view = store.pieces(cache.block_table).views[0]
    right = store.k_block(0).tobytes()
    del store, cache
    gc.collect()
    assert bytes(view) == right


def test_a_store_in_a_circle_with_its_pieces_goes():
    class Own(pagedkv.PagedKvStore):
        pass

    store = Own(4, 8, 1, 4)
    store.shown = store.pieces(store.acquire(2))
    store.filling = store.fill(2)
    store.views = store.shown.views, store.filling.views
    gone = []
    weakref.finalize(store, gone.append, True)
    del store
    gc.collect()
    assert gone


def test_no_blocks_have_no_pieces():
    store = make()
    with unchanged(store), store.pieces([]) as pieces:
        assert (pieces.views, pieces.nbytes) == ((), 0)


def test_a_block_twice_is_shown_twice():
    store = make()
    [block] = store.acquire()
    with store.pieces([block, block]) as pieces:
        assert store.refcount(block) == 3
        assert len(pieces.views) == 8
    assert store.refcount(block) == 1


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        ([0, 5], ValueError),
        ([8], IndexError),
        ([-1], IndexError),
        ([2**63], IndexError),
        (None, TypeError),
        ("01", TypeError),
        ([0.0], TypeError),
        (np.zeros((1, 1), int), TypeError),
    ],
)
def test_pieces_of_what_is_no_held_block(ids, error):
    store = make()
    store.acquire(2)
    with refused(error, "ids", store):
        store.pieces(ids)


# --- filling -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_go_out_and_in_bit_for_bit(dtype):
    """Into another store, of another number of blocks; read there by a sequence."""
    store, other = make(dtype), make(dtype, total_blocks=5)
    cache = write(store, 12)
    with store.pieces(cache.block_table) as pieces:
        stored = b"".join(pieces.views)
    file = io.BytesIO(stored)
    other.acquire(1)
    with other.fill(3) as filling:
        for view in filling.views:
            assert file.readinto(view) == len(view)
    assert filling.ids == [1, 2, 3]
    with other.pieces(filling.ids) as pieces:
        assert b"".join(pieces.views) == stored
    restored = pagedkv.PagedKvCache()
    restored.adopt_blocks(filling.ids, 12, 4, store=other)
    for layer in range(2):
        a, b = cache.to_contiguous(store, layer=layer), restored.to_contiguous(other, layer=layer)
        assert a.k.tobytes() == b.k.tobytes()
        assert a.v.tobytes() == b.v.tobytes()
    restored.release(other)
    assert other.free_block_count == 4


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="needs preadv")
def test_files_are_written_and_read_by_one_call(tmp_path):
    store = make("int8")
    cache = write(store, 12)
    with open(tmp_path / "blocks", "wb", 0) as file, store.pieces(cache.block_table) as pieces:
        assert os.writev(file.fileno(), pieces.views) == pieces.nbytes
    with open(tmp_path / "blocks", "rb", 0) as file, store.fill(3) as filling:
        assert os.preadv(file.fileno(), filling.views, 0) == filling.nbytes
    with store.pieces(cache.block_table) as a, store.pieces(filling.ids) as b:
        assert b"".join(a.views) == b"".join(b.views)


def test_fresh_blocks_are_out_of_sight_until_they_are_committed():
    store = make()
    with store.fill(2) as filling:
        assert store.free_block_count == 6
        with pytest.raises(RuntimeError, match="filling: expected one that is committed"):
            _ = filling.ids
        ids = filling.commit()
        assert ids == filling.ids == [0, 1]
        ids.clear()
        assert filling.ids == [0, 1]
        filling.ids.clear()
    assert filling.ids == [0, 1]
    assert [store.refcount(block) for block in filling.ids] == [1, 1]


def test_left_by_an_exception_they_are_free_again():
    store = make()
    filling = store.fill(5)
    with pytest.raises(ZeroDivisionError), filling:
        filling.views[1 // 0][0] = 1
    assert store.free_block_count == 8
    with pytest.raises(RuntimeError, match="filling: expected one that is committed"):
        _ = filling.ids
    for late in (filling.commit, lambda: filling.views):
        with pytest.raises(RuntimeError, match="expected open"):
            late()
    store.check()


def test_dropped_they_are_free_again():
    store = make()
    filling = store.fill(5)
    views = filling.views
    del filling
    assert store.free_block_count == 3  # somebody could write still
    views[0][0] = 7
    del views
    assert store.free_block_count == 8
    store.fill(8).release()
    assert store.free_block_count == 8


def test_a_part_that_was_verified_is_committed():
    store = make()
    with store.fill(5) as filling:
        assert filling.commit(2) == [0, 1]
    assert filling.ids == [0, 1]
    assert store.free_block_count == 6
    assert store.acquire(3) == [2, 3, 4]  # as if nobody had had them
    with store.fill(3) as filling:
        filling.commit(0)
    assert filling.ids == []
    assert store.free_block_count == 3


NO_NUMBERS = [(-1, ValueError), (2**64, ValueError), (1.5, TypeError), (True, TypeError), ("1", TypeError)]


@pytest.mark.parametrize(("n", "error"), [*NO_NUMBERS, (6, ValueError)])
def test_a_part_that_is_none(n, error):
    store = make()
    with store.fill(5) as filling:
        with refused(error, "n", store):
            filling.commit(n)
        filling.views[0][0] = 1
        assert filling.commit(5) == [0, 1, 2, 3, 4]


def test_committed_twice():
    store = make()
    filling = store.fill(2)
    filling.commit()
    with refused(RuntimeError, "expected open", store):
        filling.commit()
    with refused(RuntimeError, "expected open", store), filling:
        pass
    filling.release()
    del filling
    assert store.free_block_count == 6


def test_committed_while_its_n_is_read():
    store = make()
    filling = store.fill(2)

    class Meddling:
        def __index__(self):
            filling.commit()
            return 2

    with pytest.raises(RuntimeError, match="filling: expected an open one"):
        filling.commit(Meddling())
    assert filling.ids == [0, 1]
    assert [store.refcount(block) for block in filling.ids] == [1, 1]


def test_nothing_can_be_written_into_what_is_committed():
    store = make()
    with store.fill(2) as filling:
        views = filling.views
    for view in views:
        with pytest.raises(ValueError, match="released"):
            view[0] = 1
    with pytest.raises(BufferError, match="expected blocks that are still shown"):
        exporter(store)


def exporter(store):
    """A view by way of the object that a view looks at, which anybody can reach."""
    filling = store.fill(1)
    piece = filling.views[0].obj
    memoryview(piece).release()
    filling.commit()
    memoryview(piece)


@pytest.mark.parametrize("make_of", [lambda view: view[3:9], lambda view: np.frombuffer(view, np.uint8)])
def test_what_could_write_later_stops_a_commit(make_of):
    store = make()
    filling = store.fill(2)
    kept = make_of(filling.views[5])
    with refused(BufferError, "filling: expected no slice", store):
        filling.commit()
    filling.views[0][0] = 3  # it goes on
    kept[0] = 9
    del kept
    assert filling.commit() == [0, 1]

    with pytest.raises(BufferError, match="filling: expected no slice"), store.fill(2) as filling:
        kept = make_of(filling.views[5])
    assert store.free_block_count == 4
    kept[0] = 9  # into a block that nobody else has
    del kept
    assert store.free_block_count == 6
    store.check()


def test_read_only_pieces_are_read_only():
    store = make()
    with store.pieces(store.acquire(1)) as pieces:
        with pytest.raises(TypeError, match="cannot modify read-only memory"):
            pieces.views[0][0] = 1
        with pytest.raises((BufferError, TypeError)):
            io.BytesIO(b"1").readinto(pieces.views[0].obj)
        with pytest.raises(ValueError, match="WRITEABLE"):
            np.frombuffer(pieces.views[0], np.uint8).flags.writeable = True
        assert not hasattr(pieces, "commit")


def test_more_than_is_free_is_refused_whole():
    store = make()
    store.acquire(5)
    with refused(pagedkv.PagedStoreExhausted, "4 blocks needed, 3 of 8 free", store) as caught:
        store.fill(4)
    assert caught.value.can_ever_fit
    with refused(pagedkv.PagedStoreExhausted, "blocks needed", store) as caught:
        store.fill(2**62)
    assert not caught.value.can_ever_fit


@pytest.mark.parametrize(("n", "error"), [*NO_NUMBERS, (None, TypeError)])
def test_no_number_of_blocks(n, error):
    store = make()
    with refused(error, "n", store):
        store.fill(n)


def test_no_blocks_are_filled():
    store = make()
    with unchanged(store), store.fill(0) as filling:
        assert filling.views == ()
    assert filling.ids == []


def test_what_a_prefix_cache_can_give_up_is_evicted():
    store = make()
    prefixes = pagedkv.PrefixCache(store)
    cache = write(store, 24)
    prefixes.insert(range(24), cache)
    cache.release(store)
    with store.fill(5) as filling:
        assert prefixes.stats().blocks_held == 3
    assert len(filling.ids) == 5
    prefixes.check()


def test_blocks_that_a_prefix_cache_alone_holds_are_not_evicted_while_they_are_shown():
    store = make()
    prefixes = pagedkv.PrefixCache(store)
    cache = write(store, 24)
    prefixes.insert(range(24), cache)
    ids = cache.block_table.tolist()
    cache.release(store)
    with store.pieces(ids):
        with pytest.raises(pagedkv.PagedStoreExhausted):
            store.fill(3)
        assert prefixes.stats().blocks_held == 6
    store.fill(3).release()
    prefixes.check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_debug_fills_what_is_not_written_with_nan_and_looks_at_the_books(dtype):
    store = make(dtype, debug=True)
    with store.fill(2) as filling:
        if dtype == "float32":
            assert np.isnan(np.frombuffer(filling.views[0], np.float32)).all()
    cache = pagedkv.PagedKvCache()
    cache.adopt_blocks(filling.ids, 8, 4, store=store)
    assert np.isnan(cache.to_contiguous(store).k).all()
    with store.pieces(filling.ids):
        cache.release(store)
    assert store.free_block_count == 8


def test_a_reference_that_was_given_away_is_not_given_back_twice():
    store = make()
    ids = store.acquire(1)
    pieces = store.pieces(ids)
    store.release(ids * 2)  # one of which is not the caller's
    pieces.release()
    store.check()
    assert store.free_block_count == 8


def test_nobody_makes_or_copies_them():
    store = make()
    for cls in (pagedkv.BlockPieces, pagedkv.BlockFilling):
        with pytest.raises(TypeError, match="a PagedKvStore makes it"):
            cls()
        empty = cls.__new__(cls)
        empty.release()
        assert empty.nbytes == 0
        for name in ("views", "__enter__", "commit"):
            with pytest.raises((RuntimeError, AttributeError), match="expected open|no attribute 'commit'"):
                getattr(empty, name)()
        empty.__exit__(None, None, None)
    with store.pieces(store.acquire(1)) as pieces:
        for cls in (type(pieces.views[0].obj), pagedkv.pieces.HeldBlocks):
            with pytest.raises((BufferError, TypeError)):
                memoryview(cls())
    for made in (store.pieces([]), store.fill(1)):
        for way in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                way(made)


@can_starve
@unsanitized
def test_a_commit_without_memory_has_changed_nothing():
    store, ended = make(), 0
    for n in range(1, 60):
        filling = store.fill(5)
        views = filling.views
        try:
            testcapi.set_nomemory(n, n + 1)
            try:
                filling.commit()
            finally:
                testcapi.remove_mem_hooks()
        except MemoryError:
            with pytest.raises(RuntimeError, match="expected one that is committed"):
                _ = filling.ids
            del views
            assert len(filling.commit()) == 5
        else:
            ended += 1
        store.release(filling.ids)
        assert store.free_block_count == 8
    assert 0 < ended < 59


def test_from_another_thread():
    store = make()
    filling = store.fill(2)
    filling.views[0][0] = 1
    found = []
    thread = threading.Thread(target=lambda: found.append(filling.commit()))
    thread.start()
    thread.join()
    assert found == [[0, 1]]
    with pytest.raises(RuntimeError, match="expected open"):
        filling.commit()


@pytest.mark.parametrize("round", range(20))
def test_one_of_many_threads_commits(round):
    store = make()
    filling = store.fill(3)
    start, done, wrong = threading.Barrier(4), [], []

    def end(act):
        start.wait()
        try:
            done.append(act())
        except RuntimeError:
            pass
        except BaseException as error:
            wrong.append(error)

    acts = [filling.commit, filling.commit, filling.release, filling.__enter__]
    threads = [threading.Thread(target=end, args=[act]) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(error, (BufferError, ValueError)) for error in wrong), wrong
    committed = [ids for ids in done if isinstance(ids, list)]
    assert len(committed) <= 1
    filling.release()
    assert store.free_block_count == 8 - 3 * len(committed)
    store.check()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_has_blocks_of_its_own():
    store = make()
    with store.fill(2) as filling:
        filling.views[0][:] = b"\0" * len(filling.views[0])
        child = os.fork()
        if child == 0:
            filling.views[0][:4] = b"\0\0\x80\x3f"
            filling.commit()
            store.check()
            os._exit(0 if store.k_row(0, 0)[0] == 1 and store.free_block_count == 6 else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert store.k_row(0, 0)[0] == 0
