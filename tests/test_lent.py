"""Stores in memory of somebody else: the same store, whose bytes are seen where they were lent."""

import gc
import weakref

import numpy as np
import pytest
from foreign_support import DTYPES, RAW, given
from hostile import Array

import pagedkv

SHAPE = (3, 9, 4, 2, 6)  # layers, blocks, rows, heads, values


def zeros(dtype="float32", shape=SHAPE):
    return np.zeros(shape, RAW[dtype])


def lent(dtype="float32", **options):
    k, v = zeros(dtype), zeros(dtype, (*SHAPE[:-1], 5))
    if dtype == "bfloat16":
        options["dtype"] = dtype
    return pagedkv.PagedKvStore.from_arrays(k, v, **options), k, v


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("debug", [False, True])
def test_it_does_what_a_store_does(dtype, debug):
    """Appended, pushed, shared, copied on write, attended and given back beside a store of its own memory."""
    rng = np.random.default_rng(3)
    store, k, v = lent(dtype, debug=debug)
    own = pagedkv.PagedKvStore(4, 9, 2, 6, n_layers=3, v_head_dim=5, dtype=dtype, debug=debug)
    assert [
        getattr(store, name) for name in ("block_size", "total_blocks", "n_kv_heads", "head_dim", "v_head_dim")
    ] == [
        4,
        9,
        2,
        6,
        5,
    ]
    assert (store.n_layers, store.dtype, store.nbytes) == (3, dtype, k.nbytes + v.nbytes)
    outs = []
    k_new = rng.standard_normal((3, 10, 12), dtype=np.float32)
    v_new = rng.standard_normal((3, 10, 10), dtype=np.float32)
    q = rng.standard_normal((2, 4, 6), dtype=np.float32)
    for s in (own, store):
        cache, fork = pagedkv.PagedKvCache(), pagedkv.PagedKvCache()
        cache.append_contiguous(s, k_new, v_new, 10)
        fork.clone_from(cache)
        fork.push(s, k_new[:, 0] + 1, v_new[:, 0] + 1)
        with pagedkv.Step(s, [cache, fork]) as step:
            for layer in range(3):
                step.write(layer, k_new[layer, :2] - 1, v_new[layer, :2] - 1)
            outs.append(step.attend(2, q).copy())
        s.check([cache, fork])
        outs.append(cache.to_contiguous(s, layer=1).k.copy())
        if s is store:
            for position in range(11):
                block, row = cache.block_table[position // 4], position % 4
                source = k_new[:, position] if position < 10 else k_new[:, 0] - 1
                assert (k[:, block, row].reshape(3, 12) == given(dtype, source)).all()
        cache.release(s)
        fork.release(s)
        s.check()
    assert all((a == b).all() for a, b in zip(outs[:2], outs[2:], strict=True))


def test_values_that_are_there_stay():
    store, k, v = lent()
    k[...], v[...] = 7, 8
    cache = pagedkv.PagedKvCache()
    blocks = store.acquire(2)
    cache.adopt_blocks(blocks, 8, 4, store=store)
    assert (cache.to_contiguous(store).k == 7).all()
    cache.release(store)
    assert store.trim() == 0
    assert (k == 7).all()
    assert (v == 8).all()


def test_views_of_blocks_are_read_only():
    store, k, _ = lent()
    [block] = store.acquire(1)
    view = store.k_block(block)
    assert np.shares_memory(view, k)
    with pytest.raises(ValueError, match="read-only"):
        view[...] = 1
    k[0, block] = 2
    assert (view == 2).all()


def test_it_keeps_the_memory_alive():
    class Owner(np.ndarray):
        pass

    k = zeros().view(Owner)
    store = pagedkv.PagedKvStore.from_arrays(k, zeros())
    [block] = store.acquire(1)
    seen = weakref.ref(k)
    view = store.k_block(block)
    del k, store
    gc.collect()
    assert (view == 0).all()
    del view
    gc.collect()
    assert seen() is None


def test_rows_in_one_axis():
    k = zeros(shape=(3, 9, 4, 12))
    store = pagedkv.PagedKvStore.from_arrays(k, zeros(), 2)
    assert (store.n_kv_heads, store.head_dim) == (2, 6)
    with pytest.raises(ValueError, match="^n_kv_heads: expected"):
        pagedkv.PagedKvStore.from_arrays(k, k.copy())
    with pytest.raises(ValueError, match="^k: expected rows of 5 heads"):
        pagedkv.PagedKvStore.from_arrays(k, k.copy(), 5)
    with pytest.raises(ValueError, match="^k: expected rows of 3 heads"):
        pagedkv.PagedKvStore.from_arrays(zeros(), k, 3)


def frozen():
    array = zeros()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("error", "k"),
    [
        (TypeError, None),
        (TypeError, zeros().astype(np.float64)),
        (TypeError, zeros("bfloat16")),
        (TypeError, zeros().astype(">f4")),
        (TypeError, Array(zeros())),
        (ValueError, frozen()),
        (ValueError, zeros(shape=(3, 9, 4, 2, 12))[..., ::2]),
        (ValueError, zeros(shape=(3, 9, 8, 2, 6))[:, :, ::2]),
        (ValueError, zeros(shape=(9, 3, 4, 2, 6)).swapaxes(0, 1)),
        (ValueError, np.broadcast_to(zeros(shape=(4, 2, 6)), SHAPE)),
        (ValueError, zeros(shape=(3, 0, 4, 2, 6))),
        (ValueError, zeros(shape=(9, 4, 6))),
    ],
)
def test_memory_that_is_none(error, k):
    with pytest.raises(error, match="^k: expected"):
        pagedkv.PagedKvStore.from_arrays(k, zeros())
    with pytest.raises(error, match="^v: expected"):
        pagedkv.PagedKvStore.from_arrays(zeros(), k)


def test_k_and_v_that_do_not_go_together():
    for v in (
        zeros("float16"),
        zeros(shape=(3, 9, 4, 3, 6)),
        zeros(shape=(3, 8, 4, 2, 6)),
        zeros(shape=(2, 9, 4, 2, 6)),
    ):
        with pytest.raises(ValueError, match="^v: expected"):
            pagedkv.PagedKvStore.from_arrays(zeros(), v)
    k = zeros(shape=(4, 9, 4, 2, 6))
    with pytest.raises(ValueError, match="^v: expected an array that does not overlap k"):
        pagedkv.PagedKvStore.from_arrays(k[:3], k[1:])
    with pytest.raises(TypeError, match="^k: expected float16, got float32"):
        pagedkv.PagedKvStore.from_arrays(zeros(), zeros(), dtype="float16")
    with pytest.raises(TypeError, match="^k: expected int8"):
        pagedkv.PagedKvStore.from_arrays(zeros(), zeros(), dtype="int8")


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors(dtype):
    torch = pytest.importorskip("torch")
    k, v = torch.zeros(2, *SHAPE, dtype=getattr(torch, dtype))
    store, cache = pagedkv.PagedKvStore.from_arrays(k, v), pagedkv.PagedKvCache()
    assert store.dtype == dtype
    cache.append_contiguous(store, *np.ones((2, 3, 5, 12), np.float32), 5)
    assert (k[:, cache.block_table[0]] == 1).all()
    assert k.sum() == 3 * 5 * 12
