"""`Scheduler` asks before it starts a request: what that changes, which is nothing, and whom it lets in."""

import math
import random

import numpy as np
import pytest
from test_serving import SIZE, Model, answer_of, held, make_stores, run

import pagedkv
from pagedkv.serving import LayerShape, ModelSequence, ModelStores, Scheduler

WINDOWED = [LayerShape(6, 2, 4), LayerShape(11, 1, 8, 4)]
FLAT = [LayerShape(None, 1, 4)]


def books(stores):
    """All that a user can see of the stores, and what they would evict, in order, from a copy of what is known."""
    return [(p.store.stats(), p.stats(), p.store.free_block_count) for p in stores.prefixes.groups]


def order_of_eviction(stores, prompts):
    """Block by block, what is still known of the prompts. Empties the prefix caches."""
    seen = []
    while any(prefix.evict(1) for prefix in stores.prefixes.groups):
        seen.append([[prefix.match([*prompt, 0]) for prefix in stores.prefixes.groups] for prompt in prompts])
    return seen


# --- asking changes nothing ---


@pytest.mark.parametrize("n_steps", [0, 1, 8])
def test_a_head_that_waits_is_no_use_of_what_it_would_reuse(n_steps):
    """However often it is asked for: the counters and the order of eviction are as if it were not there."""
    known, other = [*range(18), 40], [*range(30, 49), 41]

    def world(asks):
        stores = make_stores(24)
        scheduler, model = Scheduler(stores, watermark=0), Model(stores)
        for prompt in (known, other):
            scheduler.submit(prompt, 1)
            run(scheduler, model)
        scheduler.submit([7] * 40, 30)
        scheduler.step(model)
        if asks:  # needs more than is left beside the one that runs
            scheduler.submit([*range(18), *range(60, 110)], 1)
        before = [prefix.stats() for prefix in stores.prefixes.groups]
        for _ in range(n_steps):
            scheduler.step(model)
        assert len(scheduler.running) == 1
        for then, prefix in zip(before, stores.prefixes.groups, strict=True):
            now = prefix.stats()
            assert (now.hit_tokens, now.missed_tokens) == (then.hit_tokens, then.missed_tokens)
        state = books(stores), vars(scheduler.counts)
        scheduler.close()
        return state, order_of_eviction(stores, [known, other])

    assert world(asks=True) == world(asks=False)


def test_hits_are_counted_once_when_a_request_starts():
    """By hand: 18 positions are known of the head, which waits for ten steps and then reuses 18."""
    stores = make_stores(24, FLAT)
    scheduler, model = Scheduler(stores, watermark=0), Model(stores)
    scheduler.submit([*range(18), 3, 4], 1)
    run(scheduler, model)
    first = scheduler.submit([7] * 60, 10)
    scheduler.step(model)
    second = scheduler.submit([*range(18), *range(50, 80)], 1)
    while not first.finish_reason:
        assert scheduler.waiting == (second,)
        scheduler.step(model)
    run(scheduler, model)
    [stats] = [prefix.stats() for prefix in stores.prefixes.groups]
    assert (second.num_cached_tokens, stats.hit_tokens) == (18, 18)
    assert stats.missed_tokens == 20 + 60 + 30


def test_a_request_that_others_leave_no_blocks_is_no_hit():
    stores = make_stores(8, FLAT)
    scheduler, model = Scheduler(stores), Model(stores)
    scheduler.submit(range(9), 1)
    run(scheduler, model)
    other = ModelSequence(stores)
    other.reserve(20)
    scheduler.submit([*range(9), 1, 2, 3, 4, 5], 4)
    before = stores.prefixes.stats()
    for _ in range(3):
        with pytest.raises(pagedkv.PagedStoreExhausted):
            scheduler.step(model)
        assert stores.prefixes.stats() == before
        assert not scheduler.running
    other.release()
    run(scheduler, model)
    assert stores.prefixes.stats().hit_tokens == 8


# --- what fits ---


@pytest.mark.parametrize("shapes", [FLAT, WINDOWED, [*WINDOWED, *FLAT], [LayerShape(1, 1, 4)]], ids=len)
@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_what_fits_is_what_runs_alone(shapes, chunk):
    """The most blocks that a run really held, in stores with room for everything, against what is said to fit."""
    for n_prompt, n_new in ((1, 1), (3, 30), (30, 3), (41, 40), (16, 1)):
        roomy = ModelStores(shapes, 64, block_size=SIZE, debug=True)
        scheduler, model = Scheduler(roomy, max_prefill_tokens=chunk, share_prefixes=False), Model(roomy)
        request = scheduler.submit(range(n_prompt), n_new)
        run(scheduler, model)
        most = max(group.store.stats().peak_held_blocks for group in roomy.groups)
        said = Scheduler(ModelStores(shapes, 64, block_size=SIZE), max_prefill_tokens=chunk)
        n_said = next(n for n in range(1, 64) if fits(shapes, n, chunk, n_prompt, n_new))
        assert most <= n_said
        if shapes is FLAT:
            assert most == n_said
        assert said.check_fits(n_prompt, n_new) is None
        # And in stores of just that size it runs, also when everything is known, as much as fits.
        stores = ModelStores(shapes, n_said, block_size=SIZE, debug=True)
        for watermark in (0, 1):
            scheduler, model = Scheduler(stores, max_prefill_tokens=chunk, watermark=watermark), Model(stores)
            again = scheduler.submit(range(n_prompt), n_new)
            run(scheduler, model)
            assert again.generated == request.generated == answer_of(range(n_prompt), n_new)


def fits(shapes, total_blocks, chunk, n_prompt, n_new):
    try:
        stores = ModelStores(shapes, total_blocks, block_size=SIZE)
        Scheduler(stores, max_prefill_tokens=chunk).check_fits(n_prompt, n_new)
    except ValueError:
        return False
    return True


def test_windows_make_room_for_any_length():
    stores = ModelStores(WINDOWED, 8, block_size=SIZE)
    scheduler, model = Scheduler(stores, max_prefill_tokens=8), Model(stores)
    request = scheduler.submit([n % 9 for n in range(300)], 50)
    scheduler.check_fits(10**12, 10**12)
    run(scheduler, model)
    assert request.generated == answer_of([n % 9 for n in range(300)], 50)
    with pytest.raises(
        ValueError, match="need 7 blocks of 4, the stores have 6"
    ):  # 10 seen, 8 new, 3 before in a block
        Scheduler(ModelStores(WINDOWED, 6, block_size=SIZE), max_prefill_tokens=14).check_fits(300, 50)


# --- the watermark ---


def test_one_that_just_fits_waits_for_room_to_grow():
    """Without a watermark it starts, and is preempted at the next block; with one it starts later, and never is."""
    preemptions = {}
    for watermark in (0, 0.25):
        stores = make_stores(8, FLAT)
        scheduler, model = Scheduler(stores, watermark=watermark, share_prefixes=False), Model(stores)
        first, second = scheduler.submit([1] * 15, 8), scheduler.submit([2] * 16, 4)
        scheduler.step(model)
        assert len(scheduler.running) == (2 if watermark == 0 else 1)
        run(scheduler, model)
        assert (first.generated, second.generated) == (answer_of([1] * 15, 8), answer_of([2] * 16, 4))
        preemptions[watermark] = scheduler.counts.preemptions
    assert preemptions == {0: 1, 0.25: 0}


def test_the_default_keeps_a_hundredth_and_a_block_at_least():
    for total, kept in ((8, 1), (100, 1), (250, 3)):
        stores = ModelStores(FLAT, total, block_size=1)
        scheduler, model = Scheduler(stores, max_running=total, share_prefixes=False), Model(stores)
        for _ in range(total):
            scheduler.submit([1], 1)
        scheduler.step(model)
        assert scheduler.counts.most_running == total - kept == total - math.ceil(total / 100)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_the_watermark_is_a_share_of_the_bytes_that_stores_share(share):
    """Each store may have all of the budget: what is kept is a share of it, once, and not once for each store."""
    shapes = [LayerShape(6, 1, 4), LayerShape(None, 1, 4), LayerShape(11, 1, 8)]
    least = ModelStores(shapes, 1, block_size=SIZE).nbytes
    stores = ModelStores.from_bytes(40 * least, shapes, block_size=SIZE)
    assert all(store.total_blocks > 40 for store in stores.stores)
    scheduler, model = Scheduler(stores, max_running=64, share_prefixes=False, watermark=share), Model(stores)
    for n in range(64):
        scheduler.submit([n] * SIZE, 1)
    scheduler.step(model)
    assert scheduler.counts.most_running == 40 - 40 * share  # each has a block in every store
    run(scheduler, model)


def test_the_watermark_follows_a_budget_that_is_resized():
    stores = ModelStores.from_bytes(40 * 32, FLAT, block_size=1, max_bytes=80 * 32)
    scheduler, model = Scheduler(stores, max_running=80, share_prefixes=False, watermark=0.5), Model(stores)
    running = []
    for n_blocks, n_expected in ((40, 20), (80, 40), (20, 10)):
        stores.resize(n_blocks * 32)
        for n in range(80):
            scheduler.submit([n], 1)
        running.append(len(scheduler.step(model)))
        scheduler.close()
        assert running[-1] == n_expected


def test_a_watermark_of_everything_lets_one_run_at_a_time():
    stores = make_stores(20)
    scheduler, model = Scheduler(stores, watermark=np.float32(1)), Model(stores)
    requests = [scheduler.submit([n] * 70, 8) for n in range(3)]
    while not scheduler.is_idle:
        scheduler.step(model)
        assert len(scheduler.running) <= 1
    assert [request.generated for request in requests] == [answer_of([n] * 70, 8) for n in range(3)]


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (-0.1, ValueError),
        (1.5, ValueError),
        (math.nan, ValueError),
        ("0.1", TypeError),
        (True, TypeError),
        (None, TypeError),
    ],
)
def test_watermarks_that_are_refused(value, error):
    with pytest.raises(error, match="^watermark: expected a number from 0 to 1, got"):
        Scheduler(make_stores(), watermark=value)


# --- counters ---


@pytest.mark.parametrize("seed", range(6))
def test_first_starts_and_restarts_are_told_apart(seed):
    """First starts sum up to the prompts; and whatever was computed was left to compute, or generated."""
    chance = random.Random(seed)
    stores = make_stores(14)
    scheduler, model = Scheduler(stores, watermark=0, max_prefill_tokens=chance.choice([4, 32])), Model(stores)
    prompts = [[chance.randrange(3) for _ in range(chance.randrange(1, 20))] for _ in range(12)]
    requests = [scheduler.submit(prompt, chance.randrange(8, 24)) for prompt in prompts]
    started = {}
    while not scheduler.is_idle:
        scheduler.step(model)
        for request in requests:
            if request.num_cached_tokens is not None:
                assert started.setdefault(request, request.num_cached_tokens) == request.num_cached_tokens
    counts = scheduler.counts
    assert counts.preemptions
    assert counts.positions_reused == sum(started.values())
    assert counts.positions_reused + counts.positions_missed == sum(map(len, prompts))
    assert counts.positions_restored + counts.positions_recomputed > 0
    hits = [prefix.stats() for prefix in stores.prefixes.groups]
    assert all(each.hit_tokens == counts.positions_reused + counts.positions_restored for each in hits)
    stores.prefixes.clear()
    assert held(stores) == [0, 0, 0]
