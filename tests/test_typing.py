"""typed_examples.py at run time; and, where mypy is there, that it passes and sees what is wrong."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typed_examples

import pagedkv

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "typed_examples.py"

examples = {name: thing for name, thing in vars(typed_examples).items() if name.startswith("example_")}


@pytest.mark.parametrize("name", examples)
def test_the_typed_examples_run(name):
    examples[name]()


def test_every_public_name_is_in_them():
    used = set(re.findall(r"\bpagedkv\.(\w+)", SOURCE.read_text(encoding="utf-8")))
    assert set(pagedkv.__all__) <= used


@pytest.mark.parametrize("name", pagedkv.__all__)
def test_every_member_and_keyword_is_in_them(name):
    text = SOURCE.read_text(encoding="utf-8")
    thing = getattr(pagedkv, name)
    if inspect.isclass(thing) and (issubclass(thing, (tuple, BaseException)) or thing is pagedkv.BlockMap):
        return  # results: their fields are all of one or two types
    members = [member for member in dir(thing) if not member.startswith("_")] if inspect.isclass(thing) else []
    assert not [member for member in members if not re.search(rf"\.{member}\b|\b{member}=", text)]
    parameters = inspect.signature(thing).parameters.values()
    assert not [p.name for p in parameters if p.kind == p.KEYWORD_ONLY and f"{p.name}=" not in text]


# --- the checker ----------------------------------------------------------------------------------------


def mypy(path, cwd):
    pytest.importorskip("mypy")
    if not (HERE.parent / "pyproject.toml").exists():
        pytest.skip("needs the settings beside the tests")
    command = [sys.executable, "-m", "mypy", "--config-file", str(HERE.parent / "pyproject.toml"), str(path)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300, check=False)


def test_the_checker_agrees():
    done = mypy(SOURCE, HERE.parent)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_checker_sees_a_wrong_type(tmp_path):
    """The package is typed for those who install it: no stub is missing, and a wrong result is not Any."""
    path = tmp_path / "user.py"
    path.write_text("import pagedkv\nreveal_type(pagedkv.PagedKvCache().seq_len)\nx: str = pagedkv.get_num_threads()\n")
    done = mypy(path, HERE.parent)
    assert 'Revealed type is "builtins.int"' in done.stdout or 'Revealed type is "int"' in done.stdout
    assert "[assignment]" in done.stdout
    assert done.returncode == 1
