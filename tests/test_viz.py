"""store.block_map(): who holds what, as text, as SVG and in a notebook."""

import dataclasses
import math
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from helpers import append, refused, unchanged
from prefix_support import remember

import pagedkv
from pagedkv import PagedKvCache, PagedKvStore, PrefixCache, Step

SVG = "{http://www.w3.org/2000/svg}"


def marks(picture):
    return "".join(line for _, line in picture.rows)


def counts(picture):
    return picture.free, picture.private, picture.shared, picture.evictable, picture.kept


def test_each_kind_has_its_mark(store, cache, prefixes):
    remember(prefixes, [1, 2, 3, 4, 5, 6, 7, 8])  # 0 1
    remember(prefixes, [9] * 4, ttl=math.inf)  # 2
    store.acquire()  # 2 was the tail of nothing: the next one
    prefixes.attach(cache, [1, 2, 3, 4, 0])  # shares 0 with the prefix cache
    append(store, cache, 5)  # and has two of its own
    store.retain([4] * 9)
    picture = store.block_map()
    assert [store.refcount(block) for block in range(6)] == [2, 1, 1, 1, 10, 1]
    assert marks(picture) == "2cC#+#.........."
    assert counts(picture) == (10, 2, 2, 1, 1)
    assert (picture.cached, picture.most_holders, picture.total_blocks, picture.blocks_per_mark) == (3, 10, 16, 1)
    assert picture.summary == "16 blocks: 10 free, 2 private, 2 shared by up to 10, 3 cached, 1 of them evictable"


@pytest.mark.parametrize("n", range(1, 13))
def test_a_digit_says_how_many_share(store, n):
    [block] = store.acquire()
    store.retain([block] * (n - 1))
    assert marks(store.block_map())[0] == ("#" if n == 1 else str(n) if n < 10 else "+")
    assert store.block_map().most_holders == n


def test_a_term_that_is_over_does_not_keep(store, prefixes, clock):
    remember(prefixes, [1, 2, 3, 4], ttl=5)
    assert marks(store.block_map())[0] == "C"
    clock.now += 5
    assert marks(store.block_map())[0] == "c"


def test_blocks_of_an_open_step_are_private(store, cache):
    append(store, cache, 4)
    with Step(store, [cache], 5) as step:
        assert marks(store.block_map()) == "###............."
        step.rollback()
    assert marks(store.block_map()) == "#..............."


def test_without_a_prefix_cache_nothing_is_cached(store, prefixes):
    remember(prefixes, [1, 2, 3, 4])
    assert store.block_map().cached == 1
    prefixes.clear()
    assert (store.block_map().cached, marks(store.block_map())) == (0, "." * 16)


def test_sequences_are_drawn_block_by_block(store, cache):
    append(store, cache, 14)
    fork = cache.clone()
    append(store, fork, 1)
    cache.drop_before(store, 8)
    cache.reserve(store, 6)
    picture = store.block_map({"first": cache, "second": fork})
    assert picture.sequences == (("first", "__2##"), ("second", "##2#"))
    assert store.block_map([cache, fork, PagedKvCache()]).sequences == (("0", "__2##"), ("1", "##2#"), ("2", ""))


def test_a_picture_is_of_a_moment_and_stays(store, cache):
    before = store.block_map([cache])
    text, svg = str(before), before.svg
    append(store, cache, 20)
    assert (str(before), before.svg) == (text, svg)
    assert before != store.block_map([cache])
    assert store.block_map([cache]) == store.block_map([cache])
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.free = 3


def test_drawing_changes_nothing(store, cache, prefixes):
    append(store, cache, 9)
    prefixes.insert([1] * 8, cache)
    with unchanged(store, cache):
        store.block_map([cache]).svg  # noqa: B018


def test_lines_are_as_wide_as_asked(store):
    store.acquire(3)
    assert store.block_map(width=7).rows == (("0", "###...."), ("7", "......."), ("14", ".."))


@pytest.mark.parametrize("total", [2048, 2049, 100_000, 10**7])
def test_a_large_store_is_summarised(total):
    store = PagedKvStore(1, total, 1, 1)
    store.acquire(total // 2)
    store.retain(list(range(total // 4)))
    picture = store.block_map([PagedKvCache()] * 50)
    per_mark = math.ceil(total / 2048)
    assert picture.blocks_per_mark == per_mark
    assert len(marks(picture)) == math.ceil(total / per_mark)
    assert counts(picture) == (total - total // 2, total // 2 - total // 4, total // 4, 0, 0)
    quarter = len(marks(picture)) // 4
    assert marks(picture)[: quarter - 1] == "2" * (quarter - 1)
    assert marks(picture)[quarter + 1 : 2 * quarter - 1] == "#" * (quarter - 2)
    assert marks(picture).endswith("." * (quarter - 1))
    assert len(str(picture).splitlines()) <= 1 + 32 + 1 + 33
    assert max(map(len, str(picture).splitlines())) < 150
    assert len(picture.svg) < 100_000
    assert ("a mark is" in str(picture)) == (per_mark > 1)


def test_a_mark_of_several_blocks_is_what_most_of_them_are():
    """Counted by hand: 2048 marks of two lines each stand for three blocks."""
    store = PagedKvStore(1, 3 * 2048, 1, 1)
    ids = store.acquire(9)
    store.retain(ids[:2] + ids[3:4] + ids[4:5] * 5)  # 2 2 1 | 2 6 1 | 1 1 1 | free
    assert marks(store.block_map())[:4] == "26#."


def test_of_several_kinds_the_shared_ones_count_together():
    store = PagedKvStore(1, 5 * 2048, 1, 1)
    ids = store.acquire(5)
    store.retain(ids[:1] + ids[1:2] * 11 + ids[2:3] * 3)  # 2, 12 and 4 holders against two with one
    assert marks(store.block_map())[:2] == "+."


def test_a_long_sequence_and_a_long_name_are_cut(store):
    large, long = PagedKvStore(1, 100, 1, 1), PagedKvCache()
    append(large, long, 100)
    picture = large.block_map({"a name of more than sixteen characters": long, "\x1b[2J\n": long}, width=10)
    assert picture.sequences == (("a name of more ~", "##########>"), ("?[2J?", "##########>"))
    ET.fromstring(picture.svg)


def squares(svg, colour):
    paths = [path.get("d") for path in ET.fromstring(svg).iter(f"{SVG}path") if path.get("fill") == colour]
    return sum(path.count("M") for path in paths)


def test_the_svg_has_a_square_for_each_mark(store, cache, prefixes):
    append(store, cache, 10)
    prefixes.insert([1] * 8, cache)
    remember(prefixes, [2] * 4)
    picture = store.block_map({"<&>": cache})
    assert marks(picture) == "22#c............"
    root = ET.fromstring(picture.svg)
    paths = {path.get("fill"): path.get("d").count("M") for path in root.iter(f"{SVG}path")}
    assert sorted(paths.values()) == [1, 2, 4, 12]  # evictable, private, shared, free: the sequence's three again
    numbers = [text for text in root.iter(f"{SVG}text") if " " in (text.get("x") or "")]
    assert [text.text for text in numbers] == ["2222"]
    assert [len(text.get("x").split()) for text in numbers] == [4]
    assert [text.text for text in root.iter(f"{SVG}text") if text.get("text-anchor") == "end"] == ["0", "<&>"]
    assert picture._repr_html_() == picture.svg


def test_arguments_are_checked(store, cache):
    append(store, cache, 3)
    other = PagedKvStore(4, 4, 1, 1)
    for caches, error in [(5, TypeError), ([5], TypeError), ({"a": None}, TypeError), (None, TypeError)]:
        with refused(error, "caches", store, cache):
            store.block_map(caches)
    with refused(ValueError, "caches", store, cache):
        other.block_map([cache])
    for width, error in [(0, ValueError), (1025, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)]:
        with refused(error, "width", store, cache):
            store.block_map(width=width)


def test_a_store_that_was_never_made_has_an_empty_map():
    picture = PagedKvStore.__new__(PagedKvStore).block_map()
    assert picture.total_blocks == 0
    assert str(picture).startswith("0 blocks: 0 free, 0 private, 0 shared")
    ET.fromstring(picture.svg)


def test_it_stands_among_the_public_names():
    assert isinstance(PagedKvStore(1, 1, 1, 1).block_map(), pagedkv.BlockMap)


# --- stats, which it goes with ---------------------------------------------------------------------


def test_stats_are_frozen_and_do_not_walk():
    """As many as there are blocks would take a hundred times longer than the few that do nothing."""
    import time

    store = PagedKvStore(1, 10**7, 1, 1)
    prefixes = PrefixCache(store)
    store.acquire(10**6)
    for stats in (store.stats(), prefixes.stats()):
        with pytest.raises(AttributeError):
            setattr(stats, stats._fields[0], 5)
        assert all(isinstance(value, int) for value in stats)
    for ask in (store.stats, prefixes.stats):
        best = math.inf
        for _ in range(20):
            began = time.perf_counter()
            ask()
            best = min(best, time.perf_counter() - began)
        assert best < 2e-4  # a walk over 10**7 counts takes milliseconds


def test_the_map_of_a_large_store_is_drawn_at_the_speed_of_arrays():
    store = PagedKvStore(1, 10**6, 1, 1)
    np.testing.assert_array_equal(store.block_map().free, 10**6)
