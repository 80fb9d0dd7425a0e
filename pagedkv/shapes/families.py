"""What configurations leave to the model's class, by ``model_type`` without a "_text" at its end."""

from __future__ import annotations

# ``is_decoder`` is false in them, and nobody looks at it.
DECODERS_ALL_THE_SAME = {"evolla", "gpt_neox", "gpt_neox_japanese", "trocr"}

# What nested configurations, and those of the models' authors, leave to the model's class.
_GEMMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
_HEADS_OF_128 = ("cwm", "ernie4_5", "glm", "glm4", "helium", "ministral3", "qwen3", "qwen3_vl", "seed_oss")
DEFAULTS: dict[str, dict[str, int]] = {
    "gemma": {"head_dim": 256},
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gemma3n": {**_GEMMA, "num_key_value_heads": 2, "num_kv_shared_layers": 15, "sliding_window": 512},
    "gemma4": {**_GEMMA, "global_head_dim": 512, "sliding_window": 512},
    "vaultgemma": _GEMMA,
    "gpt_oss": {"head_dim": 64},
    "mimo_v2_flash": {"head_dim": 192, "v_head_dim": 128},
    **{family: {"head_dim": 128} for family in _HEADS_OF_128},
}

# Where ``layer_types`` are not given: family -> (n, i), layer i of every n sees all.
FULL = {
    **dict.fromkeys(("gemma2", "gpt_oss", "vaultgemma"), (2, 1)),
    **dict.fromkeys(("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "olmo3"), (4, 3)),
    **dict.fromkeys(("cwm", "granite_swa", "granitemoe_swa"), (4, 0)),
    "gemma3n": (5, 4),
    **dict.fromkeys(("gemma3", "gemma4"), (6, 5)),
}
ALL_WINDOWED = {
    "doge", "ministral", "ministral3", "mistral", "mixtral", "phi3", "phi4_multimodal", "phimoe", "starcoder2",
}  # fmt: skip

# Where ``layer_types`` are not given: fields of models with layers of other kinds.
FOREIGN = {
    "attention_chunk_size": "chunked_attention",
    "attn_layer_indices": "mamba",
    "attn_layer_period": "mamba",
    "attn_type_list": "linear_attention",
    "block_types": "recurrent",
    "compress_ratios": "compressed_attention",
    "conv_L_cache": "conv",
    "conv_kernel_size": "conv",
    "full_attention_interval": "linear_attention",
    "hybrid_override_pattern": "mamba",
    "index_topk": "indexed_attention",
    "layer_group_size": "linear_attention",
    "layers_block_type": "mamba",
    "linear_attn_config": "linear_attention",
    "linear_conv_kernel_dim": "linear_attention",
    "local_attention": "local_attention",
    "lsh_attn_chunk_length": "lsh_attention",
    "mamba_d_state": "mamba",
    "mem_len": "recurrent",
    "qk_dim_factor": "recurrent",
    "rescale_every": "recurrent",
    "ssm_cfg": "mamba",
    "state_size": "mamba",
    "use_cla": "shared by others",
}
