"""A scheduler with a tier behind its prefix cache: what another process computed is there, and nobody waits for it."""

import time

import pytest

pytest.importorskip("gguf", reason="needs the extra: pip install pagedkv[demo]")

from serving_support import alone, load, run, server, tokens
from test_tiered import LONG, Gate, MemoryTier

from pagedkv import PagedStoreExhausted
from pagedkv.demo.engine import Engine
from pagedkv.serving import ModelStores, Scheduler
from pagedkv.tiers import TieredPrefixes


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(tmp_path_factory.mktemp("tiny"))


def over(model, tier, deadline=LONG, **options):
    served = server(model, **options)
    served.tiered = TieredPrefixes(served.stores.prefixes, tier, model=b"tiny", deadline=deadline)
    served.scheduler = Scheduler(served.stores, tiered=served.tiered)
    served.engine = Engine(model, served.scheduler, ())
    return served


def answers(model, served, prompts, n=6):
    requests = [served.engine.submit(prompt, n) for prompt in prompts]
    while not served.scheduler.is_idle:
        served.engine.step()
    assert served.tiered.close(LONG)  # what is known still is stored
    run(served)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.generated == alone(model, prompt, n)
    return requests


def test_a_second_start_computes_nothing_that_the_first_one_did(model):
    tier, prompts = MemoryTier(), [[*tokens(21), *tokens(n, n)] for n in (5, 12, 12, 30)]
    first = over(model, tier)
    answers(model, first, prompts)
    assert first.scheduler.counts.positions_loaded == 0
    second = over(model, tier)
    requests = answers(model, second, prompts)
    counts, size = second.scheduler.counts, second.stores.block_size
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.num_cached_tokens >= (len(prompt) - 1) // size * size
        assert request.n_loaded <= request.num_cached_tokens
    assert counts.positions_loaded == sum(request.n_loaded for request in requests)
    assert requests[0].n_loaded == requests[0].num_cached_tokens > 0
    assert counts.positions_missed <= len(prompts) * size
    # A conversation goes on where the answer ended.
    third = over(model, tier)
    [request] = answers(model, third, [[*requests[3].tokens[:], 7, 8, 9]])
    assert request.n_loaded >= (len(requests[3].tokens) - 1) // size * size


@pytest.mark.parametrize("method", ["find", "load"])
def test_others_go_on_while_one_waits(model, method):
    tier, prompt, other = MemoryTier(), tokens(40, 1), tokens(9, 2)
    answers(model, over(model, tier), [prompt])
    gate = Gate(tier.values, method)
    served = over(model, gate)
    waiting = served.engine.submit(prompt, 4)
    while not gate.hangs.is_set():
        assert served.engine.step() == []
    served.tiered._deadline = 0.001  # of those that come later: the tier has one thread
    running = served.engine.submit(other, 30)
    while running.finish_reason is None:
        served.engine.step()
        assert waiting in served.scheduler.waiting
        assert waiting.num_cached_tokens is None
    assert running.generated == alone(model, other, 30)
    gate.go.set()
    run(served)
    assert waiting.generated == alone(model, prompt, 4)
    assert waiting.n_loaded == waiting.num_cached_tokens >= 36
    served.tiered.close()


def test_the_deadline_of_one_that_waits(model):
    tier, prompt = MemoryTier(), tokens(40, 1)
    answers(model, over(model, tier), [prompt])
    gate = Gate(tier.values, "find")
    served = over(model, gate, deadline=0.2)
    request, started = served.engine.submit(prompt, 4), time.monotonic()
    run(served, most_steps=100_000)
    assert 0.2 <= time.monotonic() - started < 30
    assert request.generated == alone(model, prompt, 4)
    assert (request.num_cached_tokens, request.n_loaded) == (0, 0)
    gate.go.set()
    assert served.tiered.close(LONG)


def test_cancelling_one_that_waits(model):
    tier, prompt = MemoryTier(), tokens(40, 1)
    answers(model, over(model, tier), [prompt])
    gate = Gate(tier.values, "find")
    served = over(model, gate)
    request = served.engine.submit(prompt, 4)
    served.engine.step()
    assert gate.hangs.wait(LONG)
    served.scheduler.cancel(request)
    assert request.finish_reason == "cancelled"
    assert served.scheduler.is_idle
    gate.go.set()
    assert served.tiered.close(LONG)
    served.stores.prefixes.clear()
    assert served.stores.nbytes_in_use == 0


def test_little_room(model):
    """Requests that push each other out, and load again what they know: the same answers."""
    tier, prompts = MemoryTier(), [tokens(20 + i, i) for i in range(6)]
    for _ in range(2):
        served = over(model, tier, n_blocks=24)
        answers(model, served, prompts, 12)
        assert served.tiered.stats().corrupt == served.tiered.stats().errors == 0
    assert served.scheduler.counts.positions_loaded > 0


@pytest.mark.parametrize("n", [40, 28])
def test_a_request_that_needs_what_is_being_stored_waits_for_it(model, n):
    """At its start, or when it grows."""
    gate = Gate({}, "store", 2)  # when it stores layers without a window
    served = over(model, gate, n_blocks=11)
    first = served.engine.submit(tokens(9, 1), 2)
    while first.finish_reason is None:
        served.engine.step()
    assert gate.hangs.wait(LONG)
    prompt = tokens(n, 2)
    request = served.engine.submit(prompt, 44 - n)
    for _ in range(200):
        served.engine.step()
    assert request.finish_reason is None
    gate.go.set()
    run(served)
    assert request.generated == alone(model, prompt, 44 - n)
    assert served.tiered.close(LONG)


@pytest.mark.parametrize("n", [40, 28])
def test_a_request_that_needs_what_a_hung_tier_holds_is_told(model, monkeypatch, n):
    """It does not wait for ever: the stores say what is missing, and it keeps its turn."""
    monkeypatch.setattr("pagedkv.tiers.tiered._HANGS", 0.3)
    gate = Gate({}, "store", 2)
    served = over(model, gate, deadline=0.3, n_blocks=11)
    first = served.engine.submit(tokens(9, 1), 2)
    while first.finish_reason is None:
        served.engine.step()
    assert gate.hangs.wait(LONG)
    prompt = tokens(n, 2)
    request, started = served.engine.submit(prompt, 44 - n), time.monotonic()
    with pytest.raises(PagedStoreExhausted):
        run(served, most_steps=100_000)
    assert 0.2 < time.monotonic() - started < LONG
    with pytest.raises(PagedStoreExhausted):
        served.engine.step()
    assert request.finish_reason is None
    gate.go.set()
    assert served.tiered.flush(LONG)
    run(served)
    assert request.generated == alone(model, prompt, 44 - n)
    assert served.tiered.close(LONG)


def test_what_is_refused(model):
    served, other = over(model, MemoryTier()), ModelStores(model.config.layers, 8)
    with pytest.raises(ValueError, match=r"^tiered: expected one of the prefixes of these stores"):
        Scheduler(other, tiered=served.tiered)
    with pytest.raises(TypeError, match="^tiered: expected a TieredPrefixes"):
        Scheduler(other, tiered=3)
    with pytest.raises(ValueError, match="^tiered: expected None"):
        Scheduler(served.stores, tiered=served.tiered, share_prefixes=False)
