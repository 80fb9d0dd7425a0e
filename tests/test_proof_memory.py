"""An allocation that fails, whichever of a call's it is, leaves the state before the call or the one after it.

Python's own allocations fail by `_testcapi`, alone and with those that follow. PAGEDKV_PROOF_ROUNDS times four is how
many of a scenario's are tried, if it has as many.
"""

import gc
import os
from collections import Counter

import proof_prefix  # noqa: F401  adds its scenarios
import pytest
from proof_core import SCENARIOS
from proof_judge import conclude, judge
from proof_starved import can_starve, starve
from proof_world import ROUNDS

pytestmark = [
    can_starve,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # the caller's own code too
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]


@pytest.mark.parametrize("scenario", [scenario for scenario in SCENARIOS if scenario.robust], ids=str)
def test_at_every_allocation(scenario, record_property):
    allowed = scenario.allowed()

    def begin():
        gc.collect(0)  # so that the collector comes at the same moments each time
        return scenario.begin()

    def fault_of(world, refused):
        return judge(world, allowed if refused else allowed[-1:])

    faults, n_refused, n_calm = starve(begin, 4 * ROUNDS // scenario.costs**2, fault_of)
    conclude(Counter(faults), {True: n_refused, False: n_calm}, record_property)
    assert n_refused
