"""Shapes from the configurations of transformers, against what caches of small random models hold after a pass."""

import json

import pytest
from transformers_support import COMMON, FAMILIES, GROUPED, HEADS, torch, transformers

from pagedkv.__main__ import main
from pagedkv.integrations.transformers import PagedCache, PagedStores, generate_batch
from pagedkv.shapes import layer_shapes, model_shapes

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = {**HEADS, "num_hidden_layers": 7, "sliding_window": 6}
EXPERTS = {"num_experts": 2, "num_local_experts": 2, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1}
LATENT = {name: value for name, value in FAMILIES["deepseek_v3"][1].items() if name != "rope_interleave"}
SHORT = {"vocab_size": 97, "n_embd": 48, "n_layer": 3, "n_head": 4}

# Beside those that are served in test_transformers.py. None: as its class has it.
MORE = {
    "gemma": ("GemmaConfig", HEADS),
    "gemma2, without types": ("Gemma2Config", WINDOW),
    "gemma3, without types": ("Gemma3TextConfig", WINDOW),
    "gemma3n": (
        "Gemma3nTextConfig",
        {**WINDOW, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8,
         "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 7},
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {**WINDOW, "head_dim": None, "num_hidden_layers": 12, "num_kv_shared_layers": 6,
         "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8},
    ),
    "vaultgemma": ("VaultGemmaConfig", WINDOW),
    "mixtral": ("MixtralConfig", {**GROUPED, **EXPERTS, "sliding_window": 9}),
    "ministral": ("MinistralConfig", {**WINDOW}),
    "qwen2, no windows": ("Qwen2Config", {**GROUPED, "use_sliding_window": False, "sliding_window": 7}),
    "qwen2_moe": ("Qwen2MoeConfig", {**GROUPED, **EXPERTS, "moe_intermediate_size": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", {**HEADS, **EXPERTS, "moe_intermediate_size": 16}),
    "cohere2": ("Cohere2Config", {**WINDOW, "head_dim": None}),
    "olmo3": ("Olmo3Config", {**WINDOW, "head_dim": None}),
    "exaone4": ("Exaone4Config", {**WINDOW, "head_dim": None}),
    "smollm3": ("SmolLM3Config", GROUPED),
    "granite": ("GraniteConfig", GROUPED),
    "glm4": ("Glm4Config", HEADS),
    "stablelm": ("StableLmConfig", {**GROUPED, "hidden_size": 64}),
    "starcoder2": ("Starcoder2Config", {**GROUPED, "sliding_window": 8}),
    "falcon, one head": ("FalconConfig", {**COMMON, "multi_query": True}),
    "falcon, all heads": ("FalconConfig", {**COMMON, "multi_query": False}),
    "gpt2": ("GPT2Config", SHORT),
    "gptj": ("GPTJConfig", {**SHORT, "rotary_dim": 8}),
    "gpt_neo": (
        "GPTNeoConfig",
        {"vocab_size": 97, "hidden_size": 48, "num_layers": 4, "num_heads": 4, "window_size": 6,
         "attention_types": [[["global", "local"], 2]]},
    ),
    "gpt_bigcode": ("GPTBigCodeConfig", {**SHORT, "multi_query": True}),
    "gpt_bigcode, all heads": ("GPTBigCodeConfig", {**SHORT, "multi_query": False}),
    "mpt": ("MptConfig", {"vocab_size": 97, "d_model": 48, "n_layers": 3, "n_heads": 4, "expansion_ratio": 1}),
    "bloom": ("BloomConfig", {"vocab_size": 97, "hidden_size": 48, "n_layer": 3, "n_head": 4}),
    "opt": ("OPTConfig", {**COMMON, "ffn_dim": 64, "word_embed_proj_dim": 48}),
    "deepseek_v2": ("DeepseekV2Config", {**LATENT, "n_group": 1, "topk_group": 1, "topk_method": "greedy"}),
    "minicpm3": ("MiniCPM3Config", LATENT),
    "longcat_flash": (
        "LongcatFlashConfig",
        {**LATENT, "num_hidden_layers": None, "num_layers": 2, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 16,
         "n_routed_experts": 2, "moe_topk": 2, "head_dim": 8},
    ),
}  # fmt: skip
ALL = {**FAMILIES, **MORE}


def make_config(family):
    name, values = ALL[family]
    return getattr(transformers, name)(**{key: value for key, value in values.items() if value is not None})


def held(config):
    """``(window, K/V heads, width of K, of V)`` of each layer of transformers' own cache; None: it keeps nothing."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    cache = transformers.DynamicCache(config=config)
    with torch.no_grad():
        model(torch.arange(3, 12)[None], cache=cache)
    return [
        None if layer.keys is None
        else (getattr(layer, "sliding_window", None), layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3])
        for layer in cache.layers
    ]  # fmt: skip


def read(config):
    shapes = model_shapes(config, latent="split")
    return [
        (shape.window, shape.n_kv_heads, shape.head_dim, shape.v_head_dim) if shapes.sources[layer] == layer else None
        for layer, shape in enumerate(shapes.layers)
    ]


@pytest.mark.parametrize("family", ALL)
def test_a_family(family, tmp_path):
    """The configuration itself, as a file, all its fields, and these without what older files do not have."""
    config = make_config(family)
    expected = held(config)
    assert any(expected)
    assert read(config) == expected
    config.save_pretrained(tmp_path)
    assert read(tmp_path) == expected
    fields = json.loads(config.to_json_string(use_diff=False))
    assert read(fields) == read({"model_type": "several", "text_config": fields}) == expected
    if "layer_types" not in ALL[family][1]:
        fields.pop("layer_types", None)
        assert read(fields) == expected


@pytest.mark.parametrize("family", MORE)
def test_a_family_served_with_copies(family):
    """Logits of three passes over a `PagedCache` are those over transformers' own cache."""
    config, ids = make_config(family), torch.randint(3, 97, (2, 17), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    if getattr(config, "num_kv_shared_layers", 0):
        with pytest.raises(ValueError, match="got layer .* of .* that shares those of layer"):
            PagedStores(model, 64, block_size=4)
        return
    stores = PagedStores(model, 64, block_size=4)
    stores.check_model(model)

    def logits(cache):
        with torch.no_grad():
            return torch.cat([model(part, cache=cache).logits for part in ids.split([11, 5, 1], dim=1)], dim=1)

    cache = PagedCache(stores)
    expected = logits(transformers.DynamicCache(config=config))
    torch.testing.assert_close(logits(cache), expected, rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == 17


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text", "vaultgemma", "gpt_oss", "glm", "glm4", "cwm",
                                    "helium", "ernie4_5", "ministral3", "qwen3", "seed_oss", "mimo_v2_flash"])
def test_widths_that_a_file_leaves_to_the_class(family):
    config = transformers.AutoConfig.for_model(family)
    fields = json.loads(config.to_json_string(use_diff=False))
    width = fields.pop("head_dim")
    assert {shape.head_dim for shape in model_shapes(fields).layers} == {width}


def test_falcons_cache_has_each_head_once_for_each_query_head():
    config = transformers.FalconConfig(**COMMON, new_decoder_architecture=True, num_kv_heads=2)
    assert read(config) == [(None, 2, 12, 12)] * 3
    [group] = PagedStores(config, 1).groups
    assert held(config) == [(None, 4, 12, 12)] * 3 == [(None, group.store.n_kv_heads, 12, 12)] * 3


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_says_what_the_stores_hold(family, tmp_path, capsys):
    config = make_config(family)
    config.save_pretrained(tmp_path)
    options = ["--config", str(tmp_path), "--length", "1", "--block-size", "1", "--dtype", "float32"]
    assert main(["plan", "--memory", "1G", *options, "--json"]) == 0
    [fit] = json.loads(capsys.readouterr().out)["fits"]
    assert fit["bytes_each"] == sum(group.store.nbytes for group in PagedStores(config, 1, block_size=1).groups)
    row = sum(heads * (k + v) * 4 for _, heads, k, v in held(config))
    assert fit["bytes_each"] == row


@pytest.mark.parametrize(("config", "message"), [
    ("BertConfig", "is_decoder: expected a decoder, got bert"),
    ("RobertaConfig", "is_decoder"),
    ("BartConfig", "is_encoder_decoder"),
    ("FalconMambaConfig", "layer 0 of falcon_mamba is 'linear_attention'"),
    ("JambaConfig", "layer 0 of jamba is"),
    ("RwkvConfig", "rescale_every"),
    ("Lfm2MoeConfig", "is 'conv'"),
    ("FalconH1Config", "'hybrid'"),
    ("DeepseekV32Config", "'indexed_attention'"),
    ("Gemma3nConfig", "shares those of layer 18"),
    ("ReformerConfig", "is_decoder"),
])  # fmt: skip
def test_models_that_no_store_holds(config, message):
    options = {"layer_types": ["conv"] * 4, "num_hidden_layers": 4} if config == "Lfm2MoeConfig" else {}
    config = getattr(transformers, config)(**options)
    with pytest.raises(ValueError, match=message):
        layer_shapes(config)
    with pytest.raises(ValueError, match=message):
        PagedStores(config, 8)


@pytest.mark.parametrize("config", ["DistilBertConfig", "AlbertConfig", "DebertaV2Config", "ModernBertConfig"])
def test_encoders_that_do_not_say_so(config):
    with pytest.raises(ValueError, match="model: expected a decoder, got .*, an encoder"):
        PagedStores(getattr(transformers, config)(), 8)


def test_stores_of_a_budget_of_bytes():
    """A Gemma 3 in small, 5 windowed layers to 1: what the windows do not need is the full layers'."""
    config = transformers.Gemma3TextConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, sliding_window=8, max_position_embeddings=512,
    )  # fmt: skip
    layer = 4 * 2 * 8 * 4  # bytes of a block of 4 positions in one layer
    model = transformers.Gemma3ForCausalLM(config).eval()
    budget = (30 + 5 * 5) * layer
    for source in (config, model):
        stores = PagedStores.from_bytes(budget, source, block_size=4, max_bytes=2 * budget, debug=True)
        assert type(stores) is PagedStores
        assert stores.nbytes == budget
        assert sorted(store.total_blocks for store in stores.stores) == [budget // (5 * layer), budget // layer]
    apart = PagedStores(config, budget // (6 * layer), block_size=4)
    assert not apart.can_ever_fit(120, chunk=8)  # 9 blocks of each
    assert stores.can_ever_fit(120, chunk=8)  # 30 full blocks, and 7 seen, 8 new and 3 before: 5 windowed ones
    assert not stores.can_ever_fit(121, chunk=8)
    prompts = [[n % 50 for n in range(1, 100)], [3, 4, 5]]
    tokens, options = {}, {"max_prefill_tokens": 8, "max_new_tokens": 6, "eos_token_id": None}
    for which in (PagedStores(model, 64, block_size=4), stores):
        tokens[which] = [
            (event.request, event.token)
            for event in generate_batch(model, prompts, stores=which, **options)
        ]
        which.prefixes.clear()
        assert which.nbytes_in_use == 0
    assert len({str(sorted(found)) for found in tokens.values()}) == 1
    with pytest.raises(ValueError, match="^budget_bytes: expected at least"):
        PagedStores.from_bytes(6 * layer - 1, config, block_size=4)
    with pytest.raises(TypeError, match="^model: expected a model of transformers or its configuration, got list"):
        PagedStores.from_bytes(budget, [])
