"""Shapes from configurations, against what is published of real models; and what windows hold, against counting."""

import json
import math
import re
from collections import Counter
from types import SimpleNamespace

import pytest

from pagedkv.serving import LayerShape as ServingShape
from pagedkv.serving import ModelStores
from pagedkv.shapes import LayerShape, group_layers, layer_shapes, model_shapes, window_of

FULL, SLIDING = "full_attention", "sliding_attention"


def config(model_type, layers, heads, kv_heads, hidden, **more):
    """The fields that most models have, as their authors publish them; None is left away."""
    fields = {
        "model_type": model_type, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "hidden_size": hidden, **more,
    }  # fmt: skip
    return {name: value for name, value in fields.items() if value is not None}


QWEN = config("qwen2", 28, 28, 4, 3584, sliding_window=131072, max_window_layers=28, use_sliding_window=False)
GEMMA2 = config("gemma2", 42, 16, 8, 3584, head_dim=256, sliding_window=4096)
DEEPSEEK = config(
    "deepseek_v3", 61, 128, 128, 7168, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128
)
GEMMA3N = {
    "model_type": "gemma3n",
    "text_config": config(
        "gemma3n_text", 35, 8, 2, 2048, head_dim=256, sliding_window=512, num_kv_shared_layers=15,
        layer_types=([SLIDING] * 4 + [FULL]) * 7,
    ),
    "vision_config": {"model_type": "gemma3n_vision"},
}  # fmt: skip
MIMO = config(
    "mimo_v2_flash", 48, 64, 4, 4096, head_dim=192, v_head_dim=128, swa_num_key_value_heads=8, swa_head_dim=192,
    swa_v_head_dim=128, sliding_window=128, sliding_window_size=128,
    hybrid_layer_pattern=[int(layer > 0 and (layer + 1) % 6 > 0) for layer in range(48)],
)  # fmt: skip
FALCON = {"model_type": "falcon", "num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544}

# name -> its configuration, and (layers, window, K/V heads, width of K, of V) of each kind.
PUBLISHED = {
    "Llama 3.1 8B": (config("llama", 32, 32, 8, 4096), [(32, None, 8, 128, 128)]),
    "Llama 7B": (config("llama", 32, 32, None, 4096), [(32, None, 32, 128, 128)]),
    "Mistral 7B 0.1": (config("mistral", 32, 32, 8, 4096, sliding_window=4096), [(32, 4096, 8, 128, 128)]),
    "Mistral 7B 0.3": (config("mistral", 32, 32, 8, 4096, sliding_window=None), [(32, None, 8, 128, 128)]),
    "Qwen 2.5 7B": (QWEN, [(28, None, 4, 128, 128)]),
    "Qwen 2.5, windows on": (
        {**QWEN, "use_sliding_window": True, "max_window_layers": 21, "sliding_window": 4096},
        [(21, None, 4, 128, 128), (7, 4096, 4, 128, 128)],
    ),
    "Qwen 3 0.6B": (config("qwen3", 28, 16, 8, 1024, head_dim=128), [(28, None, 8, 128, 128)]),
    "Qwen 3 30B A3B": (config("qwen3_moe", 48, 32, 4, 2048, head_dim=128), [(48, None, 4, 128, 128)]),
    "Gemma 7B": (config("gemma", 28, 16, 16, 3072, head_dim=256), [(28, None, 16, 256, 256)]),
    "Gemma 2 9B": (GEMMA2, [(21, 4096, 8, 256, 256), (21, None, 8, 256, 256)]),
    "Gemma 3 4B": (  # says no more than this: the rest is in the model's class
        {"model_type": "gemma3",
         "text_config": config("gemma3_text", 34, None, None, 2560, sliding_window=1024)},
        [(29, 1024, 4, 256, 256), (5, None, 4, 256, 256)],
    ),
    "Gemma 3 12B": (
        {"model_type": "gemma3", "text_config": config("gemma3_text", 48, 16, 8, 3840, sliding_window=1024)},
        [(40, 1024, 8, 256, 256), (8, None, 8, 256, 256)],
    ),
    "Gemma 3n E4B": (GEMMA3N, [(16, 512, 2, 256, 256), (4, None, 2, 256, 256)]),
    "Phi 2": (config("phi", 32, 32, None, 2560), [(32, None, 32, 80, 80)]),
    "Phi 3 mini": (config("phi3", 32, 32, 32, 3072, sliding_window=2047), [(32, 2047, 32, 96, 96)]),
    "GPT-2": ({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}, [(12, None, 12, 64, 64)]),
    "GPT-J 6B": ({"model_type": "gptj", "n_layer": 28, "n_head": 16, "n_embd": 4096}, [(28, None, 16, 256, 256)]),
    "GPT-Neo 1.3B": (
        {"model_type": "gpt_neo", "num_layers": 24, "num_heads": 16, "hidden_size": 2048, "window_size": 256},
        [(24, None, 16, 128, 128)],  # its local layers mask a past that they keep
    ),
    "GPT-NeoX 20B": (config("gpt_neox", 44, 64, None, 6144), [(44, None, 64, 96, 96)]),
    "Falcon 7B": ({**FALCON, "multi_query": True, "num_kv_heads": 71}, [(32, None, 1, 64, 64)]),
    "Falcon 40B": (
        config("falcon", 60, 128, None, 8192, num_kv_heads=8, new_decoder_architecture=True, multi_query=True),
        [(60, None, 8, 64, 64)],
    ),
    "Falcon RW 1B": (config("falcon", 24, 32, None, 2048, multi_query=False), [(24, None, 32, 64, 64)]),
    "MPT 7B": (
        {"model_type": "mpt", "n_layers": 32, "n_heads": 32, "d_model": 4096, "attn_config": {"alibi": True}},
        [(32, None, 32, 128, 128)],
    ),
    "DBRX": (
        {"model_type": "dbrx", "n_layers": 40, "n_heads": 48, "d_model": 6144, "attn_config": {"kv_n_heads": 8}},
        [(40, None, 8, 128, 128)],
    ),
    "BLOOM 560M": (
        {"model_type": "bloom", "n_layer": 24, "num_attention_heads": 16, "n_embed": 1024}, [(24, None, 16, 64, 64)],
    ),
    "StarCoder": (
        {"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144, "multi_query": True},
        [(40, None, 1, 128, 128)],
    ),
    "gpt-oss 20B": (
        config("gpt_oss", 24, 64, 8, 2880, head_dim=64, sliding_window=128, layer_types=[SLIDING, FULL] * 12),
        [(12, 128, 8, 64, 64), (12, None, 8, 64, 64)],
    ),
    "OLMo 2 7B": (config("olmo2", 32, 32, 32, 4096), [(32, None, 32, 128, 128)]),
    "Command R7B": (
        config("cohere2", 32, 32, 8, 4096, sliding_window=4096, sliding_window_pattern=4),
        [(24, 4096, 8, 128, 128), (8, None, 8, 128, 128)],
    ),
    "DeepSeek V2 Lite": (
        config("deepseek_v2", 27, 16, 16, 2048, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128),
        [(27, None, 1, 576, 512)],
    ),
    "DeepSeek V3": (DEEPSEEK, [(61, None, 1, 576, 512)]),
    "MiMo V2 Flash": (MIMO, [(9, None, 4, 192, 128), (39, 129, 8, 192, 128)]),
    "OpenELM": (  # heads that differ between layers
        {"model_type": "openelm", "num_hidden_layers": 4, "num_attention_heads": [12, 12, 16, 20],
         "num_kv_heads": [3, 3, 4, 5], "head_dim": 64},
        [(2, None, 3, 64, 64), (1, None, 4, 64, 64), (1, None, 5, 64, 64)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name):
    fields, expected = PUBLISHED[name]
    kept = Counter(model_shapes(fields).kept)
    assert kept == {LayerShape(window, n, k, v): count for count, window, n, k, v in expected}


def test_which_layers_have_the_window():
    def letters(fields):
        return "".join("f" if shape.window is None else "w" for shape in model_shapes(fields).layers)

    assert letters({**GEMMA2, "num_hidden_layers": 5}) == "wfwfw"
    for pattern in (4, None):
        fields = {**PUBLISHED["Command R7B"][0], "num_hidden_layers": 9, "sliding_window_pattern": pattern}
        assert letters(fields) == "wwwfwwwfw"
    assert letters({**PUBLISHED["Gemma 3 4B"][0]["text_config"], "num_hidden_layers": 13}) == "wwwwwfwwwwwfw"
    assert letters(PUBLISHED["Qwen 2.5, windows on"][0]) == 21 * "f" + 7 * "w"
    without_pattern = {key: value for key, value in MIMO.items() if key != "hybrid_layer_pattern"}
    assert letters(without_pattern) == letters(MIMO) == "f" + "wwwwf" + "wwwwwf" * 7


@pytest.mark.parametrize(("latent", "shape"), [
    ("absorbed", LayerShape(None, 1, 576, 512)),
    ("split", LayerShape(None, 1, 512, 64)),
    ("expanded", LayerShape(None, 128, 192, 128)),
])
def test_the_forms_of_latent_attention(latent, shape):
    assert layer_shapes(DEEPSEEK, latent=latent) == (shape,) * 61
    assert model_shapes(DEEPSEEK).is_latent
    with pytest.raises(ValueError, match="latent: expected one of absorbed, split, expanded, got 'both'"):
        layer_shapes(DEEPSEEK, latent="both")


def test_layers_that_use_the_kv_of_others():
    """Those of Gemma 3n from 20 on: that of the last layer of their kind before it."""
    shapes = model_shapes(GEMMA3N)
    assert shapes.sources == (*range(20), *[18, 18, 18, 18, 19] * 3)
    assert len(shapes.kept) == 20
    with pytest.raises(ValueError, match="layer 20 of gemma3n_text that shares those of layer 18"):
        layer_shapes(GEMMA3N)


def test_what_differs_between_layers():
    fields = {**config("gemma4_text", 6, 8, 4, 2304, sliding_window=512), "layer_types": [SLIDING] * 5 + [FULL]}
    narrow, wide = LayerShape(512, 4, 256), LayerShape(None, 4, 512)
    assert layer_shapes(fields) == (narrow,) * 5 + (wide,)
    fewer = {**fields, "attention_k_eq_v": True, "num_global_key_value_heads": 2}
    assert layer_shapes(fewer)[5] == LayerShape(None, 2, 512)
    for number in ("5", "05", 5):
        other = {**fields, "per_layer_config": {number: {"head_dim": 128, "num_key_value_heads": 1}}}
        assert layer_shapes(other) == (narrow,) * 5 + (LayerShape(None, 1, 128),)
    with pytest.raises(ValueError, match=r"layer 5 skips \['attention'\]"):
        layer_shapes({**fields, "per_layer_config": {"5": {"skip": ["attention"]}}})


def test_every_way_to_give_a_configuration(tmp_path):
    fields = {**GEMMA2, "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "wrapped", "text_config": fields}))
    expected = model_shapes(fields)
    assert (expected.name, expected.max_positions, expected.is_latent) == ("gemma2", 8192, False)
    for given in (tmp_path, str(tmp_path), tmp_path / "config.json", {"text_config": fields}, SimpleNamespace(**fields),
                  SimpleNamespace(text_config=SimpleNamespace(**fields))):
        assert model_shapes(given) == expected


def test_stores_of_a_configuration():
    stores = ModelStores(layer_shapes(MIMO), total_blocks=4)
    assert [(len(group.layers), group.window, group.store.k_width, group.store.v_width) for group in stores.groups] == [
        (9, None, 4 * 192, 4 * 128), (39, 129, 8 * 192, 8 * 128),
    ]  # fmt: skip


# --- what is refused ----------------------------------------------------------------------------------

LLAMA = config("llama", 4, 8, 4, 64)


@pytest.mark.parametrize(("fields", "said"), [
    (config("qwen3_next", 48, 16, 2, 2048, head_dim=256, full_attention_interval=4), "layer 0 .* 'linear_attention'"),
    (config("qwen3_next", 4, 16, 2, 2048, layer_types=[FULL, FULL, "linear_attention", FULL]),
     "layer_types: layer 2 of qwen3_next is 'linear_attention'"),
    (config("lfm2", 2, 32, 8, 2048, layer_types=["conv", FULL]), "layer 0 of lfm2 is 'conv'"),
    (config("jamba", 32, 32, 8, 4096, attn_layer_period=8), "attn_layer_period: layer 0 of jamba is 'mamba'"),
    ({"model_type": "mamba", "num_hidden_layers": 48, "state_size": 16}, "state_size: .* 'mamba'"),
    (config("rwkv", 24, None, None, 2048, rescale_every=6), "rescale_every: .* 'recurrent'"),
    (config("nemotron_h", 52, 32, 8, 4096, hybrid_override_pattern="M-M*"), "hybrid_override_pattern: .* 'mamba'"),
    ({"model_type": "llama4", "text_config": config("llama4_text", 48, 40, 8, 5120, attention_chunk_size=8192)},
     "attention_chunk_size: layer 0 of llama4_text is 'chunked_attention'"),
    ({**DEEPSEEK, "model_type": "deepseek_v32", "index_topk": 2048}, "index_topk: .* 'indexed_attention'"),
    (config("hunyuan", 64, 80, 8, 6400, use_cla=True), "use_cla: .* 'shared by others'"),
    (config("bert", 12, 12, None, 768, is_decoder=False), "is_decoder: expected a decoder, got bert, an encoder"),
    ({**GEMMA2, "use_bidirectional_attention": True}, "use_bidirectional_attention: expected a decoder, got gemma2"),
    ({"model_type": "t5", "num_layers": 6, "num_heads": 8, "d_model": 512, "is_encoder_decoder": True},
     "is_encoder_decoder: expected a decoder, got t5"),
    (config("new", 4, 8, 4, 64, sliding_window=9), "layer_types: expected which layers of new have the sliding_window"),
])  # fmt: skip
def test_models_that_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        model_shapes(fields)


@pytest.mark.parametrize(("change", "said"), [
    ({"num_hidden_layers": None}, "expected num_hidden_layers, got none in that of llama"),
    ({"num_attention_heads": None}, "expected num_attention_heads"),
    ({"hidden_size": None}, "expected head_dim or hidden_size"),
    ({"num_hidden_layers": 0}, "num_hidden_layers: expected an integer from 1"),
    ({"num_hidden_layers": 2**31}, "num_hidden_layers: expected an integer from 1"),
    ({"num_attention_heads": -8}, "num_attention_heads: expected an integer from 1"),
    ({"num_key_value_heads": -1}, "num_key_value_heads: expected an integer from 0"),
    ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of 8 num_attention_heads, got 3"),
    ({"hidden_size": 65}, "hidden_size: expected a multiple of the 8 num_attention_heads, got 65"),
    ({"n_layer": 5}, r"num_hidden_layers and n_layer: expected one number, got \[4, 5\]"),
    ({"layer_types": [FULL]}, "layer_types: expected 4 layers, got 1"),
    ({"layer_types": [SLIDING] * 4}, "sliding_window: expected an integer from 1, got none"),
    ({"layer_types": [SLIDING] * 4, "sliding_window": 0}, "sliding_window: expected an integer from 1, got none"),
    ({"layer_types": [SLIDING] * 4, "sliding_window": 9, "use_sliding_window": False}, "use_sliding_window: false"),
    ({"layer_types": [SLIDING] * 4, "sliding_window": -9}, "sliding_window: expected an integer from 0"),
    ({"num_key_value_heads": [4, 4]}, "num_key_value_heads: expected 4 layers, got 2"),
    ({"num_kv_shared_layers": 4}, "num_kv_shared_layers: expected a full_attention layer before the last 4"),
    ({"num_kv_shared_layers": 9}, "num_kv_shared_layers: expected"),
    ({"kv_sharing_modes": [None, "reuse"]}, "kv_sharing_modes: layers of llama share"),
    ({"kv_lora_rank": 16}, "expected qk_rope_head_dim"),
    ({"max_position_embeddings": -1}, "max_position_embeddings: expected an integer"),
])
def test_values_that_are_refused(change, said):
    with pytest.raises(ValueError, match=said):
        model_shapes({**LLAMA, **change})


@pytest.mark.parametrize(("change", "said"), [
    ({"num_hidden_layers": "4"}, "num_hidden_layers: expected an integer, got str"),
    ({"num_hidden_layers": 4.0}, "num_hidden_layers: expected an integer, got 4.0"),
    ({"num_attention_heads": True}, "num_attention_heads: expected an integer, got True"),
    ({"head_dim": "8"}, "head_dim: expected an integer"),
    ({"layer_types": FULL}, "layer_types: expected a list, got str"),
    ({"layer_types": [FULL, FULL, 3, FULL]}, "layer_types: expected names, got 3"),
    ({"per_layer_config": {"first": {}}}, "per_layer_config: expected fields by number"),
    ({"per_layer_config": {"0": 8}}, "per_layer_config: expected the fields of layer 0, got 8"),
    ({"per_layer_config": [1]}, "per_layer_config: expected fields by number"),
    ({"is_encoder_decoder": "no"}, "is_encoder_decoder: expected true or false, got 'no'"),
    ({"sliding_window": 9, "use_sliding_window": 0}, "use_sliding_window: expected true or false, got 0"),
    ({"text_config": "llama"}, "text_config: expected a configuration, got str"),
])
def test_types_that_are_refused(change, said):
    with pytest.raises(TypeError, match=said):
        model_shapes({**LLAMA, **change})


FIELDS = [
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim", "v_head_dim",
    "sliding_window", "use_sliding_window", "sliding_window_pattern", "max_window_layers", "layer_types",
    "hybrid_layer_pattern", "kv_lora_rank", "qk_rope_head_dim", "multi_query", "new_decoder_architecture",
    "attn_config", "num_kv_shared_layers", "kv_sharing_modes", "per_layer_config", "global_head_dim",
    "attention_k_eq_v", "swa_num_key_value_heads", "max_position_embeddings", "text_config",
    "is_encoder_decoder", "is_decoder", "model_type", "n_layer", "sliding_window_size",
]  # fmt: skip
NONSENSE = [0, -1, 2**70, 1.5, True, False, "", "x", [], [1], [None] * 4, ["x"] * 4, [[]], {}, {"a": 1}, {0: 1}]


@pytest.mark.parametrize("name", FIELDS)
def test_nonsense_is_named_or_harmless(name):
    for family in ("llama", "qwen2", "gemma3_text", "falcon", "mimo_v2_flash", "gemma4_text"):
        for value in NONSENSE:
            for more in ({}, {"sliding_window": 9, "use_sliding_window": True}, {"layer_types": [FULL, SLIDING] * 2}):
                try:
                    model_shapes({**LLAMA, **more, "model_type": family, name: value})
                except (ValueError, TypeError) as error:
                    if not re.match(r"[a-z_0-9]+( and [a-z_]+)*: ", str(error)):
                        raise AssertionError(f"{family}, {name}={value!r}: {error}") from error


def test_what_is_no_configuration(tmp_path):
    for wrong in (None, 3, [LLAMA], b"config.json"):
        with pytest.raises(TypeError, match="config: expected a dict, a path or a configuration, got"):
            model_shapes(wrong)
    with pytest.raises(FileNotFoundError):
        model_shapes(tmp_path)
    for text, said in (("{", "is no JSON"), ("[]", "expected a JSON object, got list"), ("[" * 99999, "is no JSON")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=f"config.json: {said}"):
            model_shapes(tmp_path)


# --- windows, and layers of a shape -------------------------------------------------------------------


def test_a_width_of_v_that_is_not_given_is_that_of_k():
    assert LayerShape(None, 2, 8) == LayerShape(None, 2, 8, 8) == LayerShape(None, 2, 8, v_head_dim=0)
    assert len(ModelStores([LayerShape(None, 2, 8), LayerShape(None, 2, 8, 8)], total_blocks=4).groups) == 1
    assert ServingShape is LayerShape


def test_the_window_of_one_layer():
    assert [window_of(GEMMA2, layer) for layer in range(3)] == [4096, None, 4096]
    hybrid = config("hybrid", 3, 8, 4, 64, sliding_window=9, layer_types=["linear_attention", SLIDING, FULL])
    assert [window_of(hybrid, layer) for layer in range(3)] == [None, 9, None]


@pytest.mark.parametrize("window", [1, 2, 5, 16, None])
@pytest.mark.parametrize("chunk", [1, 3, 8])
@pytest.mark.parametrize("block_size", [1, 4, 5])
def test_what_a_window_holds(window, chunk, block_size):
    """Positions are held one by one, seen by queries one by one, and dropped in whole blocks."""
    shape = LayerShape(window, 1, 1)
    held, most, exact = set(), 0, 0
    for start in range(0, 40 * chunk, chunk):
        new = range(start, start + chunk)
        held |= set(new)
        seen = {p for q in new for p in range(0 if window is None else max(0, q - window + 1), q + 1)}
        assert seen <= held
        assert min(seen) == shape.first_needed(start)
        most, exact = max(most, len({p // block_size for p in held})), max(exact, len(seen))
        first = shape.first_needed(start + chunk) // block_size * block_size
        held = {p for p in held if p >= first}
    n = 40 * chunk
    assert exact == shape.most_held(n, chunk)
    bound = -(-shape.most_held(n, chunk, block_size) // block_size)
    begins_everywhere = math.gcd(chunk, block_size) == 1
    assert most == bound if begins_everywhere else most <= bound


def test_layers_of_a_shape():
    a, b = LayerShape(8, 1, 4), LayerShape(None, 1, 4)
    assert group_layers([b, a, a, b]) == {b: (0, 3), a: (1, 2)}
    assert group_layers([]) == {}
