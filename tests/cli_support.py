"""Running the command line, in a process of its own and in this one."""

import subprocess
import sys

import pytest

from pagedkv.__main__ import main


def run(*arguments, **options):
    command = [sys.executable, "-m", "pagedkv", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


def fails(capsys, *arguments):
    """The one line that a run with exit code 2 says."""
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    shown = capsys.readouterr()
    assert end.value.code == 2
    assert shown.out == ""
    [line] = shown.err.splitlines()
    assert line.startswith(f"python -m pagedkv {arguments[0]}: "), line
    return line.split(": ", 1)[1]
