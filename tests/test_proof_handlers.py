"""The caller's own code in the middle of a call, see `proof_meddling`; and clocks that give no time.

In processes of their own, which a watchdog ends when they hang. PAGEDKV_PROOF_ROUNDS is the number of rounds of each.
"""

import math

import proof_prefix  # noqa: F401  adds its scenarios
import pytest
from helpers import run_python
from hostile import Unwilling
from proof_core import SCENARIOS
from proof_judge import judge
from proof_meddling import WAYS
from proof_ways import needs_signals
from proof_world import ROUNDS


@needs_signals
@pytest.mark.parametrize("way", [*WAYS, "threads"])
def test_in_the_middle(way, record_property):
    code = f"import proof_meddling; proof_meddling.main({way!r}, {ROUNDS})"
    said = run_python(code, timeout=120 + 2 * ROUNDS)
    record_property("done", said.strip())
    assert "calls" in said


def refuse(clock):
    raise Unwilling


# What a clock gives instead of seconds, and what comes of it.
NO_SECONDS = {
    "an error": (refuse, Unwilling),
    "nothing": (lambda clock: None, TypeError),
    "a word": (lambda clock: "1000", TypeError),
    "no real number": (lambda clock: 1000j, TypeError),
    "no number": (lambda clock: math.nan, ValueError),
    "more than a float": (lambda clock: 10**400, OverflowError),
}


@pytest.mark.parametrize("answer", NO_SECONDS)
def test_a_clock_that_gives_no_seconds_changes_nothing(answer):
    """Whichever time it is asked."""
    give, expected = NO_SECONDS[answer]
    n_refused = 0
    for scenario in SCENARIOS:
        if scenario.alone or scenario.costs > 1:
            continue
        allowed = scenario.allowed()
        for at in range(1, ROUNDS):
            world, acts = scenario.begin()
            left = [at]

            def instead(clock, left=left):
                left[0] -= 1
                return give(clock) if left[0] == 0 else clock.now

            world.clock.instead = instead
            refused = False
            try:
                for act in acts:
                    act()
            except expected:
                refused = True
            world.clock.instead = None
            fault = judge(world, allowed if refused else allowed[-1:])
            assert fault is None, f"{scenario}, asked for the {at}. time: {fault}"
            n_refused += refused
            if left[0] > 0:
                break
    assert n_refused >= 10
