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
from proof_world import ROUNDS

import pagedkv

_testcapi = pytest.importorskip("_testcapi")  # of CPython, and not of all builds of it

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the caller's own code too


def is_refused(acts, n):
    """Whether the acts raise MemoryError when the allocation after n others fails, and it alone."""
    try:
        _testcapi.set_nomemory(n, n + 1)
        try:
            for act in acts:
                act()
        finally:
            _testcapi.remove_mem_hooks()
    except MemoryError:
        return True
    except (SystemError, pagedkv.PagedKvError) as error:
        # NumPy leaves some of them unsaid, and a check may have no room to look.
        if "without" in str(error) or "no memory" in str(error):
            return True
        raise
    return False


def allocations(scenario):
    """About how many there are: past the last one, none is missed."""
    n = 1
    while any(is_refused(scenario.begin()[1], n + i) for i in range(3)):
        n *= 2
    return n


@pytest.mark.parametrize("scenario", [scenario for scenario in SCENARIOS if scenario.robust], ids=str)
def test_at_every_allocation(scenario, record_property):
    allowed = scenario.allowed()
    faults, n_tried = Counter(), Counter()
    stride = max(1, allocations(scenario) * scenario.costs // ROUNDS) | 1
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
