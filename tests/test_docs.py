"""Every example that a reader may copy is run: of the README, of the pages in `pagedkv/docs`, of the docstrings."""

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
from test_architecture import FLOOR_OF

import pagedkv
import pagedkv.groups
import pagedkv.serving
import pagedkv.shapes
import pagedkv.tiers
from pagedkv.__main__ import main

PACKAGE = Path(pagedkv.__file__).resolve().parent
README = Path(__file__).resolve().parent.parent / "README.md"
PAGES = [path for path in [README, *sorted((PACKAGE / "docs").glob("*.md"))] if path.exists()]
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in PAGES}

needs_readme = pytest.mark.skipif(not README.exists(), reason="needs the README beside the tests")
every_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)

OPTIONAL = ("torch", "transformers")  # what an extra brings


def test_pages_are_there():
    """In an installed package too."""
    assert len(PAGES) >= 10


def blocks(text):
    """``(language, block)`` in turn."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def without_blocks(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


# --- their examples -----------------------------------------------------------------------------------


def chapters(text):
    """``(title, code, outputs)`` of each chapter that has Python in it; the blocks of a chapter are one program.

    Blocks of no language in it are what the program prints.
    """
    for part in re.split(r"^## ", text, flags=re.MULTILINE):
        code = [block for language, block in blocks(part) if language == "python"]
        if code:
            title = part.splitlines()[0].strip(" #")
            yield title, "\n".join(code), [block for language, block in blocks(part) if not language]


def test_chapters_are_found():
    text = "# a\n```python\nx = 1\n```\n## b\n```sh\nls\n```\n"
    text += "## c\n```python\ny\n```\nand\n```python\nz\n```\n```\nseen\n```\n"
    assert list(chapters(text)) == [("a", "x = 1\n", []), ("c", "y\n\nz\n", ["seen\n"])]


programs = [(f"{name}, {title}", *rest) for name, text in TEXTS.items() for title, *rest in chapters(text)]


@pytest.mark.parametrize(("where", "code", "outputs"), programs, ids=[where for where, *_ in programs])
def test_the_examples_of_the_pages_run(where, code, outputs, capsys):
    for name in OPTIONAL:
        if re.search(rf"^\s*(?:from|import) (?:.*, )?{name}\b", code, flags=re.MULTILINE):
            pytest.importorskip(name)
    if ">>>" in code:
        run_doctest(code, where)
    else:
        exec(compile(code, where, "exec"), {"__name__": "__page__"})
    printed = capsys.readouterr().out
    for output in outputs:
        assert output in printed


# --- their shell commands -----------------------------------------------------------------------------


def shell_commands():
    """The commands of the shell examples, without what is said about them."""
    shell = [block for text in TEXTS.values() for language, block in blocks(text) if language == "sh"]
    lines = [line.partition("  #")[0] for block in shell for line in block.replace("\\\n", " ").splitlines()]
    return [command.strip() for line in lines for command in line.split(" && ") if command.strip()]


def own_commands():
    found = [re.match(r"(?:python -m )?pagedkv (.*)", command) for command in shell_commands()]
    return sorted({match[1] for match in found if match})


@needs_readme
def test_the_shell_commands_name_what_there_is():
    commands = shell_commands()
    assert len(commands) >= 20
    for command in commands:
        files = re.findall(r"\b(?:benchmarks|tests)/[\w./]+|^\.ci/\w+", command)
        for path in files:
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
        shown = [block.splitlines() for page in TEXTS.values() for language, block in blocks(page) if not language]
        shown = next((lines for lines in shown if lines[0] == printed[0]), [])
        assert name == "info" or shown
        assert [line for line in shown if line != "..."] == printed[: max(0, len(shown) - 1)]


# --- their names, links and contents ------------------------------------------------------------------


@every_page
def test_the_names_in_it_exist(path):
    names = set(re.findall(r"\bpagedkv\.([A-Za-z_]\w*)", TEXTS[path.name]))
    names -= {"git", "py", "pyx", "so"}  # of addresses and files
    missing = [name for name in names if not hasattr(pagedkv, name) and not can_import(f"pagedkv.{name}")]
    assert not missing


@needs_readme
def test_every_public_name_is_on_a_page():
    text = "\n".join(TEXTS.values())
    assert not [name for name in pagedkv.__all__ if not re.search(rf"\b{name}\b", text)]


def slug(title):
    """The anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def headings(text, marks):
    return re.findall(rf"^{marks} (.+)$", without_blocks(text), flags=re.MULTILINE)


@every_page
def test_its_links_lead_somewhere(path):
    """Between pages in an installed package; to sources, tests and the README where they are."""
    for link in re.findall(r"\]\(([^)]+)\)", without_blocks(TEXTS[path.name])):
        if re.match(r"https?://", link):
            continue
        file, _, anchor = link.partition("#")
        there = path.parent / file if file else path
        if there.parent == PACKAGE / "docs" or README.exists():
            assert there.exists(), link
        if anchor and there.exists():
            assert anchor in {slug(title) for title in headings(there.read_text(encoding="utf-8"), "##+")}, link


@every_page
def test_its_contents_are_its_chapters(path):
    text = TEXTS[path.name]
    contents = re.findall(r"\[([^\]]+)\]\(#([^)]+)\)", text.partition("\n## ")[0])
    chapters = headings(text, "##")
    if contents or len(chapters) > 2:
        assert contents == [(title, slug(title)) for title in chapters]


@needs_readme
def test_the_readme_is_short_and_names_every_page_once():
    text = TEXTS["README.md"]
    assert len(text.splitlines()) <= 350
    asked = ["start", "install", "serve", "prefix cache", "errors", "threads", "numbers"]
    assert [title.lower() for title in headings(text, "##") if title.lower() in asked] == asked
    listed = re.findall(r"^\| \[([^\]]+)\]\(pagedkv/docs/([\w-]+\.md)\) \|", text, flags=re.MULTILINE)
    assert sorted(name for _, name in listed) == sorted(path.name for path in PAGES[1:])
    for title, name in listed:
        assert headings(TEXTS[name], "#") == [title]


def sentences(text):
    """Those of eight words and more, and rows of tables, as bare words."""
    prose = re.sub(r"\]\([^)]*\)", "", without_blocks(text))
    prose = re.sub(r"^\|", "\n\n|", prose, flags=re.MULTILINE)
    for part in re.split(r"(?<=[.:;!?])\s+|\n\s*\n|^\s*[-#]+ |\n(?=\d+\. )", prose, flags=re.MULTILINE):
        words = re.findall(r"\w+", part.lower())
        if len(words) >= 8:
            yield " ".join(words)


def test_sentences_are_found():
    text = "# Title\n\nOne two three four five six\nseven `eight`. Short one. | a |\n\n"
    text += "- nine [ten](x) 1 2 3 4 5 6: no.\n"
    assert list(sentences(text)) == ["one two three four five six seven eight", "nine ten 1 2 3 4 5 6"]


def test_no_sentence_is_on_the_pages_twice():
    seen = {}
    for name, text in TEXTS.items():
        for sentence in sentences(text):
            assert sentence not in seen, f"{name} and {seen.get(sentence)}: {sentence}"
            seen[sentence] = name


def test_the_rooms_of_the_map_are_those_of_the_package():
    table = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", TEXTS["design.md"], flags=re.MULTILINE)
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
    for package in (pagedkv, pagedkv.groups, pagedkv.shapes, pagedkv.serving, pagedkv.tiers):
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
