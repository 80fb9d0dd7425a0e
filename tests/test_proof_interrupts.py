"""An interrupt at any moment leaves the state before a call or the state after it: no row, no block, no book between.

Without chance, at every boundary that Python code has; by real signals, at random moments. PAGEDKV_PROOF_ROUNDS is how
many of each there are: 100 by default, which takes seconds; 3000 are all boundaries, and some minutes.
"""

import gc
import random
import time
from collections import Counter

import proof_prefix  # noqa: F401  adds its scenarios
import pytest
from proof_core import CLASSES
from proof_ways import WAYS, Timer, boundaries, needs_signals
from proof_world import ROUNDS, Wrong

SCENARIOS = [scenario for scenarios in CLASSES.values() for scenario in scenarios]


def judge(world, allowed):
    """What is wrong with what was left, or None."""
    try:
        try:
            world.truth()
        except Wrong:
            gc.collect()  # a clone may be held by the frames of the error, in a circle
            world.truth()
        found = world.snapshot()
        states = [(state, order) for state, order in allowed if state == found]
        if not states:
            return f"neither before nor after: {differences(found, allowed)}"
        if world.order() not in [order for _, order in states]:
            return "blocks go in another order, or are handed out in another"
        world.finish()
    except Wrong as wrong:
        return str(wrong)
    return None


def differences(found, allowed):
    """Which parts are like the state that is nearest to what was found, but for these."""
    return min(([key for key in found if found[key] != state.get(key)] for state, _ in allowed), key=len)


def said(faults, n_tried):
    n_all = f"{sum(n_tried.values())} ({n_tried[True]} interrupted)"
    return f"{sum(faults.values())} of {n_all}:" + "".join(f"\n  {n} x {fault}" for fault, n in faults.most_common())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_at_every_boundary(scenario, way):
    allowed = scenario.allowed()
    faults, n_tried = Counter(), Counter()

    def attempt(boundary):
        world, acts = scenario.begin()

        def act():
            for each in acts:
                each()

        interrupted = boundary.run(act)
        fault = judge(world, allowed if interrupted or boundary.hit else allowed[-1:])
        n_tried[interrupted] += 1
        if fault:
            faults[fault] += 1

    boundaries(WAYS[way], ROUNDS, attempt)
    assert not faults, said(faults, n_tried)


@needs_signals
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_by_signals(scenario):
    """Also in compiled code, as far as it looks for them, and where a call returns."""
    allowed = scenario.allowed()
    draw = random.Random(scenario.name)
    faults, n_tried = Counter(), Counter()
    lasts = 0.0
    with Timer() as timer:
        for i in range(3 + ROUNDS // 5):
            world, acts = scenario.begin()

            def act(acts=acts):
                for each in acts:
                    each()

            start = time.perf_counter()
            delay = 10.0 if i < 3 else draw.uniform(0, lasts)
            interrupted = timer.run(act, delay)
            if i < 3:
                lasts = time.perf_counter() - start
            n_tried[interrupted] += 1
            fault = judge(world, allowed if interrupted else allowed[-1:])
            if fault:
                faults[fault] += 1
    assert not faults, said(faults, n_tried)
    assert timer.n_signals or lasts < 1e-3  # a short one is over before it is heard
