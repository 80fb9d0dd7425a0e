"""Hostile input: each gets an error that names the argument, and leaves everything as it was."""

import contextlib
import gc
import pickle
import sys

import numpy as np
import pytest
from helpers import append, cache_state, contiguous_state, refused, rows, run_python, unchanged, unsanitized
from hostile import Array, Indexed, Liar, Unwilling, refuse

import pagedkv

# --- rows -----------------------------------------------------------------------------------------


def misaligned(array):
    memory = np.zeros(array.nbytes + 1, np.uint8)
    moved = memory[1:].view(np.float32).reshape(array.shape)
    moved[...] = array
    assert not moved.flags.aligned
    return moved


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def with_negative_strides(array):
    return array[..., ::-1].copy()[..., ::-1]


def with_gaps(array):
    wide = np.zeros((*array.shape[:-1], array.shape[-1] * 3), np.float32)
    wide[..., ::3] = array
    return wide[..., ::3]


SPELLINGS = {
    "fortran": np.asfortranarray,
    "negative strides": with_negative_strides,
    "gaps": with_gaps,
    "read-only": read_only,
    "misaligned": misaligned,
    "lying subclass": lambda array: array.view(Liar),
    "masked nowhere": lambda array: np.ma.masked_array(array, mask=np.zeros(array.shape, bool)),
    "matrix": lambda array: array.view(np.matrix) if array.ndim == 2 else array,
    "memoryview": memoryview,
    "__array__": Array,
    "explicit native byte order": lambda array: array.astype(f"{'<' if sys.byteorder == 'little' else '>'}f4"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("n_layers", [1, 3])
def test_rows_in_any_memory_order_are_never_misread(spelling, n_layers):
    spell = SPELLINGS[spelling]
    store = pagedkv.PagedKvStore(4, 8, 2, 3, v_head_dim=2, n_layers=n_layers, debug=True)
    cache = pagedkv.PagedKvCache()
    layers = () if n_layers == 1 else (n_layers,)
    k, v = rows(n_layers, 6, 6), rows(n_layers, 6, 4)
    cache.push(store, spell(k[:, 0].reshape(*layers, 6)), spell(v[:, 0].reshape(*layers, 4)))
    cache.push(store, spell(k[:, 1].reshape(*layers, 2, 3)), spell(v[:, 1].reshape(*layers, 2, 2)))
    cache.append_contiguous(store, spell(k[:, 2:5].reshape(*layers, 3, 6)), spell(v[:, 2:5].reshape(*layers, 3, 4)), 3)
    cache.append_contiguous(
        store, spell(k[:, 5:].reshape(*layers, 1, 2, 3)), spell(v[:, 5:].reshape(*layers, 1, 2, 2)), 1
    )
    contiguous = pagedkv.KvCache(2, 3, v_head_dim=2)
    contiguous.push(spell(k[0, 0].reshape(2, 3)), spell(v[0, 0].reshape(2, 2)))
    contiguous.extend(spell(k[0, 1:].copy()), spell(v[0, 1:].copy()))
    for layer in range(n_layers):
        got = cache.to_contiguous(store, layer=layer)
        assert np.array_equal(got.k, k[layer])
        assert np.array_equal(got.v, v[layer])
    assert np.array_equal(contiguous.k, k[0])
    assert np.array_equal(contiguous.v, v[0])


def test_every_bit_of_a_row_is_kept(store, cache):
    """NaNs with their payloads, infinities, denormals and the negative zero are stored as they are."""
    odd = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0xFF800000, 0x00000001, 0x80000000], np.uint32).view(np.float32)
    cache.push(store, odd, odd[2:])
    cache.append_contiguous(store, odd[None], odd[None, 2:], 1)
    out = cache.to_contiguous(store)
    assert out.k.tobytes() == odd.tobytes() * 2
    assert out.v.tobytes() == odd[2:].tobytes() * 2


NOT_FLOAT32 = {
    "None": lambda array: None,
    "float64": lambda array: array.astype(np.float64),
    "float16": lambda array: array.astype(np.float16),
    "int32": lambda array: array.astype(np.int32),
    "bool": lambda array: array.astype(bool),
    "complex64": lambda array: array.astype(np.complex64),
    "object": lambda array: array.astype(object),
    "swapped bytes": lambda array: array.astype(f"{'>' if sys.byteorder == 'little' else '<'}f4"),
    "swapped bytes behind __array__": lambda array: Array(
        array.astype(f"{'>' if sys.byteorder == 'little' else '<'}f4")
    ),
    "list": lambda array: array.tolist(),
    "string": lambda array: "rows",
    "bytes": lambda array: array.tobytes(),
    "record": lambda array: array.view([("x", np.float32)]),
    "dict": lambda array: {"k": array},
    "__array__ of float64": lambda array: Array(array.astype(np.float64)),
}


def writers(world):
    """Every call that takes rows: what it is given, its K and V, and their names."""
    w = world
    return [
        (lambda k, v: w.cache.push(w.store, k, v), w.k(1)[:, 0], w.v(1)[:, 0], "k_step", "v_step"),
        (lambda k, v: w.cache.append_contiguous(w.store, k, v, 2), w.k(2), w.v(2), "k", "v"),
        (w.contiguous.push, np.zeros(6, np.float32), np.zeros(6, np.float32), "k_step", "v_step"),
        (w.contiguous.extend, np.zeros((2, 6), np.float32), np.zeros((2, 6), np.float32), "k", "v"),
    ]


def assert_both_refused(world, spoil, error):
    """Spoil K alone and V alone of every call."""
    for call, k, v, k_name, v_name in writers(world):
        before = contiguous_state(world.contiguous)
        with refused(error, f"{k_name}: expected float32 [", world.store, world.cache):
            call(spoil(k), v)
        with refused(error, f"{v_name}: expected float32 [", world.store, world.cache):
            call(k, spoil(v))
        assert contiguous_state(world.contiguous) == before


@pytest.mark.parametrize("spoiled", NOT_FLOAT32)
def test_rows_that_are_not_native_float32(world, spoiled):
    assert_both_refused(world, NOT_FLOAT32[spoiled], TypeError)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda array: array[..., :-1],
        lambda array: np.concatenate([array, array], -1),
        lambda array: array[..., None],
        lambda array: array[None, None],
        lambda array: array.T if array.ndim > 1 else array[:3],
        lambda array: array.reshape(-1) if array.ndim > 1 else array[:1],
        lambda array: array.reshape(*array.shape[:-1], -1, 1),
        lambda array: array[..., 0],
        lambda array: np.float32(0),
        lambda array: np.zeros((0,) * array.ndim, np.float32),
        lambda array: np.zeros((1,) * 64, np.float32),
        lambda array: np.broadcast_to(np.float32(0), (2**31, *array.shape)),
    ],
)
def test_rows_of_another_shape(world, spoil):
    assert_both_refused(world, spoil, ValueError)


@pytest.mark.parametrize("n_rows", [0, 1, 3, 1000])
def test_a_count_that_is_not_the_rows(world, n_rows):
    with refused(ValueError, "k: expected", world.store, world.cache):
        world.cache.append_contiguous(world.store, world.k(n_rows), world.v(2), 2)
    with refused(ValueError, "v: expected", world.store, world.cache):
        world.cache.append_contiguous(world.store, world.k(2), world.v(n_rows), 2)
    contiguous = pagedkv.KvCache(2, 3)
    with pytest.raises(ValueError, match="v: expected"):
        contiguous.extend(np.zeros((2, 6), np.float32), np.zeros((n_rows, 6), np.float32))
    assert contiguous.seq_len == 0


def test_an_array_that_raises(world):
    for call, k, v, _, _ in writers(world):
        for arguments in ((Array(k, refuse), v), (k, Array(v, refuse))):
            with unchanged(world.store, world.cache), pytest.raises(Unwilling):
                call(*arguments)


# --- code of the caller that runs in the middle ------------------------------------------------------


@pytest.mark.parametrize(
    "interfere",
    [
        lambda w: w.cache.release(w.store),
        lambda w: w.cache.truncate(w.store, 1),
        lambda w: w.cache.drop_before(w.store, 5),
        lambda w: append(w.store, w.cache, 20),
        lambda w: w.store.acquire(w.store.free_block_count),
        lambda w: w.cache.clone_from(pagedkv.PagedKvCache()),
    ],
)
def test_an_argument_that_changes_the_sequence_while_it_is_read(world, interfere):
    """The call sees the sequence either as it was or as it became: it works or refuses, and the books are right."""
    w = world
    calls = [
        lambda act: w.cache.push(w.store, Array(w.k(1)[:, 0], act), w.v(1)[:, 0]),
        lambda act: w.cache.push(w.store, w.k(1)[:, 0], Array(w.v(1)[:, 0], act)),
        lambda act: w.cache.append_contiguous(w.store, Array(w.k(2), act), w.v(2), 2),
        lambda act: w.cache.append_contiguous(w.store, w.k(2), w.v(2), Indexed(2, act)),
        lambda act: w.cache.reserve(w.store, Indexed(9, act)),
        lambda act: w.cache.truncate(w.store, Indexed(3, act)),
        lambda act: w.cache.drop_before(w.store, Indexed(6, act)),
        lambda act: w.cache.to_contiguous(w.store, layer=Indexed(1, act)),
        lambda act: w.cache.blocks_needed_for(w.store, Indexed(9, act)),
        lambda act: w.store.retain([Indexed(0, act), 1]),
        lambda act: w.store.release([0, Indexed(1, act)]),
        lambda act: w.store.copy_block(0, Indexed(1, act)),
        lambda act: w.store.copy_block(Indexed(0, act), 1),
        lambda act: w.store.k_row(0, Indexed(1, act), 1),
        lambda act: w.store.acquire(Indexed(3, act)),
        lambda act: pagedkv.Step(w.store, [w.cache], Indexed(3, act)).__enter__().rollback(),
    ]
    for call in calls:
        w.__init__()
        done = []
        with contextlib.suppress(ValueError, pagedkv.PagedStoreExhausted):
            call(lambda done=done: done.append(interfere(w)) if not done else None)
        assert done
        w.store.check()
        assert w.cache.seq_len <= w.cache.capacity


def test_ids_that_change_while_they_are_read(world):
    ids = [0, 1, 0]
    ids[0] = Indexed(0, ids.clear)
    world.store.retain(ids)
    assert [world.store.refcount(block) for block in (0, 1)] == [3, 2]


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        (1 << 40, 1 << 20, 1 << 10, 1 << 10),
        (1 << 20, 2**31 - 1, 1 << 10, 1),
        (1 << 62, 1, 1, 1),
        (1, 1, 1 << 62, 1 << 62),
        (2**63 - 1, 2**31 - 1, 2**63 - 1, 2**63 - 1),
        (1, 1, 1, 1 << 45),
    ],
)
def test_a_store_that_cannot_be_allocated(sizes):
    for _ in range(3):
        with pytest.raises(MemoryError):
            pagedkv.PagedKvStore(*sizes)
        with pytest.raises(MemoryError):
            pagedkv.PagedKvStore(*sizes, n_layers=2, debug=True)


@unsanitized
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of address space that holds")
def test_a_store_whose_values_cannot_be_allocated_leaves_no_keys_behind():
    """K fits, V does not; in a process of its own with little address space, where a leak would show."""
    run_python("""
        import resource, numpy, pagedkv
        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
        for _ in range(20):
            for make in (
                lambda: pagedkv.PagedKvStore(1, 1, 1, 1 << 25, v_head_dim=1 << 29),
                lambda: pagedkv.KvCache.with_capacity(1, 1 << 25, 1, v_head_dim=1 << 29),
            ):
                try:
                    make()
                except MemoryError:
                    continue
                raise SystemExit("it fitted")
        store, cache = pagedkv.PagedKvStore(1, 1, 1, 1 << 25), pagedkv.PagedKvCache()
        row = numpy.ones(1 << 25, numpy.float32)
        cache.push(store, row, row)
    """)


def test_refused_calls_keep_no_references(world):
    """A thousand refusals leave the reference counts of all that was passed where they were."""
    k, v = world.k(1)[:, 0], world.v(2)[:, 0]
    bad = np.zeros(5, np.float32)
    calls = [
        lambda: world.cache.push(world.store, bad, v),
        lambda: world.cache.push(world.store, k, bad),
        lambda: world.cache.append_contiguous(world.store, k, bad, 1),
        lambda: world.cache.reserve(world.store, 1000),
        lambda: world.store.release([7]),
        lambda: world.store.retain(bad),
        lambda: world.cache.adopt_blocks([0], 4, 4, store=world.store),
        lambda: world.cache.to_contiguous(world.store, out=bad),
        lambda: world.cache.truncate(world.store, 100),
        lambda: pagedkv.Step(world.store, [world.cache, world.cache]),
        lambda: pagedkv.Step(world.store, [world.cache], 1000).__enter__(),
    ]

    def refuse_all():
        for call in calls:
            try:
                call()
            except (TypeError, ValueError, pagedkv.PagedStoreExhausted):
                continue
            raise AssertionError("was not refused")

    refuse_all()
    gc.collect()
    things = [world.store, world.cache, k, v, bad]
    before = [sys.getrefcount(thing) for thing in things]
    for _ in range(1000):
        refuse_all()
    gc.collect()
    assert [sys.getrefcount(thing) for thing in things] == before


# --- the errors themselves ---------------------------------------------------------------------------


def test_errors_have_one_base():
    for error in (pagedkv.PagedStoreExhausted(1, 2, 3), pagedkv.KvPoolExhausted(1, 2, 3)):
        assert isinstance(error, pagedkv.PagedKvError)
        assert isinstance(error, Exception)
        assert (error.needed, error.free, error.total) == (1, 2, 3)


def test_errors_survive_pickling(store):
    with pytest.raises(pagedkv.PagedStoreExhausted) as caught:
        store.acquire(17)
    pool_error = pagedkv.KvPoolExhausted(4, 3, 8)
    for error in (caught.value, pool_error, pagedkv.PagedKvError("block 3 is twice in the free list")):
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            copied = pickle.loads(pickle.dumps(error, protocol))
            assert type(copied) is type(error)
            assert str(copied) == str(error)
            assert vars(copied) == vars(error)


def test_a_refusal_leaves_a_sequence_that_works(world):
    state = cache_state(world.cache)
    for _ in range(10):
        with pytest.raises(pagedkv.PagedStoreExhausted):
            append(world.store, world.cache, 100)
        with pytest.raises(ValueError, match="new_len"):
            world.cache.truncate(world.store, 100)
    assert cache_state(world.cache) == state
    append(world.store, world.cache, 2)
    world.cache.release(world.store)
    assert world.store.free_block_count == 8
