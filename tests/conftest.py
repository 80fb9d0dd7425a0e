"""Profiles of Hypothesis, and the stores that most tests use."""

import os

import numpy as np
import pytest
from attention_support import SETS, forced
from hostile import World
from hypothesis import HealthCheck, Phase, settings
from prefix_support import Clock

import pagedkv

# An example of the state machine is up to 50 moves, each followed by the comparison of all that can be seen.
# test_model.py walks as well, in proportion to max_examples: "ci" makes above 10**5 moves in all, "long" 10**6.
# Nothing is explained: its trace function would be what has no memory, or what is interrupted.
_phases = [phase for phase in Phase if phase is not Phase.explain]
_common = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True, "phases": _phases}
for _name, _max_examples in (("quick", 50), ("default", 250), ("ci", 1000), ("long", 10_000)):
    settings.register_profile(_name, max_examples=_max_examples, stateful_step_count=50, **_common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_modifyitems(config, items):
    """What takes long is left out, unless PAGEDKV_LONG is set, as CI does, or `-m long` asks for it."""
    if os.environ.get("PAGEDKV_LONG") or "long" in config.getoption("-m"):
        return
    kept, left_out = [], []
    for item in items:
        (left_out if item.get_closest_marker("long") else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.fixture
def store():
    """Two heads, blocks of four rows, K wider than V, with every unwritten row NaN."""
    return pagedkv.PagedKvStore(4, 16, 2, 3, v_head_dim=2, debug=True)


@pytest.fixture
def layered():
    """The same with three layers."""
    return pagedkv.PagedKvStore(4, 16, 2, 3, v_head_dim=2, n_layers=3, debug=True)


@pytest.fixture(params=["one layer", "three layers"])
def any_store(request, store, layered):
    return store if request.param == "one layer" else layered


@pytest.fixture
def cache():
    return pagedkv.PagedKvCache()


@pytest.fixture
def row(store):
    """One position's K and V for the one-layer store."""
    return np.arange(6, dtype=np.float32), -np.arange(4, dtype=np.float32)


@pytest.fixture
def one_thread():
    """For small models of torch: they are slower on several, and far slower where something else runs beside."""
    import torch

    before = torch.get_num_threads(), pagedkv.get_num_threads()
    torch.set_num_threads(1)
    pagedkv.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    pagedkv.set_num_threads(before[1])


@pytest.fixture
def world():
    """A store of three layers, a sequence of six positions in it, and contiguous caches."""
    return World()


@pytest.fixture
def clock():
    """Seconds that pass when told to."""
    return Clock()


@pytest.fixture
def prefixes(store, clock):
    """A prefix cache of the store; its books balance in the end."""
    prefixes = pagedkv.PrefixCache(store, clock=clock)
    yield prefixes
    prefixes.check()


@pytest.fixture
def rng():
    return np.random.default_rng(2)


@pytest.fixture(params=SETS)
def simd(request):
    """Each instruction set that the machine has, in turn."""
    with forced(request.param):
        yield request.param
