"""`python -m pagedkv tier`: what a tier's folder has, whether it is right, and how to be rid of it."""

from __future__ import annotations

import argparse
import time

from pagedkv.cli.common import CliError, bytes_text, table, write_json
from pagedkv.tiers.looking import check_segments, list_contents, remove_segments

SUMMARY = "look at the K/V that a FileTier keeps in a folder"
EXAMPLES = """\
examples:
  python -m pagedkv tier ls path/to/folder
  python -m pagedkv tier check path/to/folder
  python -m pagedkv tier clear path/to/folder

exit codes:
  0  done
  1  check: a record is wrong
  2  something that you can put right: one line on stderr says what"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the command."""
    what = parser.add_argument("what", choices=["ls", "check", "clear"], metavar="ls|check|clear")
    what.help = "what is there; whether all of it is right; remove it, but for what a process writes to now"
    parser.add_argument("path", help="the folder")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Prints what was found; returns 1 if a record is wrong, or else 0."""
    try:
        return {"ls": _list, "check": _check, "clear": _clear}[options.what](options.path, options.json)
    except ValueError as error:
        raise CliError(str(error).removeprefix("path: ")) from None
    except OSError as error:
        raise CliError(f"{options.path}: {error.strerror}") from None


def _list(path: str, as_json: bool) -> int:
    now, rows, facts = time.time(), [("model", "namespace", "format", "tokens", "size", "age")], []
    for found in list_contents(path):
        space = found.space
        model = space.model.decode("utf-8", "backslashreplace") if space else "?"
        name = "-" if space is None or space.namespace is None else ascii(space.namespace)[1:]
        kind = f"{space.format.dtype}, group {space.format.group}" if space else "?"
        ages = [max(0.0, now - when) for when in (found.newest, found.oldest)] if found.records else [0.0, 0.0]
        span = _age(ages[0]) if _age(ages[0]) == _age(ages[1]) else f"{_age(ages[0])} to {_age(ages[1])}"
        rows.append((model, name, kind, f"{found.tokens:,}", bytes_text(found.nbytes), span))
        facts.append({
            "model": model, "namespace": name, "format": kind, "records": found.records, "tokens": found.tokens,
            "bytes": found.nbytes, "newest_seconds": ages[0], "oldest_seconds": ages[1],
        })  # fmt: skip
    if as_json:
        write_json(facts)
    else:
        print(table(rows, "<<<>><") if facts else "nothing")
    return 0


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _check(path: str, as_json: bool) -> int:
    found = list(check_segments(path))
    n_wrong = sum(len(segment.wrong) for segment in found)
    if as_json:
        write_json([segment._asdict() for segment in found])
        return int(n_wrong > 0)
    for segment in found:
        for text in segment.wrong:
            print(f"{segment.name} {text}")
        if segment.left and not segment.wrong and not segment.is_written:
            print(f"{segment.name}: {segment.left} bytes of a record that was never finished")
    print(f"{sum(segment.records for segment in found)} records in {len(found)} segments, {n_wrong} wrong")
    return int(n_wrong > 0)


def _clear(path: str, as_json: bool) -> int:
    removed, n_bytes, left = remove_segments(path)
    if as_json:
        write_json({"removed": removed, "bytes": n_bytes, "left": left})
        return 0
    print(f"{removed} segments removed, {bytes_text(n_bytes)}" + (f"; {left} in use are left" if left else ""))
    return 0
