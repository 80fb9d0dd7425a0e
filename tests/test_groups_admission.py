"""Who may start in a model's stores: what is said, against a plain twin, and against what the stores then do."""

import random

import groups_reference as twin
import numpy as np
import pytest

import pagedkv
from pagedkv import LayerShape, ModelSequence, ModelStores, PagedKvCache, PendingRequest, plan_admission

SIZE = 3
SHAPES = [LayerShape(None, 1, 1), LayerShape(5, 2, 2), LayerShape(None, 1, 1), LayerShape(8, 1, 3, 2)]
WINDOWS = [None, 5, 8]
BLOCK_BYTES = [SIZE * 2 * (1 + 1) * 4, SIZE * (4 + 4) * 4, SIZE * (3 + 2) * 4]
LEAST = sum(BLOCK_BYTES)


def grow(stores, sequence, n):
    with pagedkv.Step(stores, sequence, n) as step:
        for layer, shape in enumerate(SHAPES):
            k = np.zeros((n, shape.n_kv_heads * shape.head_dim), np.float32)
            step.write(layer, k, k[:, : shape.n_kv_heads * shape.v_head_dim])


class World:
    """Sequences that run, known beginnings, and a queue; always the same of a seed. The twin lives beside it."""

    def __init__(self, seed):
        draw = random.Random(seed)
        room = 60 * LEAST
        if seed % 3:
            self.stores = ModelStores.from_bytes(room, SHAPES, block_size=SIZE)
            totals = [room // size for size in BLOCK_BYTES]
        else:
            total = draw.randrange(14, 40)
            self.stores = ModelStores(SHAPES, total, block_size=SIZE)
            room, totals = total * LEAST, [total] * 3
        self.twin = twin.Groups(SIZE, BLOCK_BYTES, WINDOWS, room, totals)
        self.known = twin.Knowledge(self.twin)
        self.running = []
        for _ in range(draw.randrange(5)):
            self.begin(draw)
        if seed % 3:
            least = max(LEAST, self.twin.held_bytes)
            limit = draw.randrange(least, least + 12 * LEAST)
            self.stores.resize(limit)
            self.twin.limit = limit
            self.twin.totals = [min(total, limit // size) for total, size in zip(totals, BLOCK_BYTES, strict=True)]
        self.queue = [self.request(draw) for _ in range(draw.randrange(1, 6))]
        self.keep_free = draw.choice([0, 0, 1, 2])

    def tokens(self, draw):
        return [draw.randrange(2) if i in (0, 4) else 7 for i in range(draw.randrange(1, 30))]

    def begin(self, draw):
        """One more sequence, of tokens of its own; it may become known, drop what is behind, fork, reserve, end."""
        tokens, real, theirs = self.tokens(draw), ModelSequence(self.stores), twin.Sequence(self.twin)
        if len(tokens) > pagedkv.room_for(self.stores).now:
            return
        grow(self.stores, real, len(tokens))
        twin.grow(self.twin, [theirs], [len(tokens)])
        theirs.values = tokens
        if draw.random() < 0.7:
            self.stores.prefixes.insert(tokens, real)
            self.known.insert(tokens, theirs)
        if draw.random() < 0.4:
            real.drop_unneeded()
            theirs.drop_unneeded()
        if draw.random() < 0.3:
            self.running.append((real.clone(), theirs.fork()))
        if draw.random() < 0.2 and pagedkv.room_for(self.stores, real).now >= 4:
            real.reserve(4)
            twin.grow(self.twin, [theirs], [4])
        if draw.random() < 0.6:
            real.release()
            theirs.release()
        else:
            self.running.append((real, theirs))

    def request(self, draw):
        """What the queue has, for both: what it starts on, positions, positions at most, chunk."""
        chunk = draw.choice([None, 1, 4, 9])
        if self.running and draw.random() < 0.3:
            real, theirs = self.running.pop(draw.randrange(len(self.running)))
            n = theirs.seq_len + draw.randrange(12)
        else:
            real = theirs = self.tokens(draw)
            n = len(real)
        return real, theirs, n, n + draw.choice([0, 0, 5, 60]), chunk

    def plan(self):
        return plan_admission(self.stores, self.asked, prefix=self.stores.prefixes, keep_free=self.keep_free)

    @property
    def asked(self):
        return [
            PendingRequest(real if real is theirs else (), n, most, cache=None if real is theirs else real, chunk=chunk)
            for real, theirs, n, most, chunk in self.queue
        ]

    def expected(self):
        asked = [(theirs, n, most, chunk) for _, theirs, n, most, chunk in self.queue]
        return twin.plan(self.twin, self.known, asked, self.keep_free)

    def start(self, which):
        """What a server does: the known beginning, and the blocks of the rest."""
        real, theirs, n, _, chunk = self.queue[which]
        sequence, num_cached_tokens = real, real.seq_len if real is not theirs else 0
        if real is theirs:
            sequence = ModelSequence(self.stores)
            num_cached_tokens = self.stores.prefixes.attach(sequence, real)
        sequence.reserve(max(0, n - num_cached_tokens), chunk=chunk)
        return sequence, num_cached_tokens

    def books(self):
        counts = [[store.refcount(i) for i in range(store.total_blocks)] for store in self.stores.stores]
        return self.stores.stats(), self.stores.prefixes.stats(), counts

    @property
    def n_evicted(self):
        return self.stores.prefixes.stats().blocks_evicted


SEEDS = range(600)


def test_the_plan_is_the_twins():
    seen = set()
    for seed in SEEDS:
        world = World(seed)
        plan = world.plan()
        assert plan == world.expected(), seed
        seen |= {(admission.verdict, admission.num_cached_tokens > 0) for admission in plan}
    assert seen == {(verdict, known) for verdict in ("now", "evict", "wait", "never") for known in (True, False)}


def test_asking_changes_nothing():
    """Neither a counter, nor a count, nor the order in which what is known would be evicted."""
    for seed in SEEDS[::6]:
        asked, other = World(seed), World(seed)
        before = asked.books()
        for _ in range(3):
            asked.plan()
        assert asked.books() == before
        while other.stores.prefixes.evict(1):
            assert asked.stores.prefixes.evict(1) == 1
            assert asked.books() == other.books()


def test_who_starts_now_can():
    """In that order, taking what was said, evicting nothing; and what was to stay free can still be had."""
    n_started = n_evicting = 0
    for seed in SEEDS:
        world = World(seed)
        plan, started = world.plan(), []
        for which, admission in enumerate(plan):
            before, taken = world.n_evicted, world.stores.stats().blocks_acquired
            if admission.verdict in ("wait", "never"):
                continue
            sequence, num_cached_tokens = world.start(which)
            started.append(sequence)
            taken = world.stores.stats().blocks_acquired - taken
            if world.queue[which][0] is sequence:
                assert taken <= admission.n_blocks, seed  # a fork that started before may have spared it a copy
            else:
                assert taken == admission.n_blocks, seed
            assert num_cached_tokens == admission.num_cached_tokens, seed
            n_started += 1
            if admission.verdict == "evict":
                n_evicting += 1
                break  # it may have evicted what the next one was to start on
            assert world.n_evicted == before, seed
        else:
            spare = ModelSequence(world.stores)
            if started:
                spare.reserve(world.keep_free * SIZE)
                spare.release()
        world.stores.check([*started, *[real for real, _ in world.running]])
    assert n_started > 300
    assert n_evicting > 30


def test_who_waits_cannot():
    """Everybody before it has started and evicted nothing: then the stores refuse it."""
    n_refused = 0
    for seed in SEEDS:
        world = World(seed)
        world.keep_free = 0
        started = []
        for which, admission in enumerate(world.plan()):
            if admission.verdict == "now":
                started.append(world.start(which))
            elif admission.verdict == "wait":
                with pytest.raises(pagedkv.PagedStoreExhausted):
                    world.start(which)
                n_refused += 1
                break
            elif admission.verdict == "evict":
                break
    assert n_refused > 30


def test_never_is_never():
    """With everything else given back and forgotten it cannot have its blocks; and whoever is not refused can."""
    n_never = n_fits = 0
    for seed in SEEDS:
        for which in range(len(World(seed).queue)):
            world = World(seed)
            admission = world.plan()[which]
            real, theirs, _, most, chunk = world.queue[which]
            for other, _ in world.running:
                other.release()
            for place, (other, same, *_) in enumerate(world.queue):
                if place != which and other is not same:
                    other.release()
            if real is not theirs:
                if chunk is not None:
                    real.drop_unneeded()
                sequence = real
                sequence.release_reserved()
            else:
                sequence = ModelSequence(world.stores)
                if admission.verdict != "never":
                    assert world.stores.prefixes.attach(sequence, real) == admission.num_cached_tokens
            if admission.verdict == "never":
                world.stores.prefixes.clear()
                with pytest.raises(pagedkv.PagedStoreExhausted):
                    sequence.reserve(most - sequence.seq_len, chunk=chunk)
                n_never += 1
                if real is theirs:
                    assert not world.stores.can_ever_fit(most, chunk=chunk)
            else:
                sequence.reserve(most - sequence.seq_len, chunk=chunk)
                n_fits += 1
    assert n_never > 100
    assert n_fits > 300


# --- by hand ---


def test_a_windowed_request_needs_a_window_and_a_chunk():
    """300 positions: a full store takes 75 blocks of 4; one of window 6 the 5 seen, 8 new and 3 before: 4 blocks."""
    stores = ModelStores([LayerShape(None, 1, 1), LayerShape(6, 1, 2)], 80, block_size=4)
    prompt = range(300)
    assert plan_admission(stores, [PendingRequest(prompt)]) == [("now", 150, 0)]
    assert plan_admission(stores, [PendingRequest(prompt, chunk=8)]) == [("now", 79, 0)]
    few = ModelStores([LayerShape(6, 1, 2)], 4, block_size=4)
    assert plan_admission(few, [PendingRequest(prompt)]) == [("never", 75, 0)]
    queue = [PendingRequest(prompt, chunk=8), PendingRequest([1])]
    assert plan_admission(few, queue) == [("now", 4, 0), ("wait", 1, 0)]
    assert plan_admission(few, [PendingRequest(prompt, chunk=9)]) == [("never", 5, 0)]
    assert few.can_ever_fit(300, chunk=8)
    assert not few.can_ever_fit(300, chunk=9)


def test_stores_share_the_bytes():
    """A block of the wide store is four of the narrow one; the budget has ten narrow ones."""
    shapes = [LayerShape(None, 1, 1), LayerShape(4, 1, 4)]
    stores = ModelStores.from_bytes(10 * 32, shapes, block_size=4)
    assert [store.total_blocks for store in stores.stores] == [10, 2]
    # 24 positions are 6 narrow blocks; of the wide ones a chunk of 1 holds 3 + 1 + 3 positions, two blocks.
    assert plan_admission(stores, [PendingRequest(range(24), chunk=1)]) == [("never", 8, 0)]
    assert plan_admission(stores, [PendingRequest(range(8), chunk=1)]) == [("now", 4, 0)]
    assert plan_admission(stores, [PendingRequest(range(4))] * 3) == [("now", 2, 0), ("now", 2, 0), ("wait", 2, 0)]
    assert plan_admission(stores, [PendingRequest(range(4))] * 2, keep_free=1) == [("now", 2, 0), ("wait", 2, 0)]
    assert plan_admission(stores, [PendingRequest(range(4))], keep_free=2) == [("wait", 2, 0)]


def test_a_store_of_a_model_is_asked_alone():
    stores = ModelStores.from_bytes(10 * 32, [LayerShape(None, 1, 1), LayerShape(4, 1, 4)], block_size=4)
    narrow, wide = stores.stores
    assert plan_admission(narrow, [PendingRequest(range(40)), PendingRequest([1])], prefix=stores.prefixes) == [
        ("now", 10, 0),
        ("wait", 1, 0),
    ]
    held = wide.acquire(1)
    assert plan_admission(narrow, [PendingRequest(range(24)), PendingRequest([1])]) == [("now", 6, 0), ("wait", 1, 0)]
    wide.release(held)


def test_refusals():
    stores = ModelStores(SHAPES, 8, block_size=SIZE)
    others = ModelStores(SHAPES, 8, block_size=SIZE)
    stranger = ModelSequence(others)
    grow(others, stranger, 3)
    for queue, options, error, message in [
        ([PendingRequest(cache=PagedKvCache())], {}, TypeError, "pending[0]: cache: expected a ModelSequence or None"),
        ([PendingRequest(cache=ModelSequence)], {}, TypeError, "pending[0]: cache: expected a ModelSequence or None"),
        ([PendingRequest(), PendingRequest(cache=stranger)], {}, ValueError, "pending[1]: store: expected"),
        ([PendingRequest(chunk=0)], {}, ValueError, "pending[0]: chunk: expected an integer from 1"),
        ([PendingRequest(chunk=1.5)], {}, TypeError, "pending[0]: chunk: expected"),
        ([], {"prefix": others.prefixes}, ValueError, "prefix: expected the store's own"),
        ([], {"prefix": stores.prefixes.groups[0]}, ValueError, "prefix: expected the store's own"),
        ([], {"prefix": stores}, TypeError, "prefix: expected a PrefixCache"),
    ]:
        with pytest.raises(error) as refused:
            plan_admission(stores, queue, **options)
        assert str(refused.value).startswith(message), refused.value
    for wrong in (None, 3, stores.groups, ModelStores, stores.stores):
        with pytest.raises(TypeError, match="^store: expected a PagedKvStore or ModelStores, got"):
            plan_admission(wrong, [])
    with pytest.raises(TypeError, match="^pending.0.: cache: expected a PagedKvCache or None, got ModelSequence"):
        plan_admission(stores.stores[0], [PendingRequest(cache=ModelSequence(stores))])
    busy = ModelSequence(stores)
    grow(stores, busy, 2)
    with pagedkv.Step(stores, busy, 0), pytest.raises(RuntimeError, match="in use"):
        plan_admission(stores, [PendingRequest(cache=busy)])
