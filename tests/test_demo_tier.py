"""The demo and its server with a folder that keeps K/V: a second start computes nothing again, and says so."""

import json
import os
import re
import signal
from urllib.request import urlopen

import pytest

pytest.importorskip("gguf", reason="needs the extra: pip install pagedkv[demo]")
pytest.importorskip("fcntl", reason="a FileTier needs flock")

from cli_support import fails
from demo_support import write_model

from pagedkv.__main__ import main

PROMPTS = [f"abcdefghijklmnopqrstuvwxyz. hello world {end}" for end in ("he", "or", "xyz", "he")]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model") / "model.gguf"))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "tier"


def demo(capsys, path, *options, prompts=PROMPTS):
    """The texts; prompt tokens that were computed, shared, and loaded."""
    arguments = [argument for prompt in prompts for argument in ("--prompt", prompt)]
    assert main(["demo", "--model", path, "--max-tokens", "5", "--block-size", "2", *options, *arguments]) == 0
    out, err = capsys.readouterr()
    rows = dict(re.findall(r"^([a-z/A-Z ]+?)  +(.*)$", err, re.MULTILINE))
    computed = int(re.search(r"\((\d+) prompt tokens computed", rows["prefill"])[1])
    shared = int(rows["shared"].split()[0])
    loaded = int(rows["from the tier"].split()[0]) if "from the tier" in rows else None
    return sorted(out.split("--- ")), computed, shared, loaded


def test_a_second_start_computes_nothing_that_the_first_one_did(path, folder, capsys):
    texts, computed, shared, loaded = demo(capsys, path)
    assert (loaded, computed > 20) == (None, True)
    first = demo(capsys, path, "--tier", str(folder))
    assert first == (texts, computed, shared, 0)
    second = demo(capsys, path, "--tier", str(folder))
    assert second[0] == texts
    assert second[1] <= 2 * len(PROMPTS)  # what is in no whole block of two, and of each the last token
    assert second[1] + second[2] + second[3] == computed + shared
    assert second[3] > computed - 2 * len(PROMPTS)


@pytest.mark.parametrize("other", ["weights", "dtype", "block size"])
def test_nobody_elses_is_loaded(path, folder, capsys, tmp_path, other):
    demo(capsys, path, "--tier", str(folder))
    if other == "weights":  # of the same name and size
        (tmp_path / "other").mkdir()
        path = str(write_model(tmp_path / "other" / "model.gguf", seed=1))
    options = {"dtype": ["--kv-dtype", "bfloat16"], "block size": ["--block-size", "4"]}.get(other, [])
    plain = demo(capsys, path, *options)
    assert demo(capsys, path, "--tier", str(folder), *options) == (*plain[:3], 0)


def test_a_damaged_folder_costs_time_alone(path, folder, capsys):
    texts, computed, shared, _ = demo(capsys, path, "--tier", str(folder))
    for segment in folder.glob("*.seg"):
        data = bytearray(segment.read_bytes())
        data[300::500] = bytes(b ^ 1 for b in data[300::500])
        segment.write_bytes(data)
    for _ in range(2):  # first the layers without a window are found to be wrong, then the others
        assert demo(capsys, path, "--tier", str(folder)) == (texts, computed, shared, 0)
    assert demo(capsys, path, "--tier", str(folder))[1] <= 2 * len(PROMPTS)  # it was stored again


def test_what_is_refused(path, folder, capsys, tmp_path):
    def refused(*options):
        return fails(capsys, "demo", "--model", path, "--prompt", "hello", *options)

    (tmp_path / "file").write_text("a diary")
    assert "--tier: expected a folder, got something else" in refused("--tier", str(tmp_path / "file"))
    assert "--tier: expected a tier or an empty folder" in refused("--tier", str(tmp_path))
    assert "--tier-size: expected at least a segment" in refused("--tier", str(folder), "--tier-size", "1MB")
    assert "--tier-size: only with --tier" in refused("--tier-size", "1GB")
    assert "--tier: not with --no-share" in refused("--tier", str(folder), "--no-share")
    assert "--tier: " in refused("--tier", "/proc/no/such/folder")
    assert not folder.exists()


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_server_that_is_started_again(path, folder):
    pytest.importorskip("openai", reason="needs openai and the extras: pip install pagedkv[demo,serve]")
    from test_server_cli import client, server

    said = []
    for _ in range(2):
        with server("--model", path, "--block-size", "2", "--tier", str(folder)) as process:
            answer = client(process).completions.create(
                    model=process.model, prompt=PROMPTS[0], max_tokens=5, temperature=0
                )
            text = urlopen(process.url.removesuffix("/v1") + "/metrics").read().decode()
            counts = dict(re.findall(r"^(pagedkv_\w+) ([\d.e+-]+)$", text, re.MULTILINE))
            usage = json.loads(answer.usage.model_dump_json())
            said.append((answer.choices[0].text, usage["prompt_tokens_details"]["cached_tokens"]))
            loaded = float(counts["pagedkv_tier_loaded_tokens_total"])
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
    assert said[0][0] == said[1][0]
    assert said[0][1] == 0 < said[1][1] == loaded
    assert said[1][1] >= usage["prompt_tokens"] - 2
