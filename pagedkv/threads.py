"""How many threads a call may use: what the process is allowed to run on, or what it was told."""

from __future__ import annotations

import math
import os
from typing import SupportsIndex

from pagedkv._arrays import as_thread_count
from pagedkv._kernels.parallel import get_limit, set_limit


def get_num_threads() -> int:
    """Threads that a call uses when it is not given ``n_threads``.

    At import this is the environment variable ``PAGEDKV_NUM_THREADS``, or else the number of CPUs
    that the process may use: its affinity, and the quota of its control group where that is less.

    Returns
    -------
    int
        1 to 256.

    Notes
    -----
    Threads: may be called from any thread; one number for the process.

    Examples
    --------
    >>> import pagedkv
    >>> 1 <= pagedkv.get_num_threads() <= 256
    True
    """
    return get_limit()


def set_num_threads(n: SupportsIndex) -> None:
    """Set the number of threads that a call uses when it is not given ``n_threads``, process-wide.

    Parameters
    ----------
    n : int
        1 to 256, the caller's own thread included. Results do not depend on it.

    Raises
    ------
    TypeError, ValueError
        ``n`` is no integer from 1 to 256. Nothing was changed.

    Notes
    -----
    Threads: may be called from any thread, and holds for all of them. Calls that are running keep theirs.

    Examples
    --------
    >>> import pagedkv
    >>> before = pagedkv.get_num_threads()
    >>> pagedkv.set_num_threads(2)
    >>> pagedkv.get_num_threads()
    2
    >>> pagedkv.set_num_threads(before)
    """
    set_limit(as_thread_count(n, "n"))


def usable_cpus() -> int:
    """CPUs in the affinity mask, or as many as the control group's quota pays for."""
    try:
        n_cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # not on this platform
        n_cpus = os.cpu_count() or 1
    return max(1, min(n_cpus, _cgroup_cpus()))


def _cgroup_cpus() -> int:
    """The CPU quota, rounded up; a number beyond all CPUs where there is none."""
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:  # version 2
            quota, period = file.read().split()
    except (OSError, ValueError):
        try:
            with open("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", encoding="ascii") as file:  # version 1
                quota = file.read().strip()
            with open("/sys/fs/cgroup/cpu/cpu.cfs_period_us", encoding="ascii") as file:
                period = file.read().strip()
        except OSError:
            return 1 << 20
    if not (quota.isdigit() and period.isdigit() and int(period)):  # "max", or -1
        return 1 << 20
    return max(1, math.ceil(int(quota) / int(period)))


def _default_threads() -> int:
    text = os.environ.get("PAGEDKV_NUM_THREADS", "")
    if not text:
        return min(usable_cpus(), 256)
    try:
        return as_thread_count(int(text), "PAGEDKV_NUM_THREADS")
    except ValueError:
        raise ValueError(f"PAGEDKV_NUM_THREADS: expected an integer from 1 to 256, got {text!r}") from None


set_limit(_default_threads())
