"""Every example that a reader may copy is run: those of the README, and those of the docstrings."""

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import pagedkv

README = Path(__file__).resolve().parent.parent / "README.md"

OPTIONAL = ("torch", "transformers")  # what an extra brings

# --- README -------------------------------------------------------------------------------------------


def chapters(text):
    """``(title, code)`` of each chapter that has Python in it; the blocks of a chapter are one program."""
    for part in re.split(r"^## ", text, flags=re.MULTILINE):
        blocks = re.findall(r"^```python\n(.*?)^```", part, flags=re.MULTILINE | re.DOTALL)
        if blocks:
            yield part.splitlines()[0].strip(), "\n".join(blocks)


def readme_chapters():
    return list(chapters(README.read_text(encoding="utf-8"))) if README.exists() else []


def test_chapters_are_found():
    text = "# a\n```python\nx = 1\n```\n## b\n```sh\nls\n```\n## c\n```python\ny\n```\nand\n```python\nz\n```\n"
    assert list(chapters(text)) == [("# a", "x = 1\n"), ("c", "y\n\nz\n")]


@pytest.mark.parametrize(("title", "code"), readme_chapters(), ids=[title for title, _ in readme_chapters()])
def test_the_readmes_examples_run(title, code):
    for name in OPTIONAL:
        if re.search(rf"^\s*(?:from|import) {name}\b", code, flags=re.MULTILINE):
            pytest.importorskip(name)
    if ">>>" in code:
        run_doctest(code, title)
    else:
        exec(compile(code, f"README.md, {title}", "exec"), {"__name__": "__readme__"})


@pytest.mark.skipif(not README.exists(), reason="needs the README beside the tests")
def test_the_names_in_the_readme_exist():
    names = set(re.findall(r"\bpagedkv\.([A-Za-z_]\w*)", README.read_text(encoding="utf-8")))
    names -= {"git", "py", "pyx", "so"}  # of addresses and files
    missing = [name for name in names if not hasattr(pagedkv, name) and not can_import(f"pagedkv.{name}")]
    assert not missing


def can_import(name):
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


# --- docstrings ---------------------------------------------------------------------------------------


def modules():
    """Those of the library itself; the demo is a program, with tests of its own."""
    names = [name for _, name, _ in pkgutil.iter_modules(pagedkv.__path__, "pagedkv.") if name not in LEFT_OUT]
    return [pagedkv, *map(importlib.import_module, names)]


LEFT_OUT = {"pagedkv.demo", "pagedkv.__main__", "pagedkv.integrations"}


def documented(module):
    """``(name, object)`` of a module's own classes and functions and of their members, compiled ones too."""
    for name, thing in vars(module).items():
        if getattr(thing, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(thing):
            yield f"{module.__name__}.{name}", thing
            for member_name, member in vars(thing).items():
                yield f"{module.__name__}.{name}.{member_name}", getattr(member, "__func__", member)
        elif callable(thing):
            yield f"{module.__name__}.{name}", thing


def examples():
    found = {}
    for module in modules():
        for name, thing in [(module.__name__, module), *documented(module)]:
            text = getattr(thing, "__doc__", None)
            if isinstance(text, str) and ">>>" in text:
                found[name] = inspect.cleandoc(text)
    return found


@pytest.mark.parametrize("name", ["torch", "transformers.stores", "transformers.cache", "transformers.batch"])
def test_the_integrations_examples_run(name):
    for package in OPTIONAL if name.startswith("transformers") else OPTIONAL[:1]:
        pytest.importorskip(package)
    module = importlib.import_module(f"pagedkv.integrations.{name}")
    found = {where: text for where, thing in documented(module) if ">>>" in (text := inspect.getdoc(thing) or "")}
    assert found
    for where, text in found.items():
        run_doctest(text, where)


def run_doctest(text, name):
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    assert test.examples
    report = []
    doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(test, out=report.append)
    assert not report, "".join(report)


@pytest.mark.parametrize(("name", "text"), examples().items(), ids=examples())
def test_the_docstrings_examples_run(name, text):
    run_doctest(text, name)


def test_the_main_classes_have_examples():
    names = {name.rsplit(".", 1)[1] for name in examples()}
    assert {"PagedKvStore", "PagedKvCache", "KvCache", "KvBlockPool", "Step", "paged_attention", "attention"} <= names


def test_everything_public_is_documented():
    for name in pagedkv.__all__:
        thing = getattr(pagedkv, name)
        assert inspect.getdoc(thing), name
        if inspect.isclass(thing):
            for member_name, member in vars(thing).items():
                if not member_name.startswith("_") and (callable(member) or inspect.isdatadescriptor(member)):
                    described = inspect.getdoc(getattr(member, "__func__", member)) or member_name in thing.__doc__
                    assert described or inspect.isgetsetdescriptor(member), f"{name}.{member_name}"
