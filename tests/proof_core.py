"""What is interrupted: every public method that takes, gives or moves blocks, each in the ways that differ inside.

A scenario is a function that makes something of a new world, and returns the acts that come one after the other.
Before, between and after them are the states in which an interrupt, or an error, may leave the world: no other.
"""

import copy
from dataclasses import dataclass

import numpy as np
from hostile import Array, Indexed, Iterated
from proof_world import World

import pagedkv

SCENARIOS = []


@dataclass(frozen=True)
class Scenario:
    name: str
    setup: object
    total_blocks: int = 24
    hands_over: bool = False
    costs: int = 1  # as many others
    alone: bool = False  # the acts look at what others change
    robust: bool = True  # when NumPy's allocations fail: it may crash where it indexes by a mask

    def __str__(self):
        return self.name

    def begin(self):
        world = World.plain(self.total_blocks)
        world.hands_over = self.hands_over
        return world, self.setup(world)

    def allowed(self):
        """The states between acts, each with the order in which its blocks would go."""
        states = []
        for n_acts in range(len(self.begin()[1]) + 1):
            world, acts = self.begin()
            for act in acts[:n_acts]:
                act()
            states.append((world.snapshot(), world.order()))
        for number in range(len(world.alternatives)):
            world, _ = self.begin()
            world.alternatives[number]()
            states.insert(0, (world.snapshot(), world.order()))
        return states


def scenario(of, name, **options):
    def add(setup):
        SCENARIOS.append(Scenario(f"{of}: {name}", setup, **options))
        return setup

    return add


def text(seed, n):
    """Tokens of which no two texts have one in common."""
    return list(range(seed * 100_000, seed * 100_000 + n))


def strange(tokens):
    """The same, each of a type of the caller's own."""
    return [Indexed(token) for token in tokens]


# --- PagedKvStore: what a caller holds without a sequence ---


@scenario("PagedKvStore", "acquire", total_blocks=600, hands_over=True)
def _(world):
    """Ids beyond those that Python keeps: each is an object to be made."""
    world.start("a", text(1, 1100), 1100)
    return [lambda: world.store.acquire(Indexed(20)), lambda: world.store.acquire(1)]


@scenario("PagedKvStore", "retain")
def _(world):
    ids = world.start("a", text(1, 9), 9).block_table.tolist()

    def act():
        world.store.retain(strange(ids))

    world.hands_over = True
    return [act]


@scenario("PagedKvStore", "release", hands_over=True)
def _(world):
    ids = world.store.acquire(4)
    return [lambda: world.store.release(strange(ids[:2])), lambda: world.store.release(ids[2:])]


@scenario("PagedKvStore", "copy_block")
def _(world):
    other, source = world.start("a", text(1, 9), 9).block_table[:2].tolist()
    world.loose += world.store.acquire(1)
    world.store.copy_block(other, world.loose[0])
    return [lambda: world.store.copy_block(Indexed(source), Indexed(world.loose[0]))]


@scenario("PagedKvStore", "pieces")
def _(world):
    return show(world, world.start("a", text(1, 9), 9).block_table.tolist())


@scenario("PagedKvStore", "pieces of what would go", alone=True)
def _(world):
    world.know(text(2, 30))
    world.know(text(3, 9))
    return show(world, world.prefixes.match_blocks(text(2, 31)).tolist())


def show(world, ids):
    right = b"".join(world.store.pieces(ids).views)

    def act():
        with world.store.pieces(strange(ids)) as pieces:
            assert b"".join(pieces.views) == right
            view = pieces.views[3][1:5]
        assert len(view) == 4  # held by it alone, until it goes

    return [act, lambda: world.store.pieces(ids), act]


@scenario("PagedKvStore", "fill", hands_over=True)
def _(world):
    world.know(text(2, 60))
    ids = world.start("a", text(1, 9), 9).block_table.tolist()

    def act():
        with world.store.pieces(ids) as pieces, world.store.fill(Indexed(len(ids))) as filling:
            for view, empty in zip(pieces.views, filling.views, strict=True):
                empty[:] = view
            world.kept["ids"] = filling.commit(Indexed(2))

    def taken_back():  # leaves the traces of blocks that came and went
        world.store.fill(len(ids)).release()

    world.alternatives.append(taken_back)
    return [act]


@scenario("PagedKvStore", "fill, ended by an error")
def _(world):
    world.know(text(2, 60))

    def act():
        try:
            with world.store.fill(Indexed(12)) as filling:
                filling.views[0][0] = 1
                raise ArithmeticError
        except ArithmeticError:
            pass

    return [act]


@scenario("PagedKvStore", "looking")
def _(world):
    world.know(text(2, 8), ttl=1)
    cache = world.start("a", text(1, 9), 9)
    clone = world.start("b", text(1, 9))
    clone.clone_from(cache)
    store = world.store
    return [store.stats, store.check, lambda: store.check(Iterated([cache, clone])),
            lambda: store.k_row(int(cache.block_table[0]), 1), lambda: repr(store), lambda: repr(cache)]  # fmt: skip


@scenario("PagedKvStore", "its block map", robust=False)
def _(world):
    world.know(text(2, 8), ttl=1)
    cache = world.start("a", text(1, 9), 9)
    return [lambda: str(world.store.block_map({"a": cache}))]


@scenario("PagedKvStore", "made and dropped")
def _(world):
    return [
        lambda: pagedkv.PagedKvStore(Indexed(4), 3, 1, 2),
        lambda: pagedkv.PagedKvStore.from_bytes(1 << 12, Indexed(4), 1, 2, dtype="int8"),
        lambda: pagedkv.PrefixCache(pagedkv.PagedKvStore(4, 3, 1, 2)),
    ]


# --- PagedKvCache ---


@scenario("PagedKvCache", "push")
def _(world):
    world.start("a", text(1, 30), 6)
    steps = []
    for i in range(3):  # into a block, into it, and into a new one
        k, v = world.places[0].kv_of(text(1, 30), 6 + i, 7 + i)
        steps.append((Array(k[:, 0]), Array(v[:, 0])))
    return [lambda kv=kv: world.cache("a").push(world.store, *kv) for kv in steps]


@scenario("PagedKvCache", "push into what others hold too")
def _(world):
    world.start("a", text(1, 30), 6)
    world.start("b", text(1, 30)).clone_from(world.cache("a"))
    k, v = (side[:, 0] for side in world.rows("b", 1))
    return [lambda name=name: world.cache(name).push(world.store, k, v) for name in ("a", "b")]


@scenario("PagedKvCache", "append many", total_blocks=80)
def _(world):
    world.start("a", text(1, 300), 6)
    world.start("b", text(1, 300)).clone_from(world.cache("a"))
    k, v = world.rows("b", 200)
    return [lambda: world.cache("b").append_contiguous(world.store, Array(k), Array(v), Indexed(200))]


@scenario("PagedKvCache", "a store that is short")
def _(world):
    world.start("a", text(1, 200), 90)
    k, v = world.rows("a", 10)
    more = world.places[0].kv_of(text(1, 200), 90, 91)

    def refused():
        try:
            world.cache("a").append_contiguous(world.store, k, v, 10)
        except pagedkv.PagedStoreExhausted:
            return
        raise AssertionError("it was not refused")

    return [refused, lambda: world.cache("a").push(world.store, *(side[:, 0] for side in more)), refused]


@scenario("PagedKvCache", "reserve")
def _(world):
    world.start("a", text(1, 60), 6)
    world.start("b", text(1, 60)).clone_from(world.cache("a"))
    cache = world.cache("b")
    return [lambda: cache.reserve(world.store, Indexed(30)), lambda: cache.blocks_needed_for(world.store, 40),
            lambda: cache.reserve(world.store, 40)]  # fmt: skip


@scenario("PagedKvCache", "adopt_blocks")
def _(world):
    ids = world.start("a", text(1, 30), 12).block_table.tolist()
    world.store.retain(ids)
    world.hands_over = True  # as long as they are not adopted
    cache = world.start("b", text(1, 30))
    return [lambda: cache.adopt_blocks(strange(ids), 12, 4, store=world.store)]


@scenario("PagedKvCache", "clone")
def _(world):
    world.start("a", text(1, 30), 13)
    world.start("b", text(2, 30), 9)
    world.sequences["b"].tokens = text(1, 30)
    world.cache("b").truncate(world.store, 0)
    return [
        lambda: world.cache("a").clone(),  # and dropped
        lambda: copy.deepcopy(world.cache("a")),
        lambda: world.cache("b").clone_from(world.cache("a")),
    ]


@scenario("PagedKvCache", "clone_from over blocks of its own")
def _(world):
    world.start("a", text(1, 30), 13)
    world.start("b", text(1, 30), 21)
    return [lambda: world.cache("b").clone_from(world.cache("a"))]


@scenario("PagedKvCache", "truncate, drop_before and release")
def _(world):
    cache, store = world.start("a", text(1, 60), 40), world.store
    world.start("b", text(1, 60)).clone_from(cache)
    cache.reserve(store, 12)
    return [
        lambda: cache.truncate(store, Indexed(40)),
        lambda: cache.truncate(store, 30),
        lambda: cache.drop_before(store, Indexed(13)),
        lambda: cache.release(store),
        lambda: cache.release(store),
    ]


@scenario("PagedKvCache", "reading")
def _(world):
    cache, store = world.start("a", text(1, 60), 40), world.store
    out = cache.to_contiguous(store)
    q = np.ones((2, 1, 2), np.float32)

    def attend():
        layer_v = pagedkv.paged_attention(Array(q), store, cache, query_lens=2)
        assert layer_v.shape == (2, 1, 1)

    return [
        lambda: cache.to_contiguous(store, layer=Indexed(1)),
        lambda: cache.to_contiguous(store, out=out),
        attend,
        lambda: cache.block_table,
    ]


@scenario("PagedKvCache", "dropped")
def _(world):
    world.start("a", text(1, 60), 40)
    world.start("b", text(1, 60)).clone_from(world.cache("a"))
    return [lambda: world.sequences.pop("b"), lambda: world.sequences.pop("a")]


# --- Step ---


def batch(world):
    """Three sequences: in the middle of a block that another one holds too, at a block's end, and new."""
    world.start("a", text(1, 60), 6)
    world.start("b", text(1, 60)).clone_from(world.cache("a"))
    world.start("c", text(2, 60), 8)
    world.start("d", text(3, 60))
    names = ("b", "c", "d")
    rows = [world.rows(name, n) for name, n in zip(names, (1, 5, 9), strict=True)]
    caches = [world.cache(name) for name in names]

    def taken_back():  # leaves the traces of blocks that came and went
        pagedkv.Step(world.store, caches, [1, 5, 9]).__enter__().rollback()

    world.alternatives.append(taken_back)
    return caches, [np.concatenate(sides, axis=1) for sides in zip(*rows, strict=True)]


def forward(world, step, kv, n_layers=2):
    for layer in range(n_layers):
        step.write(layer, Array(kv[0][layer]), kv[1][layer])
        step.attend(layer, np.ones((15, 1, 2), np.float32))


@scenario("Step", "committed")
def _(world):
    caches, kv = batch(world)

    def act():
        with pagedkv.Step(world.store, Iterated(caches), [1, Indexed(5), 9]) as step:
            forward(world, step, kv)

    return [act]


@scenario("Step", "committed by hand, and dropped")
def _(world):
    caches, kv = batch(world)

    def act():
        step = pagedkv.Step(world.store, caches, [1, 5, 9])
        step.__enter__()
        forward(world, step, kv)
        repr(step)
        assert (len(step.positions), sum(step.seq_lens), step.new_blocks) == (15, 29, 6)
        step.commit()

    return [act]


@scenario("Step", "rolled back")
def _(world):
    caches, kv = batch(world)

    def act():
        with pagedkv.Step(world.store, caches, [1, 5, 9]) as step:
            forward(world, step, kv)
            step.rollback()

    return [act]


@scenario("Step", "ended by an error")
def _(world):
    caches, kv = batch(world)

    def act():
        try:
            with pagedkv.Step(world.store, caches, [1, 5, 9]) as step:
                forward(world, step, kv, 1)
        except RuntimeError as error:
            if "not written" not in str(error):
                raise

    return [act]


@scenario("Step", "a store that is short", total_blocks=8)
def _(world):
    caches, _ = batch(world)
    world.alternatives.clear()

    def act():
        try:
            pagedkv.Step(world.store, caches, [1, 5, 30]).__enter__()
        except pagedkv.PagedStoreExhausted:
            return
        raise AssertionError("it was not refused")

    return [act]


# --- reorder ---


@scenario("reorder", "beams")
def _(world):
    shared = text(1, 14)
    tokens = [shared + text(2 + i, 20) for i in range(4)]
    world.start("root", tokens[0], 14)
    for i, its_tokens in enumerate(tokens):
        beam = world.start(i, its_tokens)
        beam.clone_from(world.cache("root"))
        beam.append_contiguous(world.store, *world.rows(i, 3), 3)
    world.cache("root").release(world.store)
    beams = [world.cache(i) for i in range(4)]
    parents = [1, 1, 0, 3]

    def act():
        pagedkv.reorder(world.store, Iterated(beams), Iterated(strange(parents)))

    for i, parent in enumerate(parents):
        world.sequences[i].after = tokens[parent]
    return [act]


# --- KvCache and KvBlockPool ---


def contiguous(world, n, total_blocks=20, planned=8):
    world.pool = pagedkv.KvBlockPool(4, total_blocks)
    cache = pagedkv.KvCache.with_pool(1, 2, world.pool, planned, v_head_dim=1)
    world.contiguous["a"] = (text(1, 90), cache)
    k, v = world.places[0].kv_of(text(1, 90), 0, n)
    if n:
        cache.extend(k[0], v[0])
    return cache


@scenario("KvCache", "push")
def _(world):
    cache = contiguous(world, 7)
    k, v = (side[0] for side in world.places[0].kv_of(text(1, 90), 7, 9))
    return [lambda i=i: cache.push(Array(k[i]), Array(v[i])) for i in range(2)]  # as planned, and beyond


@scenario("KvCache", "extend")
def _(world):
    cache = contiguous(world, 3)
    k, v = (side[0] for side in world.places[0].kv_of(text(1, 90), 3, 40))
    return [
        lambda: cache.extend(Array(k[:3]), Array(v[:3])),
        lambda: cache.extend(k[3:30], v[3:30]),
        lambda: cache.extend(k[30:], v[30:]),
    ]


@scenario("KvCache", "a pool that is short")
def _(world):
    cache = contiguous(world, 3, total_blocks=2)
    k, v = (side[0] for side in world.places[0].kv_of(text(1, 90), 3, 40))

    def refused(call, *arguments):
        try:
            call(*arguments)
        except pagedkv.KvPoolExhausted:
            return
        raise AssertionError("it was not refused")

    return [
        lambda: refused(cache.extend, k, v),
        lambda: refused(pagedkv.KvCache.with_pool, 1, 2, world.pool, 4),
        lambda: cache.extend(k[:5], v[:5]),
        lambda: refused(cache.push, k[5], v[5]),
    ]


@scenario("KvCache", "made and dropped")
def _(world):
    contiguous(world, 3)
    return [
        lambda: pagedkv.KvCache.with_pool(1, 2, world.pool, Indexed(30)),
        lambda: pagedkv.KvCache.with_capacity(Indexed(1), 2, 30),
        lambda: pagedkv.KvCache(1, Indexed(2)),
    ]


@scenario("KvCache", "truncate, clear and release_to_pool")
def _(world):
    cache = contiguous(world, 30)
    return [lambda: cache.truncate(Indexed(11)), cache.clear, cache.release_to_pool, cache.release_to_pool]


@scenario("KvBlockPool", "resize")
def _(world):
    contiguous(world, 30)
    return [lambda: world.pool.resize(Indexed(9)), lambda: pagedkv.KvBlockPool(Indexed(4), 3)]
