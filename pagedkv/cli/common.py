"""What the commands share: errors, numbers with units, JSON."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence

_MOST = 2**31 - 1
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


class CliError(Exception):
    """Something the user can put right. The message is one line."""


def positive(value: str) -> int:
    """An integer from 1 to 2**31 - 1, for argparse."""
    try:
        number = int(value)
    except ValueError:
        number = 0
    if not 1 <= number <= _MOST:
        raise argparse.ArgumentTypeError(f"expected an integer from 1 to {_MOST}, got {value!r}")
    return number


def size(value: str) -> int:
    """Bytes, for argparse: "8GiB", "8G" (the same), "500MB" (of 1000), "4096"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", value.strip().lower())
    unit = _UNITS.get(match[2]) if match else None
    if not match or unit is None or not 1 <= (n_bytes := int(float(match[1]) * unit)) < 2**63:
        raise argparse.ArgumentTypeError(f"expected a size such as 8GiB, 500MB or 4096, got {value!r}")
    return n_bytes


def bytes_text(n_bytes: float) -> str:
    """Bytes with three digits or so, in units of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} TiB"


def table(rows: Sequence[Sequence[str]], align: str) -> str:
    """Lines of aligned columns; `align` has a "<" or a ">" for each. The last one is not padded on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)) for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def check_writable(path: str) -> None:
    """Raises `CliError` if `write_json` could not write there; asked before minutes are spent on what to write."""
    folder = os.path.dirname(path) or "."
    if path == "-":
        return
    if os.path.isdir(path):
        raise CliError(f"{path}: is a folder")
    if not os.path.isdir(folder):
        raise CliError(f"{path}: there is no folder {folder}")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise CliError(f"{path}: cannot be written")


def write_json(value: object, path: str = "-") -> None:
    """Writes JSON to a file, or to stdout for "-"."""
    text = json.dumps(value, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}") from None


def read_json(path: str) -> object:
    """What a JSON file holds.

    Raises
    ------
    CliError
        There is no such file, or it is no JSON.
    """
    try:
        with open(path, encoding="utf-8") as file:
            value: object = json.load(file)
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise CliError(f"{path}: is no JSON file") from None
    return value
