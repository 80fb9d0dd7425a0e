"""An interrupt at any moment leaves the state before a call or the state after it: no row, no block, no book between.

Without chance, at every boundary that Python code has; by real signals, at random moments. PAGEDKV_PROOF_ROUNDS is how
many of each there are: 100 by default, which takes seconds; 3000 are all boundaries, and some minutes.
"""

import random
import time
from collections import Counter

import proof_prefix  # noqa: F401  adds its scenarios
import pytest
from proof_core import SCENARIOS
from proof_judge import conclude, judge
from proof_ways import WAYS, Timer, boundaries, needs_signals
from proof_world import ROUNDS


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_at_every_boundary(scenario, way, record_property):
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

    boundaries(WAYS[way], ROUNDS // scenario.costs, attempt)
    conclude(faults, n_tried, record_property)


@needs_signals
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_by_signals(scenario, record_property):
    """Also in compiled code, as far as it looks for them, and where a call returns."""
    allowed = scenario.allowed()
    draw = random.Random(scenario.name)
    faults, n_tried = Counter(), Counter()
    lasts = 1.0
    with Timer(draw) as timer:
        for i in range(3 + ROUNDS // 5 // scenario.costs):
            world, acts = scenario.begin()

            def act(acts=acts):
                for each in acts:
                    each()

            start = time.perf_counter()
            interrupted = timer.run(act, lasts * 1e6 if i < 3 else lasts)
            if i < 3:
                lasts = min(lasts, time.perf_counter() - start)
            n_tried[interrupted] += 1
            fault = judge(world, allowed if interrupted else allowed[-1:])
            if fault:
                faults[fault] += 1
    conclude(faults, n_tried, record_property)
    assert timer.n_interrupts or lasts < 2e-3  # a short one is over before it is heard
