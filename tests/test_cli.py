"""The commands `info` and `bench`, and what all commands share: help, errors, exit codes."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_support import fails, run
from dtype_reference import DTYPES

import pagedkv
from pagedkv.__main__ import COMMANDS, main
from pagedkv.cli import bench, common, figures, results

ROOT = Path(__file__).resolve().parent.parent
TINY = ["bench", "--memory", "1MiB", "--seconds", "1"]


# --- all commands ---


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_examples_that_parse(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "exit codes:" in out or command == "info"
    examples = re.findall(rf"python -m pagedkv {command}(.*)", out.split("examples:")[1])
    assert len(examples) >= 3
    options = set(re.findall(r"--[a-z-]+", out.split("examples:")[0]))
    for example in examples:
        assert set(re.findall(r"--[a-z-]+", example)) <= options


def test_the_overview_names_the_commands_and_exit_codes():
    done = run("--help")
    assert done.returncode == 0
    for name in (*COMMANDS, "exit codes:", "130"):
        assert name in done.stdout
    assert run("--version").stdout == f"pagedkv {pagedkv.__version__}\n"


@pytest.mark.parametrize(("arguments", "said"), [
    ([], "required: COMMAND"),
    (["serve"], "invalid choice: 'serve'"),
    (["info", "--yaml"], "unrecognized arguments: --yaml"),
])
def test_a_wrong_command_line_is_one_line(arguments, said):
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("python -m pagedkv")
    assert said in line


def test_errors_name_the_program_as_it_was_called(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/pagedkv", "plan"])
    with pytest.raises(SystemExit):
        main(["plan", "--memory", "much"])
    assert capsys.readouterr().err.startswith("pagedkv plan: argument --memory: expected a size such as 8GiB")


def test_ctrl_c_and_a_reader_that_has_gone(capsys, monkeypatch):
    monkeypatch.setattr("pagedkv.cli.info.gather", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["info"]) == 130
    assert "interrupted" in capsys.readouterr().err
    # A pipe whose reading end is closed.
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "pagedkv", "info", "--json"], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="needs the sources beside the tests")
def test_the_script_and_every_package_are_installed():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'pagedkv = "pagedkv.__main__:main"' in text.split("[project.scripts]")[1]
    listed = set(re.findall(r'"(pagedkv[\w.]*)"', text.split("[tool.setuptools]")[1].split("]")[0]))
    assert listed == {".".join(path.relative_to(ROOT).parts[:-1]) for path in (ROOT / "pagedkv").rglob("__init__.py")}


@pytest.mark.parametrize(("text", "expected"), [
    ("4096", 4096), ("1B", 1), ("1k", 1024), ("8GiB", 8 << 30), ("8 gib", 8 << 30), ("8G", 8 << 30),
    ("1.5MiB", 3 << 19), ("500MB", 500_000_000), ("2tb", 2 * 10**12),
])
def test_sizes(text, expected):
    assert common.size(text) == expected


@pytest.mark.parametrize("text", ["", "0", "-1", "GiB", "1PiB", "1e3", "nan", "1.2.3G", "9999999999G", "0.1"])
def test_what_is_no_size(text):
    with pytest.raises(common.argparse.ArgumentTypeError, match="expected a size"):
        common.size(text)


@pytest.mark.parametrize(("n", "expected"), [
    (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (8 << 30, "8.0 GiB"), (5000 << 40, "5000.0 TiB"),
])
def test_bytes_as_text(n, expected):
    assert common.bytes_text(n) == expected


# --- info ---


def test_info_as_json_from_a_process():
    done = run("info", "--json")
    assert done.returncode == 0
    facts = json.loads(done.stdout)
    assert facts["version"] == pagedkv.__version__
    assert facts["numpy"] == np.__version__
    assert facts["python"].split()[1] == ".".join(map(str, sys.version_info[:3]))
    assert facts["simd"] in facts["available"]
    assert facts["huge_pages"] in ("always", "madvise", "never", "unknown")


def test_info_follows_the_environment():
    done = run("info", env={**os.environ, "PAGEDKV_SIMD": "plain", "PAGEDKV_NUM_THREADS": "3"})
    facts = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in done.stdout.splitlines())
    assert (facts["simd"], facts["num threads"]) == ("plain", "3")
    assert facts["available"].endswith("plain")


# --- bench ---


def test_bench_measures_everything(capsys):
    assert main([*TINY, "--threads", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""  # no progress where there is no terminal
    for name in ("push, 128", "push, 1024", "step of 32", "reserve", "append, 1 thread", "gather, all threads"):
        assert re.search(rf"^  {name}.* \d+\.\d\d ", out, flags=re.MULTILINE), name
    for dtype in DTYPES:
        assert f"decode {dtype}, all threads" in out
    assert "shared prefix, 1 thread" in out
    assert out.index("less is better") < out.index("more is better")


def test_json_and_comparison(capsys, tmp_path):
    path = tmp_path / "now.json"
    only = ["--only", "push, 128"]
    assert main([*TINY, *only, "--json", str(path)]) == 0
    assert "push, 128 floats" in capsys.readouterr().out
    kept = json.loads(path.read_text())
    assert kept["machine_info"]["numpy"] == np.__version__
    [figure] = kept["benchmarks"]
    assert (figure["name"], figure["kind"], len(figure["ratios"])) == ("push, 128 floats", "cost", 7)
    assert min(figure["ratios"]) <= figure["ratio"] <= max(figure["ratios"])  # whatever else runs on the machine
    assert "seconds" not in figure

    def compared_with(factor):
        """With a former run whose costs were so many times these."""
        figure["ratios"] = [ratio * factor for ratio in kept["benchmarks"][0]["ratios"]]
        path.write_text(json.dumps(kept))
        code = main([*TINY, *only, "--compare", str(path), "--json", "-"])
        out, err = capsys.readouterr()
        assert json.loads(out)["benchmarks"][0]["name"] == "push, 128 floats"
        assert err.splitlines()[0] == f"since {path} (numpy was 1.0):"
        return code, err.splitlines()[-1].split()[-1]

    kept["machine_info"]["numpy"] = "1.0"
    assert compared_with(20) == (0, "better")
    assert compared_with(1 / 20 / 20) == (1, "worse")


@pytest.mark.parametrize(("text", "said"), [
    ("{", "is no JSON file"),
    ("[]", "expected what bench --json writes"),
    ('{"format": 7}', "expected format 1, got 7"),
    ('{"format": 1, "benchmarks": [{"name": "x"}]}', "expected what bench --json writes"),
    ('{"format": 1, "benchmarks": [{"name": "x", "kind": "odd", "yardstick": "", "ratio": 1, "ratios": [1]}]}',
     "expected what"),
    ('{"format": 1, "benchmarks": [{"name": "x", "kind": "cost", "yardstick": "", "ratio": 1, "ratios": [0]}]}',
     "expected ratios above zero"),
    ('{"format": 1, "benchmarks": [{"name": "x", "kind": "cost", "yardstick": "", "ratio": 1, "ratios": [1]}]}',
     "has none of the figures to measure"),
])
def test_a_file_that_cannot_be_compared_with(capsys, tmp_path, text, said):
    path = tmp_path / "then.json"
    path.write_text(text)
    assert said in fails(capsys, "bench", "--compare", str(path))


def test_what_else_bench_refuses_before_it_measures(capsys, tmp_path):
    assert "No such file" in fails(capsys, "bench", "--compare", str(tmp_path / "none.json"))
    assert "is a folder" in fails(capsys, "bench", "--json", str(tmp_path))
    assert "there is no folder" in fails(capsys, "bench", "--json", str(tmp_path / "a" / "b.json"))
    assert "no figure is called like 'pull'; there are push, 128 floats;" in fails(capsys, "bench", "--only", "pull")
    assert "at most 256" in fails(capsys, "bench", "--threads", "257")
    assert "from 1 to" in fails(capsys, "bench", "--seconds", "0")


def test_progress_is_for_terminals_only(monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main([*TINY, "--only", "reserve"]) == 0
    assert " 1/1  reserve + release" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[K")


def test_a_bar_is_as_long_as_its_ratio():
    assert bench.bar(0.25, 1.0, "#", "|") == "#####              " + "|"
    assert bench.bar(1.0, 0.5, "#", "|") == "##########|#########"
    assert bench.bar(0.0, 1.0, "#", "|").count("#") == 0


def result(kind, *ratios):
    return results.Result("x", kind, "", ratios[0], ratios)


@pytest.mark.parametrize(("kind", "then", "now", "verdict"), [
    ("speed", (1.0, 1.1, 0.9), (2.0, 2.2, 1.8), "better"),
    ("cost", (1.0, 1.1, 0.9), (2.0, 2.2, 1.8), "worse"),
    ("speed", (2.0, 2.2, 1.8), (1.0, 1.1, 0.9), "worse"),
    ("cost", (2.0, 2.2, 1.8), (1.0, 1.1, 0.9), "better"),
    ("speed", (1.0, 1.1, 0.9), (2.0, 2.2, 1.1), "same"),  # one run was as good before
    ("speed", (1.0, 1.0, 1.0), (1.05, 1.05, 1.05), "same"),  # less than is asked for
])
def test_what_counts_as_a_change(kind, then, now, verdict):
    change = results.compare(result(kind, *then), result(kind, *now), least=0.1)
    assert change.verdict == verdict
    if verdict != "same":
        assert change.gain == pytest.approx(2.0 if verdict == "better" else 0.5)


def test_ratios_of_groups():
    ours, theirs = [2.0, 9.0] * 7, [9.0, 1.0] * 7  # seven pairs, minima 2 and 1
    assert results.group_ratios("speed", ours, theirs) == (0.5,) * 7
    assert results.group_ratios("cost", ours, theirs) == (2.0,) * 7
    assert figures.ratio("cost", figures.Times(ours, theirs)) == 2.0
    assert results.Result("x", "cost", "", 2.0, (1.0, 2.0, 2.2)).noise == pytest.approx(0.3)


def test_measuring_leaves_the_threads_as_they_were():
    before = pagedkv.get_num_threads()
    pair = figures.Pair(lambda: 1 / 0, lambda: None)
    with pytest.raises(ZeroDivisionError):
        figures.measure(figures.Figure("x", "cost", "", lambda memory: pair, before + 1), 1, 0.01)
    assert pagedkv.get_num_threads() == before


@pytest.mark.parametrize("figure", figures.figures(2), ids=lambda figure: figure.name)
def test_a_figure_moves_what_its_yardstick_moves(figure):
    """The shapes are right: both calls run again and again on 2 MiB."""
    pair = figure.make(2 << 20)
    for _ in range(3):
        pair.before()
        pair.call()
        pair.yardstick()
    assert pair.work == 1.0
