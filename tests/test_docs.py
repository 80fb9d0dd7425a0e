"""Every example that a reader may copy is run: those of the README, and those of the docstrings."""

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
from test_architecture import FLOOR_OF

import pagedkv
import pagedkv.serving
import pagedkv.shapes
from pagedkv.__main__ import main

README = Path(__file__).resolve().parent.parent / "README.md"

needs_readme = pytest.mark.skipif(not README.exists(), reason="needs the README beside the tests")

OPTIONAL = ("torch", "transformers")  # what an extra brings

# --- README -------------------------------------------------------------------------------------------


def chapters(text):
    """``(title, code, outputs)`` of each chapter that has Python in it; the blocks of a chapter are one program.

    Blocks of no language in it are what the program prints.
    """
    for part in re.split(r"^## ", text, flags=re.MULTILINE):
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", part, flags=re.MULTILINE | re.DOTALL)
        code = [block for language, block in blocks if language == "python"]
        if code:
            yield part.splitlines()[0].strip(), "\n".join(code), [block for language, block in blocks if not language]


def readme_chapters():
    return list(chapters(README.read_text(encoding="utf-8"))) if README.exists() else []


def test_chapters_are_found():
    text = "# a\n```python\nx = 1\n```\n## b\n```sh\nls\n```\n"
    text += "## c\n```python\ny\n```\nand\n```python\nz\n```\n```\nseen\n```\n"
    assert list(chapters(text)) == [("# a", "x = 1\n", []), ("c", "y\n\nz\n", ["seen\n"])]


titles = [title for title, *_ in readme_chapters()]


@pytest.mark.parametrize(("title", "code", "outputs"), readme_chapters(), ids=titles)
def test_the_readmes_examples_run(title, code, outputs, capsys):
    for name in OPTIONAL:
        if re.search(rf"^\s*(?:from|import) {name}\b", code, flags=re.MULTILINE):
            pytest.importorskip(name)
    if ">>>" in code:
        run_doctest(code, title)
    else:
        exec(compile(code, f"README.md, {title}", "exec"), {"__name__": "__readme__"})
    printed = capsys.readouterr().out
    for output in outputs:
        assert output in printed


# --- its shell commands ---------------------------------------------------------------------------------


def shell_commands():
    """The commands of the README's shell examples, without what is said about them."""
    text = README.read_text(encoding="utf-8") if README.exists() else ""
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line.partition("  #")[0] for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [command.strip() for line in lines for command in line.split(" && ") if command.strip()]


def own_commands():
    found = [re.match(r"(?:python -m )?pagedkv (.*)", command) for command in shell_commands()]
    return [match[1] for match in found if match]


@needs_readme
def test_the_shell_commands_name_what_there_is():
    commands = shell_commands()
    assert commands
    for command in commands:
        for path in re.findall(r"\b(?:benchmarks|tests)/[\w./]+", command):
            assert (README.parent / path).exists(), command
        extras = re.findall(r"\[([\w,]+)\]", command) if "pip install" in command else []
        for extra in ",".join(extras).split(",") if extras else ():
            pyproject = (README.parent / "pyproject.toml").read_text(encoding="utf-8")
            assert re.search(rf"^{extra} = \[", pyproject, flags=re.MULTILINE), command


@pytest.mark.parametrize("command", own_commands())
def test_the_librarys_own_commands_are_understood(command, capsys):
    """Each option is one of the command's; what takes no minute is run, if its files are there."""
    name, *words = command.split()
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert not [word for word in words if word.startswith("--") and not re.search(rf"{word}\b", text)]
    if name in ("info", "plan") and "path/to" not in command:
        assert main([name, *words]) == 0
        printed = capsys.readouterr().out.splitlines()
        text = README.read_text(encoding="utf-8")
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
        shown = [block.splitlines() for language, block in blocks if not language]
        shown = next((lines for lines in shown if lines[0] == printed[0]), [])
        assert name == "info" or shown
        assert [line for line in shown if line != "..."] == printed[: max(0, len(shown) - 1)]


# --- its names, links and contents ------------------------------------------------------------------------


@needs_readme
def test_the_names_in_the_readme_exist():
    names = set(re.findall(r"\bpagedkv\.([A-Za-z_]\w*)", README.read_text(encoding="utf-8")))
    names -= {"git", "py", "pyx", "so"}  # of addresses and files
    missing = [name for name in names if not hasattr(pagedkv, name) and not can_import(f"pagedkv.{name}")]
    assert not missing


@needs_readme
def test_every_public_name_is_in_the_readme():
    text = README.read_text(encoding="utf-8")
    assert not [name for name in pagedkv.__all__ if not re.search(rf"\b{name}\b", text)]


def slug(title):
    """The anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def headings(text, marks):
    without_code = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(rf"^{marks} (.+)$", without_code, flags=re.MULTILINE)


@needs_readme
def test_the_readmes_links_lead_somewhere():
    text = README.read_text(encoding="utf-8")
    anchors = {slug(title) for title in headings(text, "##+")}
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert any(link.startswith("#") for link in links)
    for link in links:
        if not re.match(r"https?://", link):
            path, _, anchor = link.partition("#")
            assert (README.parent / path).exists(), link
            assert not anchor or path or anchor in anchors, link


@needs_readme
def test_the_contents_are_the_chapters():
    text = README.read_text(encoding="utf-8")
    contents = re.findall(r"\[([^\]]+)\]\(#([^)]+)\)", text.partition("\n## ")[0])
    assert contents == [(title, slug(title)) for title in headings(text, "##")]
    chapters = [title.lower() for title, _ in contents]
    asked = ["start", "serve", "transformers", "threads", "dtypes", "numbers", "design"]
    assert [title for title in chapters if title in asked] == asked


@needs_readme
def test_the_rooms_of_the_readme_are_those_of_the_package():
    design = README.read_text(encoding="utf-8").partition("\n## Design\n")[2]
    table = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", design, flags=re.MULTILINE)
    rooms = [room for row in table for room in re.findall(r"\w+", row)]
    floors = [FLOOR_OF[room] for room in rooms]
    assert floors == sorted(floors)
    assert set(rooms) == {room for room in FLOOR_OF if not room.startswith("__")}


def can_import(name):
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


# --- docstrings ---------------------------------------------------------------------------------------


def modules():
    """Those of the library itself; the demo is a program, with tests of its own."""
    found = [pagedkv]
    for package in (pagedkv, pagedkv.shapes, pagedkv.serving):
        names = [name for _, name, _ in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")]
        found += [importlib.import_module(name) for name in names if name not in LEFT_OUT]
    return found


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
    names = {name.rpartition(".")[2] for name in examples()}
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
