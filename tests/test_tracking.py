"""The scripts that track regressions, on tiny sizes: the package as it is, and one that was made slower."""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import unsanitized

import pagedkv
from pagedkv.cli import results

PACKAGE = Path(pagedkv.__file__).parent
BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"

pytestmark = pytest.mark.skipif(not (BENCHMARKS / "compare.py").exists(), reason="needs the benchmarks beside it")

SLOWER = """

class PagedKvCache(PagedKvCache):
    def push(self, store, k_step, v_step):
        for _ in range(300):
            pass
        return super().push(store, k_step, v_step)
"""


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("compare"), importlib.import_module("instructions")
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    """The package twice, the second time with a push that takes longer."""
    folder = tmp_path_factory.mktemp("trees")
    for name in ("same", "slow"):
        shutil.copytree(PACKAGE, folder / name / "pagedkv", ignore=shutil.ignore_patterns("*.c", "*.h", "__pycache__"))
    with open(folder / "slow" / "pagedkv" / "__init__.py", "a", encoding="utf-8") as file:
        file.write(SLOWER)
    return folder / "same", folder / "slow"


def test_a_slower_push_is_worse_and_nothing_else_is(scripts, trees):
    compare, _ = scripts
    options = {"rounds": 4, "only": ["push, 128", "step of"], "memory": 1 << 20, "seconds": 0.05, "least": 0.5}
    changes, left_out = compare.compare_trees(*trees, **options)
    assert {change.name: change.verdict for change in changes} == {
        "push, 128 floats": "worse", "step of 32 sequences": "same",
    }  # fmt: skip
    assert left_out == []
    [better] = compare.compare_trees(*reversed(trees), **{**options, "only": ["push, 128"]})[0]
    assert better.verdict == "better"


def test_a_tree_that_is_not_the_one_measured_is_an_error(scripts, tmp_path, capsys):
    """Another package must never stand in for the one to measure."""
    compare, _ = scripts
    with pytest.raises(SystemExit) as end:
        compare.measure(tmp_path, ["push"], 1 << 20, 0.01)
    assert end.value.code == 2
    assert "pagedkv" in capsys.readouterr().err


def test_snapshot_and_checkout(scripts, tmp_path, monkeypatch):
    """The working tree with what is not committed, and a commit without it."""
    compare, _ = scripts
    root, folder = tmp_path / "repo", tmp_path / "built"
    (root / "pagedkv").mkdir(parents=True)

    def git(*arguments):
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@x", *arguments], cwd=root, check=True,
                       capture_output=True)  # fmt: skip

    git("init")
    for name, text in (("setup.py", "1"), ("pagedkv/a.py", "old"), ("pagedkv/gone.py", ""), (".gitignore", "*.so")):
        (root / name).write_text(text)
    git("add", "-A")
    git("commit", "-m", "x")
    monkeypatch.setattr(compare, "ROOT", root)
    before = compare.snapshot(folder)
    (root / "pagedkv" / "a.py").write_text("new")
    (root / "pagedkv" / "b.py").write_text("untracked")
    (root / "pagedkv" / "x.so").write_text("built")
    (root / "pagedkv" / "gone.py").unlink()
    untouched = (before / "setup.py").stat().st_mtime_ns
    tree, commit = compare.snapshot(folder), compare.checkout("HEAD", folder)
    now, then = ({path.name: path.read_text() for path in (where / "pagedkv").iterdir()} for where in (tree, commit))
    assert now == {"a.py": "new", "b.py": "untracked"}
    assert then == {"a.py": "old", "gone.py": ""}
    assert (tree / "setup.py").stat().st_mtime_ns == untouched
    assert compare.checkout("HEAD", folder) == commit
    with pytest.raises(SystemExit) as end:
        compare.checkout("no-such-commit", folder)
    assert end.value.code == 2


def test_the_saved_baseline_is_of_todays_figures():
    from pagedkv.cli.figures import figures

    saved = results.from_json(json.loads((BENCHMARKS / "baseline.json").read_text(encoding="utf-8")))
    assert [result.name for result in saved] == [figure.name for figure in figures(2)]
    assert [result.kind for result in saved] == [figure.kind for figure in figures(2)]


# --- instructions ---


def test_counts_are_compared_to_the_instruction(scripts):
    _, instructions = scripts
    rows, grown = instructions.compare({"a": 100, "b": 100, "c": 100}, {"a": 101, "b": 100.1, "c": 99, "d": 1})
    assert grown == ["a"]
    assert [row[-1] for row in rows[1:]] == ["worse", "", "better"]


def test_counts_are_kept_by_version_and_environment(scripts, tmp_path, monkeypatch, capsys):
    _, instructions = scripts
    counts = {"push": 1000}
    monkeypatch.setattr(instructions, "valgrind", lambda: "valgrind")
    monkeypatch.setattr(instructions, "count", lambda tree: dict(counts))
    options = ["--file", str(tmp_path / "counts.json")]
    assert instructions.main(options) == 0
    assert "no counts are saved" in capsys.readouterr().out
    assert instructions.main([*options, "--save"]) == 0
    counts["push"] = 1001
    assert instructions.main(options) == 1
    counts["push"] = 999
    assert instructions.main(options) == 0
    counts["push"] = 1001
    monkeypatch.setattr(instructions, "environment", lambda: {"python": "another"})
    assert instructions.main(options) == 0  # not comparable
    monkeypatch.setattr(instructions, "valgrind", lambda: None)
    assert instructions.main(options) == 2


@pytest.mark.long
@unsanitized
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="needs valgrind")
def test_instructions_are_counted(scripts, trees):
    """Of the slower push: 300 turns of an empty loop, of ten to two hundred instructions each."""
    _, instructions = scripts
    [(name, counted)] = instructions.count(trees[1], repeats=2, only=["push, 128 floats"]).items()
    assert name == "push, 128 floats"
    assert 300 * 10 < counted < 300 * 200
