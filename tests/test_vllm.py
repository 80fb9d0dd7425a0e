"""vLLM's engine on random models, with the plugin and without: the same greedy tokens. Only where vLLM is installed.

Each run is a process of its own. PAGEDKV_VLLM_FAMILIES names fewer families, or more: "all".
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

SMALL = {"vocab_size": 500, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 3}
LLAMA = {**SMALL, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048}
# name -> (configuration class, its options, dtype, how far apart two logprobs may be where tokens part)
FAMILIES = {
    "llama": ("LlamaConfig", LLAMA, "float32", 1e-3),
    "llama-float16": ("LlamaConfig", LLAMA, "float16", 2e-2),
    "llama-bfloat16": ("LlamaConfig", LLAMA, "bfloat16", 1e-1),
    "window": ("MistralConfig", {**LLAMA, "sliding_window": 50}, "float32", 1e-3),
    "softcap": (
        "Gemma2Config",
        {**LLAMA, "sliding_window": 64, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 64},
        "float32",
        1e-3,
    ),
    "alibi": ("BloomConfig", {"vocab_size": 500, "hidden_size": 256, "n_layer": 3, "n_head": 4}, "float32", 1e-3),
}
CHOSEN = os.environ.get("PAGEDKV_VLLM_FAMILIES", "llama llama-bfloat16 softcap alibi")
CHOSEN = list(FAMILIES) if CHOSEN == "all" else CHOSEN.split()

ENGINE = """
import json, sys
import numpy as np
from vllm import LLM, SamplingParams

def main():
    path, dtype, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    llm = LLM(model=path, skip_tokenizer_init=True, dtype=dtype, enforce_eager=True, max_model_len=2048, **options)
    rng = np.random.default_rng(0)
    common = rng.integers(1, 500, 300).tolist()            # found by the prefix cache
    prompts = [rng.integers(1, 500, n).tolist() for n in (1, 2, 31, 64, 65, 200, 500, 1200)]
    prompts += [common + rng.integers(1, 500, n).tolist() for n in (1, 5, 40, 100)]
    asked = SamplingParams(temperature=0, max_tokens=12, detokenize=False, logprobs=2, ignore_eos=True)
    found = []
    for part in (prompts[:4], prompts[4:], prompts[8:]):   # the last of them again, from the prefix cache
        for answer in llm.generate([{"prompt_token_ids": p} for p in part], asked, use_tqdm=False):
            [output] = answer.outputs
            best = [sorted((entry.logprob for entry in step.values()), reverse=True)[:2] for step in output.logprobs]
            found.append((list(output.token_ids), best))
    print("FOUND" + json.dumps(found))

if __name__ == "__main__":
    main()
"""


def run(path, dtype, plugin, tmp_path, **options):
    """What an engine finds: for each prompt its tokens, and the two best logprobs at each; and its log."""
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    environment = {
        **os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
        "PAGEDKV_VLLM": plugin, **options.pop("environment", {}),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, script, path, dtype, json.dumps(options)], env=environment, capture_output=True, text=True
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-5000:]
    [found] = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    return json.loads(found.removeprefix("FOUND")), log


def assert_same_tokens(own, ours, tolerance):
    """The same, or parted where vLLM's own two best were as good as one another."""
    n_same = 0
    for (tokens, best), (got, _) in zip(own, ours, strict=True):
        parted = next((i for i, (a, b) in enumerate(zip(tokens, got, strict=True)) if a != b), None)
        n_same += parted is None
        assert parted is None or best[parted][0] - best[parted][1] < tolerance
    assert n_same >= len(own) // 2, "near ties are rare"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Random models, made when they are asked for."""
    import torch
    import transformers

    def make(family):
        kind, options, *_ = FAMILIES[family]
        path = tmp_path_factory.mktemp(family)
        torch.manual_seed(0)
        tied = kind in ("BloomConfig", "Gemma2Config")  # vLLM loads no other
        config = getattr(transformers, kind)(**options, initializer_range=0.2, tie_word_embeddings=tied)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
        return path

    return make


@pytest.mark.parametrize("family", CHOSEN)
def test_the_same_tokens(models, family, tmp_path):
    """Decode and prefill, in chunks, mixed, with prefixes found again."""
    _, _, dtype, tolerance = FAMILIES[family]
    path = models(family)
    options = {"max_num_batched_tokens": 512, "max_num_seqs": 8}
    own, log = run(path, dtype, "0", tmp_path, **options)
    assert "pagedkv" not in log
    ours, log = run(path, dtype, "1", tmp_path, **options)
    assert log.count("pagedkv: attends") == 1
    assert_same_tokens(own, ours, tolerance)


def test_a_version_that_was_not_tried(monkeypatch, caplog):
    """One line, and vLLM's own attention."""
    import vllm.version
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from pagedkv.integrations import vllm as plugin

    before = AttentionBackendEnum.CPU_ATTN.get_path()
    monkeypatch.setenv(plugin.SWITCH, "1")
    monkeypatch.setattr(vllm.version, "__version__", "99.0.0")
    plugin.register()
    assert AttentionBackendEnum.CPU_ATTN.get_path() == before
    [record] = [record for record in caplog.records if "pagedkv" in record.getMessage()]
    assert "99.0.0" in record.getMessage()
