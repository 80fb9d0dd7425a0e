"""`python -m pagedkv info`: what is installed, and what it found on this machine."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import sysconfig

import numpy as np

import pagedkv
from pagedkv.cli.common import write_json

SUMMARY = "show the version, and what the kernels found on this machine and use"
EXAMPLES = """\
examples:
  python -m pagedkv info
  python -m pagedkv info --json
  PAGEDKV_SIMD=sse2 PAGEDKV_NUM_THREADS=1 python -m pagedkv info"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the command."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Prints the facts; returns 0."""
    facts = gather()
    if options.json:
        write_json(facts)
        return 0
    width = max(map(len, facts))
    for name, value in facts.items():
        shown = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        print(f"{name.replace('_', ' '):{width}}  {shown or 'none'}")
    return 0


def gather() -> dict[str, object]:
    """Version, build and `pagedkv.cpu_info()`, as JSON takes them."""
    return {
        "version": pagedkv.__version__,
        "path": os.path.dirname(pagedkv.__file__),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "build": sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag,
        "gil": "on" if getattr(sys, "_is_gil_enabled", lambda: True)() else "off",
        "numpy": np.__version__,
        "platform": platform.platform(),
        **{name: list(value) if isinstance(value, tuple) else value for name, value in _cpu().items()},
    }


def _cpu() -> dict[str, object]:
    return pagedkv.cpu_info()._asdict()
