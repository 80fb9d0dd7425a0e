"""Allocations of Python that fail when they are told to. In a fork: where nobody expects it, interpreters end."""

import json
import os
import sys
import sysconfig
import traceback

import pytest

try:
    import _testcapi as testcapi
except ImportError:  # it is CPython's, and not in all builds of it
    testcapi = None
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    testcapi = None  # lists and dicts alone, starved so, end an interpreter 3.13t in one of six trials

can_starve = pytest.mark.skipif(testcapi is None, reason="needs CPython's test of its own C API, and a GIL")

WIDTHS = (1, 25)  # one allocation alone, and a row that leaves none for cleaning up; NumPy loops where all fail


def is_refused(acts, n, width=1):
    """Whether the acts raise MemoryError when the allocations after n others fail."""
    try:
        testcapi.set_nomemory(n, n + width)
        try:
            for act in acts:
                act()
        finally:
            testcapi.remove_mem_hooks()
    except MemoryError:
        return True
    except SystemError as error:
        # NumPy leaves some of them unsaid.
        if "without" in str(error):
            return True
        raise
    return False


def allocations(begin):
    """About how many there are: past the last one, none is missed."""
    n = 1
    while any(is_refused(begin()[1], n + i) for i in range(3)):
        n *= 2
    return n


def references(world):
    """How many hold each sequence: an object that is given back twice is missed only later, and anywhere."""
    return {name: [sys.getrefcount(cache) for cache in sequence.caches] for name, sequence in world.sequences.items()}


def starve(begin, most, judge, widths=WIDTHS):
    """Let about so many allocations fail, evenly; ``judge(world, refused)`` says what is wrong then.

    Returns a list of faults, and how often the acts were refused, and were not.
    """

    def work(say):
        faults, n_refused, n_calm = [], 0, 0
        stride = max(1, -(-allocations(begin) // most)) | 1
        for width in widths:
            n = calm = 0
            while calm < 3:
                say(f"{width} after {n}")
                world, acts = begin()
                before = references(world)
                refused = is_refused(acts, n, width)
                lost = any(before[name] > count for name, count in references(world).items())
                fault = "an object has lost a reference" if lost else judge(world, refused)
                if fault:
                    faults.append(f"{width} failed: {fault}")
                n_refused += refused
                n_calm += not refused
                calm = 0 if refused else calm + 1
                n += stride
        return faults, n_refused, n_calm

    return in_child(work)


def in_child(work):
    """What ``work(say)`` returns, as JSON has it. What it has said last is told if it does not come to an end."""
    read, write = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(read)
            found = work(lambda words: os.write(write, words.encode() + b"\n"))
            os.write(write, json.dumps(found).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as file:
        said = file.read().splitlines()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"ended with {os.waitstatus_to_exitcode(status)} where allocations failed: {said[-1:]}"
    return json.loads(said[-1])
