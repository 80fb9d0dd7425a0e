"""An allocation that fails, whichever of a call's it is, leaves the state before the call or the one after it.

Python's allocations, and those of the prefix cache's books, fail by `_testcapi`, one after the other.
PAGEDKV_PROOF_ROUNDS is how many of a scenario's are tried at most.
"""

import gc
from collections import Counter

import proof_prefix  # noqa: F401  adds its scenarios
import pytest
from proof_core import SCENARIOS
from proof_judge import conclude, judge
from proof_starved import allocations, is_refused
from proof_world import ROUNDS

pytest.importorskip("_testcapi")  # of CPython, and not of all builds of it
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the caller's own code too


@pytest.mark.parametrize("scenario", [scenario for scenario in SCENARIOS if scenario.robust], ids=str)
def test_at_every_allocation(scenario, record_property):
    allowed = scenario.allowed()
    faults, n_tried = Counter(), Counter()
    stride = max(1, allocations(scenario.begin) * scenario.costs // ROUNDS) | 1
    n = n_calm = 0
    while n_calm < 3:
        world, acts = scenario.begin()
        gc.collect(0)  # so that the collector comes at the same moments each time
        refused = is_refused(acts, n)
        fault = judge(world, allowed if refused else allowed[-1:])
        n_tried[refused] += 1
        if fault:
            faults[fault] += 1
        n_calm = 0 if refused else n_calm + 1
        n += stride
    conclude(faults, n_tried, record_property)
    assert n_tried[True]
