"""What is refused is refused in the library's words, and what the caller's own code raises comes out as it is."""

import fractions
import traceback

import numpy as np
import pytest
from helpers import append, contiguous_state, refused, unchanged
from hostile import Unwilling

import pagedkv
from pagedkv import _keys


def floats(*shape):
    return np.ones(shape, np.float32)


# --- the caller's own errors -------------------------------------------------------------------------

ERRORS = [
    TypeError, ValueError, RuntimeError, BufferError, OverflowError, AttributeError, IndexError, KeyError, MemoryError,
    StopIteration, Unwilling, KeyboardInterrupt,
]


def of_the_caller(error):
    raise error("mine")


def protocol(name, error):
    """An object whose one special method raises."""

    def method(self, *arguments, **options):
        of_the_caller(error)

    methods = {name: method}
    if name == "__dlpack__":
        methods["__dlpack_device__"] = lambda self: (1, 0)
    if name == "__dlpack_device__":
        methods["__dlpack__"] = method
    return type("Own", (), methods)()


def array_arguments(world):
    """Every argument that is an array of floats."""
    w, q = world, floats(1, 2, 3)
    step = pagedkv.Step(w.store, [pagedkv.PagedKvCache()]).__enter__()
    step.write(0, floats(1, 6), floats(1, 4))
    return {
        "push k": lambda a: w.cache.push(w.store, a, w.v(1)[:, 0]),
        "push v": lambda a: w.cache.push(w.store, w.k(1)[:, 0], a),
        "append k": lambda a: w.cache.append_contiguous(w.store, a, w.v(2), 2),
        "append v": lambda a: w.cache.append_contiguous(w.store, w.k(2), a, 2),
        "KvCache.push k": lambda a: w.contiguous.push(a, floats(6)),
        "KvCache.push v": lambda a: w.contiguous.push(floats(6), a),
        "KvCache.extend k": lambda a: w.contiguous.extend(a, floats(2, 6)),
        "KvCache.extend v": lambda a: w.contiguous.extend(floats(2, 6), a),
        "write k": lambda a: step.write(0, a, floats(1, 4)),
        "write v": lambda a: step.write(0, floats(1, 6), a),
        "attend q": lambda a: step.attend(0, a),
        "paged_attention q": lambda a: pagedkv.paged_attention(a, w.store, w.cache),
        "paged_attention sinks": lambda a: pagedkv.paged_attention(q, w.store, w.cache, sinks=a),
        "paged_attention alibi_slopes": lambda a: pagedkv.paged_attention(q, w.store, w.cache, alibi_slopes=a),
        "attention q": lambda a: pagedkv.attention(a, floats(4, 6), floats(4, 4)),
        "attention k": lambda a: pagedkv.attention(q, a, floats(4, 4)),
        "attention v": lambda a: pagedkv.attention(q, floats(4, 6), a),
        "tokens": lambda a: _keys.as_token_ids(a),
    }


def assert_as_it_is(call, error):
    """The very error, with the frame that raised it."""
    with pytest.raises(error, match="mine") as caught:
        call()
    assert type(caught.value) is error
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-1] == "of_the_caller"


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("method", ["__array__", "__dlpack__", "__dlpack_device__"])
def test_what_an_array_of_the_callers_raises(world, method, error):
    for call in array_arguments(world).values():
        before = contiguous_state(world.contiguous)
        with unchanged(world.store, world.cache):
            assert_as_it_is(lambda call=call: call(protocol(method, error)), error)
        assert contiguous_state(world.contiguous) == before


@pytest.mark.parametrize("error", ERRORS)
def test_what_a_property_of_the_callers_raises(world, error):
    if error is AttributeError:
        pytest.skip("there is no such attribute, it says")
    own = type("Own", (), {"__array__": property(lambda self: of_the_caller(error))})()
    for call in array_arguments(world).values():
        assert_as_it_is(lambda call=call: call(own), error)


@pytest.mark.parametrize("error", ERRORS)
def test_what_a_number_of_the_callers_raises(world, error):
    w, one = world, protocol("__index__", error)
    for call in (
        lambda: w.store.acquire(one),
        lambda: w.store.retain([0, one]),
        lambda: w.store.k_row(0, one),
        lambda: w.store.copy_block(0, one),
        lambda: w.cache.reserve(w.store, one),
        lambda: w.cache.truncate(w.store, one),
        lambda: w.cache.append_contiguous(w.store, w.k(1), w.v(1), one),
        lambda: w.cache.to_contiguous(w.store, layer=one),
        lambda: w.contiguous.truncate(one),
        lambda: pagedkv.KvCache(one, 1),
        lambda: pagedkv.KvBlockPool(1, one),
        lambda: pagedkv.PagedKvStore(1, one, 1, 1),
        lambda: pagedkv.Step(w.store, [w.cache], one),
        lambda: pagedkv.Step(w.store, [w.cache], [one]),
        lambda: pagedkv.reorder(w.store, [w.cache], [one]),
        lambda: pagedkv.paged_attention(floats(1, 2, 3), w.store, w.cache, window=one),
        lambda: pagedkv.set_num_threads(one),
        lambda: _keys.as_token_ids([1, one]),
    ):
        with unchanged(w.store, w.cache):
            assert_as_it_is(call, error)


@pytest.mark.parametrize("error", [error for error in ERRORS if error is not StopIteration])
def test_what_an_iterable_of_the_callers_raises(world, error):
    w, several = world, protocol("__iter__", error)
    for call in (
        lambda: pagedkv.Step(w.store, several),
        lambda: pagedkv.paged_attention(floats(1, 2, 3), w.store, several),
        lambda: pagedkv.reorder(w.store, several, [0]),
        lambda: pagedkv.reorder(w.store, [w.cache], several),
        lambda: w.store.check(several),
        lambda: w.store.block_map(several),
    ):
        with unchanged(w.store, w.cache):
            assert_as_it_is(call, error)


@pytest.mark.parametrize("error", ERRORS)
def test_what_a_real_number_of_the_callers_raises(world, error):
    own = type("Own", (float,), {"__float__": lambda self: of_the_caller(error)})(1)
    for name in ("scale", "softcap"):
        assert_as_it_is(
            lambda name=name: pagedkv.paged_attention(floats(1, 2, 3), world.store, world.cache, **{name: own}), error
        )


def test_what_numpy_raises_is_said_in_the_librarys_words(world):
    """An object without code of its own: what is wrong with it NumPy says, and the argument is named."""

    class Text:
        def __index__(self):
            return "1"

    interface = type("Own", (), {"__array_interface__": {"shape": (6,), "typestr": "nonsense", "version": 3}})()
    for bad in ([1.0], [[1.0], [2.0, 3.0]], {"k": 1}, {1.0}, object(), 1.0, "rows", np.float32, interface, iter([1.0])):
        for name, call in array_arguments(world).items():
            if name != "tokens":
                named = rf"^{name.split()[-1]}\w*: expected"
                with unchanged(world.store, world.cache), pytest.raises((TypeError, ValueError), match=named):
                    call(bad)
    for bad in (np.zeros(3, int), np.array(0.5), Text()):
        with refused(TypeError, "n: expected an integer", world.store):
            world.store.acquire(bad)
    for lists in (np.array(0), 7, None):
        with refused(TypeError, "parents: expected", world.store):
            pagedkv.reorder(world.store, [world.cache], lists)
        with refused(TypeError, "caches: expected", world.store):
            world.store.check(lists)
        with refused(TypeError, "caches: expected", world.store):
            pagedkv.Step(world.store, lists)


# --- every door --------------------------------------------------------------------------------------


class Stores:
    """What stands beside a store in a server, and is none."""


OF_MODELS = {"Step", "reorder", "PrefixCache"}  # doors that take the stores of a model too


def doors(store):
    cache, q = pagedkv.PagedKvCache(), floats(1, 2, 3)
    return {
        "push": lambda: cache.push(store, floats(6), floats(4)),
        "append_contiguous": lambda: cache.append_contiguous(store, floats(1, 6), floats(1, 4), 1),
        "blocks_needed_for": lambda: cache.blocks_needed_for(store, 1),
        "reserve": lambda: cache.reserve(store, 1),
        "release": lambda: cache.release(store),
        "truncate": lambda: cache.truncate(store, 0),
        "drop_before": lambda: cache.drop_before(store, 0),
        "to_contiguous": lambda: cache.to_contiguous(store),
        "adopt_blocks": lambda: cache.adopt_blocks([], 0, 4, store=store),
        "paged_attention": lambda: pagedkv.paged_attention(q, store, cache),
        "Step": lambda: pagedkv.Step(store, cache),
        "reorder": lambda: pagedkv.reorder(store, [cache], [0]),
    }


@pytest.mark.parametrize("door", doors(None))
def test_an_argument_of_another_class(door):
    for other, name in ((Stores(), "Stores"), (None, "None"), (pagedkv.PagedKvCache(), "PagedKvCache"),
                        (pagedkv.PagedKvStore, "type"), (3, "3")):
        if door == "adopt_blocks" and other is None:
            continue
        wanted = "PagedKvStore or ModelStores" if door in OF_MODELS else "PagedKvStore"
        with pytest.raises(TypeError, match=f"^store: expected a {wanted}, got {name}$"):
            doors(other)[door]()


def test_a_cache_of_another_class(world):
    for other in (None, 3, world.contiguous, world.store):
        with pytest.raises(TypeError, match="^source: expected a PagedKvCache, got "):
            world.cache.clone_from(other)
        with pytest.raises(TypeError, match=r"^caches\[0\]: expected a PagedKvCache, got "):
            pagedkv.Step(world.store, [other])
    with pytest.raises(TypeError, match="^out: expected a KvCache, got PagedKvCache"):
        world.cache.to_contiguous(world.store, out=world.cache)
    with pytest.raises(TypeError, match="^pool: expected a KvBlockPool, got PagedKvStore"):
        pagedkv.KvCache.with_pool(1, 1, world.store, 1)


# --- numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["no", "", 0, 1, None, [], np.array(True), 1.0])
def test_only_booleans_are_true_or_false(world, flag):
    q = floats(1, 2, 3)
    for name, call in (
        ("debug", lambda: pagedkv.PagedKvStore(1, 1, 1, 1, debug=flag)),
        ("prefault", lambda: pagedkv.PagedKvStore(1, 1, 1, 1, prefault=flag)),
        ("debug", lambda: pagedkv.PagedKvStore.from_bytes(64, 1, 1, 1, debug=flag)),
        ("causal", lambda: pagedkv.paged_attention(q, world.store, world.cache, causal=flag)),
        ("return_lse", lambda: pagedkv.attention(q, floats(4, 6), floats(4, 4), return_lse=flag)),
    ):
        with pytest.raises(TypeError, match=f"^{name}: expected True or False, got "):
            call()
    for true in (True, np.True_):
        assert pagedkv.PagedKvStore(1, 1, 1, 1, debug=true, prefault=true).total_blocks == 1


@pytest.mark.parametrize("huge", [10**5000, -(10**5000), fractions.Fraction(10**5000)], ids=["+", "-", "fraction"])
def test_numbers_beyond_any_float(world, huge):
    q = floats(1, 2, 3)
    for name in ("scale", "softcap"):
        with refused(ValueError, f"{name}: expected", world.store, world.cache):
            pagedkv.paged_attention(q, world.store, world.cache, **{name: huge})


def test_seconds_beyond_any_float(world):
    prefixes = pagedkv.PrefixCache(world.store)
    for huge in (10**5000, -(10**5000)):
        with refused(ValueError, "ttl: expected", world.store, world.cache):
            prefixes.insert([1, 2, 3, 4], world.cache, ttl=huge)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [((2**31, 2**31), "head_dim"), ((2**60, 2**60), "head_dim"), ((2**61 - 1, 2), "head_dim")],
)
def test_rows_beyond_any_address(sizes, name):
    with pytest.raises(ValueError, match=f"^{name}: expected at most"):
        pagedkv.KvCache(*sizes)
    with pytest.raises(ValueError, match=f"^{name}: expected at most"):
        pagedkv.KvCache.with_capacity(*sizes, 0)
    with pytest.raises(ValueError, match=f"^v_{name}: expected at most"):
        pagedkv.KvCache(sizes[0], 1, v_head_dim=sizes[1])
    assert pagedkv.KvCache(2**30, 2**30).k.shape == (0, 2**60)


@pytest.mark.parametrize(
    "given", [np.float32(2.0), np.float32([1, 2]), np.int8(3), type("Own", (), {"dtype": np.dtype("f4")})(), 10**5000],
    ids=["scalar", "array", "int8", "object", "huge"],
)
def test_what_only_has_a_dtype_is_none(given):
    with pytest.raises(ValueError, match="^dtype: expected float32, float16, .* or int8, got "):
        pagedkv.PagedKvStore(1, 1, 1, 1, dtype=given)


# --- arrays --------------------------------------------------------------------------------------------


def test_masked_values_are_not_stored(world):
    """Nobody said what stands where a mask is; an array that masks nothing is one like any other."""
    for name, call in array_arguments(world).items():
        argument = name.split()[-1]
        data = {
            "push k": world.k(1)[:, 0], "push v": world.v(1)[:, 0], "append k": world.k(2), "append v": world.v(2),
            "KvCache.push k": floats(6), "KvCache.push v": floats(6), "KvCache.extend k": floats(2, 6),
            "KvCache.extend v": floats(2, 6), "write k": floats(1, 6), "write v": floats(1, 4), "tokens": np.arange(3),
            "attention k": floats(4, 6), "attention v": floats(4, 4),
        }.get(name, floats(2) if argument in ("sinks", "alibi_slopes") else floats(1, 2, 3))
        mask = np.zeros(data.shape, bool)
        call(np.ma.masked_array(data))
        call(np.ma.masked_array(data, mask=mask))
        mask.flat[-1] = True
        before = contiguous_state(world.contiguous)
        with refused(ValueError, "mask", world.store, world.cache) as caught:
            call(np.ma.masked_array(data, mask=mask))
        assert str(caught.value).startswith(argument)
        assert contiguous_state(world.contiguous) == before
    out = np.ma.masked_array(floats(1, 2, 2), mask=[[[False, True]] * 2])
    with refused(ValueError, "out: expected", world.store, world.cache):
        pagedkv.paged_attention(floats(1, 2, 3), world.store, world.cache, out=out)


def test_a_namespace_is_its_bytes():
    """A subclass that calls itself every other name's equal finds only what is its own."""

    class Anything(bytes):
        def __bytes__(self):
            return self

        def __eq__(self, other):
            return True

        def __hash__(self):
            return hash(b"theirs")

        def __getitem__(self, index):
            return b"theirs"

        def __buffer__(self, flags):
            return memoryview(b"theirs")

    name = _keys.as_namespace(Anything(b"mine"))
    assert type(name) is bytes
    assert name == b"mine"
    store, cache = pagedkv.PagedKvStore(4, 8, 1, 1), pagedkv.PagedKvCache()
    append(store, cache, 8)
    prefixes = pagedkv.PrefixCache(store)
    prefixes.insert(range(8), cache, namespace=b"theirs")
    assert prefixes.match(range(9), namespace=Anything(b"mine")) == 0
    assert prefixes.match(range(9), namespace=Anything(b"theirs")) == 8
    for other in ("mine", bytearray(b"mine"), 3, type("Fake", (), {"__class__": property(lambda self: bytes)})()):
        with pytest.raises(TypeError, match="^namespace: expected bytes or None"):
            _keys.as_namespace(other)


def test_token_ids_belong_to_the_library():
    """Of whatever kind the array is, it is copied, and what comes out is int64 to the last one."""
    ids = np.arange(1000)
    for given in (
        ids, ids.astype(np.int32), ids.astype(np.uint64), ids.astype(">i8"), ids[::-1][::-1], np.repeat(ids, 2)[::2],
        ids.astype(object), ids.tolist(), tuple(ids.tolist()), range(1000), memoryview(ids),
    ):
        got = _keys.as_token_ids(given)
        assert got.dtype == np.dtype("<i8")
        assert got.tolist() == list(range(1000))
        assert not isinstance(given, np.ndarray) or not np.shares_memory(got, given)
    for n in (511, 512, 513, 1024, 1025):
        for place in (0, n // 2, n - 1):
            given = np.arange(n)
            given[place] = -5
            with pytest.raises(ValueError, match="^tokens: expected ids from 0 to .*, got -5$"):
                _keys.as_token_ids(given)
    with pytest.raises(ValueError, match=rf"got {2**63 + 7}$"):
        _keys.as_token_ids(np.array([1, 2**63 + 7], np.uint64))
