"""A `PrefixCache` of a model: several stores know the same beginnings, and a change reaches all of them or none."""

import copy
import pickle
import random
import re
import sys

import numpy as np
import pytest
from proof_starved import can_starve, testcapi
from test_serving import SHAPES, SIZE, Model, answer_of, held, make_stores, run
from test_serving_hostile import computed

import pagedkv
from pagedkv import _beginnings
from pagedkv.serving import LayerShape, ModelSequence, ModelStores, Scheduler, TokenIds

FLAT = [LayerShape(None, 1, 4), LayerShape(None, 1, 8)]


def state(stores):
    """What a user can see, without the order of eviction."""
    return [(p.store.free_block_count, p.evictable_block_count, p.stats()) for p in stores.prefixes.groups]


def refs(stores, sequence):
    return [
        [group.store.refcount(block) for block in cache.block_table.tolist() if block >= 0]
        for group, cache in zip(stores.groups, sequence.caches, strict=True)
    ]


# --- what is known ---


@pytest.mark.parametrize("seed", range(8))
def test_what_is_common_is_found_by_comparing_lists(seed):
    """Each store was told of other tokens: the greatest beginning that both were told of, by plain lists."""
    chance = random.Random(seed)
    stores = make_stores(64, FLAT)
    told = [[], []]
    for _ in range(6):
        tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 14))]
        sequence = computed(stores, tokens)
        for number in (0, 1):
            if chance.random() < 0.6:
                stores.prefixes.groups[number].insert(tokens, sequence.caches[number])
                told[number].append(tokens[: len(tokens) // SIZE * SIZE])
        sequence.release()

    def common(tokens, known):
        return max((next((i for i, pair in enumerate(zip(tokens, k, strict=False)) if pair[0] != pair[1]),
                         min(len(tokens), len(k))) for k in known), default=0)  # fmt: skip

    for _ in range(40):
        tokens = [chance.randrange(2) for _ in range(chance.randrange(0, 14))]
        expected = max(0, min([len(tokens) - 1, *(common(tokens, known) for known in told)]))
        before = state(stores)
        assert stores.prefixes.match(tokens) == expected
        assert state(stores) == before
        if tokens:
            sequence, hits = ModelSequence(stores), stores.prefixes.stats()
            assert stores.prefixes.attach(sequence, tokens) == expected
            assert [cache.seq_len for cache in sequence.caches] == [expected] * 2
            if expected % SIZE:  # nothing is left shared that would have to be copied by the next token
                assert [counts[-1] for counts in refs(stores, sequence)] == [1, 1]
            now = stores.prefixes.stats()
            assert (now.hit_tokens - hits.hit_tokens, now.missed_tokens - hits.missed_tokens) == (
                expected,
                len(tokens) - expected,
            )
            sequence.release()
        stores.prefixes.check()


def test_what_was_new_what_is_forgotten_and_what_is_counted():
    """By hand: two stores, ten tokens in blocks of four."""
    stores = make_stores(16, FLAT)
    prefixes, tokens = stores.prefixes, list(range(10))
    sequence = computed(stores, tokens)
    assert prefixes.insert(tokens, sequence, priority=1, ttl=3600.0) == 4
    assert prefixes.insert(tokens, sequence) == 0
    sequence.release()
    assert prefixes.stats() == pagedkv.PrefixStats(4, 0, 1, 0, 0, 4, 0)
    assert prefixes.match(tokens) == 8
    assert prefixes.forget(tokens, start=np.int64(5)) == 2
    assert prefixes.match(tokens) == 4
    assert prefixes.forget(tokens, namespace=b"a") == 0
    assert prefixes.clear() == 2
    assert held(stores) == [0, 0]
    prefixes.check()


def test_inserting_what_grows():
    """Only new tokens are looked at, in all stores; what was evicted in one of them is inserted anew."""
    stores = make_stores(64, FLAT)
    handle, sequence, tokens = pagedkv.PrefixHandle(), ModelSequence(stores), []
    for n in range(1, 40):
        tokens.append(n % 5)
        computed(stores, tokens, sequence)
        if n == 23:
            stores.prefixes.groups[1].forget(tokens)
        expected = {True: 2, False: 0}[n % SIZE == 0]
        if n == 23:
            expected = 5  # of the second store
        assert stores.prefixes.insert(tokens, sequence, handle=handle) == expected
        assert stores.prefixes.match([*tokens, 9]) == n // SIZE * SIZE
    stores.prefixes.check()
    with pytest.raises(ValueError, match="tokens: expected the 36 that were inserted"):
        stores.prefixes.insert(tokens[:20], sequence, handle=handle)
    with pytest.raises(TypeError, match="handle: expected a PrefixHandle"):
        stores.prefixes.insert(tokens, sequence, handle=[handle])
    first, second = stores.prefixes.groups
    for other, cache in ((first, sequence.caches[0]), (second, sequence.caches[1])):
        with pytest.raises(ValueError, match="handle: expected one of this prefix cache"):
            other.insert(tokens, cache, handle=handle)
    with pytest.raises(ValueError, match="handle: expected one of this prefix cache"):
        stores.prefixes.insert(tokens, sequence, namespace=b"other", handle=handle)
    assert repr(handle) == "PrefixHandle(36 tokens)"


# --- all or nothing ---


def test_whatever_is_refused_has_changed_no_store():
    stores, others = make_stores(16, FLAT), make_stores(16, FLAT)
    tokens = list(range(9))
    sequence = computed(stores, tokens)
    stores.prefixes.insert(tokens[:4], sequence)
    foreign = pagedkv.PagedKvCache()
    foreign.append_contiguous(others.groups[1].store, *np.ones((2, 9, 8), np.float32), 9)
    mixed = ModelSequence(stores, [sequence.caches[0], foreign])
    before = state(stores), state(others)
    with pytest.raises(ValueError, match="^cache: expected a sequence of"):
        stores.prefixes.insert(tokens, mixed)
    for call in (lambda s: stores.prefixes.attach(s, tokens), lambda s: stores.prefixes.insert(tokens, s)):
        with pytest.raises(ValueError, match="^cache: expected a sequence of the stores whose"):
            call(ModelSequence(others))
        for wrong in (None, 3, foreign, stores):
            with pytest.raises(TypeError, match="^cache: expected a ModelSequence, got"):
                call(wrong)
    empty = ModelSequence(stores)
    with pagedkv.Step(stores.groups[1].store, [empty.caches[1]], 0), pytest.raises(RuntimeError, match="in use"):
        stores.prefixes.attach(empty, tokens)
    assert [cache.capacity for cache in empty.caches] == [0, 0]
    twice = ModelSequence(stores, [empty.caches[0], empty.caches[0]])
    with pytest.raises(RuntimeError, match="in use"):
        stores.prefixes.attach(twice, tokens)
    assert (state(stores), state(others)) == before
    assert stores.prefixes.attach(empty, tokens) == 4


@can_starve
@pytest.mark.parametrize("what", ["attach", "insert", "insert inside", "insert with a handle"])
def test_memory_that_cannot_be_had(what):
    """At one allocation after the other: no store knows more, no hit is counted, every sequence is as it was."""
    refused = 0
    for at in range(200):
        stores = ModelStores(FLAT, 32, block_size=SIZE)
        prefixes, tokens = stores.prefixes, list(range(30))
        first = computed(stores, tokens)
        prefixes.insert(tokens[:11] if what == "insert inside" else tokens[:20], first)
        ours, handle = [*tokens[:11], 50, *range(60, 78)], pagedkv.PrefixHandle()
        sequence = ModelSequence(stores) if what == "attach" else computed(stores, ours)
        if what == "insert with a handle":
            prefixes.insert(ours[:12], sequence, handle=handle)
        ids = np.array(ours)
        before = state(stores), refs(stores, sequence), [prefixes.match([*t, 1]) for t in (tokens, ours)]
        testcapi.set_nomemory(at, at + 1)
        try:
            if what == "attach":
                prefixes.attach(sequence, ids)
            elif what == "insert with a handle":
                prefixes.insert(ids, sequence, handle=handle)
            else:
                prefixes.insert(ids, sequence)
        except (MemoryError, SystemError):  # NumPy says it in its own way
            testcapi.remove_mem_hooks()
            refused += 1
            after = state(stores), refs(stores, sequence), [prefixes.match([*t, 1]) for t in (tokens, ours)]
            assert after == before
            assert what != "attach" or [cache.capacity for cache in sequence.caches] == [0, 0]
            prefixes.check()
            if what == "insert with a handle":
                prefixes.insert(ids, sequence, handle=handle)
                assert prefixes.match([*ours, 1]) == 28
        else:
            testcapi.remove_mem_hooks()
            prefixes.check()
            if at > 100:
                break
    assert refused > 3


@pytest.mark.parametrize("n_free", [0, 1, 2, 5])
def test_a_copy_in_every_store_or_in_none(n_free):
    """One store has no block left for the copy of a part: reuse ends before it in both."""
    stores = make_stores(8, FLAT)
    tokens = list(range(8))
    sequence = computed(stores, tokens)
    stores.prefixes.insert(tokens, sequence)
    second = stores.groups[1].store
    taken = second.acquire(6 - n_free) if n_free < 6 else []
    other = ModelSequence(stores)
    expected = 6 if n_free else 4
    assert stores.prefixes.attach(other, [*tokens[:6], 9, 9]) == expected
    assert [cache.seq_len for cache in other.caches] == [expected] * 2
    assert stores.groups[0].store.free_block_count == (5 if n_free else 6)
    assert second.stats().exhaustions == 0
    second.release(taken)


# --- sequences ---


def test_a_copy_is_a_clone():
    stores = make_stores()
    sequence = computed(stores, list(range(9)))
    before = held(stores)
    for make in (copy.copy, copy.deepcopy, ModelSequence.clone):
        twin = make(sequence)
        assert held(stores) == before
        assert not set(map(id, twin.caches)) & set(map(id, sequence.caches))
        computed(stores, list(range(14)), twin)
        assert (twin.seq_len, sequence.seq_len) == (14, 9)
        twin.release()
        assert (sequence.seq_len, held(stores)) == (9, before)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(sequence, protocol)


# --- numbers and classes: one rule ---

NUMBERS = {
    "max_running": lambda stores, n: Scheduler(stores, max_running=n),
    "max_prefill_tokens": lambda stores, n: Scheduler(stores, max_prefill_tokens=n),
    "max_new_tokens": lambda stores, n: Scheduler(stores).check_fits(1, n),
    "n_prompt": lambda stores, n: Scheduler(stores).check_fits(n, 1),
    "n_positions": lambda stores, n: stores.blocks_for(n),
    "chunk": lambda stores, n: stores.blocks_for(9, chunk=n),
    "n_new": lambda stores, n: ModelSequence(stores).reserve(n),
    "total_blocks": lambda stores, n: ModelStores(SHAPES, n),
    "block_size": lambda stores, n: ModelStores(SHAPES, 4, block_size=n),
    "query_lens": lambda stores, n: pagedkv.Step(stores, [ModelSequence(stores)], n),
    "query_lens[0]": lambda stores, n: pagedkv.Step(stores, [ModelSequence(stores)], [n]),
    "new_len": lambda stores, n: ModelSequence(stores).caches[0].can_truncate_to(n),
    "priority": lambda stores, n: stores.prefixes.insert([1], ModelSequence(stores), priority=n),
    "start": lambda stores, n: stores.prefixes.forget([1], start=n),
    "pending[0]: first_position": lambda stores, n: pagedkv.plan_admission(
        stores.groups[0].store, [pagedkv.PendingRequest(first_position=n)]
    ),
    "keep_free": lambda stores, n: pagedkv.plan_admission(stores.groups[0].store, [], keep_free=n),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name):
    call, stores = NUMBERS[name], make_stores()
    for number in (3, np.int64(3), np.uint8(3), np.array(3)):
        call(stores, number)
    for wrong in (True, np.True_, 3.0, np.float32(3), "3", [3], None):
        if (name, wrong) in (("chunk", None), ("query_lens", [3])):
            continue
        with pytest.raises(TypeError) as refused:
            call(stores, wrong)
        assert str(refused.value).startswith(f"{name}: expected"), refused.value
    for wrong in (-1 if name != "priority" else -(2**63), 10**40):
        with pytest.raises(ValueError, match="^" + re.escape(f"{name}: expected an integer from ")):
            call(stores, wrong)
    assert held(stores) == [0, 0, 0]


def test_classes():
    stores = make_stores()
    for wrong in (None, 3, stores.groups, stores.groups[0].store):
        for call in (Scheduler, ModelSequence):
            with pytest.raises(TypeError, match=f"^stores: expected a ModelStores, got {type(wrong).__name__}"):
                call(wrong)
    sequence = ModelSequence(stores)
    for given, match in ((3, "caches: expected a list"), ([1, 2, 3], r"caches\[0\]: expected a PagedKvCache, got int")):
        with pytest.raises(TypeError, match=match):
            ModelSequence(stores, given)
    with pytest.raises(TypeError, match="^caches: expected a ModelSequence or several of them, got 3"):
        pagedkv.Step(stores, 3, [1])
    with pytest.raises(ValueError, match="^caches: expected each cache once"):
        pagedkv.Step(stores, [sequence, sequence], 1)
    with pytest.raises(ValueError, match="^query_lens: expected 1 lengths"):
        pagedkv.Step(stores, [sequence], [1, 2])
    with pytest.raises(TypeError, match="^shapes: expected"):
        ModelStores(3, 4)
    running = pagedkv.Step(stores, [sequence, ModelSequence(stores)], np.int64(2))
    assert (running.query_lens, running.n_rows) == ((2, 2), 4)


# --- tokens ---


def test_tokens_are_read_like_a_list():
    given = np.arange(3)
    tokens, model = TokenIds(given), [0, 1, 2]
    given[:] = 9
    for token in range(50, 90):
        for at in range(-len(model), len(model)):
            assert tokens[at] == model[at]
        assert (len(tokens), list(tokens), repr(tokens)) == (len(model), model, repr(model))
        assert tokens[1:-1] == model[1:-1]
        assert tokens[::-2] == model[::-2]
        assert tokens == model
        assert model == tokens
        assert tokens == tuple(model)
        assert tokens != [*model, 1]
        assert tokens == TokenIds(np.array(model))
        assert {type(token) for token in tokens} == {type(tokens[np.int8(-1)])} == {int}
        assert (model[-1] in tokens, 7 in tokens, tokens.index(2), tokens.count(1)) == (True, False, 2, 1)
        view = np.asarray(tokens)
        assert np.array_equal(view, model)
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 3
        assert np.array(tokens).flags.writeable
        assert np.asarray(tokens, np.int32).dtype == np.int32
        with pytest.raises(IndexError):
            tokens[len(model)]
        tokens._put(len(model), token)
        model.append(token)
    assert tokens != "text"
    assert np.array_equal(view, model[:-1])
    with pytest.raises(TypeError):
        hash(tokens)


# --- what a step costs ---


def test_remembering_looks_at_what_is_new(monkeypatch):
    """However long the request is: the ids that are given to the books are those of a block, in each store."""
    looked_at = []
    convert = _beginnings.as_token_ids
    stores = make_stores(400)
    scheduler, model = Scheduler(stores, max_prefill_tokens=2000), Model(stores)
    request = scheduler.submit([n % 7 for n in range(1001)], 40)
    scheduler.step(model)
    monkeypatch.setattr(_beginnings, "as_token_ids", lambda ids: looked_at.append(len(ids)) or convert(ids))
    run(scheduler, model)
    assert len(looked_at) == 40 // SIZE
    assert set(looked_at) == {SIZE}
    assert request.generated == answer_of(request.tokens[:1001], 40)


def test_a_step_does_not_depend_on_how_many_wait():
    def count(n_waiting):
        stores = make_stores(64)
        scheduler, model = Scheduler(stores, max_running=2), Model(stores)
        for n in range(2 + n_waiting):
            scheduler.submit([n, 1, 2], 9)
        scheduler.step(model)
        n_lines = [0]

        def trace(frame, event, argument):
            n_lines[0] += "serving" in frame.f_code.co_filename
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            for _ in range(8):
                scheduler.step(model)
        finally:
            sys.settrace(before)
        assert [request.finish_reason for request in scheduler.running] == []
        return n_lines[0]

    assert count(1000) == count(10)
