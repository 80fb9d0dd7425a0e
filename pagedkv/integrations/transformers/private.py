"""All of transformers and torch that is used and that they do not document: what a new version may break.

Each function says what it stands for. What was tried with the versions named here is what the tests of this room do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, FunctionType
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import causal_mask_function, sliding_window_overlay
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as _CAUSAL
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as _MASKED
from transformers.utils.output_capturing import _active_collector

VERSIONS = ("5.24.0",)


# --- configurations -----------------------------------------------------------------------------------


def attention_of(config: PretrainedConfig) -> str | None:
    """The name of the attention function in use."""
    name: str | None = config._attn_implementation
    return name


@contextmanager
def attending(configs: list[PretrainedConfig], name: str) -> Iterator[None]:
    """The attention function is this one inside, and what it was afterwards."""
    before = [config._attn_implementation_internal for config in configs]
    try:
        for config in configs:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, its_own in zip(configs, before, strict=True):
            config._attn_implementation_internal = its_own


def is_encoder(config: PretrainedConfig) -> bool:
    """Whether a family is known by its masked language model alone."""
    return config.model_type in _MASKED and config.model_type not in _CAUSAL


# --- models -------------------------------------------------------------------------------------------


def asks_for_attention(model: PreTrainedModel) -> bool:
    """Whether its layers call the attention function of their configuration."""
    return bool(model._can_set_attn_implementation())


def running_model() -> PreTrainedModel | None:
    """The model whose forward pass the caller is part of, the innermost one: nobody tells a cache who asks it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "forward" and isinstance(owner := frame.f_locals.get("self"), PreTrainedModel):
            return owner
        frame = frame.f_back
    return None


def layers_of(model: PreTrainedModel) -> set[int]:
    """The numbers under which its attention layers know themselves in a cache."""
    found = (getattr(module, "layer_idx", getattr(module, "layer_id", None)) for module in model.modules())
    return {layer for layer in found if isinstance(layer, int)}


def records_attentions() -> bool:
    """Whether the pass that is running collects attention weights, which layers need not be told."""
    return "attentions" in (_active_collector.get() or ())


# --- masks --------------------------------------------------------------------------------------------


def is_causal(function: Callable[..., Any]) -> bool:
    """Whether a mask function is the causal one, or that and a sliding window."""
    if function is causal_mask_function:
        return True
    if not isinstance(function, FunctionType) or function.__closure__ is None:
        return False
    parts = function.__closure__[0].cell_contents
    if function.__qualname__ != "and_masks.<locals>.and_mask" or not isinstance(parts, tuple):
        return False
    window = sliding_window_overlay(1).__code__
    others = [part for part in parts if part is not causal_mask_function]
    return len(others) < len(parts) and all(getattr(part, "__code__", None) is window for part in others)


# --- generation ---------------------------------------------------------------------------------------


def generation_config_of(
    model: PreTrainedModel, given: GenerationConfig | None, options: dict[str, Any]
) -> tuple[GenerationConfig, dict[str, Any]]:
    """What ``generate`` makes of these, and the options that are no attributes of a configuration."""
    config, unknown = model._prepare_generation_config(given, **options)
    return config, unknown


def stop_tokens_of(model: PreTrainedModel, config: GenerationConfig) -> set[int]:
    """The tokens that end a sequence by its configuration."""
    model._prepare_special_tokens(config, device=model.device)
    return set() if config._eos_token_tensor is None else set(config._eos_token_tensor.tolist())


def logits_processors_of(
    model: PreTrainedModel, config: GenerationConfig, n_prompt: int, given: LogitsProcessorList | None
) -> LogitsProcessorList:
    """What ``generate`` does to the logits of a prompt of so many tokens."""
    return model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=n_prompt,
        prefix_allowed_tokens_fn=None,
        logits_processor=LogitsProcessorList() if given is None else given,
        device=model.device,
        model_kwargs={},
    )


# --- torch --------------------------------------------------------------------------------------------


def plain(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A function of torch on tensors of a subclass, without asking the subclass."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **options)


def is_compiled() -> bool:
    """Whether the caller runs for a compiler that wants to know what is done, with its tensors or in between."""
    return torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None
