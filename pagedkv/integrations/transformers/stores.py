"""A model's K/V: one store for all layers of a kind, and sequences with a cache in each of them.

Layers of one store share a block table, so they hold and drop the same positions. A layer with a sliding
window needs its last positions only, a full one needs all: hence a store for each window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from pagedkv import PagedKvCache, PagedKvStore, Step

if TYPE_CHECKING:
    from pagedkv._arrays import _DType


@dataclass(frozen=True)
class LayerShape:
    """What decides in which store a layer's K/V live."""

    window: int | None
    n_kv_heads: int
    head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class LayerGroup:
    """The layers of one shape, and the store of their K/V.

    Attributes
    ----------
    shape : LayerShape
    layers : tuple of int
        The model's numbers of these layers; the store counts them from 0 in this order.
    store : PagedKvStore
    """

    shape: LayerShape
    layers: tuple[int, ...]
    store: PagedKvStore

    @property
    def window(self) -> int | None:
        """How many positions a query of these layers sees, itself included; None: all."""
        return self.shape.window

    def first_needed(self, seq_len: int) -> int:
        """The first position that queries from position ``seq_len`` on can see."""
        return 0 if self.window is None else max(0, seq_len + 1 - self.window)

    @property
    def row_dtype(self) -> str:
        """How rows are handed to the store: as they will be stored, where that is a float."""
        return self.store.dtype if self.store.dtype in ("float16", "bfloat16") else "float32"

    @property
    def nbytes_held(self) -> int:
        """Bytes of the blocks that somebody holds."""
        held = self.store.total_blocks - self.store.free_block_count
        return held * (self.store.nbytes // self.store.total_blocks)


def layer_shapes(config: PretrainedConfig) -> list[LayerShape]:
    """The shape of each layer of a decoder, from its configuration.

    Raises
    ------
    ValueError
        A kind of layer whose past is not K and V of positions, or is shared between layers.
    """
    types, options = get_layer_types_and_kwargs(config)
    foreign = sorted(set(types) - {"full_attention", "sliding_attention"})
    if foreign:
        raise ValueError(f"config: expected layers of full or sliding-window attention, got {', '.join(foreign)}")
    shapes = []
    for layer, own, option in zip(range(len(types)), config.per_layer_config, options, strict=True):
        n_q_heads = own.num_attention_heads
        n_kv_heads = getattr(own, "num_key_value_heads", None) or n_q_heads
        head_dim = v_head_dim = getattr(own, "head_dim", None) or own.hidden_size // n_q_heads
        if getattr(own, "kv_lora_rank", None):  # latent attention keeps what K and V are expanded from
            n_kv_heads, head_dim, v_head_dim = 1, own.kv_lora_rank, own.qk_rope_head_dim
        window = option.get("sliding_window")
        if types[layer] == "sliding_attention" and not window:
            raise ValueError(f"config: layer {layer} has a sliding window of no size")
        shapes.append(LayerShape(window, n_kv_heads, head_dim, v_head_dim))
    return shapes


class PagedStores:
    """The blocks of a model, shared by everybody who generates with it: a store for each kind of layer.

    Most models have one. Models that mix full and sliding-window attention have one for each window, with
    ``total_blocks`` blocks each; a block takes memory from its first use on.

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
    config : PretrainedConfig
        That of the decoder.
    block_size, total_blocks : int
        Of each store.
    n_layers : int
        Layers of the model.

    Raises
    ------
    TypeError, ValueError
        No model; layers of another kind (linear attention, chunked attention, shared K/V); numbers as for
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
        config = model.config if isinstance(model, PreTrainedModel) else model
        if not isinstance(config, PretrainedConfig):
            raise TypeError(f"model: expected a model of transformers or its configuration, got {type(model).__name__}")
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError("model: expected a decoder, got an encoder and decoder")
        self.config = config.get_text_config(decoder=True)
        shapes = layer_shapes(self.config)
        groups = []
        self._place: list[tuple[int, int]] = [(0, 0)] * len(shapes)
        for number, shape in enumerate(dict.fromkeys(shapes)):
            layers = tuple(layer for layer, its_shape in enumerate(shapes) if its_shape == shape)
            for index, layer in enumerate(layers):
                self._place[layer] = (number, index)
            store = PagedKvStore(
                block_size,
                total_blocks,
                shape.n_kv_heads,
                shape.head_dim,
                v_head_dim=shape.v_head_dim,
                n_layers=len(layers),
                dtype=dtype,
                debug=debug,
            )
            groups.append(LayerGroup(shape, layers, store))
        self.groups = tuple(groups)

    @property
    def n_layers(self) -> int:
        return len(self._place)

    @property
    def block_size(self) -> int:
        return self.groups[0].store.block_size

    @property
    def total_blocks(self) -> int:
        """Of each store."""
        return self.groups[0].store.total_blocks

    @property
    def free_block_count(self) -> int:
        """Of the store that has the fewest."""
        return min(group.store.free_block_count for group in self.groups)

    @property
    def nbytes_held(self) -> int:
        """Bytes of K and V in the blocks that somebody holds."""
        return sum(group.nbytes_held for group in self.groups)

    def place_of(self, layer: int) -> tuple[int, int]:
        """A layer's group, and its number in that group's store.

        Parameters
        ----------
        layer : int
            0 to ``n_layers - 1``, as the model counts.

        Returns
        -------
        tuple of int
            An index into ``groups``, and the ``layer`` of its store.

        Raises
        ------
        IndexError
            ``layer`` out of range.
        """
        return self._place[layer]

    def group_of(self, layer: int) -> LayerGroup:
        """The group that a layer belongs to. Arguments and errors as for `place_of`."""
        return self.groups[self._place[layer][0]]

    def blocks_for(self, n_positions: int) -> int:
        """Blocks of a store that so many positions take at most; a window makes it fewer.

        Parameters
        ----------
        n_positions : int
            Of one sequence.

        Returns
        -------
        int

        Raises
        ------
        TypeError
            No number.
        """
        return -(-n_positions // self.block_size)

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
        shape = self.groups[self._place[layer][0]].shape
        for name, got, head_dim in (("key", k_shape, shape.head_dim), ("value", v_shape, shape.v_head_dim)):
            if len(got) != 4 or got[1] != shape.n_kv_heads or got[3] != head_dim:
                raise ValueError(
                    f"{name}_states: expected [batch, {shape.n_kv_heads}, positions, {head_dim}] in layer {layer}, "
                    f"got {list(got)}"
                )

    def __repr__(self) -> str:
        groups = ", ".join(f"{len(group.layers)} layers of window {group.window}" for group in self.groups)
        return f"PagedStores({groups}; {self.free_block_count} of {self.total_blocks} blocks free)"


@dataclass
class PagedSequence:
    """The K/V of one sequence: a `PagedKvCache` in every store of a model."""

    stores: PagedStores
    caches: list[PagedKvCache] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.caches:
            self.caches = [PagedKvCache() for _ in self.stores.groups]

    @property
    def seq_len(self) -> int:
        """Positions whose K/V is there."""
        return self.caches[0].seq_len

    def clone(self) -> PagedSequence:
        """A second sequence with the same positions. It costs no blocks."""
        return PagedSequence(self.stores, [cache.clone() for cache in self.caches])

    def can_truncate_to(self, n_positions: int) -> bool:
        """Whether all that a query from there on can see is still held."""
        return n_positions <= self.seq_len and all(
            cache.first_position <= group.first_needed(n_positions)
            for group, cache in self._places()
        )

    def truncate(self, n_positions: int) -> None:
        """Cuts the caches that are longer than ``n_positions``."""
        for group, cache in self._places():
            if cache.seq_len > n_positions:
                cache.truncate(group.store, n_positions)

    def reserve(self, n_new: int, *, chunk: int | None = None) -> None:
        """Takes the blocks of ``n_new`` positions in every store, or none.

        Who grows by ``chunk`` positions at a time and drops what is left behind needs no more than a window
        and a chunk where there is a window.

        Raises
        ------
        PagedStoreExhausted
            They are not free now. The sequence holds no reserved blocks.
        """
        try:
            for group, cache in self._places():
                limit = n_new if group.window is None or chunk is None else group.window + chunk
                cache.reserve(group.store, min(n_new, limit))
        except BaseException:
            self.give_back_reserved()
            raise

    def give_back_reserved(self) -> None:
        """Gives back the blocks past the end."""
        for group, cache in self._places():
            cache.truncate(group.store, cache.seq_len)

    def drop_unneeded(self) -> None:
        """Gives back what the windows have left behind."""
        for group, cache in self._places():
            cache.drop_before(group.store, group.first_needed(cache.seq_len))

    def release(self) -> None:
        """Gives every block back."""
        for group, cache in self._places():
            cache.release(group.store)

    def _places(self) -> Iterator[tuple[LayerGroup, PagedKvCache]]:
        return zip(self.stores.groups, self.caches, strict=True)


class ForwardPass:
    """One `Step` in every store of a model: all layers of all sequences advance, or none does.

    Raises
    ------
    PagedStoreExhausted
        A store has too few free blocks. Nothing was changed.
    """

    def __init__(self, stores: PagedStores, sequences: Sequence[PagedSequence], query_lens: Sequence[int]) -> None:
        self.stores = stores
        self.sequences = tuple(sequences)
        self.query_lens = tuple(query_lens)
        self.n_rows = sum(query_lens)
        self.written: set[int] = set()
        self._seq_lens = [sequence.seq_len for sequence in sequences]
        self._steps: list[Step] = []
        try:
            for number, group in enumerate(stores.groups):
                step = Step(group.store, [sequence.caches[number] for sequence in sequences], self.query_lens)
                self._steps.append(step)
                step.__enter__()
        except BaseException:
            self.rollback()
            raise

    @property
    def is_complete(self) -> bool:
        """Whether every layer has been written."""
        return len(self.written) == self.stores.n_layers

    def write(self, layer: int, k: npt.NDArray[Any], v: npt.NDArray[Any]) -> None:
        """The new rows of one layer, ``[n_rows, n_kv_heads, head_dim]``."""
        number, index = self.stores.place_of(layer)
        self._steps[number].write(index, k, v)
        self.written.add(layer)

    def attend(self, layer: int, q: npt.NDArray[Any], **options: Any) -> npt.NDArray[Any]:
        """`Step.attend` in the layer's store."""
        number, index = self.stores.place_of(layer)
        return self._steps[number].attend(index, q, **options)

    def commit(self) -> None:
        """Ends the pass: every sequence has grown by its query length.

        Raises
        ------
        RuntimeError
            A layer was not written; everything was rolled back.
        """
        if self.n_rows and not self.is_complete:
            self.rollback()
            missing = sorted(set(range(self.stores.n_layers)) - self.written)
            raise RuntimeError(f"the forward pass did not reach layers {missing}; it was taken back")
        try:
            for step in self._steps:
                step.commit()
        except BaseException:
            self.rollback()
            raise

    def rollback(self) -> None:
        """Ends the pass, and leaves every sequence as it was."""
        for step in self._steps:
            step.__exit__(GeneratorExit, None, None)  # one that is open is rolled back, others take no notice
        # The stores commit one after the other: those that did before an interrupt are taken back.
        for sequence, length in zip(self.sequences, self._seq_lens, strict=True):
            sequence.truncate(length)
