"""`generate_batch`: many prompts at once through one model, their K/V in shared blocks."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Literal, SupportsIndex, cast

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation import GenerationMode

from pagedkv import Step
from pagedkv._arrays import as_flag, as_size
from pagedkv._keys import as_namespace, as_stop_tokens
from pagedkv.integrations.torch import as_rows, as_tensor
from pagedkv.integrations.transformers.attention import NAME, PagedKeys
from pagedkv.integrations.transformers.private import (
    asks_for_attention,
    attending,
    generation_config_of,
    logits_processors_of,
    stop_tokens_of,
)
from pagedkv.integrations.transformers.stores import PagedStores
from pagedkv.serving import Batch, Request, Scheduler, TokenIds


@dataclass(frozen=True)
class TokenEvent:
    """A token that `generate_batch` has found.

    Attributes
    ----------
    request : int
        The prompt that it continues, by its number.
    token : int
        Its id.
    finish_reason : None, "stop" or "length"
        Set with a request's last token: it is a stop token, or there are as many as were asked for.

    Examples
    --------
    >>> from pagedkv.integrations.transformers import TokenEvent
    >>> TokenEvent(request=3, token=42, finish_reason=None).token
    42
    """

    request: int
    token: int
    finish_reason: Literal["stop", "length"] | None


def generate_batch(
    model: PreTrainedModel,
    prompts: Iterable[Sequence[SupportsIndex] | torch.Tensor],
    generation_config: GenerationConfig | None = None,
    *,
    stores: PagedStores | None = None,
    stop_tokens: Iterable[int] = (),
    logits_processor: LogitsProcessorList | None = None,
    seed: int | None = None,
    max_running: SupportsIndex = 32,
    max_prefill_tokens: SupportsIndex = 256,
    share_prefixes: bool = True,
    namespace: bytes | None = None,
    progress: bool = False,
    **options: Any,
) -> Iterator[TokenEvent]:
    """Continue many prompts by continuous batching, and yield tokens as they come.

    Each step of the loop is one forward pass over the next token of every request that decodes and a piece of
    the prompts that are not computed yet, without padding. A request starts as soon as blocks are free, on what the
    requests before it with the same beginning have computed. The model's attention function is ``pagedkv`` during a
    pass, and what it was in between.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder on the CPU, in evaluation mode.
    prompts : iterable of token ids
        Lists, arrays or one-dimensional tensors of at least one token.
    generation_config : GenerationConfig, optional
        As for ``model.generate``: greedy or sampling, its logits processors, ``max_new_tokens``, ``eos_token_id``.
    stores : PagedStores, optional
        Of this model; may be shared with other caches and calls. Without it, one is made that holds the
        ``max_running`` longest requests at once.
    stop_tokens : iterable of int, optional
        End a request, beside ``eos_token_id``. The stop token itself is yielded.
    logits_processor : LogitsProcessorList, optional
        Used after those of the configuration; one list for all requests.
    seed : int, optional
        For sampling: request ``i`` draws from a generator of its own, seeded with ``seed + i``, whatever else runs.
    max_running : int, optional
        Requests that run at once at most.
    max_prefill_tokens : int, optional
        Prompt tokens that a step computes at most.
    share_prefixes : bool, optional
        Whether requests start on what is known of their beginning.
    namespace : bytes, optional
        What is computed stays known in ``stores.prefixes`` under this name, as long as nobody needs the blocks, and
        later calls with this name start on it. It stands for the weights: give models, adapters and versions that share
        the stores a name each. Without it, requests of this call share among themselves, and nothing stays.
    progress : bool, optional
        Show a bar (needs tqdm).
    **options
        Attributes of ``generation_config``, such as ``max_new_tokens=64``.

    Returns
    -------
    iterator of TokenEvent
        Tokens of one request come in order, requests in any. Closing it, an exception and Ctrl-C give every
        block back, but for those that stay known under a ``namespace``.

    Raises
    ------
    TypeError, ValueError
        At once, before anything is computed: prompts that are no token ids, or that do not fit into the stores even
        alone; beams, assistants and other ways to generate than greedy and sampling; a model whose attention is
        its own, or whose position embeddings depend on what else is in the batch.
    PagedStoreExhausted
        While iterating: other users of the stores hold the blocks that a single request needs.

    Notes
    -----
    Threads: the model belongs to one thread while a token is being asked for. Several iterators over the same
    stores, of other models or in turn, do not disturb each other.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from pagedkv.integrations.transformers import generate_batch
    >>> config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    ...                      num_attention_heads=4, num_key_value_heads=2)
    >>> model = LlamaForCausalLM(config).eval()
    >>> answers = {0: [], 1: []}
    >>> for event in generate_batch(model, [[5, 6, 7], [8, 9]], max_new_tokens=4, eos_token_id=None):
    ...     answers[event.request].append(event.token)
    >>> [len(answer) for answer in answers.values()]
    [4, 4]
    """
    _check_model(model)
    config, unknown = generation_config_of(model, generation_config, options)
    if unknown:
        raise TypeError(f"options: expected attributes of a GenerationConfig, got {', '.join(map(repr, unknown))}")
    _check_config(config)
    tokens = [_as_tokens(prompt, number, model) for number, prompt in enumerate(prompts)]
    lengths = [_count_new(config, len(prompt), number) for number, prompt in enumerate(tokens)]
    namespace, shows = as_namespace(namespace), as_flag(progress, "progress")
    n_most = as_size(max_running, "max_running", 1, sys.maxsize)
    spare: dict[str, Any] = {}
    if stores is None:  # these hold the longest to their end
        spare = {"watermark": 0.0}
        stores = PagedStores(model, _blocks_for_the_longest(n_most, tokens, lengths), block_size=_BLOCK_SIZE)
    elif not isinstance(stores, PagedStores):
        raise TypeError(f"stores: expected a PagedStores, got {type(stores).__name__}")
    else:
        stores.check_model(model)
    scheduler = Scheduler(
        stores, max_running=n_most, max_prefill_tokens=max_prefill_tokens, share_prefixes=share_prefixes, **spare
    )
    stops = as_stop_tokens(stop_tokens) | stop_tokens_of(model, config)
    # A name that nobody else has, for what is forgotten at the end.
    name = os.urandom(16) if namespace is None else namespace
    samplers = {}
    for number, (prompt, n_new) in enumerate(zip(tokens, lengths, strict=True)):
        try:
            request = scheduler.submit(prompt, n_new, stop_tokens=stops, namespace=name)
        except ValueError as error:
            raise ValueError(f"prompts[{number}]: {error}") from None
        samplers[request] = _Sampler(model, config, request, logits_processor, seed)
    bar = _make_bar(lengths) if shows else None
    return _run(_Engine(model, stores, samplers), scheduler, name if namespace is None else ..., bar)


_BLOCK_SIZE = 16


def _blocks_for_the_longest(n: int, tokens: list[list[int]], lengths: list[int]) -> int:
    """Blocks that the n longest requests hold together."""
    needed = (-(-(len(prompt) + n_new - 1) // _BLOCK_SIZE) for prompt, n_new in zip(tokens, lengths, strict=True))
    return max(1, sum(sorted(needed, reverse=True)[:n]))


def _run(
    engine: _Engine, scheduler: Scheduler, to_forget: bytes | EllipsisType, bar: Any
) -> Iterator[TokenEvent]:
    try:
        while not scheduler.is_idle:
            for request in scheduler.step(engine.compute):
                if bar is not None:
                    bar.update()
                    if request.finish_reason is not None:
                        bar.total -= request.n_prompt + request.max_new_tokens - len(request.tokens)
                reason = cast(Literal["stop", "length"] | None, request.finish_reason)
                yield TokenEvent(request.number, request.tokens[-1], reason)
    finally:
        scheduler.close()
        if to_forget is not ...:
            scheduler.stores.prefixes.clear(namespace=to_forget)
        if bar is not None:
            bar.close()


def _make_bar(lengths: list[int]) -> Any:
    from tqdm.auto import tqdm

    return tqdm(total=sum(lengths), unit=" tokens")


# --- the forward pass ---------------------------------------------------------------------------------


class _Engine:
    """Runs the model over the batches of a scheduler."""

    def __init__(self, model: PreTrainedModel, stores: PagedStores, samplers: dict[Request, _Sampler]) -> None:
        self._model = model
        self._stores = stores
        self._samplers = samplers
        self._configs = list({id(c): c for m in model.modules() if (c := _config_of(m)) is not None}.values())
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._keeps_logits = "logits_to_keep" in names

    def compute(self, batch: Batch, step: Step) -> list[int]:
        """The next token of every request that gets one."""
        with torch.no_grad(), attending(self._configs, NAME):
            inputs = {"input_ids": torch.tensor([batch.token_ids]), "position_ids": torch.tensor([batch.positions])}
            if self._keeps_logits:
                inputs["logits_to_keep"] = torch.tensor(batch.logits_indices, dtype=torch.long)
            inputs[self._cache_name] = _PassCache(self._stores, step)
            logits = self._model(**inputs, use_cache=True, return_dict=True).logits[0]
            chosen = logits if self._keeps_logits else logits[batch.logits_indices]
            return self._choose(batch.sampled, chosen)

    def _choose(self, sampled: Sequence[Request], logits: torch.Tensor) -> list[int]:
        tokens: list[int] = logits.argmax(dim=-1).tolist() if sampled else []
        for row, request in enumerate(sampled):
            sampler = self._samplers[request]
            if not sampler.is_greedy:
                tokens[row] = sampler.choose(request.tokens, logits[row])
        return tokens


class _Sampler:
    """How a request's next token is chosen from the logits: as ``generate`` does it, with a generator of its own."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: GenerationConfig,
        request: Request,
        logits_processor: LogitsProcessorList | None,
        seed: int | None,
    ) -> None:
        self._processors = logits_processors_of(model, config, request.n_prompt, logits_processor)
        self._draws = bool(config.do_sample)
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed + request.number)
        self.is_greedy = not self._draws and not self._processors

    def choose(self, tokens: TokenIds, logits: torch.Tensor) -> int:
        scores = self._processors(torch.from_numpy(np.array([tokens])), logits[None].to(torch.float32, copy=True))
        if self._draws:
            return int(torch.multinomial(scores.softmax(dim=-1)[0], 1, generator=self._generator))
        return int(scores[0].argmax())


class _PassCache(Cache):
    """What the model takes for its cache during a `pagedkv.Step`: rows of all sequences, one after the other."""

    def __init__(self, stores: PagedStores, step: Step) -> None:
        super().__init__(layers=[_PassLayer(stores, step, layer) for layer in range(stores.n_layers)])


class _PassLayer(CacheLayerMixin):
    """A layer's rows ``[1, heads, n_rows, dim]`` on their way into and out of a pass."""

    supports_early_init = False

    def __init__(self, stores: PagedStores, step: Step, layer: int) -> None:
        super().__init__()
        self._stores = stores
        self._step = step
        self._layer = layer
        self.is_sliding = self.window_of(layer) is not None

    def window_of(self, layer: int) -> int | None:
        return self._stores.group_of(layer).window

    def attend(
        self,
        keys: PagedKeys,
        query: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        dtype = self._stores.group_of(keys.layer).row_dtype
        if mask is not None:
            raise ValueError("attention_mask: expected none, got one of the model's own making; use generate")
        self._step.write(keys.layer, *(as_rows(rows[0].transpose(0, 1), dtype) for rows in (keys.plain, value)))
        attended = self._step.attend(keys.layer, as_rows(query[0].transpose(0, 1)), **options)
        return as_tensor(attended, query.dtype)[None]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._stores.check_rows(self._layer, key_states.shape, value_states.shape)
        return PagedKeys.of(key_states, value_states, self, self._layer), value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the stores are there."""


def _config_of(module: torch.nn.Module) -> PretrainedConfig | None:
    config = getattr(module, "config", None)
    return config if isinstance(config, PretrainedConfig) else None


# --- arguments ----------------------------------------------------------------------------------------


def _check_model(model: PreTrainedModel) -> None:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a PreTrainedModel, got {type(model).__name__}")
    if not model.can_generate() or not asks_for_attention(model):
        raise ValueError(f"model: expected one that uses the attention interface, got {type(model).__name__}")
    if model.device.type != "cpu":
        raise ValueError(f"model: expected it on the CPU, got {model.device}")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"model: expected one that takes position_ids, got {type(model).__name__}")
    parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):
        if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):
            raise ValueError(
                f"model: expected position embeddings of one sequence that do not depend on the others of a batch, "
                f"got {rope['rope_type']}; use generate with a PagedCache"
            )


def _check_config(config: GenerationConfig) -> None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(f"generation_config: expected greedy search or sampling, got {mode.value}; use generate")
    neutral = {"num_return_sequences": 1, "guidance_scale": 1, "token_healing": False}
    for name in ("num_return_sequences", "guidance_scale", "token_healing", "stop_strings", "max_time",
                 "cache_implementation"):
        value = getattr(config, name, None)
        if value is not None and value != neutral.get(name):
            raise ValueError(f"generation_config: {name}={value!r} is not supported by generate_batch; use generate")


def _as_tokens(prompt: Any, number: int, model: PreTrainedModel) -> list[int]:
    if isinstance(prompt, str):
        raise TypeError(f"prompts[{number}]: expected token ids, got text: tokenize it first")
    if hasattr(prompt, "tolist"):  # tensors and arrays
        prompt = prompt.tolist()
    try:
        tokens = [token.__index__() for token in prompt]
    except (TypeError, AttributeError):
        raise TypeError(f"prompts[{number}]: expected a list of token ids, got {prompt!r:.60}") from None
    vocabulary = model.get_input_embeddings().num_embeddings
    if not tokens or not all(0 <= token < vocabulary for token in tokens):
        raise ValueError(f"prompts[{number}]: expected one or more ids from 0 to {vocabulary - 1}, got {tokens!r:.60}")
    return tokens


def _count_new(config: GenerationConfig, n_prompt: int, number: int) -> int:
    """How many tokens a request gets at most; 20 if nothing is said, as ``generate`` has it."""
    n_new = config.max_new_tokens
    if n_new is None:
        n_new = 20 if config.max_length is None else config.max_length - n_prompt
    if n_new < 1:
        raise ValueError(f"prompts[{number}]: expected room for new tokens, got {n_prompt} and {n_new} new ones")
    return int(n_new)
