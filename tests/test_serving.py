"""`pagedkv.serving`: continuous batching against a model whose K, V and next token are known from the tokens alone."""

import random

import numpy as np
import pytest

import pagedkv
from pagedkv.serving import LayerShape, ModelSequence, ModelStores, Scheduler

SHAPES = [LayerShape(None, 2, 4), LayerShape(6, 1, 8, 4), LayerShape(None, 2, 4), LayerShape(11, 1, 8, 4)]
SIZE = 4


def make_stores(total_blocks=64, shapes=SHAPES):
    return ModelStores(shapes, total_blocks, block_size=SIZE, debug=True)


def next_token(tokens):
    """What the model answers; it looks at everything, as a model does."""
    return (7 * len(tokens) + sum(tokens)) % 50


def rows_of(tokens, layer, width):
    """K or V of every position: it says which tokens led there."""
    sums = np.cumsum([(token + 1) * (layer + 1) for token in tokens])
    return np.repeat(sums[:, None], width, axis=1).astype(np.float32)


def held(stores):
    return [group.store.total_blocks - group.store.free_block_count for group in stores.groups]


class Model:
    """Writes the rows of a batch, and checks that what its sequences hold is what their tokens say."""

    def __init__(self, stores):
        self.stores = stores
        self.n_computed = 0
        self.fails_at = None

    def __call__(self, batch, running):
        ends = np.cumsum(batch.query_lens)
        for layer in range(self.stores.n_layers):
            shape = self.stores.group_of(layer).shape
            k, v = (
                np.concatenate(
                    [
                        rows_of(request.tokens, layer, shape.n_kv_heads * head_dim)[at - n : at]
                        for request, n in zip(batch.requests, batch.query_lens, strict=True)
                        for at in [request.sequence.seq_len + n]
                    ]
                )
                for head_dim in (shape.head_dim, shape.v_head_dim or shape.head_dim)
            )
            running.write(layer, k, v)
            if self.fails_at == layer:
                raise OSError("the model failed")
            out = running.attend(layer, np.zeros((running.n_rows, shape.n_kv_heads, shape.head_dim), np.float32))
            self.check(layer, batch, ends, out)
        self.n_computed += running.n_rows
        assert batch.token_ids == [
            token
            for request, n in zip(batch.requests, batch.query_lens, strict=True)
            for token in request.tokens[request.sequence.seq_len :][:n]
        ]
        return [next_token(request.tokens) for request in batch.sampled]

    def check(self, layer, batch, ends, out):
        """A query of zeros sees the mean of what it may see."""
        window = self.stores.group_of(layer).window
        for request, n, end in zip(batch.requests, batch.query_lens, ends, strict=True):
            last = request.sequence.seq_len + n
            rows = rows_of(request.tokens[:last], layer, 1)[:, 0].astype(np.float64)
            for i in range(n):
                at = last - n + i + 1
                expected = rows[max(0, at - window) if window else 0 : at].mean()
                np.testing.assert_allclose(out[end - n + i], expected, rtol=1e-5)


def answer_of(prompt, n_new, stop_tokens=()):
    tokens = list(prompt)
    for _ in range(n_new):
        tokens.append(next_token(tokens))
        if tokens[-1] in stop_tokens:
            break
    return tokens[len(prompt) :]


def run(scheduler, model):
    while not scheduler.is_idle:
        scheduler.step(model)


def test_tokens_and_reasons():
    stores = make_stores()
    scheduler, model = Scheduler(stores), Model(stores)
    prompts = [[1, 2, 3], [4] * 30, list(range(20))]
    full = answer_of(prompts[0], 9)
    stop = full[4]
    requests = [scheduler.submit(prompt, 9, stop_tokens={stop}) for prompt in prompts]
    assert scheduler.waiting == tuple(requests)
    run(scheduler, model)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.generated == answer_of(prompt, 9, {stop})
        assert request.finish_reason == ("stop" if request.generated[-1] == stop else "length")
    assert requests[0].finish_reason == "stop"
    assert [request.number for request in requests] == [0, 1, 2]
    stores.prefixes.clear()
    assert held(stores) == [0, 0, 0]


@pytest.mark.parametrize(("max_prefill_tokens", "n_cached"), [(64, 26), (8, 24)])
def test_a_beginning_is_computed_once(max_prefill_tokens, n_cached):
    """Also by those that wait for it, and inside a block, unless a block is all that waiting longer would spare."""
    stores = make_stores()
    scheduler, model = Scheduler(stores, max_prefill_tokens=max_prefill_tokens), Model(stores)
    shared = list(range(10, 36))  # six blocks and two rows
    prompts = [[*shared, 1 + i, 2, 3, 4] for i in range(5)]
    requests = [scheduler.submit(prompt, 3) for prompt in prompts]
    run(scheduler, model)
    assert [request.num_cached_tokens for request in requests] == [0] + [n_cached] * 4
    assert scheduler.counts.positions_reused == 4 * n_cached
    assert model.n_computed == scheduler.counts.positions_computed == 30 + 4 * (30 - n_cached) + 5 * 2
    assert all(r.generated == answer_of(p, 3) for r, p in zip(requests, prompts, strict=True))


def test_nobody_waits_for_what_is_less_than_a_block():
    stores = make_stores()
    scheduler, model = Scheduler(stores, max_prefill_tokens=4), Model(stores)
    first, second = scheduler.submit([*range(3), 9, 9, 9, 9, 9, 9], 2), scheduler.submit([*range(3), 8, 8, 8], 2)
    scheduler.step(model)
    assert scheduler.running == (first, second)


def test_nothing_is_shared_if_so_told():
    stores = make_stores()
    scheduler, model = Scheduler(stores, share_prefixes=False), Model(stores)
    for _ in range(3):
        scheduler.submit(list(range(12)), 2)
    run(scheduler, model)
    assert model.n_computed == 3 * 13
    assert held(stores) == [0, 0, 0]


def test_namespaces_share_nothing():
    stores = make_stores()
    scheduler, model = Scheduler(stores), Model(stores)
    prompt = list(range(12))
    requests = [scheduler.submit(prompt, 1, namespace=name) for name in (b"a", b"b", None, b"a")]
    run(scheduler, model)
    assert [request.num_cached_tokens for request in requests] == [0, 0, 0, 11]
    stores.prefixes.clear(namespace=b"a")
    match = stores.prefixes.match
    assert [match(prompt, namespace=name) for name in (b"a", b"b", None)] == [0, 11, 11]


def test_what_is_refused_changes_nothing():
    """A request of another scheduler cannot be cancelled, and goes on."""
    stores = make_stores()
    scheduler, model = Scheduler(stores), Model(stores)
    request = scheduler.submit([1, 2], 3)
    with pytest.raises(ValueError, match="request: expected one of this scheduler"):
        Scheduler(stores).cancel(request)
    assert request.finish_reason is None
    run(scheduler, model)
    assert request.generated == answer_of([1, 2], 3)


REFUSED = [
    {"prompt": [1.5]},
    {"prompt": [-1]},
    {"prompt": [2**63]},
    {"prompt": [True]},
    {"prompt": "text"},
    {"prompt": None},
    {"max_new_tokens": 2.5},
    {"max_new_tokens": True},
    {"max_new_tokens": None},
    {"stop_tokens": None},
    {"stop_tokens": 3},
    {"namespace": "a"},
]


@pytest.mark.parametrize("given", REFUSED, ids=str)
def test_a_bad_request_is_refused_when_it_comes(given):
    """Not in a step, which would then fail for everybody, and again and again."""
    stores = make_stores()
    scheduler, model = Scheduler(stores), Model(stores)
    request = scheduler.submit(np.array([1, 2]), 3)
    with pytest.raises((TypeError, ValueError), match=f"^{next(iter(given))}: expected"):
        scheduler.submit(**{"prompt": [1, 2], "max_new_tokens": 3, **given})
    assert scheduler.waiting == (request,)
    run(scheduler, model)
    assert request.generated == answer_of([1, 2], 3)


def test_a_step_of_nothing():
    scheduler = Scheduler(make_stores())
    assert scheduler.step(lambda batch, running: pytest.fail("there is nothing to compute")) == []


def test_cancelling():
    """Waiting, in the middle of its prompt, decoding, ended, twice."""
    stores = make_stores()
    scheduler, model = Scheduler(stores, max_running=3, max_prefill_tokens=8), Model(stores)
    decoding, other = scheduler.submit([1, 2], 20), scheduler.submit([3, 4], 2)
    prefilling, waiting = scheduler.submit([5] * 40, 5), scheduler.submit([6] * 4, 5)
    scheduler.step(model)
    assert scheduler.running == (decoding, other, prefilling)
    assert prefilling.n_pending > 1
    for request in (waiting, prefilling, decoding, decoding):
        scheduler.cancel(request)
    run(scheduler, model)
    assert other.generated == answer_of([3, 4], 2)
    scheduler.cancel(other)
    reasons = [request.finish_reason for request in (decoding, other, prefilling, waiting)]
    assert reasons == ["cancelled", "length", "cancelled", "cancelled"]
    stores.prefixes.clear()
    assert held(stores) == [0, 0, 0]
    scheduler.submit([9] * 5, 2)
    scheduler.close()
    assert scheduler.is_idle


@pytest.mark.parametrize("layer", range(len(SHAPES)))
def test_a_model_that_fails_loses_nothing(layer):
    stores = make_stores()
    scheduler, model = Scheduler(stores, max_prefill_tokens=8), Model(stores)
    request = scheduler.submit(list(range(20)), 4)
    scheduler.step(model)
    before = request.sequence.seq_len, list(request.tokens), held(stores)
    model.fails_at = layer
    with pytest.raises(OSError, match="failed"):
        scheduler.step(model)
    assert (request.sequence.seq_len, request.tokens, held(stores)) == before
    model.fails_at = None
    run(scheduler, model)
    assert request.generated == answer_of(range(20), 4)


def test_a_model_that_is_short_of_blocks_elsewhere_preempts_nobody():
    stores = make_stores()
    scheduler, model = Scheduler(stores), Model(stores)
    requests = [scheduler.submit([i, 2], 4) for i in range(3)]
    elsewhere = pagedkv.PagedKvStore(4, 1, 1, 4)
    with pytest.raises(pagedkv.PagedStoreExhausted):
        scheduler.step(lambda batch, running: elsewhere.acquire(2))
    assert scheduler.running == tuple(requests)
    run(scheduler, model)
    assert all(request.generated == answer_of(request.tokens[:2], 4) for request in requests)


def test_a_compute_that_answers_wrongly():
    stores = make_stores()
    scheduler = Scheduler(stores)
    request = scheduler.submit([1, 2], 4)
    with pytest.raises(ValueError, match="expected 1 tokens, got 2"):
        scheduler.step(lambda batch, running: Model(stores)(batch, running) * 2)
    with pytest.raises(RuntimeError, match="layers"):
        scheduler.step(lambda batch, running: [1])
    assert request.sequence.seq_len == 0


def test_the_youngest_gives_way():
    stores = make_stores(total_blocks=9)
    scheduler, model = Scheduler(stores), Model(stores)
    prompts = [[1] * 10, [2] * 10, [3] * 10]
    requests = [scheduler.submit(prompt, 12) for prompt in prompts]
    ends = []
    while not scheduler.is_idle:
        ends += [request.number for request in scheduler.step(model) if request.finish_reason]
    assert scheduler.counts.preemptions
    assert ends[0] == 0
    assert all(r.generated == answer_of(p, 12) for r, p in zip(requests, prompts, strict=True))


def test_what_cannot_fit_is_refused_at_once():
    scheduler = Scheduler(make_stores(total_blocks=4))
    scheduler.submit([1] * 13, 4)
    with pytest.raises(ValueError, match="13 tokens and 5 new ones need 5 blocks of 4, the stores have 4"):
        scheduler.submit([1] * 13, 5)
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        scheduler.submit([], 3)
    for n_new in (0, -1):
        with pytest.raises(ValueError, match=f"max_new_tokens: expected an integer from 1 to .*, got {n_new}"):
            scheduler.submit([1], n_new)
    with pytest.raises(ValueError, match="max_running"):
        Scheduler(make_stores(), max_running=0)
    with pytest.raises(TypeError, match="max_prefill_tokens"):
        Scheduler(make_stores(), max_prefill_tokens=True)


def test_blocks_that_others_hold():
    stores = make_stores(total_blocks=8)
    scheduler, model = Scheduler(stores), Model(stores)
    other = ModelSequence(stores)
    other.reserve(20)
    with pytest.raises(pagedkv.PagedStoreExhausted):
        scheduler.submit([1] * 16, 4) and scheduler.step(model)
    other.release()
    run(scheduler, model)
    stores.prefixes.clear()
    assert held(stores) == [0, 0, 0]


def test_a_forward_pass_that_others_run():
    stores = make_stores()
    sequence = ModelSequence(stores)
    with pytest.raises(RuntimeError, match="layer 0 was not written"), pagedkv.Step(stores, [sequence], [3]):
        pass
    with pytest.raises(KeyboardInterrupt), pagedkv.Step(stores, [sequence], [3]):
        raise KeyboardInterrupt
    assert (sequence.seq_len, held(stores)) == (0, [0, 0, 0])


def computed(stores, n, sequence=None):
    """A sequence with so many positions more."""
    sequence = sequence or ModelSequence(stores)
    with pagedkv.Step(stores, [sequence], [n]) as running:
        write_all(running, n)
    return sequence


def write_all(running, n):
    for layer in range(running.store.n_layers):
        shape = running.store.group_of(layer).shape
        v_head_dim = shape.v_head_dim or shape.head_dim
        k, v = (np.ones((n, shape.n_kv_heads, head_dim), np.float32) for head_dim in (shape.head_dim, v_head_dim))
        running.write(layer, k, v)


def test_a_pass_that_has_ended_stays_as_it_is():
    """As a step does: what was committed is not taken back by what comes later in the block, nor by `rollback`."""
    stores = make_stores()
    sequence = ModelSequence(stores)
    with pagedkv.Step(stores, [sequence], [3]) as running:
        write_all(running, 3)
        running.commit()
    assert sequence.seq_len == 3
    running = pagedkv.Step(stores, [sequence], [2]).__enter__()
    write_all(running, 2)
    running.commit()
    running.__exit__(OSError, OSError("later"), None)
    for end in (running.commit, running.rollback):
        with pytest.raises(RuntimeError, match="expected it to be open, got Step.*committed"):
            end()
    assert [cache.seq_len for cache in sequence.caches] == [5, 5, 5]
    with pagedkv.Step(stores, [sequence], [2]) as running:
        running.rollback()
    assert sequence.seq_len == 5


def test_a_pass_takes_iterators():
    stores = make_stores()
    sequence = ModelSequence(stores)
    with pagedkv.Step(stores, iter([sequence]), [3]) as running:
        assert running.n_rows == 3
        write_all(running, 3)
    assert sequence.seq_len == 3


def test_a_sequence_is_cut_in_all_stores_or_in_none():
    stores = make_stores()
    sequence = computed(stores, 20)
    sequence.drop_unneeded()  # two of three have a window
    before = held(stores)
    for n_positions, expected in ((-1, "an integer from 0"), (3, "12 or more")):
        assert n_positions < 0 or not sequence.can_truncate_to(n_positions)
        with pytest.raises(ValueError, match=f"n_positions: expected {expected}.* got {n_positions}"):
            sequence.truncate(n_positions)
        assert [cache.seq_len for cache in sequence.caches] == [20] * 3
        assert held(stores) == before
    sequence.truncate(19)
    assert sequence.seq_len == 19


def test_attaching_to_a_sequence_that_holds_blocks():
    """Is refused, and leaves it what it has."""
    stores = make_stores()
    tokens = list(range(8))
    stores.prefixes.insert(tokens, computed(stores, 8))
    sequence, reserved = computed(stores, 5), ModelSequence(stores)
    reserved.reserve(5)
    before = held(stores)
    for other in (sequence, reserved):
        with pytest.raises(ValueError, match="cache: expected one that holds no blocks"):
            stores.prefixes.attach(other, [*tokens, 9])
    assert (sequence.seq_len, held(stores)) == (5, before)
    reserved.release()
    assert stores.prefixes.attach(reserved, [*tokens, 9]) == reserved.seq_len == 8


def test_layers_and_caches_that_are_not_there():
    stores = make_stores()
    sequence = ModelSequence(stores)
    for layer in (-1, 4):
        with pytest.raises(IndexError, match=f"layer: expected 0 to 3, got {layer}"):
            stores.place_of(layer)
    with pagedkv.Step(stores, [sequence], [1]) as running:
        with pytest.raises(IndexError, match="layer: expected 0 to 3, got -1"):
            running.write(-1, *np.ones((2, 1, 8), np.float32))
        running.rollback()
    with pytest.raises(ValueError, match="caches: expected 3, one for each store, got 1"):
        ModelSequence(stores, sequence.caches[:1])


@pytest.mark.parametrize(
    "shapes", [[], [LayerShape(0, 1, 4)], [LayerShape(-3, 1, 4)], [LayerShape(2.5, 1, 4)], [LayerShape(None, 1, 4), 7]]
)
def test_shapes_that_are_refused(shapes):
    with pytest.raises((TypeError, ValueError), match="shapes"):
        ModelStores(shapes, 4)


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_events(seed):
    """Submit, step, cancel and fail at random, over stores that are too small: everybody gets the right answer."""
    chance = random.Random(seed)
    stores = make_stores(total_blocks=chance.choice([12, 20, 64]))
    scheduler = Scheduler(stores, max_running=chance.choice([2, 5, 32]), max_prefill_tokens=chance.choice([1, 5, 64]))
    model = Model(stores)
    beginnings = [[chance.randrange(50) for _ in range(chance.randrange(1, 20))] for _ in range(3)]
    expected = {}
    for _ in range(120):
        what = chance.random()
        if what < 0.3:
            prompt = [*chance.choice(beginnings)[: chance.randrange(1, 20)], chance.randrange(50)]
            n_new, stops = chance.randrange(1, 12), {chance.randrange(50)}
            name = chance.choice([None, b"a"])
            request = scheduler.submit(prompt, n_new, stop_tokens=stops, namespace=name)
            expected[request] = answer_of(prompt, n_new, stops)
        elif what < 0.35 and expected:
            scheduler.cancel(chance.choice(list(expected)))
        elif what < 0.4 and not scheduler.is_idle:
            model.fails_at = chance.randrange(len(SHAPES))
            with pytest.raises(OSError, match="failed"):
                scheduler.step(model)
            model.fails_at = None
        elif what < 0.42:
            stores.prefixes.clear(namespace=chance.choice([None, b"a", b"b"]))
        elif not scheduler.is_idle:
            scheduler.step(model)
        for cache in stores.prefixes.groups:
            cache.check()
    run(scheduler, model)
    assert len(expected) > 20
    for request, answer in expected.items():
        if request.finish_reason == "cancelled":
            assert request.generated == answer[: len(request.generated)]
        else:
            assert request.generated == answer
    stores.prefixes.clear()
    assert held(stores) == [0, 0, 0]
    assert scheduler.counts.positions_reused
