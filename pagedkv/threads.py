"""How many threads a call may use: what the process is allowed to run on, or what it was told."""

from __future__ import annotations

import math
import os
from typing import SupportsIndex

from pagedkv._arrays import as_flag, as_thread_count
from pagedkv._kernels.parallel import get_limit, set_limit, use_team


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


def use_openmp(on: bool = True) -> bool:
    """Compute on the threads of an OpenMP runtime that the process has loaded, torch's, and not on the library's own.

    Between two layers' attention a model computes other things on those threads. They spin for milliseconds when they
    have done their part, and take CPUs from the library's helpers meanwhile; on one set of threads nobody does. It is
    for one thread that computes: others that call at the same time have teams of their own.

    Parameters
    ----------
    on : bool, optional
        False: on the library's own threads again.

    Returns
    -------
    bool
        Whether it does now; False where no runtime is loaded that speaks GCC's interface: libgomp, and on Linux LLVM's
        libomp and Intel's libiomp5.

    Raises
    ------
    TypeError
        No bool.

    Notes
    -----
    Threads: one setting for the process, and what runs goes on as it began. A forked child computes on the library's
    own threads again, since it has none of its parent's. The number of threads is what it was: that of the call, or
    `get_num_threads`.

    Examples
    --------
    >>> import pagedkv
    >>> found = pagedkv.use_openmp()                       # True where torch was imported
    >>> pagedkv.use_openmp(False)
    False
    """
    address = _find_team() if as_flag(on, "on") else 0
    use_team(address)
    return address != 0


def _find_team() -> int:
    """The address of GOMP_parallel in a library that is loaded, or 0."""
    if not hasattr(os, "RTLD_NOLOAD"):
        return 0
    import ctypes

    for path in (None, *_loaded_libraries()):
        try:
            function = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


def _loaded_libraries() -> list[str]:
    """Files of OpenMP runtimes in the process; loaded for another library alone, names do not find them."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
            paths = {line.split(maxsplit=5)[-1].rstrip("\n") for line in file}
    except OSError:
        return []
    names = ("libgomp", "libiomp5", "libomp")
    return sorted(path for path in paths if os.path.basename(path).startswith(names))


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
