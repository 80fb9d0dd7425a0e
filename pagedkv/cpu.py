"""What the kernels found on this machine, and what they use."""

import os
import sys
from typing import NamedTuple

from pagedkv._kernels.simd import get_simd, list_features, list_simd, set_simd
from pagedkv.stats import with_field_docs
from pagedkv.threads import get_num_threads, usable_cpus


@with_field_docs
class CpuInfo(NamedTuple):
    """What `cpu_info` returns: a named tuple.

    Attributes
    ----------
    simd : str
        The instruction set that the kernels use: "plain", "sse2", "avx2", "avx512" or "neon".
    available : tuple of str
        The sets that this build has and this machine can run, the best first.
    features : tuple of str
        The extensions of the machine that matter here, used or not.
    usable_cpus : int
        CPUs that the process may use: its affinity, and the quota of its control group.
    num_threads : int
        Threads that a call uses when it names no number: what `get_num_threads` says.
    huge_pages : str
        When the system backs large memory by huge pages: "always", "madvise" (NumPy asks), "never", or "unknown".

    Examples
    --------
    >>> import pagedkv
    >>> isinstance(pagedkv.cpu_info(), pagedkv.CpuInfo)
    True
    """

    simd: str
    available: tuple[str, ...]
    features: tuple[str, ...]
    usable_cpus: int
    num_threads: int
    huge_pages: str


def cpu_info() -> CpuInfo:
    """What the kernels found on this machine, and what they use.

    The instruction set is chosen once, at import: the best that the machine can run, or the one that the
    environment variable ``PAGEDKV_SIMD`` names.

    Returns
    -------
    CpuInfo

    Notes
    -----
    Threads: may be called from any thread.

    Examples
    --------
    >>> import pagedkv
    >>> info = pagedkv.cpu_info()
    >>> info.simd in info.available, info.num_threads >= 1
    (True, True)
    """
    return CpuInfo(
        simd=get_simd(),
        available=tuple(list_simd()),
        features=tuple(list_features()),
        usable_cpus=usable_cpus(),
        num_threads=get_num_threads(),
        huge_pages=_huge_pages(),
    )


def _huge_pages() -> str:
    if not sys.platform.startswith("linux"):
        return "unknown"
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled", encoding="ascii") as file:
            return file.read().split("[")[1].split("]")[0]
    except (OSError, IndexError):
        return "unknown"


if os.environ.get("PAGEDKV_SIMD"):
    set_simd(os.environ["PAGEDKV_SIMD"])
