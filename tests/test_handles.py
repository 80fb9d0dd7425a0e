"""PrefixHandle and a sequence that was taken back: no row is ever known under tokens that it was not computed from.

Rows are those of `proof_world`: each says which tokens led to it, and `truth` reads all that is known.
"""

import pytest
from proof_core import text
from proof_world import END, World

from pagedkv import PagedKvCache, PrefixHandle, reorder

N = 24  # of blocks of 4, all whole
FIRST = text(1, 60)

MEANWHILE = {
    "nothing": lambda world: None,
    "evict one": lambda world: world.prefixes.evict(1),
    "evict all": lambda world: world.prefixes.evict(99),
    "forget the end": lambda world: world.prefixes.forget(FIRST[:N], start=16),
    "forget": lambda world: world.prefixes.forget(FIRST[:N]),
    "clear": lambda world: world.prefixes.clear(),
    "another takes its place": lambda world: (
        world.prefixes.forget(FIRST[:N], start=16),
        world.know(FIRST[:16] + text(5, 20)),
    ),
}


def begin():
    """A sequence of N tokens that is inserted by a handle."""
    world = World.plain(80)
    world.may_know(FIRST)
    world.start("a", FIRST, N)
    handle = PrefixHandle()
    insert(world, "a", FIRST[:N], handle)
    return world, handle


def insert(world, name, tokens, handle, **options):
    n = world.prefixes.insert(tokens, world.cache(name), handle=handle, **options)
    world.truth()
    return n


def go_on(world, name, tokens, n):
    """The sequence has n positions of these tokens, of which it has some."""
    world.sequences[name].tokens = list(tokens)
    for namespace in (None, b"b"):
        world.may_know(tokens, namespace)
        # What must not be found: its rows under the tokens that were there before.
        world.may_know(FIRST[:N] + list(tokens[N:]), namespace)
    n -= world.cache(name).seq_len
    world.cache(name).append_contiguous(world.store, *world.rows(name, n), n)


def assert_known(world, tokens, namespace=None):
    assert world.prefixes.match([*tokens, END], namespace=namespace) == len(tokens) // 4 * 4
    world.truth()


@pytest.mark.parametrize("meanwhile", MEANWHILE)
@pytest.mark.parametrize("cut", [0, 1, 3, 4, 5, 8, N - 1, N])
def test_truncated_and_gone_on_with_other_tokens(cut, meanwhile):
    world, handle = begin()
    world.cache("a").truncate(world.store, N - cut)
    MEANWHILE[meanwhile](world)
    tokens = FIRST[: N - cut] + text(2, 60)
    for n in (N, N + 9, N + 16):
        if n > N - cut:
            go_on(world, "a", tokens, n)
            insert(world, "a", tokens[:n], handle)
            assert_known(world, tokens[:n])
    assert insert(world, "a", tokens[: N + 16], handle) == 0
    world.finish()


@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_truncated_twice_and_grown_beyond_in_between(meanwhile):
    world, handle = begin()
    tokens = FIRST
    for i, keep in enumerate([20, 13, 27, 4, 0]):
        world.cache("a").truncate(world.store, keep)
        tokens = tokens[:keep] + text(10 + i, 60)
        go_on(world, "a", tokens, keep + 14)
        if i % 2:
            MEANWHILE[meanwhile](world)
        insert(world, "a", tokens[: keep + 14], handle)
        assert_known(world, tokens[: keep + 14])
    world.finish()


def test_fewer_tokens_than_were_inserted_before_it_was_truncated():
    world, handle = begin()
    world.cache("a").truncate(world.store, 6)
    tokens = FIRST[:6] + text(2, 60)
    go_on(world, "a", tokens, 13)
    assert insert(world, "a", tokens[:13], handle) == 2
    assert_known(world, tokens[:13])


@pytest.mark.parametrize("how", ["release", "clone_from", "reorder", "attach"])
def test_a_sequence_that_has_become_another(how):
    world, handle = begin()
    tokens = FIRST[:5] + text(2, 60)
    cache = world.cache("a")
    world.start("b", tokens)
    go_on(world, "b", tokens, 32)
    if how == "clone_from":
        cache.clone_from(world.cache("b"))
    elif how == "reorder":
        reorder(world.store, [cache, world.cache("b")], [1, 1])
    else:
        cache.release(world.store)
    if how == "attach":
        world.prefixes.insert(tokens[:32], world.cache("b"))
        assert world.prefixes.attach(cache, [*tokens[:32], END]) == 32
    go_on(world, "a", tokens, 37)
    insert(world, "a", tokens[:37], handle)
    assert_known(world, tokens[:37])


@pytest.mark.parametrize("keep", [0, 7, 20, N])
def test_a_handle_that_goes_from_one_sequence_to_its_fork_and_back(keep):
    world, handle = begin()
    world.start("b", FIRST).clone_from(world.cache("a"))
    world.cache("b").truncate(world.store, keep)
    other = FIRST[:keep] + text(2, 60)
    for n in (N + 4, N + 11, N + 17):
        for name, tokens in (("a", FIRST), ("b", other)):
            go_on(world, name, tokens, n)
            insert(world, name, tokens[:n], handle)
            assert_known(world, tokens[:n])
    world.finish()


def test_two_handles_of_one_sequence():
    world, handle = begin()
    second, tokens = PrefixHandle(), FIRST
    for i, keep in enumerate([24, 21, 30, 9]):
        world.cache("a").truncate(world.store, min(keep, world.cache("a").seq_len))
        keep = world.cache("a").seq_len
        tokens = tokens[:keep] + text(10 + i, 60)
        go_on(world, "a", tokens, keep + 13)
        for each, namespace in ((handle, None), (second, b"b"))[:: 1 if i % 2 else -1]:
            insert(world, "a", tokens[: keep + 13], each, namespace=namespace)
            assert_known(world, tokens[: keep + 13], namespace)


def test_a_clock_that_takes_the_sequence_back():
    """In the middle of the call, when the tokens have been looked at."""
    world, handle = begin()
    tokens = FIRST[:5] + text(2, 60)

    def take_back(clock):
        clock.instead = None
        world.cache("a").truncate(world.store, 5)
        go_on(world, "a", tokens, N + 8)
        given[:] = tokens[: N + 8]
        return 0.0

    go_on(world, "a", FIRST, N + 8)
    world.clock.instead = take_back
    given = FIRST[: N + 8]
    insert(world, "a", given, handle, ttl=5)
    assert_known(world, tokens[: N + 8])


def test_what_is_taken_back_beyond_what_was_inserted():
    """What is truncated beyond what was inserted, as speculation does, is no reason to look at all tokens again."""
    world, handle = begin()
    seen = []

    class Counted(list):
        def __getitem__(self, item):
            seen.append(item)
            return list.__getitem__(self, item)

    for n in range(N + 4, N + 24, 4):
        go_on(world, "a", FIRST, n + 3)
        world.cache("a").truncate(world.store, n)
        assert insert(world, "a", Counted(FIRST[:n]), handle) == 1
    assert seen == [slice(n, None) for n in range(N, N + 20, 4)]


def test_another_cache_that_is_empty():
    world, handle = begin()
    world.sequences["b"] = type(world.sequences["a"])(FIRST, [PagedKvCache()])
    assert insert(world, "b", FIRST[:N], handle) == 0
    assert insert(world, "b", FIRST[:3], handle) == 0
    go_on(world, "a", FIRST, N + 4)
    assert insert(world, "a", FIRST[: N + 4], handle) == 1
