"""PagedKvStore: sizes, bytes, holders, and the books that it keeps."""

import copy
import gc
import os
import pickle
import weakref

import numpy as np
import pytest
from helpers import append, refused, rows, run_python, store_rows, store_state, unchanged, unsanitized
from proof_starved import can_starve

import pagedkv

# --- sizes ---


def test_sizes_are_what_was_asked_for():
    store = pagedkv.PagedKvStore(16, 8, 2, 64, n_layers=3, v_head_dim=32)
    assert (store.block_size, store.total_blocks, store.free_block_count) == (16, 8, 8)
    assert (store.n_kv_heads, store.head_dim, store.v_head_dim, store.n_layers) == (2, 64, 32, 3)
    assert (store.k_width, store.v_width) == (128, 64)
    assert store.nbytes == 3 * 8 * 16 * (128 + 64) * 4
    assert store.dtype == "float32"


def test_v_is_as_wide_as_k_unless_told():
    store = pagedkv.PagedKvStore(16, 8, 2, 64)
    assert (store.v_head_dim, store.v_width, store.n_layers) == (64, 128, 1)


@unsanitized
def test_a_large_store_costs_no_memory_until_it_is_written():
    before = resident_bytes()
    store = pagedkv.PagedKvStore(16, 1 << 16, 8, 128, n_layers=2)
    assert store.nbytes == 16 << 30
    assert resident_bytes() - before < 64 << 20
    cache = pagedkv.PagedKvCache()
    append(store, cache, 16)
    store.release(store.acquire(64))
    assert resident_bytes() - before < 64 << 20


def test_prefault_takes_the_memory_at_once():
    before = resident_bytes()
    store = pagedkv.PagedKvStore(16, 1024, 8, 128, prefault=True)
    assert resident_bytes() - before > store.nbytes * 0.9


def resident_bytes():
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            line = next(line for line in status if line.startswith("VmRSS:"))
    except OSError:
        pytest.skip("needs /proc")
    return int(line.split()[1]) << 10


def test_rows_beyond_2_to_the_31_elements_are_their_own():
    """Offsets of 32 bits would wrap: the last block would be an early one."""
    store = pagedkv.PagedKvStore(1024, (1 << 22) // 1024 + 1, 1, 1024)  # 2**32 elements and one more block
    ids = store.acquire(store.total_blocks)
    assert store.k_block(ids[-1]).size * ids[-1] >= 2**32
    cache = pagedkv.PagedKvCache()
    store.release([ids[-1], ids[0], ids[2]])
    k, v = append(store, cache, 2100)
    assert set(cache.block_table.tolist()) == {ids[-1], ids[0], ids[2]}
    got_k, got_v = store_rows(store, cache)
    assert np.array_equal(got_k, k[0])
    assert np.array_equal(got_v, v[0])
    contiguous = cache.to_contiguous(store)
    assert np.array_equal(contiguous.k, k[0])
    assert np.array_equal(contiguous.v, v[0])


def test_rows_beyond_2_to_the_31_elements_in_a_later_layer():
    store = pagedkv.PagedKvStore(1024, 1024, 1, 1024, n_layers=5)
    ids = store.acquire(1023)
    cache = pagedkv.PagedKvCache()
    k, v = append(store, cache, 3)
    assert cache.block_table.tolist() == [1023]
    for layer in (0, 4):
        assert np.array_equal(store_rows(store, cache, layer)[0], k[layer])
        assert np.array_equal(store_rows(store, cache, layer)[1], v[layer])
    store.release(ids)


# --- from_bytes ---


@pytest.mark.parametrize(("budget", "n_blocks"), [(960, 1), (1919, 1), (1920, 2), (96_000, 100)])
def test_from_bytes_takes_the_blocks_that_fit(budget, n_blocks):
    """A block is 3 layers x 4 rows x 2 heads x (6 + 4) values x 4 bytes = 960."""
    store = pagedkv.PagedKvStore.from_bytes(budget, 4, 2, 6, n_layers=3, v_head_dim=4)
    assert store.total_blocks == n_blocks
    assert store.nbytes == n_blocks * 960


def test_from_bytes_of_less_than_a_block_is_refused():
    with pytest.raises(ValueError, match="budget_bytes: expected at least 960"):
        pagedkv.PagedKvStore.from_bytes(959, 4, 2, 6, n_layers=3, v_head_dim=4)


def test_from_bytes_passes_the_options_on_and_refuses_unknown_ones():
    store = pagedkv.PagedKvStore.from_bytes(1 << 10, 4, 1, 1, debug=True, prefault=True)
    assert np.isnan(store.k_block(store.acquire()[0])).all()
    with pytest.raises(TypeError, match="colour"):
        pagedkv.PagedKvStore.from_bytes(1 << 10, 4, 1, 1, colour=True)


def test_from_bytes_of_a_subclass_is_of_the_subclass():
    class Store(pagedkv.PagedKvStore):
        pass

    assert type(Store.from_bytes(1 << 10, 4, 1, 1)) is Store


# --- reading ---


def test_views_are_of_the_rows(any_store, cache):
    store = any_store
    k, v = append(store, cache, 6)
    a, b = cache.block_table.tolist()
    for layer in range(store.n_layers):
        assert np.array_equal(store.k_block(a, layer), k[layer, :4])
        assert np.array_equal(store.v_block(b, layer)[:2], v[layer, 4:])
        assert np.array_equal(store.k_row(b, 1, layer), k[layer, 5])
        assert np.array_equal(store.v_row(a, 3, layer), v[layer, 3])
    assert store.k_row(a, 0).shape == (store.k_width,)
    assert store.v_row(a, 0).shape == (store.v_width,)
    assert store.k_block(a).shape == (4, store.k_width)
    assert store.v_block(a).shape == (4, store.v_width)


def test_views_show_later_rows_and_are_no_copies(store, cache):
    cache.reserve(store, 1)
    view = store.k_block(cache.block_table[0])
    k, _ = append(store, cache, 1)
    assert np.array_equal(view[0], k[0, 0])


@pytest.mark.parametrize("name", ["k_row", "v_row", "k_block", "v_block"])
def test_views_cannot_be_written_even_by_force(store, name):
    [block] = store.acquire()
    view = getattr(store, name)(block, 0)
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        view[:] = 0
    for derived in (view, view[:1], view.reshape(-1)):
        with pytest.raises(ValueError, match="WRITEABLE"):
            derived.flags.writeable = True


def test_views_outlive_the_store():
    store = pagedkv.PagedKvStore(4, 2, 1, 3)
    cache = pagedkv.PagedKvCache()
    k, _ = append(store, cache, 2)
    view = store.k_block(0)
    del store, cache
    gc.collect()
    assert np.array_equal(view[:2], k[0])


@pytest.mark.parametrize("name", ["k_row", "v_row", "k_block", "v_block"])
def test_a_free_block_cannot_be_read(store, name):
    ids = store.acquire(2)
    store.release([ids[1]])
    for block in (ids[1], 9):
        with refused(ValueError, "id", store):
            getattr(store, name)(block, 0)


def test_indices_of_reading_are_checked(layered):
    layered.acquire(1)
    for read, argument in [
        (lambda: layered.k_row(16, 0), "id"),
        (lambda: layered.k_row(-1, 0), "id"),
        (lambda: layered.v_row(0, 4), "offset"),
        (lambda: layered.v_row(0, -1), "offset"),
        (lambda: layered.k_row(0, 0, 3), "layer"),
        (lambda: layered.v_row(0, 0, -1), "layer"),
        (lambda: layered.k_block(0, 3), "layer"),
        (lambda: layered.v_block(2**32), "id"),
        (lambda: layered.refcount(16), "id"),
        (lambda: layered.refcount(-1), "id"),
    ]:
        with refused(IndexError, argument, layered):
            read()


# --- copy_block ---


def test_copy_block_copies_all_rows_of_all_layers(any_store, cache):
    store = any_store
    append(store, cache, 4)
    [source] = cache.block_table.tolist()
    [target] = store.acquire()
    store.copy_block(source, target)
    for layer in range(store.n_layers):
        assert np.array_equal(store.k_block(target, layer), store.k_block(source, layer))
        assert np.array_equal(store.v_block(target, layer), store.v_block(source, layer))


def test_copy_block_to_itself_is_no_change(store):
    [block] = store.acquire()
    store.retain([block])
    with unchanged(store):
        store.copy_block(block, block)


def test_copy_block_never_writes_a_shared_block(store):
    a, b = store.acquire(2)
    store.retain([a, b])
    with refused(ValueError, "dst", store):
        store.copy_block(a, b)


def test_copy_block_wants_held_blocks(store):
    a, b = store.acquire(2)
    store.release([b])
    for source, target, argument, error in [
        (a, b, "dst", ValueError),
        (b, a, "src", ValueError),
        (b, b, "src", ValueError),
        (16, a, "src", IndexError),
        (a, -1, "dst", IndexError),
    ]:
        with refused(error, argument, store):
            store.copy_block(source, target)


# --- debug, counters, check ---


def test_debug_fills_what_is_taken_with_nan(layered):
    for block in layered.acquire(3):
        for layer in range(3):
            assert np.isnan(layered.k_block(block, layer)).all()
            assert np.isnan(layered.v_block(block, layer)).all()


@pytest.mark.parametrize("let_go", ["release ids", "cache", "truncate", "drop_before", "collect"])
def test_debug_fills_what_is_given_back_with_nan(store, let_go):
    cache = pagedkv.PagedKvCache()
    append(store, cache, 8)
    view = store.v_block(cache.block_table[0]), store.v_block(cache.block_table[1])
    if let_go == "release ids":
        store.retain(cache.block_table)
        ids = cache.block_table
        cache.release(store)
        assert not np.isnan(view[0]).any()
        store.release(ids)
    elif let_go == "cache":
        cache.release(store)
    elif let_go == "truncate":
        cache.truncate(store, 0)
    elif let_go == "drop_before":
        cache.drop_before(store, 8)
    else:
        del cache
    assert np.isnan(view[0]).all()
    assert np.isnan(view[1]).all()


def test_debug_checks_the_books_after_every_change(store, cache):
    """A reference that was not the caller's to give back is missed at the next change."""
    append(store, cache, 2)
    other = cache.clone()
    store.release(other.block_table)
    store.release(other.block_table)
    with pytest.raises(pagedkv.PagedKvError, match="block 0 is in 1 tables and has 0 holders"):
        append(store, cache, 1)


def test_without_debug_nothing_is_filled():
    store = pagedkv.PagedKvStore(4, 4, 1, 2)
    cache = pagedkv.PagedKvCache()
    k, _ = append(store, cache, 4)
    view = store.k_block(0)
    cache.release(store)
    store.acquire()
    assert np.array_equal(view, k[0])


def test_stats_count_what_happened():
    store = pagedkv.PagedKvStore(4, 8, 1, 2)
    cache = pagedkv.PagedKvCache()
    append(store, cache, 6)  # 2 blocks
    clone = cache.clone()
    append(store, clone, 1)  # copies the tail
    ids = store.acquire(4)
    with pytest.raises(pagedkv.PagedStoreExhausted):
        store.acquire(2)
    store.release(ids)
    clone.release(store)
    stats = store.stats()
    assert stats._asdict() == {
        "total_blocks": 8,
        "free_blocks": 6,
        "held_blocks": 2,
        "peak_held_blocks": 7,
        "blocks_acquired": 7,
        "blocks_released": 5,
        "copies_on_write": 1,
        "exhaustions": 1,
        "nbytes": store.nbytes,
    }
    assert isinstance(stats, pagedkv.StoreStats)
    with pytest.raises(AttributeError):
        stats.free_blocks = 0
    cache.release(store)
    assert stats.free_blocks == 6, "a snapshot"


def test_check_accepts_what_is_right(store, cache):
    append(store, cache, 6)
    clone = cache.clone()
    store.check()
    store.check([cache, clone])
    store.check(iter([cache]))
    store.check([pagedkv.PagedKvCache()])


def test_check_finds_a_reference_that_is_missing(store, cache):
    append(store, cache, 6)
    clone = cache.clone()
    store.release(cache.block_table[:1])  # one that the caller does not hold
    store.check([cache])
    with pytest.raises(pagedkv.PagedKvError, match="block 0 is in 2 tables and has 1 holders"):
        store.check([cache, clone])
    store.retain(cache.block_table[:1])


def test_check_refuses_what_is_no_sequence_of_this_store(store, cache):
    other = pagedkv.PagedKvStore(4, 2, 1, 1)
    append(other, cache, 1)
    with pytest.raises(ValueError, match="caches"):
        store.check([cache])
    with pytest.raises(TypeError, match="caches"):
        store.check([5])


# --- as an object ---


def test_a_store_cannot_be_copied_or_pickled(store):
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="PagedKvStore"):
            attempt(store)


def test_a_store_can_be_referred_to_weakly_and_goes(store):
    other = pagedkv.PagedKvStore(1, 1, 1, 1)
    reference = weakref.ref(other)
    cache = pagedkv.PagedKvCache()
    append(other, cache, 1)
    del other
    assert reference() is cache.store, "held by its sequence"
    cache.release(reference())
    gc.collect()
    assert reference() is None


def test_repr_tells_the_sizes(store):
    assert repr(store).startswith("PagedKvStore(block_size=4, total_blocks=16, n_kv_heads=2, head_dim=3")


def test_init_runs_once(store):
    state = store_state(store)
    with pytest.raises(RuntimeError, match="__init__"):
        store.__init__(1, 1, 1, 1)
    assert store_state(store) == state


def test_a_store_without_init_refuses_everything():
    store = pagedkv.PagedKvStore.__new__(pagedkv.PagedKvStore)
    cache = pagedkv.PagedKvCache()
    assert (store.total_blocks, store.free_block_count) == (0, 0)
    with pytest.raises(pagedkv.PagedStoreExhausted):
        store.acquire()
    with pytest.raises((IndexError, ValueError)):
        store.k_row(0, 0)
    q = np.zeros((1, 1, 1), np.float32)
    for use in (
        lambda: cache.push(store, rows(1), rows(1)),
        lambda: cache.append_contiguous(store, rows(0, 1), rows(0, 1), 0),
        lambda: cache.reserve(store, 1),
        lambda: cache.release(store),
        lambda: cache.to_contiguous(store),
        lambda: pagedkv.Step(store, cache),
        lambda: pagedkv.reorder(store, [cache], [0]),
        lambda: pagedkv.paged_attention(q, store, cache),
    ):
        with pytest.raises(RuntimeError, match="^store: its __init__ has not run"):
            use()
    repr(store)
    store.check()


def test_sizes_cannot_be_changed(store):
    for name in ("block_size", "total_blocks", "n_layers", "k_width", "free_block_count", "dtype", "nbytes"):
        with pytest.raises(AttributeError):
            setattr(store, name, 1)


@can_starve
@unsanitized
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_what_there_is_no_memory_to_make_is_not_made():
    """Whatever a store, its books or a model's stores allocate first may fail: what was begun goes again."""
    run_python("""
        import _testcapi, os
        import numpy as np
        import pagedkv
        from pagedkv import LayerShape, ModelStores, PagedKvStore

        shapes, store = [LayerShape(None, 1, 2), LayerShape(8, 1, 3, 2)], PagedKvStore(4, 8, 1, 2)
        k, v = np.zeros((2, 1, 4, 4, 1, 2), np.float32)
        batch = [[1]], [4]
        makers = [
            lambda: PagedKvStore(4, 8, 1, 2),
            lambda: PagedKvStore.__new__(PagedKvStore),
            lambda: PagedKvStore.from_bytes(10000, 4, 1, 2, max_bytes=20000),
            lambda: PagedKvStore.from_arrays(k, v),
            lambda: ModelStores(shapes, 8),
            lambda: ModelStores.from_bytes(10000, shapes),
            lambda: pagedkv.PrefixCache(store),
            lambda: pagedkv.PrefixHandle(),
            lambda: pagedkv.PagedKvCache(),
            lambda: pagedkv.KvCache(1, 2),
            lambda: pagedkv.KvBlockPool(4, 8),
            lambda: pagedkv.AttentionBatch(*batch, block_size=4),
            lambda: store.fill(2),
            lambda: store.pieces([]),
        ]
        for number, make in enumerate(makers):
            for width in (1, 25):
                refused = 0
                for n in range(90):
                    child = os.fork()
                    if child == 0:
                        made = make()
                        del made
                        status = 0
                        _testcapi.set_nomemory(n, n + width)
                        try:
                            make()
                        except (MemoryError, SystemError):  # NumPy leaves some unsaid
                            status = 1
                        finally:
                            _testcapi.remove_mem_hooks()
                        os._exit(status)
                    status = os.waitpid(child, 0)[1]
                    assert status in (0, 256), (number, width, n, status)
                    refused += status == 256
                assert refused, (number, width)
    """)
