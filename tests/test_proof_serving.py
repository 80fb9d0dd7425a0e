"""Interrupts in models with several stores: a pass or an attach is over in all of them or in none.

And whatever comes to a scheduler, its next steps bring every request to its end, with the rows and tokens that it has
alone. See `proof_serving`.
"""

import gc
import os
import random
import time
from collections import Counter

import pytest
from proof_judge import conclude
from proof_serving import ACTS, SERVICES, Server, lengths
from proof_starved import can_starve, starve
from proof_ways import WAYS, Interrupt, Timer, boundaries, needs_signals
from proof_world import ROUNDS, Wrong


def fault_of(world, acts, allowed, again):
    try:
        gc.collect(0)  # a pass may be held by the frames of the error, in a circle
        world.truth()
        if again:
            for act in acts:
                act()
            world.truth()
        if lengths(world) not in (allowed[-1:] if again else allowed):
            return "neither before nor after"
        world.finish()
    except Wrong as wrong:
        return str(wrong)
    return None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("act", ACTS, ids=str)
def test_in_all_stores_or_in_none(act, way, record_property):
    allowed = act.allowed()
    faults, n_tried = Counter(), Counter()

    def attempt(boundary):
        world, acts = act.begin()

        def run():
            for each in acts:
                each()

        interrupted = boundary.run(run)
        fault = fault_of(world, acts, allowed if interrupted else allowed[-1:], act.again and interrupted)
        n_tried[interrupted] += 1
        if fault:
            faults[fault] += 1

    boundaries(WAYS[way], ROUNDS // 3, attempt)
    conclude(faults, n_tried, record_property)


@can_starve
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("act", ACTS, ids=str)
def test_without_memory(act, record_property):
    """The same, for an allocation that fails."""
    allowed = act.allowed()
    kept = []

    def begin():
        kept[:] = act.begin()
        return kept

    def fault(world, refused):
        return fault_of(world, kept[1], allowed if refused else allowed[-1:], act.again and refused)

    # One alone: Python code that takes something back needs memory for it.
    faults, n_refused, n_calm = starve(begin, ROUNDS, fault, widths=[1])
    conclude(Counter(faults), {True: n_refused, False: n_calm}, record_property)
    assert n_refused


def outcome(server, interrupted):
    """What is wrong with how it goes on, or None."""
    try:
        server.go_on()
        server.judge(interrupted)
    except Interrupt:
        raise
    except Exception as error:  # whatever it raises now, it does not go on
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("service", SERVICES, ids=str)
def test_a_scheduler_goes_on(service, way, record_property):
    faults, n_tried = Counter(), Counter()

    def attempt(boundary):
        server = Server(service)
        interrupted = boundary.run(server.go_on)
        fault = outcome(server, interrupted)
        n_tried[interrupted] += 1
        if fault:
            faults[fault] += 1

    boundaries(WAYS[way], max(1, ROUNDS // 8), attempt)
    conclude(faults, n_tried, record_property)


@can_starve
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("service", SERVICES, ids=str)
def test_a_scheduler_goes_on_when_there_is_memory_again(service, record_property):
    servers = []

    def begin():
        servers[:] = [Server(service)]
        return servers[0].world, [servers[0].go_on]

    faults, n_refused, n_calm = starve(begin, ROUNDS, lambda world, refused: outcome(servers[0], refused), widths=[1])
    conclude(Counter(faults), {True: n_refused, False: n_calm}, record_property)
    assert n_refused


@needs_signals
@pytest.mark.parametrize("service", SERVICES, ids=str)
def test_a_scheduler_goes_on_after_signals(service, record_property):
    """One after the other, as from somebody who is impatient."""
    draw = random.Random(service.name)
    faults, n_tried = Counter(), Counter()
    start = time.perf_counter()
    Server(service).go_on()
    longest = time.perf_counter() - start
    with Timer(draw) as timer:
        for _ in range(max(2, ROUNDS // 8)):
            server, n_interrupts = Server(service), 0
            while n_interrupts < 4 and timer.run(server.go_on, longest):
                n_interrupts += 1
            fault = outcome(server, n_interrupts > 0)
            n_tried[n_interrupts > 0] += 1
            if fault:
                faults[fault] += 1
    conclude(faults, n_tried, record_property)
