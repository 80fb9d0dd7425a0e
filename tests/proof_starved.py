"""Allocations that fail when they are told to: Python's own, and those of the prefix cache's books."""

import _testcapi

import pagedkv


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


def allocations(begin):
    """About how many there are: past the last one, none is missed."""
    n = 1
    while any(is_refused(begin()[1], n + i) for i in range(3)):
        n *= 2
    return n
