"""Hostile input: each gets an error that names the argument, and leaves everything as it was."""

import decimal
import gc
import pickle
import sys

import numpy as np
import pytest
from helpers import append, cache_state, contiguous_state, refused, rows, run_python, unchanged

import pagedkv

# --- integers -------------------------------------------------------------------------------------

NOT_INTEGERS = [
    None,
    True,
    False,
    np.True_,
    2.5,
    2.0,
    np.float32(2),
    "2",
    b"2",
    [2],
    (2,),
    2j,
    decimal.Decimal(2),
    np.array([2]),
    np.array(2.0),
    np.array(True),
    object(),
    int,
]
TOO_SMALL = [-1, -(2**31), -(2**63), -(2**64), -(10**5000)]
TOO_LARGE = [2**63 - 1, 2**63, 2**64, 2**64 + 1, 10**5000]


class World:
    """A store of three layers, a sequence of six positions in it, and a contiguous cache."""

    def __init__(self):
        self.store = pagedkv.PagedKvStore(4, 8, 2, 3, v_head_dim=2, n_layers=3)
        self.cache = pagedkv.PagedKvCache()
        append(self.store, self.cache, 6)
        self.contiguous = pagedkv.KvCache(2, 3)
        self.contiguous.extend(rows(3, 6), rows(3, 6))
        self.pool = pagedkv.KvBlockPool(4, 8)

    def k(self, n):
        return np.zeros((3, n, 6), np.float32)

    def v(self, n):
        return np.zeros((3, n, 4), np.float32)


@pytest.fixture
def world():
    return World()


SIZES = {
    "block_size": lambda w, n: pagedkv.PagedKvStore(n, 1, 1, 1),
    "total_blocks": lambda w, n: pagedkv.PagedKvStore(1, n, 1, 1),
    "n_kv_heads": lambda w, n: pagedkv.PagedKvStore(1, 1, n, 1),
    "head_dim": lambda w, n: pagedkv.PagedKvStore(1, 1, 1, n),
    "n_layers": lambda w, n: pagedkv.PagedKvStore(1, 1, 1, 1, n_layers=n),
    "v_head_dim": lambda w, n: pagedkv.PagedKvStore(1, 1, 1, 1, v_head_dim=n),
    "budget_bytes": lambda w, n: pagedkv.PagedKvStore.from_bytes(n, 1, 1, 1),
    "block_size of from_bytes": lambda w, n: pagedkv.PagedKvStore.from_bytes(100, n, 1, 1),
    "head_dim of from_bytes": lambda w, n: pagedkv.PagedKvStore.from_bytes(100, 1, 1, n),
    "n_layers of from_bytes": lambda w, n: pagedkv.PagedKvStore.from_bytes(100, 1, 1, 1, n_layers=n),
    "n_kv_heads of KvCache": lambda w, n: pagedkv.KvCache(n, 1),
    "head_dim of KvCache": lambda w, n: pagedkv.KvCache(1, n),
    "v_head_dim of KvCache": lambda w, n: pagedkv.KvCache(1, 1, v_head_dim=n),
    "block_size of KvBlockPool": lambda w, n: pagedkv.KvBlockPool(n, 1),
    "total_blocks of KvBlockPool": lambda w, n: pagedkv.KvBlockPool(1, n),
    "total_blocks of resize": lambda w, n: w.pool.resize(n),
    "block_size of adopt_blocks": lambda w, n: pagedkv.PagedKvCache().adopt_blocks([0], 0, n, store=w.store),
    "n of set_num_threads": lambda w, n: pagedkv.set_num_threads(n),
}
COUNTS = {
    "n of acquire": lambda w, n: w.store.acquire(n),
    "count": lambda w, n: w.cache.append_contiguous(w.store, w.k(1), w.v(1), n),
    "n_new of blocks_needed_for": lambda w, n: w.cache.blocks_needed_for(w.store, n),
    "n_new of reserve": lambda w, n: w.cache.reserve(w.store, n),
    "seq_len": lambda w, n: pagedkv.PagedKvCache().adopt_blocks([0], n, 4, store=w.store),
    "new_len": lambda w, n: w.cache.truncate(w.store, n),
    "new_len of can_truncate_to": lambda w, n: w.cache.can_truncate_to(n),
    "position": lambda w, n: w.cache.drop_before(w.store, n),
    "max_seq_len of with_capacity": lambda w, n: pagedkv.KvCache.with_capacity(1, 1, n),
    "max_seq_len of with_pool": lambda w, n: pagedkv.KvCache.with_pool(1, 1, w.pool, n),
    "n of KvCache.truncate": lambda w, n: w.contiguous.truncate(n),
    "query_lens": lambda w, n: pagedkv.Step(w.store, [w.cache], n),
    "query_lens of a list": lambda w, n: pagedkv.Step(w.store, [w.cache], [n]),
}
INDICES = {
    "id of k_row": lambda w, n: w.store.k_row(n, 0),
    "id of v_block": lambda w, n: w.store.v_block(n),
    "id of refcount": lambda w, n: w.store.refcount(n),
    "offset of k_row": lambda w, n: w.store.k_row(0, n),
    "offset of v_row": lambda w, n: w.store.v_row(0, n),
    "layer of k_row": lambda w, n: w.store.k_row(0, 0, n),
    "layer of v_block": lambda w, n: w.store.v_block(0, n),
    "layer of to_contiguous": lambda w, n: w.cache.to_contiguous(w.store, layer=n),
    "src": lambda w, n: w.store.copy_block(n, 0),
    "dst": lambda w, n: w.store.copy_block(0, n),
    "ids of retain": lambda w, n: w.store.retain([n]),
    "ids of release": lambda w, n: w.store.release([0, n]),
    "block_table": lambda w, n: pagedkv.PagedKvCache().adopt_blocks([0, n], 0, 4),
}
MAY_BE_NONE = {"v_head_dim", "v_head_dim of KvCache"}


@pytest.mark.parametrize("value", NOT_INTEGERS, ids=repr)
@pytest.mark.parametrize("name", [*SIZES, *COUNTS, *INDICES])
def test_what_is_no_integer(world, name, value):
    if value is None and name in MAY_BE_NONE:
        pytest.skip("None stands for head_dim")
    call = {**SIZES, **COUNTS, **INDICES}[name]
    if name == "query_lens" and isinstance(value, (list, tuple, np.ndarray)) and np.ndim(value):
        pytest.skip("one for each cache")
    with refused(TypeError, name.split()[0], world.store, world.cache):
        call(world, value)


@pytest.mark.parametrize(
    "value", [*TOO_SMALL, 0, 2**62], ids=lambda value: f"{value:.3g}" if abs(value) < 2**70 else "huge"
)
@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_are_too_small(world, name, value):
    if value > 0:
        pytest.skip("sizes that are too large are another test")
    with refused(ValueError, name.split()[0], world.store, world.cache):
        SIZES[name](world, value)


@pytest.mark.parametrize("value", TOO_LARGE, ids=["2**63-1", "2**63", "2**64", "2**64+1", "10**5000"])
@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_are_too_large(world, name, value):
    """Beyond what can be counted, or what memory can hold; a budget may be any number that is one."""
    if value == 2**63 - 1 and name in ("budget_bytes", "block_size of KvBlockPool", "total_blocks of KvBlockPool"):
        pytest.skip("may be allowed: nothing is allocated, or no more than there is")
    with unchanged(world.store, world.cache):
        with pytest.raises((ValueError, MemoryError)) as caught:
            SIZES[name](world, value)
    assert type(caught.value) in (ValueError, MemoryError)
    if type(caught.value) is ValueError:
        assert name.split()[0] in str(caught.value)


@pytest.mark.parametrize("value", TOO_SMALL, ids=["-1", "-2**31", "-2**63", "-2**64", "-10**5000"])
@pytest.mark.parametrize("name", COUNTS)
def test_counts_below_zero(world, name, value):
    with refused(ValueError, name.split()[0], world.store, world.cache):
        COUNTS[name](world, value)


@pytest.mark.parametrize("value", TOO_LARGE, ids=["2**63-1", "2**63", "2**64", "2**64+1", "10**5000"])
@pytest.mark.parametrize("name", COUNTS)
def test_counts_beyond_all_bounds(world, name, value):
    if value == 2**63 - 1 and name == "n of acquire":
        with refused(pagedkv.PagedStoreExhausted, "needed", world.store):
            COUNTS[name](world, value)
        return
    with refused(ValueError, name.split()[0], world.store, world.cache):
        COUNTS[name](world, value)


@pytest.mark.parametrize(
    "value", [*TOO_SMALL, *TOO_LARGE, 8, 2**31, 2**32], ids=lambda v: str(v) if abs(v) < 2**70 else "huge"
)
@pytest.mark.parametrize("name", INDICES)
def test_indices_out_of_range(world, name, value):
    if name == "block_table" and value == 8:
        pytest.skip("without a store any id of 31 bits may be right")
    with refused(IndexError, name.split()[0], world.store, world.cache):
        INDICES[name](world, value)


class Indexed:
    """Stands for an integer, as NumPy's do; and may do something else first."""

    def __init__(self, value, first=lambda: None):
        self.value = value
        self.first = first

    def __index__(self):
        self.first()
        return self.value


def test_anything_with_an_index_is_an_integer(world):
    for two in (Indexed(2), np.int8(2), np.uint64(2), np.array(2)):
        assert pagedkv.PagedKvStore(two, two, two, two, n_layers=two, v_head_dim=two).nbytes == 256
        assert world.cache.can_truncate_to(two)
        assert world.store.refcount(two) == 0
    assert world.store.acquire(Indexed(2)) == [2, 3]
    world.store.release([Indexed(2), np.int64(3)])


@pytest.mark.parametrize("value", ["two", 2.0, None, np.float64(1)], ids=repr)
def test_an_index_that_is_no_integer(world, value):
    for name, call in {**SIZES, **COUNTS, **INDICES}.items():
        with refused(TypeError, name.split()[0], world.store, world.cache):
            call(world, Indexed(value))


class Unwilling(Exception):
    pass


def refuse():
    raise Unwilling


def test_an_index_that_raises(world):
    for call in {**SIZES, **COUNTS, **INDICES}.values():
        with unchanged(world.store, world.cache), pytest.raises(Unwilling):
            call(world, Indexed(0, refuse))


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


class Subclass(np.ndarray):
    """A lying one: what it says of itself must not be believed."""

    shape = property(lambda self: (1,))

    def reshape(self, *shape):
        return np.zeros(1, np.float32)

    def min(self):
        return 0

    max = min


class Array:
    def __init__(self, array, first=lambda: None):
        self.array = array
        self.first = first

    def __array__(self, dtype=None, copy=None):
        self.first()
        return self.array


SPELLINGS = {
    "fortran": np.asfortranarray,
    "negative strides": with_negative_strides,
    "gaps": with_gaps,
    "read-only": read_only,
    "misaligned": misaligned,
    "lying subclass": lambda array: array.view(Subclass),
    "masked": lambda array: np.ma.masked_array(array, mask=np.ones(array.shape, bool)),
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
        lambda array: array[:0],
        lambda array: array.T if array.ndim > 1 else array[:3],
        lambda array: array.reshape(-1) if array.ndim > 1 else array[:1],
        lambda array: array.reshape(*array.shape[:-1], -1, 2),
        lambda array: array.reshape(*array.shape[:-1], 1, -1),
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
    with refused(ValueError, "v: expected", world.store, world.cache):
        world.cache.append_contiguous(
            world.store, world.k(2 * n_rows), world.v(n_rows), 2 * n_rows
        ) if n_rows else refuse()


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
        try:
            call(lambda done=done: done.append(interfere(w)) if not done else None)
        except (ValueError, pagedkv.PagedStoreExhausted):
            pass
        assert done
        w.store.check()
        assert w.cache.seq_len <= w.cache.capacity


def test_ids_that_change_while_they_are_read(world):
    ids = [0, 1, 0]
    ids[0] = Indexed(0, ids.clear)
    world.store.retain(ids)
    assert [world.store.refcount(block) for block in (0, 1)] == [3, 2]


# --- ids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        0,
        "01",
        b"01",
        {0, 1},
        {0: 1},
        iter([0, 1]),
        [0, 1.0],
        [0, None],
        [True],
        ["0"],
        [[0]],
        np.array([0.0, 1.0]),
        np.array([0, 1], np.float32),
        np.array([True]),
        np.array([0, 1], object),
        np.array(["0"]),
        np.array([[0, 1]]),
        np.array(0),
        np.array([0, 1], "m8[s]"),
        np.array([], np.float64),
    ],
    ids=repr,
)
def test_what_is_no_list_of_ids(world, wrong):
    for call, name in [
        (world.store.retain, "ids"),
        (world.store.release, "ids"),
        (lambda ids: pagedkv.PagedKvCache().adopt_blocks(ids, 0, 4), "block_table"),
        (lambda ids: pagedkv.PagedKvCache().adopt_blocks(ids, 0, 4, store=world.store), "block_table"),
    ]:
        with refused(TypeError, name, world.store, world.cache):
            call(wrong)


@pytest.mark.parametrize(
    "disguise",
    [
        lambda ids: np.ma.masked_array(ids, mask=[False, True]),
        lambda ids: ids.view(Subclass),
        lambda ids: ids.astype(np.uint64).view(Subclass),
    ],
)
def test_an_id_out_of_range_behind_an_array_that_hides_it(world, disguise):
    ids = disguise(np.array([0, 2**30]))
    for call, name in [(world.store.retain, "ids"), (world.store.release, "ids")]:
        with refused(IndexError, name, world.store, world.cache):
            call(ids)
    with refused(IndexError, "block_table", world.store):
        pagedkv.PagedKvCache().adopt_blocks(ids, 8, 4, store=world.store)


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


def test_a_store_whose_values_cannot_be_allocated_leaves_no_keys_behind():
    """K fits, V does not; in a process of its own with little address space, where a leak would show."""
    run_python("""
        import resource, numpy, pagedkv
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        for _ in range(20):
            try:
                pagedkv.PagedKvStore(1, 1, 1, 1 << 28, v_head_dim=1 << 30)
            except MemoryError:
                pass
            else:
                raise SystemExit("it fitted")
        store = pagedkv.PagedKvStore(1, 1, 1, 1 << 28)
        cache = pagedkv.PagedKvCache()
        cache.push(store, numpy.ones(1 << 28, numpy.float32), numpy.ones(1 << 28, numpy.float32))
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
