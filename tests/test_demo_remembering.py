"""Requests that start on what ended ones have computed, requests that are given up, and tokens that are drawn."""

import numpy as np
import pytest

pytest.importorskip("gguf", reason="needs the extra: pip install pagedkv[demo]")

from hypothesis import given, settings
from hypothesis import strategies as st
from serving_support import alone, assert_all_free, check, load, run, server, tokens

from pagedkv.demo.engine import Work
from pagedkv.demo.sampling import Sampler, greedy
from pagedkv.demo.verify import compare


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(tmp_path_factory.mktemp("model"))


def steps(served, n=10_000):
    while n and not served.scheduler.is_idle:
        served.engine.step()
        check(served)
        n -= 1


# --- what is remembered ---


def test_a_request_starts_on_what_an_ended_one_computed(model):
    """Its prompt and its answer, beyond what the windows of the ended request held, and inside a block."""
    served = server(model)
    first = served.engine.submit(tokens(41), 10)
    steps(served)
    computed = served.engine.prefill.tokens
    known = [*tokens(41), *first.generated][:-1]  # the last token was never computed
    prompt = [*known[:46], 7, 8, 9]
    second = served.engine.submit(prompt, 6)
    steps(served)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 46)
    assert served.engine.prefill.tokens - computed == 3
    assert second.generated == alone(model, prompt, 6)
    run(served)


def test_the_books_of_a_store_that_remembers(model):
    served = server(model)
    served.engine.submit(tokens(20), 5)
    steps(served)
    for group in served.stores.groups:
        assert group.store.free_block_count == 64 - 6
        assert group.store.evictable_block_count == 6
    assert (served.scheduler.counts.positions_reused, served.scheduler.counts.positions_missed) == (0, 20)
    served.engine.close()
    assert_all_free(served)


def test_what_is_remembered_makes_room(model):
    served = server(model, n_blocks=16)
    for seed in range(6):
        request = served.engine.submit(tokens(40, seed=seed), 8)
        steps(served)
        assert request.generated == alone(model, tokens(40, seed=seed), 8)
    assert all(prefixes.stats().blocks_evicted for prefixes in served.stores.prefixes.groups)
    run(served)


def test_a_long_beginning_that_is_known_does_not_keep_a_request_from_starting(model):
    """All blocks are remembered, and what the windows have left behind of them must make room for the rest."""
    served = server(model, n_blocks=12)
    served.engine.submit(tokens(44), 5)
    steps(served)
    again = served.engine.submit([*tokens(44)[:21], *tokens(20, seed=3)], 8)
    steps(served, 50)
    assert again.finish_reason
    assert again.num_cached_tokens >= 20
    run(served)


def test_who_was_preempted_finds_its_own_blocks(model):
    served = server(model, n_blocks=10)
    requests = [served.engine.submit(tokens(10, seed=i), 20) for i in range(2)]
    steps(served)
    assert served.scheduler.counts.preemptions >= 1
    assert served.scheduler.counts.positions_restored > 0
    assert served.scheduler.counts.positions_reused == 0
    assert [request.num_cached_tokens for request in requests] == [0, 0]  # what it was admitted with at first
    assert [r.generated for r in requests] == [alone(model, tokens(10, seed=i), 20) for i in range(2)]
    run(served)


def test_without_sharing_nothing_is_looked_up(model):
    served = server(model, share_prefixes=False)
    for _ in range(2):
        request = served.engine.submit(tokens(20), 3)
        steps(served)
    assert request.num_cached_tokens == 0
    run(served)


# --- who is given up ---


@pytest.mark.parametrize("shares", [False, True])
def test_a_request_can_be_given_up_wherever_it_is(model, shares):
    served = server(model, n_blocks=12, share_prefixes=shares)
    waiting, first, second, queued = (served.engine.submit(tokens(18, seed=i), 12) for i in range(4))
    served.engine.cancel(waiting)  # before it ran
    served.engine.step()
    assert served.scheduler.running == (first, second)
    served.engine.cancel(first)  # while it runs
    served.engine.cancel(first)  # again: nothing
    assert served.scheduler.running == (second,)
    steps(served)
    assert (waiting.generated, len(first.generated)) == ([], 1)
    assert second.generated == alone(model, tokens(18, seed=2), 12)
    assert queued.generated == alone(model, tokens(18, seed=3), 12)
    run(served)


def test_who_waits_for_a_lender_that_is_given_up_computes_by_itself(model):
    served = server(model, max_prefill_tokens=4)
    lender = served.engine.submit(tokens(40), 4)
    heir = served.engine.submit([*tokens(30), 7], 4)
    served.engine.step()
    assert len(served.scheduler.waiting) == 1
    served.engine.cancel(lender)
    steps(served)
    assert heir.num_cached_tokens == 4
    assert heir.generated == alone(model, [*tokens(30), 7], 4)
    run(served)


def test_giving_up_who_was_preempted_lets_others_in(model):
    served = server(model, n_blocks=8, share_prefixes=False)
    first, second = (served.engine.submit(tokens(10, seed=i), 20) for i in range(2))
    while not served.scheduler.counts.preemptions:
        served.engine.step()
    small = served.engine.submit([5], 1)
    served.engine.cancel(second)
    served.engine.step()
    assert small.finish_reason
    assert not first.finish_reason
    run(served)


arrivals = st.lists(
    st.tuples(
        st.integers(0, 40),  # tokens in common with others
        st.integers(1, 12),  # tokens of its own
        st.integers(1, 10),  # to generate
        st.integers(0, 5),  # steps until the next arrives
        st.none() | st.integers(0, 8),  # steps until it is given up, if nothing else is to do
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=60, deadline=None)
@given(arrivals, st.integers(1, 9), st.integers(0, 20), st.sampled_from([1, 5, 256]))
def test_everyone_gets_their_own_tokens(model, arrivals, block_size, spare, max_prefill_tokens):
    """Whoever comes, shares, is preempted or given up, over stores that remember."""
    texts = [tokens(n_common) + tokens(n_own, seed=n_own % 3) for n_common, n_own, *_ in arrivals]
    largest = max(-(-(len(text) + case[2]) // block_size) for text, case in zip(texts, arrivals, strict=True))
    served = server(model, block_size=block_size, n_blocks=largest + spare, max_prefill_tokens=max_prefill_tokens)
    requests, given_up, now = [], {}, 0
    for text, (_, _, n_new, pause, patience) in zip(texts, arrivals, strict=True):
        requests.append(served.engine.submit(text, n_new))
        if patience is not None:
            given_up[requests[-1]] = now + patience
        for _ in range(pause):
            now = step(served, given_up, now)
    while not served.scheduler.is_idle:
        now = step(served, given_up, now)
        assert now < 2000
    for request, text, case in zip(requests, texts, arrivals, strict=True):
        assert request in given_up or len(request.generated) == case[2]
        mismatch = compare(model, text, request.generated, Work())
        assert mismatch is None or mismatch.margin < 1e-4
    run(served)


def step(served, given_up, now):
    for request, end in given_up.items():
        if end == now:
            served.engine.cancel(request)
    if not served.scheduler.is_idle:
        served.engine.step()
        check(served)
    return now + 1


# --- how tokens are drawn ---


def drawn(logits, n=4000, **options):
    """How often each token is drawn."""
    sampler = Sampler(seed=1, **options)
    return np.bincount([sampler(np.array(logits, np.float32)) for _ in range(n)], minlength=len(logits)) / n


LOGITS = np.log([0.5, 0.05, 0.3, 0.15]) + 3


def test_tokens_are_drawn_by_their_probability():
    np.testing.assert_allclose(drawn(LOGITS), [0.5, 0.05, 0.3, 0.15], atol=0.03)


def test_temperature_flattens_and_sharpens():
    for temperature in (0.5, 2.0):
        expected = np.array([0.5, 0.05, 0.3, 0.15]) ** (1 / temperature)
        np.testing.assert_allclose(drawn(LOGITS, temperature=temperature), expected / expected.sum(), atol=0.03)


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (0.0, [1, 0, 0, 0]),
        (0.49, [1, 0, 0, 0]),
        (0.51, [5 / 8, 0, 3 / 8, 0]),
        (0.9, [0.5 / 0.95, 0, 0.3 / 0.95, 0.15 / 0.95]),
        (0.99, [0.5, 0.05, 0.3, 0.15]),
        (1.0, [0.5, 0.05, 0.3, 0.15]),
    ],
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p, expected):
    np.testing.assert_allclose(drawn(LOGITS, top_p=top_p), expected, atol=0.03)


def test_top_p_over_a_large_flat_vocabulary():
    """The threshold that spares the sorting must not cost tokens that belong."""
    logits = np.zeros(1000, np.float32)
    sampler = Sampler(top_p=0.75, seed=2)
    found = {sampler(logits) for _ in range(6000)}
    assert 735 <= len(found) <= 751


@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-9, 1e-4])
def test_cold_is_greedy(temperature):
    logits = np.array([1e4, 3, 1e4 + 1, -1e30, -np.inf], np.float32)
    with np.errstate(all="raise"):
        assert Sampler(temperature, seed=0)(logits) == 2 == greedy(logits)


def test_a_seed_says_what_is_drawn():
    logits = np.zeros(1000, np.float32)

    def draw(seed):
        sampler = Sampler(seed=seed)
        return [sampler(logits) for _ in range(10)]

    assert draw(3) == draw(3) != draw([3, 1])
    assert draw(None) != draw(None)


def test_what_else_is_in_the_batch_makes_no_difference(model):
    def serve(n_others):
        served = server(model)
        others = [served.engine.submit(tokens(9, seed=i), 12, Sampler(seed=i)) for i in range(n_others)]
        request = served.engine.submit(tokens(9), 12, Sampler(seed=5))
        run(served)
        return request.generated, [other.generated for other in others]

    (together, others), (by_itself, _) = serve(3), serve(0)
    assert together == by_itself
    assert together != alone(model, tokens(9), 12)
    assert together not in others
