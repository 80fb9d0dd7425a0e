"""What a caller should not do: sources that are views of the store, references given back twice, constructors
that are entered again. Nothing is misread, no other block is lost, the interpreter lives."""

import gc

import numpy as np
import pytest
from helpers import append, rows, unchanged

import pagedkv

ROW = np.ones(1, np.float32)


class Reenters:
    """An integer that first does something else."""

    def __init__(self, value, act):
        self.value, self.act = value, act

    def __index__(self):
        self.act()
        return self.value


@pytest.mark.parametrize("n", [7, 7000])  # by plain copies, and by streaming ones
def test_rows_of_the_same_block_are_a_source_like_any_other(n):
    store, cache = pagedkv.PagedKvStore(8192, 2, 1, 128), pagedkv.PagedKvCache()
    k, v = rows(8000, 128), rows(8000, 128)
    cache.append_contiguous(store, k, v, 8000)
    cache.truncate(store, 10)  # what lies past it is still there to be read
    cache.append_contiguous(store, store.k_block(0)[5:5 + n], store.v_block(0)[5:5 + n], n)
    cache.push(store, store.k_block(0)[0], store.v_block(0)[0])
    got = cache.to_contiguous(store)
    np.testing.assert_array_equal(got.k, np.concatenate([k[:10], k[5:5 + n], k[:1]]))
    np.testing.assert_array_equal(got.v, np.concatenate([v[:10], v[5:5 + n], v[:1]]))


def test_a_step_takes_rows_of_the_store():
    store, caches = pagedkv.PagedKvStore(4, 8, 1, 3), [pagedkv.PagedKvCache() for _ in range(3)]
    k, _ = append(store, caches[0], 4)
    with pagedkv.Step(store, caches[1:], 2) as step:
        step.write(0, store.k_block(0), store.k_block(0))
    np.testing.assert_array_equal(caches[2].to_contiguous(store).v, k[0, 2:])


@pytest.mark.parametrize("give_back", [
    lambda store, cache: cache.release(store),
    lambda store, cache: cache.truncate(store, 0),
    lambda store, cache: cache.drop_before(store, 16),
])
def test_a_reference_that_somebody_else_gave_back_is_told_and_costs_no_other(give_back):
    store, cache = pagedkv.PagedKvStore(4, 8, 1, 1), pagedkv.PagedKvCache()
    append(store, cache, 16)
    store.release([2])  # not the caller's to give
    with unchanged(store), pytest.raises(pagedkv.PagedKvError, match="block 2"):
        give_back(store, cache)
    del cache
    gc.collect()
    assert store.free_block_count == 8
    store.check()


def test_a_clone_cannot_replace_blocks_whose_store_is_unknown():
    store, source, adopted = pagedkv.PagedKvStore(4, 8, 1, 1), pagedkv.PagedKvCache(), pagedkv.PagedKvCache()
    append(store, source, 3)
    adopted.adopt_blocks(store.acquire(2), 8, 4)
    with unchanged(store, source), pytest.raises(RuntimeError, match="store is not known"):
        adopted.clone_from(source)
    adopted.release(store)
    assert store.free_block_count == 7


def test_constructors_are_entered_once():
    store = pagedkv.PagedKvStore.__new__(pagedkv.PagedKvStore)
    inner = (4, 100, 1, 1)
    with pytest.raises(RuntimeError, match="once"):
        store.__init__(4, 1, 1, Reenters(1, lambda: pagedkv.PagedKvStore.__init__(store, *inner)))
    assert store.total_blocks == 100
    cache = pagedkv.KvCache.__new__(pagedkv.KvCache)
    cache.__init__(64, 64)
    cache.push(*rows(2, 64 * 64))
    assert (cache.seq_len, cache.k.shape) == (1, (1, 4096))
    with pytest.raises(RuntimeError, match="once"):
        cache.__init__(64, 64)


@pytest.mark.parametrize("table", [np.array([3 * 10**9]), np.array([-2]), np.array([0.5])])
def test_check_believes_no_table(table):
    store = pagedkv.PagedKvStore(4, 8, 1, 1)
    liar = type("Liar", (), {"block_table": table, "store": store})()
    with pytest.raises((IndexError, TypeError), match="block_table"):
        store.check([liar])


def test_debug_fills_every_block_that_becomes_free():
    store, cache = pagedkv.PagedKvStore(4, 4, 1, 1, debug=True), pagedkv.PagedKvCache()
    [block] = store.acquire()
    rows_of_block = store.k_block(block)
    store.retain([block])
    store.release([block, block])
    assert np.isnan(rows_of_block).all()
    cache.push(store, ROW, ROW)
    rows_of_tail = store.k_block(int(cache.block_table[0]))
    clone = cache.clone()
    with pagedkv.Step(store, [cache, clone]) as step:
        step.write(0, np.ones((2, 1), np.float32), np.ones((2, 1), np.float32))
    assert np.isnan(rows_of_tail).all()


def test_views_stay_read_only():
    cache = pagedkv.KvCache(1, 1)
    cache.push(ROW, ROW)
    for view in (cache.k, cache.v):
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
