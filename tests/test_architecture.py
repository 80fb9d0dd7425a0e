"""The rooms of the package, and who may import whom: imports go down only."""

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest
from helpers import run_python

import pagedkv

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pagedkv"

# From the ground up. A module imports from the floors below its own, and nothing else of the package; the
# modules of a subpackage may use each other. Stubs are for type checkers, and may name what they like.
FLOORS = [
    ["_kernels"],  # C-level only
    ["errors", "formats", "stats", "viz"],  # plain values, and pictures of them
    ["_radix"],  # what is known of token ids: C level too
    ["_arrays", "_guard"],  # what the caller gave, checked; who may use it now
    ["_tensors"],  # arrays of any strides, looked at where they lie
    ["allocator", "_rows", "_keys", "threads", "_windows"],
    ["pieces"],  # the bytes of blocks, shown to callers
    ["store", "cpu"],
    ["contiguous", "_tables"],  # _tables: which blocks a sequence holds, and how that changes
    ["sequence"],
    ["_batch"],  # several sequences change together
    ["_groups"],  # a store and its sequences, or a model's: one form for both
    ["attention", "known", "events"],  # what a prefix cache knows, learns and forgets, from outside
    ["_beginnings"],  # of sequences, in all stores of a model
    ["step", "prefix", "beams", "foreign"],
    ["admission", "shapes"],  # shapes: what layers keep, plain values, from a configuration
    ["groups"],  # a model's layers over several stores
    ["__init__"],
    ["serving"],
    ["tiers"],  # K and V beyond the process
    ["integrations", "cli"],
    ["demo"],
    ["__main__"],
]
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}

IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+c?import\b|c?import[ \t]+([\w., ]+))", re.MULTILINE)

needs_sources = pytest.mark.skipif(not (PACKAGE / "store.pyx").exists(), reason="needs the sources beside the tests")


def sources(*suffixes):
    return [path for path in sorted(PACKAGE.rglob("*")) if path.suffix in suffixes]


def imported(text):
    """The modules that a file imports or cimports, as they are written."""
    for match in IMPORT.finditer(text):
        for name in (match[1] or match[2]).split(","):
            yield name.split()[0]


def room(path):
    """The module or subpackage that a file belongs to: a name in FLOORS."""
    return path.relative_to(PACKAGE).parts[0].split(".")[0]


def test_imports_are_read():
    text = """
import numpy as np, os
cimport cython
from pagedkv.store cimport PagedKvStore
from pagedkv._arrays cimport (
    as_rows)
    from pagedkv.demo import app
"""
    assert list(imported(text)) == ["numpy", "os", "cython", "pagedkv.store", "pagedkv._arrays", "pagedkv.demo"]


@needs_sources
def test_every_module_has_a_floor():
    rooms = {room(path) for path in sources(".py", ".pyx", ".pxd")}
    assert rooms <= set(FLOOR_OF), f"no floor for {rooms - set(FLOOR_OF)}"
    assert {"_kernels", "_arrays", "allocator", "store", "sequence", "attention", "step"} <= rooms


@needs_sources
@pytest.mark.parametrize("path", sources(".py", ".pyx", ".pxd"), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_only(path):
    here = room(path)
    for name in imported(path.read_text(encoding="utf-8")):
        if name.split(".")[0] != "pagedkv":
            continue
        there = name.split(".")[1] if "." in name else "__init__"
        own = there == here and (PACKAGE / here).is_dir()
        own = own or (there == here and path.suffix == ".pyx")
        assert own or FLOOR_OF[there] < FLOOR_OF[here], f"{here} imports {name}, which is not below it"


def circles(modules):
    """Groups of modules that import one another, each by its name; `modules` says whom each imports."""
    reached = {name: {name} for name in modules}
    for _ in modules:
        for seen in reached.values():
            seen.update(*(modules[other] & modules.keys() for other in list(seen)))
    found = {frozenset(other for other in seen if name in reached[other]) for name, seen in reached.items()}
    return [sorted(group) for group in found if len(group) > 1]


def test_circles_are_found():
    modules = {"a": {"b"}, "b": {"c", "elsewhere"}, "c": {"b"}, "d": {"a", "d"}}
    assert circles(modules) == [["b", "c"]]
    assert circles({**modules, "c": {"d"}}) == [["a", "b", "c", "d"]]
    assert circles({**modules, "c": set()}) == []


SUBPACKAGES = sorted({path.parent for path in PACKAGE.rglob("__init__.py")} - {PACKAGE})


@needs_sources
@pytest.mark.parametrize("folder", SUBPACKAGES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_circles_inside_a_subpackage(folder):
    """Nor what only a type checker would see: what a module knows of another, it knows."""
    modules = {}
    for path in sorted(folder.glob("*.p*")):
        if path.suffix in (".py", ".pyx", ".pxd"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found = set(imported(path.read_text(encoding="utf-8"))) - {name}
            modules.setdefault(name, set()).update(found)
    assert circles(modules) == []


@needs_sources
def test_no_relative_imports():
    """They would be missed by the test above."""
    for path in sources(".py", ".pyx", ".pxd"):
        assert not re.search(r"^\s*from\s+\.", path.read_text(encoding="utf-8"), re.MULTILINE), path


@needs_sources
def test_kernels_know_no_numpy():
    for path in (PACKAGE / "_kernels").glob("*.p*"):
        if path.suffix in (".pyx", ".pxd", ".py"):
            assert "numpy" not in set(imported(path.read_text(encoding="utf-8"))), path


@needs_sources
def test_the_floor_of_arguments_speaks_numpys_c_api():
    """Elsewhere only its array type is named, and the address of an array that was checked is taken."""
    for path in sources(".pyx", ".pxd"):
        if room(path) not in ("_arrays", "_tensors"):
            used = set(re.findall(r"\bcnp\.(\w+)", path.read_text(encoding="utf-8")))
            assert used <= {"ndarray", "PyArray_DATA"}, path


@needs_sources
def test_intrinsics_are_in_headers_of_the_kernels_only():
    for path in sources(".py", ".pyx", ".pxd", ".h"):
        if re.search(r"\b_mm\d*_\w+|immintrin|arm_neon", path.read_text(encoding="utf-8")):
            assert path.suffix == ".h", path
            assert room(path) == "_kernels", path


@needs_sources
def test_the_build_is_portable_and_exact():
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    for flag in ("fast-math", "march=native", "openmp"):
        assert flag not in setup


@needs_sources
def test_files_can_be_read_in_one_go():
    """About 500 lines of code, some more where one class is one concept; what is said to users is not counted."""
    suffixes = {".py", ".pyx", ".pxd", ".pyi", ".h", ".c"}
    for folder in ("pagedkv", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*"):
            text = path.read_text(encoding="utf-8") if path.suffix in suffixes else ""
            if "Generated by Cython" not in text[:200]:
                n_lines = len(re.sub(r'""".*?"""', "", text, flags=re.DOTALL).splitlines())
                assert n_lines <= 650, f"{path.relative_to(ROOT)} has {n_lines} lines of code"


# --- what an import costs and brings -----------------------------------------------------------------


def test_an_import_takes_less_than_150_ms_beyond_numpys():
    """Of a processor's time, and the best of a few runs: what the machine does beside is not the package's."""
    code = """
        import time
        import numpy
        began = time.process_time()
        import pagedkv
        print(time.process_time() - began)
    """
    assert min([float(run_python(code)) for _ in range(5)]) < 0.15


def test_an_import_brings_nothing_but_numpy_and_the_standard_library():
    code = """
        import sys
        import numpy
        before = set(sys.modules)
        import pagedkv
        print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
        print(*sorted(name for name in sys.modules if name.startswith("pagedkv.")))
    """
    brought, own = run_python(code).splitlines()
    foreign = set(brought.split()) - set(sys.stdlib_module_names) - {"pagedkv", "numpy"}
    foreign -= {"_pagedkv_shared"}  # pagedkv._kernels._pagedkv_shared, which Cython gives this name as well
    assert {name for name in foreign if "cython" not in name} == set()  # what compiled modules share is no import
    above = {"cli", "demo", "integrations", "serving", "tiers"}
    assert not {name.split(".")[1] for name in own.split()} & above


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.name)
def test_benchmarks_import_what_is_there(path):
    """Most of them run only where somebody measures."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "pagedkv":
            try:
                module = importlib.import_module(node.module)
            except ModuleNotFoundError as error:
                if error.name.split(".")[0] == "pagedkv":
                    raise
                continue  # an extra that is not installed
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


def test_the_public_names():
    assert set(pagedkv.__all__) >= {
        "KvBlockPool",
        "KvCache",
        "KvPoolExhausted",
        "PagedKvCache",
        "PagedKvError",
        "PagedKvStore",
        "PagedStoreExhausted",
        "PrefixCache",
        "Step",
        "attention",
        "get_num_threads",
        "paged_attention",
        "plan_admission",
        "reorder",
        "room_for",
        "set_num_threads",
    }
    assert sorted(pagedkv.__all__) == list(pagedkv.__all__)
    for name in pagedkv.__all__:
        assert getattr(pagedkv, name) is not None
