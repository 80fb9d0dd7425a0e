"""Eight prompts that begin alike through a model of transformers: `generate_batch` against ``generate``, one by one and
in a padded batch, and against transformers' own continuous batching.

A random model of 25 million parameters, or a real one: PAGEDKV_BENCH_MODEL names its folder, or a GGUF file.
Each case checks that both sides give the same tokens, and keeps tokens/s and bytes of K/V beside the ratio.
"""

import os
from pathlib import Path
from time import perf_counter

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from pagedkv.integrations.transformers import PagedStores, generate_batch  # noqa: E402

N_PROMPTS, N_SHARED, N_OWN, N_NEW = 8, 256, 16, 32
OPTIONS = {"max_new_tokens": N_NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model():
    transformers.utils.logging.set_verbosity_error()
    if name := os.environ.get("PAGEDKV_BENCH_MODEL"):
        path = Path(name)
        where = (path.parent, path.name) if path.suffix == ".gguf" else (path, None)
        model = transformers.AutoModelForCausalLM.from_pretrained(where[0], gguf_file=where[1], dtype=torch.float32)
    else:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=8192,
                hidden_size=512,
                intermediate_size=1408,
                num_hidden_layers=6,
                num_attention_heads=8,
                num_key_value_heads=4,
                initializer_range=0.1,
            )
        )
    model.set_attn_implementation("sdpa")
    return model.eval()


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(1)
    shared, own = (torch.randint(3, 8000, shape, generator=generator) for shape in ((N_SHARED,), (N_PROMPTS, N_OWN)))
    return [shared.tolist() + row.tolist() for row in own]


def nbytes(cache):
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def one_by_one(model, prompts):
    """Tokens, and the bytes that the caches of all prompts would hold at once."""
    answers, held = [], 0
    for prompt in prompts:
        cache = transformers.DynamicCache(config=model.config)
        answers.append(model.generate(torch.tensor([prompt]), cache=cache, **OPTIONS)[0, len(prompt) :].tolist())
        held += nbytes(cache)
    return answers, held


def padded_batch(model, prompts):
    cache = transformers.DynamicCache(config=model.config)
    out = model.generate(torch.tensor(prompts), cache=cache, **OPTIONS)
    return out[:, len(prompts[0]) :].tolist(), nbytes(cache)


def their_continuous_batching(model, prompts):
    """Its pool is as large as it is told to be; here just as large as the prompts need."""
    config = transformers.ContinuousBatchingConfig(
        page_size=16, num_blocks=N_PROMPTS * -(-(N_SHARED + N_OWN + N_NEW) // 16) + 8, max_batch_tokens=512
    )
    out = model.generate_batch(
        inputs=prompts,
        generation_config=transformers.GenerationConfig(**OPTIONS),
        continuous_batching_config=config,
        warmup=False,
    )
    return [out[f"req_{i}"].generated_tokens for i in range(len(prompts))], None


def ours(model, prompts):
    """Tokens, and the most bytes that were held at once."""
    stores = PagedStores(model, total_blocks=N_PROMPTS * 32)
    answers = [[] for _ in prompts]
    for event in generate_batch(model, prompts, stores=stores, **OPTIONS):
        answers[event.request].append(event.token)
    held = sum(
        group.store.stats().peak_held_blocks * (group.store.nbytes // group.store.total_blocks)
        for group in stores.groups
    )
    return answers, held


@pytest.mark.parametrize("other", [one_by_one, padded_batch, their_continuous_batching], ids=lambda f: f.__name__)
def test_prompts_that_begin_alike(against, benchmark, n_threads, model, prompts, other):
    torch.set_num_threads(n_threads)
    (answers, held), (theirs, their_bytes) = ours(model, prompts), other(model, prompts)
    assert answers == theirs
    seconds = []

    def timed():
        start = perf_counter()
        ours(model, prompts)
        seconds.append(perf_counter() - start)

    against(timed, lambda: other(model, prompts), "speed", rounds=3)
    n_tokens = N_PROMPTS * N_NEW
    benchmark.extra_info.update(
        tokens_per_second=round(n_tokens / min(seconds), 1), kv_bytes=held, their_kv_bytes=their_bytes,
        shared_prefix=N_SHARED)
