"""PrefixCache: what is one key, and what is reused."""

import math

import numpy as np
import pytest
from helpers import append, assert_rows, refused, unchanged, write_all
from prefix_support import attach, fill, first, remember, sequence

import pagedkv
from pagedkv import PagedKvCache, PagedKvStore


@pytest.fixture
def store(layered):
    return layered


# --- keys ---------------------------------------------------------------------------------------------

SPELLINGS = {
    "list": list,
    "tuple": tuple,
    "int64": lambda ids: np.array(ids, np.int64),
    "uint64": lambda ids: np.array(ids, np.uint64),
    "int32": lambda ids: np.array(ids, np.int32),
    "uint16": lambda ids: np.array(ids, np.uint16),
    "big-endian": lambda ids: np.array(ids, ">i4"),
    "strided": lambda ids: np.repeat(np.array(ids), 2)[::2],
    "reversed": lambda ids: np.array(ids[::-1])[::-1],
    "read-only": lambda ids: np.frombuffer(np.array(ids).tobytes(), np.int64),
    "objects": lambda ids: np.array(ids, object),
    "NumPy scalars": lambda ids: [np.int32(i) for i in ids],
    "mixed": lambda ids: [ids[0], np.uint8(ids[1]), *ids[2:]],
    "memoryview": lambda ids: memoryview(np.array(ids)),
}


@pytest.mark.parametrize("one", SPELLINGS)
@pytest.mark.parametrize("other", SPELLINGS)
def test_spellings_are_one_key(store, prefixes, one, other):
    ids = [7, 200, 1, 0, 65535, 3, 9, 2]
    kv = remember(prefixes, SPELLINGS[one](ids))
    again, _ = sequence(store, 8)
    assert prefixes.insert(SPELLINGS[other](ids), again) == 0
    cache, n = attach(prefixes, SPELLINGS[other](ids + ids))
    assert n == 8
    assert_rows(store, cache, *kv)


@pytest.mark.parametrize("distance", [2**8, 2**16, 2**32, 2**48, 2**62])
@pytest.mark.parametrize("place", [0, 3, 4, 7])
def test_ids_that_agree_in_their_low_bits_differ(prefixes, distance, place):
    ids = [5, 6, 7, 8, 9, 10, 11, 12]
    remember(prefixes, ids)
    other = list(ids)
    other[place] += distance
    assert prefixes.match([*other, 1]) == place
    assert prefixes.match([*ids, 1]) == 8


def test_the_largest_id_is_one(prefixes):
    largest = 2**63 - 1
    remember(prefixes, [largest] * 4)
    assert prefixes.match(np.full(5, largest, np.uint64)) == 4
    assert prefixes.match([largest - 1] * 5) == 0


class Indexable:
    def __index__(self):
        return 3


NOT_IDS = [
    [1, -1],
    np.array([1, -1]),
    np.array([1, -1], np.int8),
    [True, False],
    [1, True],
    [1, np.True_],
    np.array([True]),
    [1.0],
    [1, 2.5],
    np.array([1.0]),
    np.array([1], np.complex64),
    [None],
    ["1"],
    [[1, 2]],
    np.zeros((2, 2), int),
    [2**63],
    [1, 2**64],
    [1, 10**5000],
    [-(10**5000)],
    np.array([2**63], np.uint64),
    np.array([1, None], object),
    np.array(["a"]),
    [np.array([1, 2])],
    np.array([], float),
]


@pytest.mark.parametrize("ids", NOT_IDS, ids=lambda ids: repr(type(ids)))
@pytest.mark.parametrize("method", ["match", "match_blocks", "attach", "insert"])
def test_what_is_no_id_is_refused(store, prefixes, ids, method):
    remember(prefixes, [1, 2, 3, 4])
    cache = PagedKvCache()
    arguments = {"attach": (cache, ids), "insert": (ids, cache)}.get(method, (ids,))
    with refused(ValueError, "tokens", store, cache):
        getattr(prefixes, method)(*arguments)


@pytest.mark.parametrize("tokens", [None, 5, "abc", b"abc", {1, 2}, object(), iter([1])], ids=repr)
def test_what_is_no_sequence_is_refused(store, prefixes, tokens):
    with refused(TypeError, "tokens", store):
        prefixes.match(tokens)


def test_few_tokens_match_nothing(prefixes):
    remember(prefixes, [1, 2, 3, 4])
    assert prefixes.match([]) == prefixes.match(()) == prefixes.match(np.empty(0, int)) == prefixes.match([1]) == 0
    assert prefixes.match([1, 2]) == 1
    assert prefixes.match(SPELLINGS["list"]([Indexable()] * 5)) == 0


def test_namespaces_are_apart_by_type_and_value(store, prefixes):
    spaces = [None, b"", b"a", b"\0", b"ab"]
    for i, space in enumerate(spaces):
        assert prefixes.match([1, 2, 3, 4, 5], namespace=space) == 0
        kv = remember(prefixes, [1, 2, 3, 4], namespace=space)
        cache, n = attach(prefixes, [1, 2, 3, 4, 5], namespace=space)
        assert (n, prefixes.stats().namespaces) == (4, i + 1)
        assert_rows(store, cache, *kv)


class Same(bytes):
    def __eq__(self, other):
        return True

    def __hash__(self):
        return hash(b"a")


def test_a_namespace_cannot_say_that_it_is_another(prefixes):
    remember(prefixes, [1, 2, 3, 4], namespace=b"a")
    assert prefixes.match([1, 2, 3, 4, 5], namespace=Same(b"x")) == 0
    assert prefixes.match([1, 2, 3, 4, 5], namespace=Same(b"a")) == 4


@pytest.mark.parametrize("namespace", ["a", 1, bytearray(b"a"), (b"a",)], ids=repr)
def test_other_namespaces_are_refused(store, prefixes, namespace):
    cache, _ = sequence(store, 4)
    with refused(TypeError, "namespace", store, cache):
        prefixes.insert([1, 2, 3, 4], cache, namespace=namespace)
    with refused(TypeError, "namespace", store):
        prefixes.match([1], namespace=namespace)


# --- reuse --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_known", [4, 7, 8, 12])
@pytest.mark.parametrize("n_common", range(14))
def test_reuse_ends_where_the_tokens_part(store, prefixes, n_known, n_common):
    known = list(range(100, 100 + n_known))
    kv = remember(prefixes, known)
    n = min(n_common, n_known // 4 * 4)
    tokens = [*known[:n_common], *range(3)]
    free = store.free_block_count
    assert prefixes.match(tokens) == n
    assert len(prefixes.match_blocks(tokens)) == n // 4
    assert store.free_block_count == free
    cache, reused = attach(prefixes, tokens)
    assert reused == n
    assert_rows(store, cache, *first(kv, n))
    assert store.free_block_count == free - (n % 4 > 0)
    assert cache.block_table[: n // 4].tolist() == prefixes.match_blocks(tokens).tolist()
    more = append(store, cache, 6)  # what is reused is not written
    assert_rows(store, cache, *(np.concatenate([a, b], 1) for a, b in zip(first(kv, n), more, strict=True)))
    assert_rows(store, attach(prefixes, [*known, 1])[0], *first(kv, n_known // 4 * 4))


def test_one_token_is_left_to_compute(store, prefixes):
    kv = remember(prefixes, range(8))
    cache, n = attach(prefixes, range(8))
    assert n == 7
    assert_rows(store, cache, *first(kv, 7))
    assert cache.block_table[0] == prefixes.match_blocks(range(8))[0]
    assert store.refcount(int(cache.block_table[1])) == 1


def test_a_part_is_found_in_any_continuation(store, prefixes):
    """Beginnings that part inside a block, and part again before its end."""
    for tokens in ([1, 2, 3, 4], [1, 2, 9, 9], [1, 2, 9, 8, 5, 5, 5, 5], [1, 7, 7, 7]):
        kv = remember(prefixes, tokens)
        for n in range(len(tokens) + 1):
            cache, reused = attach(prefixes, [*tokens[:n], 50, 51])
            assert reused == n
            # Equal tokens may come from another sequence's block; its rows are those of the first that had them.
            if n == len(tokens):
                assert_rows(store, attach(prefixes, [*tokens, 50])[0], *kv)
            cache.release(store)


def test_without_a_block_for_the_rest_whole_blocks_are_shared(store, prefixes):
    holder, kv = sequence(store, 8)
    prefixes.insert(range(8), holder)
    fill(store)
    cache, n = attach(prefixes, [0, 1, 2, 3, 4, 5, 99])
    assert n == 4
    assert_rows(store, cache, *first(kv, 4))
    cache, n = attach(prefixes, [0, 1, 99])
    assert (n, cache.store) == (0, None)


def test_the_block_for_the_rest_may_be_evicted_but_not_the_one_to_copy(store, prefixes):
    kv = remember(prefixes, range(8))
    taken = fill(store)
    cache, n = attach(prefixes, [0, 1, 2, 3, 4, 5, 99])  # nothing else to evict: its own source is no victim
    assert n == 4
    assert_rows(store, cache, *first(kv, 4))
    cache.release(store)
    store.release(taken[:1])
    remember(prefixes, [7, 7, 7, 7])
    cache, n = attach(prefixes, [0, 1, 2, 3, 4, 5, 99])
    assert n == 6
    assert_rows(store, cache, *first(kv, 6))
    assert prefixes.match([7, 7, 7, 7, 7]) == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_parts_are_copied_as_they_are_stored(dtype):
    """Of every dtype: the rows read the same in both blocks, though they are not what was given."""
    store = PagedKvStore(4, 16, 2, 3, n_layers=2, v_head_dim=2, dtype=dtype, debug=True)
    prefixes, source, part = pagedkv.PrefixCache(store), PagedKvCache(), PagedKvCache()
    values = np.random.default_rng(0).standard_normal((2, 8, 6)).astype(np.float32)
    source.append_contiguous(store, values, values[..., :4].copy(), 8)
    prefixes.insert(range(8), source)
    assert prefixes.attach(part, [0, 1, 2, 3, 4, 5, 6, 99]) == 7
    for layer in range(2):
        ours, theirs = part.to_contiguous(store, layer=layer), source.to_contiguous(store, layer=layer)
        assert (ours.k == theirs.k[:7]).all()
        assert (ours.v == theirs.v[:7]).all()
        np.testing.assert_allclose(ours.k, values[layer, :7], atol=0.05)


def test_insert_takes_whole_blocks_of_what_is_there(store, prefixes):
    cache, _ = sequence(store, 6)
    cache.reserve(store, 10)
    assert prefixes.insert(range(20), cache) == 1
    assert prefixes.match(range(20)) == 4
    append(store, cache, 3)
    assert prefixes.insert(range(3), cache) == prefixes.insert([], cache) == 0
    assert prefixes.insert(range(20), cache) == 1
    assert prefixes.match(range(20)) == 8
    assert prefixes.insert(range(20), PagedKvCache()) == 0


def test_what_is_known_stays(store, prefixes):
    first_kv = remember(prefixes, range(8))
    other, _ = sequence(store, 12)
    held = prefixes.match_blocks(range(12)).tolist()
    assert prefixes.insert(range(12), other) == 1
    assert prefixes.match_blocks(range(13)).tolist() == [*held, other.block_table[2]]
    assert_rows(store, attach(prefixes, [*range(8), 99])[0], *first_kv)


def test_insert_while_it_runs_and_goes_on(store, prefixes):
    cache, kv = sequence(store, 6)
    with pagedkv.Step(store, [cache], 7) as step:
        assert prefixes.insert(range(13), cache) == 1  # not what the step computes
        new = write_all(step)
    assert prefixes.insert(range(13), cache) == 2
    kv = tuple(np.concatenate(both, 1) for both in zip(kv, new, strict=True))
    cache.truncate(store, 5)
    append(store, cache, 7)  # copies the block that is cached, and leaves it as it is
    other, n = attach(prefixes, range(13))
    assert n == 12
    assert_rows(store, other, *first(kv, 12))


def test_windows_can_go_on_but_not_begin(store, prefixes):
    early, late = PagedKvCache(), PagedKvCache()
    kv = append(store, early, 8)
    prefixes.insert(range(8), early)
    early.drop_before(store, 8)
    more = append(store, early, 4)
    assert prefixes.insert(range(12), early) == 1
    both = [np.concatenate(pair, 1) for pair in zip(kv, more, strict=True)]
    assert_rows(store, attach(prefixes, range(13))[0], *both)
    append(store, late, 8)
    late.drop_before(store, 4)
    with unchanged(store, late):
        assert prefixes.insert([9, *range(7)], late) == 0
    assert prefixes.match([9, *range(8)]) == 0


def test_attach_refuses(store, prefixes):
    remember(prefixes, range(8))
    busy, other = PagedKvCache(), PagedKvCache()
    append(store, other, 1)
    with refused(ValueError, "cache", store, other):
        prefixes.attach(other, range(8))
    with refused(TypeError, "cache", store):
        prefixes.attach(None, range(8))
    with pagedkv.Step(store, [busy], 0), refused(RuntimeError, "cache", store, busy):
        prefixes.attach(busy, range(9))
    foreign = PagedKvStore(4, 4, 2, 3)
    cache, _ = sequence(foreign, 4)
    with refused(ValueError, "cache", store):
        prefixes.insert(range(4), cache)
    with refused(TypeError, "cache", store):
        prefixes.insert(range(4), "cache")
    held = store.acquire(1)
    unbound = PagedKvCache()
    unbound.adopt_blocks(held, 4, 4)
    with refused(ValueError, "cache", store):
        prefixes.insert(range(4), unbound)


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"priority": 1.0}, TypeError, "priority"),
        ({"priority": True}, TypeError, "priority"),
        ({"priority": None}, TypeError, "priority"),
        ({"ttl": 0}, ValueError, "ttl"),
        ({"ttl": -1.0}, ValueError, "ttl"),
        ({"ttl": math.nan}, ValueError, "ttl"),
        ({"ttl": True}, TypeError, "ttl"),
        ({"ttl": "1"}, TypeError, "ttl"),
    ],
)
def test_insert_refuses(store, prefixes, options, error, name):
    cache, _ = sequence(store, 4)
    with refused(error, name, store, cache):
        prefixes.insert(range(4), cache, **options)


@pytest.mark.parametrize("n", [1.0, None, True, "1"])
def test_evict_refuses_what_is_no_number(store, prefixes, n):
    with refused(TypeError, "n", store):
        prefixes.evict(n)
    with refused(ValueError, "n", store):
        prefixes.evict(-1)
