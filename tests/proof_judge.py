"""Whether what an interrupt or an error has left is a state that the calls pass through."""

import gc

from proof_world import Wrong


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


def conclude(faults, n_tried, record):
    """Fail with all faults, if there are any. How much was tried is in the report of ``--junitxml``."""
    record("interrupted", n_tried[True])
    record("uninterrupted", n_tried[False])
    n_all = f"{sum(n_tried.values())} ({n_tried[True]} interrupted)"
    assert not faults, f"{sum(faults.values())} of {n_all}:" + "".join(
        f"\n  {n} x {fault}" for fault, n in faults.most_common()
    )
