"""What nobody should do to `pagedkv.serving`: it is refused where it comes in, changes nothing, and others go on."""

import sys
from pathlib import Path

import numpy as np
import pytest
from test_serving import SHAPES, Model, answer_of, held, make_stores, rows_of, run

import pagedkv
from pagedkv.serving import Batch, LayerShape, ModelSequence, ModelStores, Scheduler

FLAT = [LayerShape(None, 1, 4), LayerShape(None, 1, 8)]


def computed(stores, tokens, sequence=None):
    """A sequence with the K/V of these tokens."""
    sequence = sequence or ModelSequence(stores)
    n = sequence.seq_len
    with pagedkv.Step(stores, [sequence], [len(tokens) - n]) as running:
        for layer in range(stores.n_layers):
            shape = stores.group_of(layer).shape
            widths = (shape.n_kv_heads * shape.head_dim, shape.n_kv_heads * (shape.v_head_dim or shape.head_dim))
            running.write(layer, *(rows_of(tokens, layer, width)[n:] for width in widths))
    return sequence


# --- arguments ---

PROMPTS = [None, 7, "abc", b"abc", {1, 2}, iter([1]), [1.0], ["a"], [True], [None], [-1], [2**63], [10**40], [[1]],
           np.array([1.0]), np.array([True]), np.array([[1]]), np.array(3), np.array([-1])]  # fmt: skip


@pytest.mark.parametrize("prompt", PROMPTS, ids=repr)
def test_prompts_that_are_refused(prompt):
    stores = make_stores()
    scheduler = Scheduler(stores)
    with pytest.raises((TypeError, ValueError), match="^prompt: expected"):
        scheduler.submit(prompt, 3)
    for call in (stores.prefixes.match, lambda tokens: stores.prefixes.attach(ModelSequence(stores), tokens),
                 lambda tokens: stores.prefixes.insert(tokens, ModelSequence(stores))):
        with pytest.raises((TypeError, ValueError), match="^tokens: expected"):
            call(prompt)
    assert scheduler.is_idle


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        *[("max_new_tokens", value, TypeError) for value in (None, True, 2.0, "4", float("nan"), [1])],
        *[("max_new_tokens", value, ValueError) for value in (0, -1, 10**40)],
        *[("stop_tokens", value, TypeError) for value in (None, 7, "ab", b"ab", [1.5], [None], [True], ["a"])],
        *[("namespace", value, TypeError) for value in ("a", 7, bytearray(b"a"), ["a"], True)],
    ],
)
def test_options_that_are_refused(name, value, error):
    scheduler = Scheduler(make_stores())
    with pytest.raises(error, match=f"^{name}: expected"):
        scheduler.submit([1], **{"max_new_tokens": 3, name: value})
    assert scheduler.is_idle


@pytest.mark.parametrize("prompt", [(1, 2, 3), range(1, 4), np.array([1, 2, 3], np.uint8), [np.int64(1), 2, 3]])
@pytest.mark.parametrize("kind", [list, set, iter, np.array])
def test_whatever_is_a_list_of_integers(prompt, kind):
    """And what becomes of it are Python's own integers, whatever `compute` returns."""
    stores = make_stores()
    scheduler, model = Scheduler(stores), Model(stores)
    stop = answer_of([1, 2, 3], 5)[3]
    request = scheduler.submit(prompt, np.int32(5), stop_tokens=kind([stop, -1]))
    while not scheduler.is_idle:
        scheduler.step(lambda batch, running: np.array(model(batch, running), np.int32))
    assert request.generated == answer_of([1, 2, 3], 5, {stop})
    assert {type(token) for token in request.tokens} == {int}


def test_other_arguments_that_are_refused():
    stores, others = make_stores(), make_stores()
    scheduler = Scheduler(stores)
    rows = np.zeros((1, 8), np.float32)
    with pytest.raises(TypeError, match="^stores: expected a ModelStores, got NoneType"):
        Scheduler(None)
    with pytest.raises(TypeError, match="^request: expected a Request, got int"):
        scheduler.cancel(3)
    with pytest.raises(ValueError, match="^request: expected one of this scheduler"):
        scheduler.cancel(Scheduler(stores).submit([1], 1))
    with pytest.raises(ValueError, match="^caches: expected 3"):
        ModelSequence(stores, [pagedkv.PagedKvCache()])
    with pytest.raises(TypeError, match=r"^caches\[0\]: expected a ModelSequence, got 3"):
        pagedkv.Step(stores, [3], [1])
    with pytest.raises(ValueError, match=r"^caches\[1\]: expected a sequence of ModelStores"):
        pagedkv.Step(stores, [ModelSequence(stores), ModelSequence(others)], [1, 1])
    for shapes, error in (([3], TypeError), ([LayerShape("a", 1, 4)], TypeError), ([LayerShape(1.5, 1, 4)], TypeError),
                          ([LayerShape(True, 1, 4)], TypeError), ([LayerShape(10**30, 1, 4)], ValueError)):
        with pytest.raises(error, match=r"^shapes\[0\]"):
            ModelStores(shapes, 4)
    for layer, error in ((-1, IndexError), (4, IndexError), (1.0, TypeError), (True, TypeError), ("a", TypeError)):
        with pagedkv.Step(stores, [ModelSequence(stores)], [1]) as running:
            for call in (lambda: running.write(layer, rows, rows), lambda: running.attend(layer, rows)):  # noqa: B023
                with pytest.raises(error, match="^layer: expected"):
                    call()
            assert running.unwritten_layers == (0, 1, 2, 3)
            running.rollback()
    assert held(stores) == [0, 0, 0]


# --- what compute does to its pass ---


def ends(what):
    def compute(batch, running, tokens):
        getattr(running, what)()
        return tokens

    return compute


def raises(error, commits=False):
    def compute(batch, running, tokens):
        if commits:
            running.commit()
        raise error

    return compute


def returns(make):
    return lambda batch, running, tokens: make(tokens)


FAULTS = {
    "commits": (ends("commit"), RuntimeError),
    "rolls back": (ends("rollback"), RuntimeError),
    "fails": (raises(OSError()), OSError),
    "commits and fails": (raises(OSError(), True), RuntimeError),
    "is interrupted": (raises(KeyboardInterrupt()), KeyboardInterrupt),
    "lacks blocks of its own": (raises(pagedkv.PagedStoreExhausted(1, 0, 1)), pagedkv.PagedStoreExhausted),
    "nothing": (returns(lambda tokens: None), TypeError),
    "one number": (returns(lambda tokens: 5), TypeError),
    "too many": (returns(lambda tokens: tokens * 2), ValueError),
    "too few": (returns(lambda tokens: iter(tokens[1:])), ValueError),
    "negative": (returns(lambda tokens: [-1] * len(tokens)), ValueError),
    "huge": (returns(lambda tokens: [2**63] * len(tokens)), ValueError),
    "floats": (returns(lambda tokens: [1.0] * len(tokens)), ValueError),
    "flags": (returns(lambda tokens: np.ones(len(tokens), bool)), ValueError),
    "rows": (returns(lambda tokens: np.ones((len(tokens), 1), int)), ValueError),
    "text": (returns(lambda tokens: "a" * len(tokens)), TypeError),
}


@pytest.mark.parametrize(("fault", "error"), FAULTS.values(), ids=FAULTS)
def test_a_compute_that_misbehaves_changes_nothing(fault, error):
    """At every step of two requests: the same tokens come in the end, and every block comes back."""
    stores = make_stores()
    scheduler, model = Scheduler(stores), Model(stores)
    prompts = [list(range(20)), [7] * 9]
    requests = [scheduler.submit(prompt, 6) for prompt in prompts]
    kept = []

    def compute(batch, running):
        kept.append(running)
        return fault(batch, running, model(batch, running))

    def state():
        return [(request.sequence.seq_len, list(request.tokens), request.finish_reason) for request in requests]

    while not scheduler.is_idle:
        before = state()
        with pytest.raises(error):
            scheduler.step(compute)
        assert state() == before
        for cache in stores.prefixes.groups:
            cache.check()
        scheduler.step(model)
        before = [(each.sequence.seq_len, list(each.tokens)) for each in scheduler.running]
        for end in (kept[-1].rollback, kept[-1].commit):  # who keeps it cannot do harm later
            with pytest.raises(RuntimeError, match="its scheduler ends it"):
                end()
        for end in (pagedkv.Step.rollback, pagedkv.Step.commit):
            with pytest.raises(RuntimeError, match="expected it to be open"):
                end(kept[-1])
        assert [(each.sequence.seq_len, each.tokens) for each in scheduler.running] == before
    assert scheduler.counts.preemptions == 0
    assert [request.generated for request in requests] == [answer_of(prompt, 6) for prompt in prompts]
    stores.prefixes.clear()
    assert held(stores) == [0, 0, 0]


def test_what_compute_may_ask_of_its_scheduler():
    """It may submit, and cancel what waits; what is being computed, and the step, it cannot touch."""
    stores = make_stores()
    scheduler, model = Scheduler(stores, max_running=2), Model(stores)
    first, second, third = (scheduler.submit([n] * 6, 4) for n in range(3))
    more = []

    def compute(batch, running):
        if not more:
            more.append(scheduler.submit([9] * 5, 3))
            scheduler.cancel(third)
        for call in (lambda: scheduler.cancel(batch.requests[0]), scheduler.close, lambda: scheduler.step(model)):
            with pytest.raises(RuntimeError, match="comput"):
                call()
        return model(batch, running)

    while not scheduler.is_idle:
        scheduler.step(compute)
    assert (third.finish_reason, third.generated) == ("cancelled", [])
    for request, prompt in ((first, [0] * 6), (second, [1] * 6), (more[0], [9] * 5)):
        assert request.generated == answer_of(prompt, request.max_new_tokens)


def test_a_step_without_work():
    scheduler = Scheduler(make_stores())
    assert scheduler.step(None) == []


def test_a_pass_that_is_ended_inside_its_block():
    """Once; and what was committed stays."""
    stores = make_stores()
    sequence = computed(stores, [1, 2, 3])
    with pagedkv.Step(stores, iter([sequence]), [2]) as running:
        running.rollback()
    assert (sequence.seq_len, running.n_rows, running.state) == (3, 2, "rolled back")
    with pagedkv.Step(stores, [sequence], [0]) as running:
        running.commit()
    for end in (running.rollback, running.commit):
        with pytest.raises(RuntimeError, match="expected it to be open"):
            end()
    assert sequence.seq_len == 3


# --- interrupts ---


INTERRUPTED = ["_compute", "_remember", "drop_unneeded", "_start", "_open"]
MOVING = ["_admit", "_preempt", "_end", "_settle", "_carry_out", "release"]  # what moves a request


@pytest.mark.parametrize(
    ("function", "stride"),
    [(name, 17) for name in INTERRUPTED + MOVING]
    + [pytest.param(name, 5, marks=pytest.mark.long) for name in INTERRUPTED]
    + [pytest.param(name, 1, marks=pytest.mark.long) for name in MOVING],  # every line
)
def test_an_interrupt_anywhere_in_a_function(function, stride):
    """At one line after the other that the function runs: the requests go on, and get what they would have got."""
    n_hits = 0
    for at in range(1, 400):
        stores = make_stores(total_blocks=9)
        scheduler, model = Scheduler(stores, max_prefill_tokens=8), Model(stores)
        prompts = [[1] * 10, [1] * 8 + [2] * 4, [3] * 10]
        requests = [scheduler.submit(prompt, 6) for prompt in prompts]
        left = [1 + (at - 1) * stride]

        def trace(frame, event, argument, left=left):
            if event == "line" and frame.f_code.co_name == function:
                left[0] -= 1
                if left[0] == 0:
                    raise KeyboardInterrupt
            return trace if {"serving", "groups"} & set(Path(frame.f_code.co_filename).parts) else None

        for _ in range(200):
            if scheduler.is_idle:
                break
            before = sys.gettrace()
            try:
                sys.settrace(trace if left[0] > 0 else before)
                scheduler.step(model)
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
        assert [request.generated for request in requests] == [answer_of(prompt, 6) for prompt in prompts]
        for cache in stores.prefixes.groups:
            cache.check()
        stores.prefixes.clear()
        assert held(stores) == [0, 0, 0]
        if left[0] > 0:
            break
        n_hits += 1
    assert n_hits > 0


# --- what is known ---


def test_what_one_store_knows_beyond_the_others():
    """It ends inside a block, in a request that needs every block there is: no copy may be left for later."""
    stores = make_stores(5, FLAT)
    scheduler, model = Scheduler(stores), Model(stores)
    ours = list(range(10, 26))
    other = [*ours[:10], 1, 2]
    for prompt in (other, ours):
        scheduler.submit(prompt, 1)
        run(scheduler, model)
    first, second = stores.prefixes.groups
    user = pagedkv.PagedKvCache()  # so that the end of ours was not used for longest
    first.attach(user, [*other, 9])
    user.release(first.store)
    first.evict(2)
    prompt = [*ours, 1, 2, 3, 4]
    assert [cache.match(prompt) for cache in (first, second)] == [10, 16]
    request = scheduler.submit(prompt, 1)
    run(scheduler, model)
    assert (request.num_cached_tokens, request.generated) == (10, answer_of(prompt, 1))


def test_windows_that_have_lost_blocks_in_the_middle():
    """A windowed store evicts what is in front of others first or last: reuse ends where one of the stores ends."""
    stores = make_stores(40)
    prompt = [n % 7 for n in range(60)]
    sequence = computed(stores, prompt)
    stores.prefixes.insert(prompt, sequence)
    sequence.drop_unneeded()  # holds its last positions on, where there is a window
    windowed = stores.prefixes.groups[1]
    for n_evicted in (1, 3, 20):
        windowed.evict(n_evicted)
        for cache in stores.prefixes.groups:
            cache.check()
        scheduler, model = Scheduler(stores), Model(stores)
        known = stores.prefixes.match([*prompt[:40], 8, 9])
        request = scheduler.submit([*prompt[:40], 8, 9], 4)
        while not scheduler.is_idle:
            scheduler.step(model)
        assert request.num_cached_tokens == known
        assert request.generated == answer_of([*prompt[:40], 8, 9], 4)
    sequence.release()


def test_what_is_refused_leaves_a_sequence_as_it_is():
    stores = make_stores()
    sequence = computed(stores, list(range(30)))
    with pytest.raises(ValueError, match="^cache: expected one that holds no blocks"):
        stores.prefixes.attach(sequence, [1, 2, 3])
    sequence.drop_unneeded()
    assert not sequence.can_truncate_to(5)
    for length, error in ((5, ValueError), (-1, ValueError), (2.0, TypeError)):
        with pytest.raises(error, match="^n_positions: expected"):
            sequence.truncate(length)
    assert [cache.seq_len for cache in sequence.caches] == [30] * 3
    before = held(stores)
    computed(stores, list(range(31)), sequence)
    assert sequence.seq_len == 31
    assert held(stores) == before
    sequence.release()
    assert held(stores) == [0] * len(before) == [0] * len({shape for shape in SHAPES})


def test_a_batch_of_nothing():
    batch = Batch.of([])
    assert (batch.requests, batch.token_ids, batch.logits_indices) == ((), [], [])
