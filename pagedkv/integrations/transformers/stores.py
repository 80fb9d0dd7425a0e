"""A model's stores, from its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

from transformers import PretrainedConfig, PreTrainedModel

from pagedkv import ModelStores
from pagedkv.integrations.transformers.private import is_encoder, layers_of
from pagedkv.shapes import LayerShape, layer_shapes

if TYPE_CHECKING:
    from typing_extensions import Self

    from pagedkv._arrays import _DType


class PagedStores(ModelStores):
    """The blocks of a model, shared by everybody who generates with it: a store for each kind of layer.

    Most models have one. Models that mix full and sliding-window attention have one for each window, with
    ``total_blocks`` blocks each, or by `from_bytes` with a budget of bytes that all of them share; a block takes memory
    from its first use on.

    Parameters
    ----------
    model : PreTrainedModel or PretrainedConfig
        A decoder of full and sliding-window attention; or the configuration that the model itself holds.
    total_blocks : int
        Blocks of each store: ``ceil(positions / block_size)`` for every sequence that is not shared.
    block_size : int, optional
        Positions of a block.
    dtype : optional
        That of `PagedKvStore`: "float32", "float16", "bfloat16" or "int8". Rows are converted from and to the
        model's own.
    debug : bool, optional
        As for `PagedKvStore`.

    Attributes
    ----------
    groups : tuple of LayerGroup
        The layers of each kind, their window, and their `PagedKvStore`.
    prefixes : PrefixCache
        What is known of token ids in these stores.
    config : PretrainedConfig
        That of the decoder.
    block_size, total_blocks : int
        Of each store.
    n_layers : int
        Layers of the model.

    Raises
    ------
    TypeError, ValueError
        No model; an encoder; layers of another kind (linear attention, chunked attention, shared K/V); numbers as for
        `PagedKvStore`.

    Notes
    -----
    Threads: as a `PagedKvStore`, any number of them. A `PagedCache` belongs to one thread at a time.

    Examples
    --------
    >>> from transformers import MistralConfig
    >>> from pagedkv.integrations.transformers import PagedStores
    >>> config = MistralConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    ...                        sliding_window=32)
    >>> stores = PagedStores(config, total_blocks=64)
    >>> [(group.window, group.layers, group.store.k_width) for group in stores.groups]
    [(32, (0, 1), 16)]
    """

    def __init__(
        self,
        model: PreTrainedModel | PretrainedConfig,
        total_blocks: int,
        *,
        block_size: int = 16,
        dtype: _DType = "float32",
        debug: bool = False,
    ) -> None:
        super().__init__(model, total_blocks, block_size=block_size, dtype=dtype, debug=debug)

    @classmethod
    def from_bytes(  # type: ignore[override, unused-ignore]  # a model, not its shapes
        cls,
        budget_bytes: SupportsIndex,
        model: PreTrainedModel | PretrainedConfig,
        *,
        block_size: int = 16,
        dtype: _DType = "float32",
        debug: bool = False,
        max_bytes: SupportsIndex | None = None,
    ) -> Self:
        """Stores that share ``budget_bytes``: `ModelStores.from_bytes`, of a model.

        Parameters
        ----------
        budget_bytes : int
            Bytes for K and V of all layers together.
        model : PreTrainedModel or PretrainedConfig
            As for the class.
        block_size, dtype, debug : optional
            As for the class.
        max_bytes : int, optional
            The most that `resize` may make of it: address space, which costs no memory. ``budget_bytes`` without it.

        Returns
        -------
        PagedStores

        Raises
        ------
        TypeError, ValueError, MemoryError
            Not one block of each store fits; and as the class.
        """
        return super().from_bytes(
            budget_bytes, cast(Any, model), block_size=block_size, dtype=dtype, debug=debug, max_bytes=max_bytes
        )

    def _shapes_of(self, model: Any) -> tuple[LayerShape, ...]:
        config = model.config if isinstance(model, PreTrainedModel) else model
        if not isinstance(config, PretrainedConfig):
            raise TypeError(f"model: expected a model of transformers or its configuration, got {type(model).__name__}")
        if is_encoder(config):
            raise ValueError(f"model: expected a decoder, got {config.model_type}, an encoder")
        shapes = _read_shapes(config)
        if isinstance(model, PreTrainedModel):
            _check_layers(model, len(shapes))
        self.config = config.get_text_config(decoder=True)
        return shapes

    def check_model(self, model: PreTrainedModel) -> None:
        """Refuses a model whose layers are not those of these stores.

        Parameters
        ----------
        model : PreTrainedModel
            A model, or the decoder inside it.

        Raises
        ------
        ValueError
            Its layers have other shapes, or are fewer than its configuration says; TypeError too as for the class.
        """
        shapes = _read_shapes(model.config)
        if shapes != tuple(self.group_of(layer).shape for layer in range(self.n_layers)):
            raise ValueError(
                f"stores: expected those of this {type(model).__name__}, got {self!r}: another model's cache?"
            )
        _check_layers(model, len(shapes))

    def check_rows(self, layer: int, k_shape: Sequence[int], v_shape: Sequence[int]) -> None:
        """Refuses K and V that are not of a layer's shape.

        Parameters
        ----------
        layer : int
            0 to ``n_layers - 1``, as the model counts.
        k_shape, v_shape : sequence of int
            Expected are ``[batch, n_kv_heads, positions, head_dim]``, and ``v_head_dim``.

        Raises
        ------
        ValueError
            Another shape, or a layer that is not there: the cache of another model.
        """
        if not 0 <= layer < self.n_layers:
            raise ValueError(f"layer_idx: expected 0 to {self.n_layers - 1}, got {layer}: another model's cache?")
        if self.config.num_hidden_layers != self.n_layers:
            raise ValueError(
                f"config: the model had {self.n_layers} layers and now runs {self.config.num_hidden_layers}; "
                "leaving it early is not supported"
            )
        shape = self.group_of(layer).shape
        for name, got, head_dim in (("key", k_shape, shape.head_dim), ("value", v_shape, shape.v_head_dim)):
            if len(got) != 4 or got[1] != shape.n_kv_heads or got[3] != head_dim:
                raise ValueError(
                    f"{name}_states: expected [batch, {shape.n_kv_heads}, positions, {head_dim}] in layer {layer}, "
                    f"got {list(got)}"
                )


def _read_shapes(config: PretrainedConfig) -> tuple[LayerShape, ...]:
    """What the layers hand to their caches."""
    shapes = layer_shapes(config, latent="split")
    text = config.get_text_config(decoder=True)
    if getattr(text, "new_decoder_architecture", False):  # Falcon repeats K and V before it caches them
        shapes = tuple(replace(shape, n_kv_heads=text.num_attention_heads) for shape in shapes)
    return shapes


def _check_layers(model: PreTrainedModel, n_layers: int) -> None:
    """A pass ends with the last layer's rows: one that never comes would be waited for."""
    found = layers_of(model)
    missing = [layer for layer in range(n_layers) if layer not in found]
    if found and missing:
        raise ValueError(
            f"model: expected the {n_layers} layers of its configuration, got a {type(model).__name__} without layer "
            f"{missing[0]}; set config.num_hidden_layers to what it runs, or use the cache of its own model"
        )
