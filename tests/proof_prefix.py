"""What is interrupted, of the prefix cache and of those who make it give up blocks. As `proof_core`, with its rules."""

import math

from proof_core import batch, forward, scenario, strange, text

import pagedkv


def attach(world, name, tokens, spell=strange, **options):
    world.start(name, tokens)
    return lambda: world.prefixes.attach(world.cache(name), spell(tokens), **options)


def history(world, namespaces=(None,), total=3):
    """Some requests have ended, on common beginnings that part inside a block."""
    for space in namespaces:
        shared = text(1, 10)
        for i in range(total):
            world.know(shared + text(2 + i, 6 + 4 * i), namespace=space)
    return shared


@scenario("attach", "whole blocks")
def _(world):
    world.know(text(1, 16))
    return [attach(world, "a", text(1, 16) + text(9, 3)), attach(world, "b", text(1, 12) + text(8, 3))]


@scenario("attach", "parts of a block")
def _(world):
    shared = history(world)
    return [attach(world, "a", shared + text(9, 3)), attach(world, "b", shared + text(3, 7) + text(9, 1))]


@scenario("attach", "nothing known")
def _(world):
    history(world)
    return [attach(world, "a", text(9, 9)), attach(world, "b", text(1, 9), namespace=b"none")]


@scenario("attach", "a copy for which another block goes", total_blocks=9)
def _(world):
    world.know(text(5, 8))
    world.know(text(1, 8))
    world.start("held", text(6, 20), 20)
    return [attach(world, "a", text(1, 6) + text(9, 3)), attach(world, "b", text(1, 5) + text(8, 3))]


@scenario("attach", "four hundred blocks", total_blocks=402, costs=5)
def _(world):
    world.know(text(1, 1600))
    return [attach(world, "a", text(1, 1599) + text(9, 3), list), attach(world, "b", text(1, 1590) + text(8, 3), list)]


def ended(world, name, tokens, namespace=None):
    """A sequence that has all its tokens, and may become known."""
    world.may_know(tokens, namespace)
    return world.start(name, tokens, len(tokens))


@scenario("insert", "new, longer, and known")
def _(world):
    cache = ended(world, "a", text(1, 17))
    insert = world.prefixes.insert
    return [lambda: insert(strange(text(1, 9)), cache), *[lambda: insert(text(1, 17), cache)] * 2]


@scenario("insert", "beside what is known")
def _(world):
    shared = history(world)
    cache = ended(world, "a", shared + text(9, 9))
    other = ended(world, "b", text(8, 9), b"other")
    return [
        lambda: world.prefixes.insert(shared + text(9, 9), cache),
        lambda: world.prefixes.insert(text(8, 9), other, namespace=b"other"),
    ]


@scenario("insert", "priority and ttl")
def _(world):
    shared = history(world)
    cache = ended(world, "a", shared + text(9, 9))
    insert = world.prefixes.insert

    def later():
        world.clock.now += 7

    return [
        lambda: insert(shared + text(9, 9), cache, priority=2),
        lambda: insert(shared + text(9, 9), cache, ttl=5),
        later,
        lambda: insert(shared + text(9, 5), cache, priority=3, ttl=math.inf),
    ]


@scenario("insert", "by a handle, as the sequence grows")
def _(world):
    world.may_know(text(1, 60))
    world.start("a", text(1, 60), 9)
    handle = pagedkv.PrefixHandle()

    def insert(n, **options):
        world.prefixes.insert(text(1, n), world.cache("a"), handle=handle, **options)

    def grow():
        world.cache("a").append_contiguous(world.store, *world.rows("a", 21), 21)

    return [
        lambda: insert(9), grow, lambda: insert(30, priority=1, ttl=5), lambda: insert(30), lambda: repr(handle),
        lambda: world.prefixes.evict(1), lambda: world.prefixes.clear(), lambda: insert(30),
    ]  # fmt: skip


@scenario("insert", "behind what was dropped")
def _(world):
    world.know(text(1, 12))
    cache = ended(world, "a", text(1, 24))
    cache.drop_before(world.store, 12)
    unknown = ended(world, "b", text(2, 24))
    unknown.drop_before(world.store, 12)
    insert = world.prefixes.insert
    return [lambda: insert(text(2, 24), unknown), lambda: insert(text(1, 24), cache)]


@scenario("insert", "four hundred blocks", total_blocks=402, costs=5)
def _(world):
    cache = ended(world, "a", text(1, 1600))
    return [lambda: world.prefixes.insert(text(1, 1600), cache)]


@scenario("evict", "from the ends")
def _(world):
    history(world)
    world.know(text(9, 8), namespace=b"other")
    return [lambda: world.prefixes.evict(1), lambda: world.prefixes.evict(4), lambda: world.prefixes.evict(99)]


@scenario("evict", "what others hold, or a ttl protects")
def _(world):
    shared = history(world)
    world.know(text(9, 12), ttl=5)
    attach(world, "a", shared + text(3, 10))()

    def later():
        world.clock.now += 7

    return [lambda: world.prefixes.evict(99), later, lambda: world.prefixes.evict(2), lambda: world.prefixes.evict(99)]


@scenario("evict", "in the middle, before what a window holds")
def _(world):
    cache = ended(world, "a", text(1, 24))
    world.prefixes.insert(text(1, 24), cache)
    cache.drop_before(world.store, 16)
    return [lambda: world.prefixes.evict(1), lambda: world.prefixes.evict(9)]


@scenario("evict", "more than there are")
def _(world):
    history(world)
    return [lambda: world.prefixes.evict(2), lambda: world.prefixes.evict(99)]


@scenario("evict", "four hundred blocks", total_blocks=402, costs=5)
def _(world):
    for i in range(20):
        world.know(text(1, 10) + text(2 + i, 67))
    return [lambda: world.prefixes.evict(150), lambda: world.prefixes.evict(150)]


@scenario("clear", "a namespace, and all")
def _(world):
    shared = history(world, (None, b"other"))
    world.know(text(9, 12), ttl=5)
    attach(world, "a", shared + text(3, 10))()
    clear = world.prefixes.clear
    return [lambda: clear(namespace=b"other"), clear, clear]


@scenario("clear", "forget")
def _(world):
    shared = history(world)
    prefixes = world.prefixes
    attach(world, "a", shared + text(3, 10))()
    world.know(text(9, 20), namespace=b"other", ttl=5)
    return [
        lambda: prefixes.forget(strange(shared + text(2, 6)), start=12),
        lambda: prefixes.forget(shared),
        lambda: prefixes.forget(text(9, 12), namespace=b"other"),
    ]


@scenario("clear", "dropped as a whole")
def _(world):
    shared = history(world)
    attach(world, "a", shared + text(3, 10))()

    def act():
        world.places[0].known = None

    return [act]


@scenario("looking", "at a prefix cache")
def _(world):
    shared = history(world)
    world.know(text(9, 12), ttl=5)
    prefixes = world.prefixes

    def later():
        world.clock.now += 7

    return [
        lambda: prefixes.match(strange(shared)), lambda: prefixes.match_blocks(strange(shared)), prefixes.stats,
        prefixes.check, lambda: prefixes.is_evictable(3), later, lambda: prefixes.is_evictable(3),
        lambda: prefixes.evictable_block_count, prefixes.stats, lambda: repr(prefixes),
    ]  # fmt: skip


@scenario("looking", "a walk")
def _(world):
    history(world, (None, b"other"))
    world.know(text(9, 12), ttl=5)
    walk, names = world.prefixes.walk, world.prefixes.namespaces
    return [names, lambda: next(walk()), lambda: list(walk(namespace=b"other")), lambda: list(walk())]


# --- with a window ---


def see(world, window):
    """The layers of the world see so many positions."""
    world.places[0].known = None
    world.places[0].known = pagedkv.PrefixCache(world.store, clock=world.clock, window=window)


def dropped(world, name, n):
    """A sequence that has its first 24 tokens of a text, and has dropped the first n."""
    cache = ended(world, name, text(1, 24))
    cache.drop_before(world.store, n)
    return cache


@scenario("window", "a hole is left, and filled in part")
def _(world):
    see(world, 6)
    cache, other = dropped(world, "a", 16), dropped(world, "b", 8)
    third = ended(world, "c", text(1, 10) + text(9, 6))
    insert = world.prefixes.insert
    return [
        lambda: insert(strange(text(1, 24)), cache),
        lambda: insert(text(1, 24), other, ttl=5),
        lambda: insert(text(1, 10) + text(9, 6), third),
    ]


@scenario("window", "attach behind a hole")
def _(world):
    see(world, 6)
    world.prefixes.insert(text(1, 24), dropped(world, "known", 8))
    return [
        attach(world, "a", text(1, 24) + text(9, 3)),
        attach(world, "b", text(1, 18) + text(9, 3)),
        attach(world, "c", text(1, 12) + text(9, 3)),
    ]


@scenario("window", "a hole is made by what a store takes", total_blocks=10, hands_over=True)
def _(world):
    see(world, 6)
    cache = ended(world, "a", text(1, 24))
    world.prefixes.insert(text(1, 24), cache)
    cache.drop_before(world.store, 16)
    return [lambda: world.prefixes.evict(1), lambda: world.store.acquire(6)]


@scenario("window", "forgotten from inside a hole on")
def _(world):
    see(world, 6)
    world.prefixes.insert(text(1, 24), dropped(world, "a", 8))
    forget = world.prefixes.forget
    return [lambda: forget(text(1, 24), start=20), lambda: forget(text(1, 24), start=5)]


# --- events ---


def listen(world, capacity=100):
    world.events = world.prefixes.events(capacity)


@scenario("events", "begun, read and closed")
def _(world):
    shared = history(world)
    cache = ended(world, "a", shared + text(9, 9))

    return [
        lambda: listen(world), lambda: world.prefixes.insert(shared + text(9, 9), cache), lambda: world.events.poll(1),
        lambda: world.events.poll(), lambda: world.events.close(), lambda: listen(world, 3),
    ]  # fmt: skip


@scenario("events", "of all that changes")
def _(world):
    shared = history(world, (None, b"other"))
    cache = ended(world, "a", shared + text(9, 9), b"new")
    listen(world)
    prefixes = world.prefixes
    return [
        lambda: prefixes.insert(shared + text(9, 9), cache, namespace=b"new"), lambda: prefixes.evict(2),
        lambda: prefixes.forget(shared + text(9, 9), namespace=b"new", start=8), lambda: repr(world.events),
        lambda: prefixes.clear(namespace=b"other"), lambda: world.events.poll(), lambda: prefixes.clear(),
    ]  # fmt: skip


@scenario("events", "a queue that is full")
def _(world):
    history(world)
    cache = ended(world, "a", text(9, 8), b"other")
    listen(world, 2)
    return [
        lambda: world.prefixes.evict(4), lambda: world.events.poll(1),
        lambda: world.prefixes.insert(text(9, 8), cache, namespace=b"other"), lambda: world.events.poll(),
    ]  # fmt: skip


@scenario("events", "the cache or the reader is dropped")
def _(world):
    history(world)
    new = ended(world, "a", text(9, 8), b"other")
    listen(world)

    def reader():
        world.events = None

    def cache():
        world.places[0].known = None

    return [
        lambda: world.prefixes.insert(text(9, 8), new, namespace=b"other"), reader, lambda: listen(world), cache,
    ]  # fmt: skip


# --- a store that is short ---


def short(world):
    """All blocks are known or held, and two texts were used less long ago than a third."""
    for i in range(3):
        world.know(text(1 + i, 20), namespace=[None, b"other", None][i])
    world.start("held", text(7, 90), 4 * world.store.free_block_count)


@scenario("short", "push")
def _(world):
    short(world)
    k, v = world.rows("held", 1)
    return [lambda: world.cache("held").push(world.store, k[:, 0], v[:, 0])]


@scenario("short", "append and reserve")
def _(world):
    short(world)
    k, v = world.rows("held", 9)
    cache = world.cache("held")
    return [lambda: cache.append_contiguous(world.store, k, v, 9), lambda: cache.reserve(world.store, 16)]


@scenario("short", "more than there is", alone=True)
def _(world):
    short(world)
    k, v = world.rows("held", 9)
    world.sequences["held"].tokens = text(7, 900)

    def act():
        try:
            world.cache("held").reserve(world.store, 80)
        except pagedkv.PagedStoreExhausted as error:
            if error.evictable == 15:
                return
        raise AssertionError("it was not refused, or for another reason")

    return [act, lambda: world.cache("held").append_contiguous(world.store, k, v, 9)]


@scenario("short", "acquire", hands_over=True)
def _(world):
    short(world)
    return [lambda: world.store.acquire(7)]


@scenario("short", "acquire ids that are objects to be made", total_blocks=600, hands_over=True)
def _(world):
    world.start("held", text(7, 3000), 1200)
    for i in range(3):
        world.know(text(1 + i, 40), namespace=[None, b"other", None][i])
    n = 4 * (world.store.free_block_count - 2)
    world.cache("held").append_contiguous(world.store, *world.rows("held", n), n)
    world.alternatives.append(lambda: world.prefixes.evict(5))  # and no memory for their names
    return [lambda: world.store.acquire(7)]


@scenario("short", "Step", total_blocks=16)
def _(world):
    caches, kv = batch(world)
    world.know(text(7, 24))
    world.start("held", text(8, 90), 4 * world.store.free_block_count)

    def act():
        with pagedkv.Step(world.store, caches, [1, 5, 9]) as step:
            forward(world, step, kv)

    return [act]


@scenario("short", "a term that is over")
def _(world):
    world.know(text(1, 20), ttl=5)
    world.know(text(2, 20), ttl=50)
    world.start("held", text(7, 90), 4 * world.store.free_block_count)
    k, v = world.rows("held", 6)
    world.clock.now += 7
    return [lambda: world.cache("held").append_contiguous(world.store, k, v, 6)]
