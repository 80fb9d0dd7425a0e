"""Arguments that change while a call has them, by the code of a later argument.

A later argument may resize an earlier array, give it other memory or another shape, or initialise or release the object
that is called. Every call then works on what is there, or refuses it; nothing is read or written past a buffer. Other
threads do so in test_changing_threads.py.
"""

import contextlib
import sys

import numpy as np
import pytest
from helpers import contiguous_state, refused, rows, run_python, unchanged, unsanitized
from hostile import Array, Indexed

import pagedkv

# --- an argument that changes an earlier one ----------------------------------------------------------


def shrink(array):
    array.resize((0,), refcheck=False)


def grow(array):
    array.resize((*array.shape, 1000), refcheck=False)


def replace(array):
    """Other memory, of one value."""
    array.__setstate__(np.ones(1, np.float32).__reduce__()[2])


def reshape(array):
    array.shape = (array.size,)


def retype(array):
    array.dtype = np.int32


def strided(array):
    """Fewer bytes behind it than its shape says."""
    array.strides = (0,) * array.ndim


CHANGES = [shrink, grow, replace, reshape, retype, strided]


class Owner(np.ndarray):
    """Of a subclass: what is read is a view of it."""


def spellings(array):
    """Arrays that are read as they lie there, and what to change for it: themselves, or what they are a view of."""
    own = array.copy()
    yield own, own
    own = array.copy().view(Owner).copy()
    yield own, own
    own = array.copy()
    yield own[...], own
    own = array.copy()
    yield memoryview(own), own
    own = array.copy()
    yield Array(own), own


def floats(*shape):
    return np.ones(shape, np.float32)


def calls(world):
    """Name -> (the arrays of a call in their order, the call)."""
    w = world
    step = pagedkv.Step(w.store, [pagedkv.PagedKvCache()], 40)
    step.__enter__()
    step.write(0, floats(40, 6), floats(40, 4))
    q, sinks, slopes, out = floats(40, 4, 3), floats(4), floats(4), floats(40, 4, 2)
    w.big = pagedkv.PagedKvCache()
    w.big.append_contiguous(w.store, floats(3, 40, 6), floats(3, 40, 4), 40)
    return {
        "push": ([floats(3, 6), floats(3, 4)], lambda k, v: w.cache.push(w.store, k, v)),
        "append": ([floats(3, 40, 6), floats(3, 40, 4)], lambda k, v: w.cache.append_contiguous(w.store, k, v, 40)),
        "Step.write": ([floats(40, 6), floats(40, 4)], lambda k, v: step.write(1, k, v)),
        "Step.attend": (
            [q, sinks, slopes],
            lambda q, sinks, slopes: step.attend(0, q, sinks=sinks, alibi_slopes=slopes, out=out.copy()),
        ),
        "paged_attention": (
            [q, sinks, slopes],
            lambda q, sinks, slopes: pagedkv.paged_attention(
                q, w.store, w.big, query_lens=40, sinks=sinks, alibi_slopes=slopes
            ),
        ),
        "attention": (
            [q, floats(50, 6), floats(50, 4), sinks, slopes],
            lambda q, k, v, sinks, slopes: pagedkv.attention(q, k, v, sinks=sinks, alibi_slopes=slopes),
        ),
        "KvCache.push": ([floats(6), floats(6)], w.contiguous.push),
        "KvCache.extend": ([floats(40, 6), floats(40, 6)], w.contiguous.extend),
    }


NAMES = [
    "push", "append", "Step.write", "Step.attend", "paged_attention", "attention", "KvCache.push", "KvCache.extend",
]


@pytest.fixture
def roomy(world):
    """With room for what the calls below ask."""
    world.store = pagedkv.PagedKvStore(4, 200, 2, 3, v_head_dim=2, n_layers=3)
    world.cache = pagedkv.PagedKvCache()
    return world


@pytest.mark.filterwarnings("ignore:Setting the:DeprecationWarning")  # in later versions of NumPy some cannot be set
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_an_argument_that_changes_an_earlier_array(roomy, name, change):
    """Refused by the name of the argument, or done where the bytes are still all there."""
    arrays, call = calls(roomy)[name]
    for changed in range(len(arrays)):
        for changing in range(changed + 1, len(arrays)):
            for given, owner in spellings(arrays[changed]):
                arguments = [array.copy() for array in arrays]
                arguments[changed] = given
                done, size = [], owner.size

                def act(owner=owner, done=done):
                    if not done:
                        with contextlib.suppress(AttributeError, TypeError, ValueError):  # some cannot
                            change(owner)
                        done.append(True)

                arguments[changing] = Array(arguments[changing], act)
                before = state(roomy)
                try:
                    call(*arguments)
                except (TypeError, ValueError) as error:
                    assert "expected" in str(error)  # noqa: PT017
                    assert state(roomy) == before
                else:
                    assert owner.size >= size, f"argument {changed} has no such bytes any more"
                assert done
    roomy.store.check([roomy.cache])


def state(world):
    return contiguous_state(world.contiguous), world.cache.seq_len, world.cache.capacity, world.store.free_block_count


@pytest.mark.parametrize("option", ["scale", "softcap", "window", "layer", "n_threads"])
def test_a_number_that_changes_the_queries(roomy, option):
    """The numbers of a call run the caller's code too."""

    class Number(float):
        def __float__(self):
            act()
            return 1.0

    def act():
        q.resize((0,), refcheck=False)

    cache = pagedkv.PagedKvCache()
    cache.append_contiguous(roomy.store, floats(3, 5, 6), floats(3, 5, 4), 5)
    q, contiguous = floats(5, 4, 3), (floats(5, 6), floats(5, 4))
    value = Number(1) if option in ("scale", "softcap") else Indexed(1, act)
    with pytest.raises(ValueError, match="^q: expected"):
        pagedkv.paged_attention(q, roomy.store, cache, query_lens=5, **{option: value})
    if option != "layer":
        q = floats(5, 4, 3)
        with pytest.raises(ValueError, match="^q: expected"):
            pagedkv.attention(q, *contiguous, **{option: value})


def test_out_and_the_arrays_that_were_read_before_it(roomy):
    cache = pagedkv.PagedKvCache()
    cache.append_contiguous(roomy.store, floats(3, 5, 6), floats(3, 5, 4), 5)
    out, sinks = floats(5, 4, 2), floats(4)
    with pytest.raises(ValueError, match="^out: expected"):
        pagedkv.paged_attention(
            floats(5, 4, 3), roomy.store, cache, query_lens=5, out=out, sinks=Array(sinks, lambda: shrink(out))
        )
    owner = floats(200)
    out = owner[:40].reshape(5, 4, 2)
    with pytest.raises(ValueError, match="^out: expected"):
        pagedkv.attention(
            floats(5, 4, 3), floats(5, 6), floats(5, 4), out=out, alibi_slopes=Array(sinks, lambda: shrink(owner))
        )


def test_the_clock_of_a_prefix_cache_that_changes_rows(roomy):
    """It is asked when blocks run short, long after the rows were checked."""
    store = pagedkv.PagedKvStore(4, 8, 1, 64)
    k, v = floats(20, 64), floats(20, 64)
    armed = []

    def clock():
        if armed:
            shrink(k)
        return 100.0 * len(armed)

    prefixes = pagedkv.PrefixCache(store, clock=clock)
    old, cache = pagedkv.PagedKvCache(), pagedkv.PagedKvCache()
    old.append_contiguous(store, floats(32, 64), floats(32, 64), 32)
    prefixes.insert(range(32), old, ttl=1)
    old.release(store)
    armed.append(True)
    with pytest.raises(ValueError, match="^k: expected"):
        cache.append_contiguous(store, k, v, 20)
    assert (cache.seq_len, cache.capacity) == (0, 0)
    store.check([cache])
    prefixes.check()


# --- objects that come into being inside a call ------------------------------------------------------


def test_a_contiguous_cache_that_is_initialised_by_its_own_argument():
    for write, shape in (("push", (0,)), ("extend", (1, 0))):
        cache = pagedkv.KvCache.__new__(pagedkv.KvCache)
        begin = Array(np.empty(shape, np.float32), lambda cache=cache: cache.__init__(64, 4096))
        with pytest.raises(RuntimeError, match="__init__"):
            getattr(cache, write)(np.empty(shape, np.float32), begin)
        assert cache.seq_len == 0


def test_a_store_that_is_initialised_by_an_argument():
    for use in (
        lambda store, begin: pagedkv.PagedKvCache().push(store, begin(floats(0)), floats(0)),
        lambda store, begin: pagedkv.PagedKvCache().append_contiguous(store, begin(floats(5, 0)), floats(5, 0), 5),
        lambda store, begin: pagedkv.PagedKvCache().to_contiguous(store, layer=Indexed(0, begin)),
        lambda store, begin: pagedkv.paged_attention(begin(floats(0, 1, 0)), store, []),
        lambda store, begin: pagedkv.Step(store, [], begin(0)),
        lambda store, begin: pagedkv.PagedKvCache().adopt_blocks([Indexed(0, begin)], 4, 4, store=store),
    ):
        store = pagedkv.PagedKvStore.__new__(pagedkv.PagedKvStore)

        def begin(value=None, store=store):
            if value is None:
                store.__init__(4, 100, 8, 4096)
                return None
            return Array(value, lambda: store.__init__(4, 100, 8, 4096))

        with pytest.raises(RuntimeError, match="^store: its __init__ has not run"):
            use(store, begin)


def test_a_subclass_that_never_initialised_itself():
    lazy = type("Lazy", (pagedkv.KvCache,), {"__init__": lambda self, *sizes, **options: None})
    pool = pagedkv.KvBlockPool(4, 100)
    for make in (lambda: lazy.with_capacity(1, 1, 100), lambda: lazy.with_pool(1, 1, pool, 100)):
        with pytest.raises(RuntimeError, match="__init__ has not run"):
            make()
    assert pool.free_blocks == 100
    store = pagedkv.PagedKvStore(4, 4, 1, 1)
    with pytest.raises(RuntimeError, match="__init__ has not run"):
        pagedkv.PagedKvCache().to_contiguous(store, out=lazy())


def test_a_cache_that_was_handed_out_before_is_no_new_one():
    pool, other = pagedkv.KvBlockPool(4, 100), pagedkv.KvBlockPool(4, 100)
    made = pagedkv.KvCache.with_pool(1, 1, pool, 8)
    again = type("Again", (pagedkv.KvCache,), {"__new__": lambda cls, *sizes, **options: made})
    with pytest.raises(RuntimeError, match="new"):
        again.with_pool(1, 1, other, 8)
    assert (pool.free_blocks, other.free_blocks) == (98, 100)


# --- a contiguous cache whose argument uses it -------------------------------------------------------


USES = {
    "release": lambda cache: cache.release_to_pool(),
    "clear": lambda cache: cache.clear(),
    "extend": lambda cache: cache.extend(floats(100, 6), floats(100, 6)),
    "truncate": lambda cache: cache.truncate(1),
}


@pytest.mark.parametrize("use", USES)
def test_a_contiguous_cache_that_changes_while_an_argument_is_read(use):
    for write in (
        lambda cache, act: cache.truncate(Indexed(90, act)),
        lambda cache, act: cache.push(floats(6), Array(floats(6), act)),
        lambda cache, act: cache.extend(Array(floats(9, 6), act), floats(9, 6)),
        lambda cache, act: cache.extend(floats(9, 6), Array(floats(9, 6), act)),
    ):
        pool = pagedkv.KvBlockPool(16, 100)
        cache = pagedkv.KvCache.with_pool(2, 3, pool, 90)
        cache.extend(floats(90, 6), floats(90, 6))
        with contextlib.suppress(ValueError):
            write(cache, lambda cache=cache: USES[use](cache))
        assert cache.k.shape == cache.v.shape == (cache.seq_len, 6)
        assert cache.allocated_bytes >= cache.seq_len * 48
        cache.push(floats(6), floats(6))
        assert (cache.k == 1).all()
        cache.release_to_pool()
        assert pool.free_blocks == 100


def test_truncate_sees_the_length_that_is_left():
    cache = pagedkv.KvCache(64, 64)
    cache.extend(floats(100, 4096), floats(100, 4096))
    with pytest.raises(ValueError, match="n: expected an integer from 0 to 0, got 90"):
        cache.truncate(Indexed(90, cache.release_to_pool))
    assert (cache.seq_len, cache.allocated_bytes) == (0, 0)


def test_a_plan_that_memory_has_no_room_for_costs_no_budget():
    pool = pagedkv.KvBlockPool(1 << 40, 8)
    with pytest.raises(MemoryError) as caught:
        pagedkv.KvCache.with_pool(1 << 10, 1 << 10, pool, 1 << 42)
    assert pool.free_blocks == 8, "while the error still lives"
    assert caught.value is not None


@unsanitized
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of address space that holds")
def test_a_length_covers_no_rows_that_memory_had_no_room_for():
    """The source overlaps its destination; what then takes a copy of it must take that first."""
    run_python("""
        import resource, numpy, pagedkv
        cache = pagedkv.KvCache.with_capacity(1, 1 << 10, 1 << 15, v_head_dim=1)
        k, v = numpy.ones((20000, 1 << 10), numpy.float32), numpy.ones((20000, 1), numpy.float32)
        cache.extend(k, v)
        k, v = cache.k, cache.v
        cache.truncate(10000)
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), used + (16 << 20)))
        try:
            cache.extend(k, v)
        except MemoryError:
            assert cache.seq_len == 10000
        else:
            assert cache.seq_len == 30000 and (cache.k[::500] == 1).all()
    """)


def test_an_id_that_frees_an_earlier_one(world):
    """copy_block looks at its two blocks when both are known."""
    [a, b] = world.store.acquire(2)
    with refused_after(world, lambda: world.store.release([a])):
        world.store.copy_block(a, Indexed(b, lambda: world.store.release([a])))
    with pytest.raises(ValueError, match="^id: expected a block that someone holds"):
        world.store.k_row(b, 0, Indexed(0, lambda: world.store.release([b])))


@contextlib.contextmanager
def refused_after(world, change):
    with pytest.raises(ValueError, match="^src: expected a block that someone holds"):
        yield
    world.store.check([world.cache])


def test_sizes_are_asked_for_once():
    """A store of a number of bytes is what was counted, whatever a size says the second time."""

    class Growing:
        value = 0

        def __index__(self):
            self.value += 4
            return self.value

    store = pagedkv.PagedKvStore.from_bytes(1 << 12, Growing(), Growing(), Growing(), n_layers=Growing())
    assert (store.block_size, store.n_kv_heads, store.head_dim, store.n_layers) == (4, 4, 4, 4)
    assert store.nbytes <= 1 << 12


def test_rows_of_a_cache_from_before_it_was_cut():
    """The source overlaps its own destination."""
    cache = pagedkv.KvCache(1, 2)
    k, v = rows(60, 2), rows(60, 2)
    cache.extend(k, v)
    seen = cache.k, cache.v
    cache.truncate(10)
    cache.extend(seen[0][5:45], seen[1][5:45])
    np.testing.assert_array_equal(cache.k, np.concatenate([k[:10], k[5:45]]))
    np.testing.assert_array_equal(cache.v, np.concatenate([v[:10], v[5:45]]))


def test_a_refusal_in_the_middle_leaves_shared_blocks_shared(store, cache):
    """A copy that a push was about to make is not made."""
    cache.append_contiguous(store, floats(2, 6), floats(2, 4), 2)
    other = cache.clone()
    k = floats(6)
    with unchanged(store, cache, other), refused(ValueError, "k_step", store, cache):
        cache.push(store, k, Array(floats(4), lambda: shrink(k)))


# --- sequences that say something else the next time --------------------------------------------------


class Fickle:
    """A sequence of a model, which shows its caches as they are once, and then something else."""

    def __init__(self, sequence, then):
        self.sequence, self.then = sequence, then
        self.stores = sequence.stores
        self.times = 0

    @property
    def caches(self):
        self.times += 1
        return self.sequence.caches if self.times == 1 else self.then


@pytest.mark.parametrize("then", [(None, None), (1, 2), (), None, (1,)], ids=repr)
@pytest.mark.parametrize("n_stores", [1, 2])
def test_the_caches_of_a_sequence_are_asked_for_once(n_stores, then):
    shapes = [pagedkv.LayerShape(None, 1, 2), pagedkv.LayerShape(8, 1, 2)][:n_stores]
    stores = pagedkv.ModelStores(shapes, 16, block_size=4)

    def grown(n):
        sequence, k = pagedkv.ModelSequence(stores), rows(n, 1, 2)
        with pagedkv.Step(stores, Fickle(sequence, then), n) as step:
            for layer in range(n_stores):
                step.write(layer, k, k)
        assert sequence.seq_len == n
        return sequence

    sequence = grown(8)
    assert stores.prefixes.insert(range(8), Fickle(sequence, then)) == 2 * n_stores
    fresh, other = pagedkv.ModelSequence(stores), grown(3)
    assert stores.prefixes.attach(Fickle(fresh, then), range(9)) == 8
    pagedkv.reorder(stores, [Fickle(fresh, then), Fickle(other, then)], [1, 1])
    assert (fresh.seq_len, other.seq_len) == (3, 3)
    fickle = Fickle(sequence, then)
    if n_stores == 1:
        del fickle.stores  # of a store by itself it needs none
        q = np.ones((1, 1, 2), np.float32)
        expected = pagedkv.paged_attention(q, stores.stores[0], sequence.caches[0])
        assert (pagedkv.paged_attention(q, stores.stores[0], [fickle]) == expected).all()
    stores.check([sequence, fresh, other])
