"""`help()` of every public name is a manual page: what each page must say, and that it says it of the right names."""

import ast
import copy
import importlib
import inspect
import re
import sys
from functools import lru_cache
from pathlib import Path

import pytest

import pagedkv
import pagedkv.serving
import pagedkv.shapes
import pagedkv.tiers

PACKAGE = Path(pagedkv.__file__).resolve().parent
MODULES = {
    "pagedkv.shapes": pagedkv.shapes.__all__,
    "pagedkv.serving": pagedkv.serving.__all__,
    "pagedkv.tiers": pagedkv.tiers.__all__,
    "pagedkv.integrations.torch": ["as_rows", "as_tensor"],
    "pagedkv.integrations.vllm": ["register"],
    "pagedkv.integrations.transformers": ["PagedCache", "PagedStores", "TokenEvent", "generate_batch"],
}
# Where they are defined: they are listed without what they integrate, too.
FILES = {
    "pagedkv.shapes": ["pagedkv.shapes.layers", "pagedkv.shapes.reading"],
    "pagedkv.serving": [
        *(f"pagedkv.serving.{part}" for part in ("counts", "requests", "scheduler", "tokens")),
        *(f"pagedkv.groups.{part}" for part in ("sequence", "stores")),
        "pagedkv.shapes.layers",
    ],
    "pagedkv.tiers": [
        f"pagedkv.tiers.{part}"
        for part in (
            "counts", "files", "keys", "loading", "records", "saving", "saving_prefixes", "tier", "tiered",
        )
    ],
    "pagedkv.integrations.torch": ["pagedkv.integrations.torch"],
    "pagedkv.integrations.vllm": ["pagedkv.integrations.vllm"],
    "pagedkv.integrations.transformers": [
        "pagedkv.integrations.transformers.cache",
        "pagedkv.integrations.transformers.stores",
        "pagedkv.integrations.transformers.batch",
    ],
}
NAMES = list(pagedkv.__all__) + [f"{module}.{name}" for module, names in MODULES.items() for name in names]
SECTIONS = ["Parameters", "Attributes", "Returns", "Raises", "Notes", "Examples"]


def find(name):
    """A public object by its name; those of integrations need what they integrate."""
    module, _, last = name.rpartition(".")
    if module.startswith("pagedkv.integrations"):
        pytest.importorskip(module.split(".")[2])
    return getattr(importlib.import_module(module or "pagedkv"), last)


# --- reading a page -----------------------------------------------------------------------------------


class Page:
    """A docstring in its parts: the summary, the text after it, and the sections by their titles."""

    def __init__(self, thing):
        self.text = inspect.getdoc(thing) or ""
        head, *rest = re.split(r"^(\w+)\n-+$\n", self.text, flags=re.MULTILINE)
        self.summary, _, self.body = head.strip().partition("\n\n")
        self.titles = rest[::2]
        self.sections = dict(zip(rest[::2], rest[1::2], strict=True))

    def entries(self, title):
        """``{name: (type, description)}`` of a section; a line may describe several names."""
        found, head = {}, ""
        for line in self.sections.get(title, "").splitlines():
            if line and not line.startswith(" "):
                head, _, kind = line.partition(" : ")
                for name in head.split(", "):
                    assert name not in found or title == "Raises", f"{name} is described twice"
                    found[name] = [kind, ""]
            elif found:
                for name in head.split(", "):
                    found[name][1] += line + "\n"
        return {name: (kind, inspect.cleandoc(text)) for name, (kind, text) in found.items()}

    def described(self):
        return {**self.entries("Attributes"), **self.entries("Parameters")}

    def referred(self):
        """The page that "arguments ... as for `name`" names, for a method."""
        match = re.search(r"Arguments(?:, result)? and errors as for `(\w+)`", self.text)
        return match[1] if match else None


def test_a_page_is_read():
    def thing(a, b):
        """What it does.

        More.

        Parameters
        ----------
        a, b : int
            Numbers.

            Of a kind.

        Raises
        ------
        ValueError
            Never.
        """

    page = Page(thing)
    assert (page.summary, page.body, page.titles) == ("What it does.", "More.", ["Parameters", "Raises"])
    assert page.entries("Parameters") == {name: ("int", "Numbers.\n\nOf a kind.") for name in "ab"}
    assert page.entries("Raises") == {"ValueError": ("", "Never.")}


def parameters(thing):
    if getattr(thing, "_is_protocol", False):  # nobody makes one
        return []
    return [p for p in inspect.signature(thing).parameters.values() if p.name not in ("self", "cls")]


def members(cls):
    """``(name, function)`` of a class's own public methods, and the names of its properties."""
    methods, properties = {}, []
    for name, member in vars(cls).items():
        inner = getattr(member, "__func__", member)
        if name.startswith("_"):
            continue
        if callable(inner):
            methods[name] = inner
        elif inspect.isdatadescriptor(member):
            properties.append(name)
    if cls.__mro__[1].__name__ in ("BlockStore", "BlockTable"):  # what they hold at C level is public here
        properties += [name for name, member in vars(cls.__mro__[1]).items() if inspect.isgetsetdescriptor(member)]
    return methods, properties


def is_value(cls):
    """A result or an error: nobody makes one with arguments that could be wrong."""
    return (inspect.isclass(cls) and issubclass(cls, (tuple, BaseException))) or hasattr(cls, "__dataclass_fields__")


def is_frozen(cls):
    return is_value(cls) and getattr(getattr(cls, "__dataclass_params__", None), "frozen", True)


def is_made(thing):
    """By another one of the package, which is the page to look at."""
    return bool(re.search(r"`[\w.]+` makes it\.", thing.__doc__ or ""))


def pages():
    """``(name of the public object, name of a method or None)``."""
    for name in pagedkv.__all__:
        yield name, None
        if inspect.isclass(getattr(pagedkv, name)):
            yield from ((name, method) for method in members(getattr(pagedkv, name))[0])
    for module, names in MODULES.items():
        for name in names:
            tree = next(tree for file in FILES[module] if name in (tree := stub(file)))
            yield from ((f"{module}.{name}", method) for method in [None, *own_methods(tree, name)])


# --- what the types say ----------------------------------------------------------------------------------


@lru_cache(None)
def stub(module):
    """The classes and functions that a module, or its stub, defines: by name, as trees."""
    path = PACKAGE.joinpath(*module.split(".")[1:])
    path = next(p for p in (path.with_suffix(".pyi"), path.with_suffix(".py")) if p.exists())
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found[node.name] = node
    return found


def own_methods(tree, name):
    body = tree[name].body if isinstance(tree[name], ast.ClassDef) else []
    methods = [n for n in body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
    return [n.name for n in methods if not any("property" in ast.unparse(d) for d in n.decorator_list)]


def annotations(name, method):
    """``({parameter: annotation}, the result's annotation)`` as text, of a function, method or constructor."""
    thing = find(name)
    tree = stub(thing.__module__)[thing.__name__]
    if isinstance(tree, ast.ClassDef):
        wanted = (method,) if method else ("__init__", "__new__")
        tree = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in wanted), None)
    if tree is None:
        return {}, None
    arguments = tree.args.args + tree.args.kwonlyargs
    types = {a.arg: ast.unparse(a.annotation) for a in arguments if a.annotation is not None}
    return types, ast.unparse(tree.returns) if tree.returns else None


def test_annotations_are_found():
    assert annotations("paged_attention", None)[0]["q"] == "_Floats"
    assert annotations("PagedKvStore", "acquire") == ({"n": "SupportsIndex"}, "list[int]")
    assert annotations("PrefixCache", None)[0]["store"] == "PagedKvStore | _Groups"


# --- what every page has ----------------------------------------------------------------------------------

ids = [f"{name}.{method}" if method else name for name, method in pages()]
every_page = pytest.mark.parametrize(("name", "method"), list(pages()), ids=ids)
every_name = pytest.mark.parametrize("name", NAMES)


def page_of(name, method):
    thing = find(name)
    thing = thing if method is None else getattr(thing, method)
    return getattr(thing, "__func__", thing)


@every_page
def test_it_begins_with_a_sentence(name, method):
    summary = Page(page_of(name, method)).summary
    assert re.fullmatch(r"[A-Z][^\n]*(\n[^\n]+)?[.)]", summary), summary


@every_page
def test_it_has_a_signature(name, method):
    inspect.signature(page_of(name, method))


@every_page
def test_sections_are_known_and_in_order(name, method):
    titles = Page(page_of(name, method)).titles
    assert titles == [title for title in SECTIONS if title in titles]


@every_page
def test_it_describes_its_parameters_and_no_others(name, method):
    thing = page_of(name, method)
    page = Page(thing)
    names = [p.name if p.kind != p.VAR_POSITIONAL else f"*{p.name}" for p in parameters(thing)]
    names = [f"**{n}" if p.kind == p.VAR_KEYWORD else n for n, p in zip(names, parameters(thing), strict=True)]
    if inspect.isclass(thing) and is_made(thing):
        assert page.described()
    elif names and not page.entries("Parameters") and page.referred():
        other = vars(find(name))[page.referred()]
        assert set(names) <= {p.name for p in parameters(other)}
    elif inspect.isclass(thing) and is_value(thing) and page.entries("Attributes"):
        assert set(names) <= set(page.described())
        assert all(hasattr(thing, n) or n in names for n in page.entries("Attributes"))
    else:
        order = list(page.entries("Parameters"))
        assert sorted(order) == sorted(names)
        if not any("..." in text for _, text in page.entries("Parameters").values()):
            positional = [p.name for p in parameters(thing) if p.kind == p.POSITIONAL_OR_KEYWORD]
            assert [n for n in order if n in positional] == positional


def described(name, method, parameter):
    """What is said of a parameter, here or on the page that this one refers to."""
    page = Page(page_of(name, method))
    if page.referred() and not page.entries("Parameters"):
        return described(name, page.referred(), parameter)
    kind, text = page.described()[parameter]
    if match := re.match(r"As for `(\w+)`", text):
        return described(match[1], None, parameter)
    if re.match(r"As for the class", text):
        return described(name, None, parameter)
    return kind, text


@every_page
def test_it_says_shape_and_dtype_of_arrays(name, method):
    for parameter, annotation in annotations(name, method)[0].items():
        if re.search(r"NDArray|Tokens|_BlockIds|_Floats|_Rows|_Ints", annotation):
            kind, text = described(name, method, parameter)
            assert re.search(r"float|int", kind), f"{parameter}: {kind}"
            assert re.search(r"``\[.*\]``", kind + text) or "shape" in text, f"{parameter}: {kind}\n{text}"


@every_page
def test_it_says_what_every_parameter_is(name, method):
    thing = page_of(name, method)
    for p in [] if inspect.isclass(thing) and is_made(thing) else parameters(thing):
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) or not p.name.isidentifier():
            continue
        kind, text = described(name, method, p.name)
        assert kind, p.name
        # Only what has one meaning everywhere goes without a word.
        assert text or p.name in ("store", "cache", "pool", "id"), p.name
        if p.default is not p.empty and not is_value(thing):
            assert "optional" in kind, p.name


@every_page
def test_it_says_what_it_returns_and_raises(name, method):
    thing = page_of(name, method)
    page = Page(thing)
    if inspect.isclass(thing):
        assert is_value(thing) or is_made(thing) or not parameters(thing) or page.entries("Raises")
        return
    result = annotations(name, method)[1]
    if page.referred():
        return
    if parameters(thing):
        assert page.entries("Raises")
    if result not in (None, "None"):
        # A method without arguments may say it in a sentence.
        assert page.entries("Returns") or (method and not parameters(thing))
    else:
        assert not page.entries("Returns")


@every_name
def test_it_has_a_thread_rule_and_an_example(name):
    """Of values that nobody changes there is nothing to say about threads."""
    page = Page(find(name))
    assert is_frozen(find(name)) or re.search(r"^Threads: ", page.sections["Notes"], re.MULTILINE)
    assert "Threads: a plain value" not in page.text
    assert ">>> " in page.sections["Examples"]


@every_name
def test_attributes_and_properties_are_described(name):
    cls = find(name)
    if not inspect.isclass(cls):
        return
    page = Page(cls)
    assert all("," not in n for n in page.entries("Attributes"))
    for prop in members(cls)[1]:
        own = inspect.getdoc(getattr(cls, prop))
        assert (own and "Alias for" not in own) or prop in page.entries("Attributes"), prop
    fields = getattr(cls, "__dataclass_fields__", {})
    for attribute in page.entries("Attributes"):
        known = hasattr(cls, attribute) or attribute in fields or issubclass(cls, BaseException)
        assert known or re.search(rf"self\.{attribute}\b.* = ", source_of(cls)), attribute


def source_of(cls):
    """The classes that it is made of, where they are Python."""
    return "".join(inspect.getsource(base) for base in cls.__mro__ if base.__module__.startswith("pagedkv."))


def test_the_package_names_every_page():
    text = inspect.getdoc(pagedkv)
    assert not [name for name in pagedkv.__all__ if not re.search(rf"`{name}(\.\w+)?`", text)]


def test_fields_of_results_have_docstrings():
    for name in pagedkv.__all__:
        cls = getattr(pagedkv, name)
        for field in getattr(cls, "_fields", ()):
            text = inspect.getdoc(getattr(cls, field))
            assert text.endswith("."), f"{name}.{field}"
            assert "Alias for" not in text, f"{name}.{field}"


def test_methods_have_sources():
    """Where a method comes from a paper, the page names it: paper, year, section."""
    for name, paper in {
        "PagedKvStore": "Kwon",
        "PagedKvCache": "Kwon",
        "paged_attention": "Dao",
        "attention": "paged_attention",
        "AttentionBatch": "FlashInfer",
        "PrefixCache": "Zheng",
    }.items():
        [source] = re.findall(r"^Method: ((?:.+\n?)+)", Page(getattr(pagedkv, name)).text, re.MULTILINE)
        assert paper in source
        assert "section" in source or "`" in source


# --- that the pages agree with the code -----------------------------------------------------------------


@every_page
def test_names_in_backticks_exist(name, method):
    """`name` is one of this class, of the package or of a module; parameters and code have two backticks."""
    cls = find(name)
    for word in re.findall(r"(?<![`\w])`([^`\n]+)`(?!`)", Page(page_of(name, method)).text):
        first, *rest = word.split(".")
        roots = {"copy": copy, "pagedkv": pagedkv}
        thing = roots.get(first, getattr(pagedkv, first, getattr(cls, first, None)))
        module = importlib.import_module(cls.__module__)
        integration = sys.modules.get("pagedkv.integrations.transformers")
        for place in (module, pagedkv.shapes, pagedkv.serving, pagedkv.tiers, integration):
            thing = getattr(place, first, None) if thing is None else thing
        for part in rest:
            thing = getattr(thing, part, None)
        assert thing is not None, word


COMPILED = ["AttentionBatch", "KvBlockPool", "KvCache", "PagedKvCache", "PagedKvStore", "Step"]


@pytest.mark.parametrize("name", COMPILED)
def test_signatures_of_compiled_classes_are_those_of_the_source(name):
    """They are written in the docstring: the compiler keeps none for a class."""
    cls = getattr(pagedkv, name)
    source = PACKAGE / f"{cls.__module__.split('.')[1]}.pyx"
    if not source.exists():
        pytest.skip("needs the sources beside the tests")
    text = source.read_text(encoding="utf-8").partition(f"cdef class {name}")[2]
    found = re.findall(r"def __c?init__\(self(?:, )?([^)]*)\):", text.partition("\n    @")[0])
    [written] = {" ".join(arguments.split()) for arguments in found if arguments} or {""}
    plain = re.sub(r"\w+ (\w+) not None", r"\1", written)
    assert str(inspect.signature(cls)) == f"({plain})".replace('"', "'")


@pytest.mark.parametrize("name", COMPILED)
def test_signatures_of_compiled_classes_are_those_of_the_stub(name):
    cls = getattr(pagedkv, name)
    tree = stub(cls.__module__)[name]
    [made] = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in ("__init__", "__new__")]
    keywords = [a.arg for a in made.args.kwonlyargs]
    names = [a.arg for a in made.args.args[1:]] + ["*"] * bool(keywords) + keywords
    shown = [part.partition("=")[0] for part in str(inspect.signature(cls))[1:-1].split(", ") if part]
    assert shown == names
