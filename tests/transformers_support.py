"""Small random decoders of several families, and how transformers itself continues a prompt."""

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")
transformers.utils.logging.set_verbosity_error()

COMMON = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # wide enough that the next token depends on the whole past
}
GROUPED = {**COMMON, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 16}
UNTIED = {**HEADS, "tie_word_embeddings": False}  # tied, they repeat the last token for ever
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

# family -> its configuration class, and what differs. Windows are shorter than the tests' prompts.
FAMILIES = {
    "llama": ("LlamaConfig", GROUPED),
    "qwen2": ("Qwen2Config", {**GROUPED, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", HEADS),
    "gemma2": ("Gemma2Config", {**UNTIED, "sliding_window": 6, "query_pre_attn_scalar": 10, "layer_types": MIXED}),
    "gemma3": ("Gemma3TextConfig", {**UNTIED, "sliding_window": 6, "query_pre_attn_scalar": 10, "layer_types": MIXED}),
    "mistral": ("MistralConfig", {**HEADS, "sliding_window": 9}),
    "phi": ("PhiConfig", COMMON),
    "phi3": ("Phi3Config", {**GROUPED, "sliding_window": 8}),
    "gpt_neox": ("GPTNeoXConfig", COMMON),
    "gpt_oss": (
        "GptOssConfig",
        {**HEADS, "sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": MIXED},
    ),
    "olmo2": ("Olmo2Config", GROUPED),
    "mimo_v2_flash": (  # V narrower than K, and twice the K/V heads where there is a window
        "MiMoV2FlashConfig",
        {
            **HEADS,
            "num_key_value_heads": 1,
            "sliding_window": 6,
            "v_head_dim": 10,
            "num_local_experts": 2,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "n_group": 1,
            "moe_intermediate_size": 16,
        },
    ),
    "diffllama": ("DiffLlamaConfig", GROUPED),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **COMMON,
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 12,
            "v_head_dim": 10,
            "first_k_dense_replace": 3,
            "rope_interleave": False,
        },
    ),
}


# Their attention reads the cache itself, or twice, so it works with copies only.
OWN_ATTENTION = {"deepseek_v3", "diffllama"}
PAGED = [family for family in FAMILIES if family not in OWN_ATTENTION]


def make_model(family, attention="eager", **changes):
    """A random model of a family, always the same."""
    name, values = FAMILIES[family]
    config = getattr(transformers, name)(**{**values, **changes})
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model.eval()


def make_prompt(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (length,), generator=generator).tolist()


def pad_left(prompts):
    """``input_ids`` and ``attention_mask``."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def generate(model, prompts, cache=None, **options):
    """The new tokens of each prompt, greedily, as transformers has them; without a cache by its own."""
    ids, mask = pad_left(prompts)
    options = {"max_new_tokens": 12, "do_sample": False, **options}
    if cache is not None:
        options["cache"] = cache
    out = model.generate(ids, attention_mask=mask, **options)
    return out[:, ids.shape[1] :].tolist()
