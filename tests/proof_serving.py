"""What is interrupted, of models with several stores: passes, sequences and prefixes of all stores, and schedulers."""

from dataclasses import dataclass, field

import numpy as np
from proof_core import text
from proof_world import Place, Sequence, World, WorldClock, expect, rows_of

import pagedkv
from pagedkv.serving import LayerShape, ModelSequence, ModelStores, Scheduler

# Two layers see all, two a window that ends inside a block, and one has other heads.
FULL, WINDOWED, WIDER = LayerShape(None, 1, 2), LayerShape(6, 1, 2), LayerShape(None, 1, 3)
SHAPES = [FULL, WINDOWED, FULL, WINDOWED, WIDER]
ACTS = []


def model_world(total_blocks=24, block_size=4):
    stores = ModelStores(SHAPES, total_blocks, block_size=block_size)
    each = zip(stores.groups, stores.prefixes.groups, strict=True)
    places = [Place(group.store, prefixes, group.layers) for group, prefixes in each]
    return World(places, WorldClock(), model=stores)


def write_layers(world, running, parts):
    """`parts`: the tokens of each sequence up to its last new position, and how many are new."""
    for layer, shape in enumerate(SHAPES):
        rows = np.concatenate([rows_of(tuple(all_of_it), (layer,), shape.head_dim)[0][len(all_of_it) - n :]
                               for all_of_it, n in parts])  # fmt: skip
        running.write(layer, rows, -rows)
        running.attend(layer, np.ones((len(rows), 1, shape.head_dim), np.float32))


# --- passes, sequences, prefixes ---


@dataclass(frozen=True)
class Act:
    name: str
    setup: object
    total_blocks: int = 24
    again: bool = False  # it may be half done; doing it once more does the rest

    def __str__(self):
        return self.name

    def begin(self):
        world = model_world(self.total_blocks)
        return world, self.setup(world)

    def allowed(self):
        states = []
        for n_acts in range(len(self.begin()[1]) + 1):
            world, acts = self.begin()
            for act in acts[:n_acts]:
                act()
            states.append(lengths(world))
        return states


def act_of(name, **options):
    def add(setup):
        ACTS.append(Act(name, setup, **options))
        return setup

    return add


def lengths(world):
    """Of all sequences in all stores, and how much of each text is known: what has to move together."""
    sequences = {
        name: ([cache.seq_len for cache in sequence.caches], [cache.first_position for cache in sequence.caches])
        for name, sequence in world.sequences.items()
    }
    return sequences, [[*map(place_match(space, tokens), world.places)] for space, tokens in world.prompts]


def place_match(space, tokens):
    return lambda place: place.prefixes.match([*tokens, 2**62], namespace=space)


def start(world, name, tokens, n=0):
    whole = ModelSequence(world.model)
    world.sequences[name] = Sequence(list(tokens), whole.caches, whole)
    if n:
        advance(world, {name: n})
    return whole


def advance(world, new, **options):
    """A forward pass that gives each sequence so many positions more."""
    sequences = [world.sequences[name] for name in new]
    with pagedkv.Step(world.model, [sequence.whole for sequence in sequences], list(new.values())) as running:
        write_layers(world, running, [(each.tokens[: each.whole.seq_len + n], n)
                                      for each, n in zip(sequences, new.values(), strict=True)])  # fmt: skip
        for method in options.get("then", ()):
            getattr(running, method)()


def fork(world, name, of):
    source = world.sequences[of]
    whole = source.whole.clone()
    world.sequences[name] = Sequence(source.tokens, whole.caches, whole)
    return whole


def know(world, tokens, namespace=None):
    whole = start(world, "", tokens, len(tokens))
    world.may_know(tokens, namespace)
    world.model.prefixes.insert(tokens, whole, namespace=namespace)
    world.sequences.pop("").whole.release()


def batch(world):
    start(world, "a", text(1, 60), 6)
    fork(world, "b", "a")
    start(world, "c", text(2, 60), 8)
    start(world, "d", text(3, 60))
    return {"b": 1, "c": 5, "d": 9}


@act_of("Step of a model: committed")
def _(world):
    new = batch(world)
    return [lambda: advance(world, new), lambda: advance(world, new)]


@act_of("Step of a model: committed by hand")
def _(world):
    new = batch(world)
    return [lambda: advance(world, new, then=["commit"])]


@act_of("Step of a model: rolled back")
def _(world):
    new = batch(world)
    return [lambda: advance(world, new, then=["rollback"])]


@act_of("Step of a model: stores that are short", total_blocks=8)
def _(world):
    batch(world)

    def refused():
        try:
            advance(world, {"a": 1, "b": 1, "c": 20, "d": 9})
        except pagedkv.PagedStoreExhausted:
            return
        raise AssertionError("it was not refused")

    return [refused, lambda: advance(world, {"d": 1}), refused]


@act_of("ModelSequence: clone and truncate")
def _(world):
    start(world, "a", text(1, 60), 13)
    whole = world.sequences["a"].whole
    return [whole.clone, lambda: whole.truncate(9)]


@act_of("ModelSequence: reserve and go on")
def _(world):
    start(world, "a", text(1, 60), 13)
    return [lambda: world.sequences["a"].whole.reserve(20), lambda: advance(world, {"a": 7})]


@act_of("ModelSequence: reserve in a store that is short", total_blocks=10)
def _(world):
    start(world, "a", text(1, 200), 33)

    def refused():
        try:
            world.sequences["a"].whole.reserve(9)
        except pagedkv.PagedStoreExhausted:
            return
        raise AssertionError("it was not refused")

    return [refused]


@act_of("ModelSequence: drop_unneeded and release", again=True)
def _(world):
    whole = start(world, "a", text(1, 60), 30)
    return [whole.drop_unneeded, whole.release]


@act_of("PrefixCache of a model: attach")
def _(world):
    know(world, text(1, 18))
    know(world, text(1, 10) + text(2, 9))
    a, b = start(world, "a", text(1, 10) + text(3, 4)), start(world, "b", text(1, 18) + text(3, 4))
    attach = world.model.prefixes.attach
    return [lambda: attach(a, text(1, 10) + text(3, 4)), lambda: attach(b, text(1, 18) + text(3, 4))]


@act_of("PrefixCache of a model: attach where a store knows less")
def _(world):
    know(world, text(1, 30))
    world.places[1].prefixes.evict(3)
    whole = start(world, "a", text(1, 30) + text(3, 4))
    return [lambda: world.model.prefixes.attach(whole, text(1, 30) + text(3, 4))]


@act_of("PrefixCache of a model: insert", again=True)
def _(world):
    whole = start(world, "a", text(1, 30), 30)
    world.may_know(text(1, 30))
    return [lambda: world.model.prefixes.insert(text(1, 30), whole)]


@act_of("PrefixCache of a model: clear", again=True)
def _(world):
    know(world, text(1, 30))
    know(world, text(2, 30), b"other")
    return [lambda: world.model.prefixes.clear(namespace=b"other"), world.model.prefixes.clear]


# --- schedulers ---


@dataclass(frozen=True)
class Service:
    """Prompts and how many tokens each is continued with, and what is done beside the steps."""

    name: str
    prompts: list
    total_blocks: int = 60
    options: dict = field(default_factory=dict)
    cancelled: dict = field(default_factory=dict)  # after which step which of them
    closed: int = 0  # after which step, if it is

    def __str__(self):
        return self.name


SHARED = text(1, 10)
SERVICES = [
    Service("one that is alone", [(text(1, 9), 4, None)]),
    Service(
        "common beginnings",
        [(SHARED + text(2, 3), 5, None), (SHARED + text(3, 5), 3, None), (SHARED, 4, b"other"), (text(4, 21), 2, None)],
        options={"max_prefill_tokens": 8},
    ),
    Service(
        "stores that are short",
        [(text(1, 10), 9, None), (SHARED + text(3, 4), 9, None), (text(4, 12), 8, None)],
        total_blocks=8,
        options={"max_prefill_tokens": 8},
    ),
    Service(
        "some are cancelled",
        [(SHARED + text(2, 3), 9, None), (SHARED + text(3, 5), 9, None), (text(4, 7), 9, None), (text(5, 7), 3, None)],
        options={"max_running": 2},
        cancelled={2: 0, 4: 3, 5: 1},
    ),
    Service("closed", [(SHARED + text(2, 3), 9, None), (text(4, 7), 9, None), (text(5, 7), 3, b"other")], closed=3),
    Service("nothing is shared", [(SHARED, 3, None), (SHARED, 3, None)], options={"share_prefixes": False}),
]  # fmt: skip


def next_token(tokens):
    """What a model would say: it depends on all tokens."""
    return int(rows_of(tuple(tokens), (0,), 1)[0, -1, 0]) % 50_000


def continued(prompt, n):
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(next_token(tokens))
    return tokens


class Server:
    """A scheduler whose model looks at every row that it builds on."""

    def __init__(self, service):
        self.service = service
        self.world = model_world(service.total_blocks)
        self.scheduler = Scheduler(self.world.model, **service.options)
        self.requests = {}  # those that were submitted, and did not get lost on their way to the caller
        self.n_submitted = self.n_steps = 0

    def compute(self, batch, running):
        parts = []
        for request, n in zip(batch.requests, batch.query_lens, strict=True):
            tokens, before = list(request.tokens), request.sequence.seq_len
            for place, cache in zip(self.world.places, request.sequence.caches, strict=True):
                expect(cache.seq_len == before, "a store is ahead of another")
                place.check_rows(cache.block_table.tolist(), tokens, cache.first_position, before, "a request")
            parts.append((tokens[: before + n], n))
        write_layers(self.world, running, parts)
        return [next_token(request.tokens) for request in batch.sampled]

    def go_on(self, enough=300):
        """From wherever an interrupt has left it: submit what is left to submit, and make steps until all is done."""
        service, scheduler = self.service, self.scheduler
        while self.n_submitted < len(service.prompts):
            number = self.n_submitted
            prompt, n_new, namespace = service.prompts[number]
            self.n_submitted += 1  # whether it arrives or not: a caller that is interrupted does not try again
            self.requests[number] = scheduler.submit(prompt, n_new, namespace=namespace)
        while not scheduler.is_idle:
            expect(self.n_steps < enough, "it does not come to an end")
            self.n_steps += 1
            scheduler.step(self.compute)
            number = service.cancelled.get(self.n_steps)
            if number in self.requests:
                scheduler.cancel(self.requests[number])
            if self.n_steps == service.closed:
                scheduler.close()

    def judge(self, interrupted):
        """What is wrong in the end, once all requests are done."""
        service, world = self.service, self.world
        for prompt, n_new, namespace in service.prompts:
            world.may_know(continued(prompt, n_new), namespace)
        for number, request in self.requests.items():
            prompt, n_new, _ = service.prompts[number]
            right, got = continued(prompt, n_new), list(request.tokens)
            if request.finish_reason == "cancelled":
                expect(number in service.cancelled.values() or service.closed, "a request was cancelled by nobody")
                expect(got == right[: len(got)], "a request has tokens of others")
            else:
                expect(request.finish_reason == "length", "a request has not come to its end")
                expect(got == right, "a request has not the tokens that it has alone")
            held = [cache.capacity for cache in request.sequence.caches]
            expect(not any(held), "a request that has ended holds blocks")
        expect(interrupted or len(self.requests) == len(service.prompts), "a request is missing")
        world.truth()
        world.finish()
