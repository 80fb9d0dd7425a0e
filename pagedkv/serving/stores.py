"""A model's blocks: one store for all layers of a kind.

Layers of one store share a block table, so they hold and drop the same positions. A layer with a sliding
window needs its last positions only, a full one needs all: hence a store for each window.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy.typing as npt

from pagedkv import PagedKvStore
from pagedkv.serving.prefixes import ModelPrefixes


@dataclass(frozen=True)
class LayerShape:
    """What decides in which store a layer's K/V live.

    Attributes
    ----------
    window : int or None
        How many positions a query of the layer sees, itself included; None: all.
    n_kv_heads, head_dim : int
    v_head_dim : int or None
        None: ``head_dim``.
    """

    window: int | None
    n_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None


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

    def at_once(self, n_new: int, chunk: int) -> int:
        """How many of ``n_new`` positions are held at once by who grows by ``chunk`` and drops what is left behind."""
        return n_new if self.window is None else min(n_new, self.window + chunk)

    @property
    def row_dtype(self) -> str:
        """What rows are handed to the store as without being converted twice: its dtype if that is a float."""
        return self.store.dtype if self.store.dtype in ("float16", "bfloat16") else "float32"

    @property
    def nbytes_held(self) -> int:
        """Bytes of the blocks that somebody holds."""
        held = self.store.total_blocks - self.store.free_block_count
        return held * (self.store.nbytes // self.store.total_blocks)


class ModelStores:
    """The blocks of a model, shared by everybody who generates with it: a store for each kind of layer.

    Most models have one. Models that mix full and sliding-window attention have one for each window, with
    ``total_blocks`` blocks each; a block takes memory from its first use on.

    Parameters
    ----------
    shapes : iterable of LayerShape
        One for each layer, in the model's order.
    total_blocks : int
        Blocks of each store: ``ceil(positions / block_size)`` for every sequence that is not shared.
    block_size : int, optional
        Positions of a block.
    dtype : optional
        That of `PagedKvStore`.
    debug : bool, optional
        As for `PagedKvStore`.

    Attributes
    ----------
    groups : tuple of LayerGroup
    prefixes : ModelPrefixes
        What is known of token ids in these stores.

    Raises
    ------
    ValueError
        No layers; numbers as for `PagedKvStore`.

    Notes
    -----
    Threads: as a store. A `ModelSequence` belongs to one thread at a time.

    Examples
    --------
    >>> from pagedkv.serving import LayerShape, ModelStores
    >>> shapes = [LayerShape(window, n_kv_heads=1, head_dim=8) for window in (32, 32, None)]
    >>> stores = ModelStores(shapes, total_blocks=64)
    >>> [(group.window, group.layers) for group in stores.groups]
    [(32, (0, 1)), (None, (2,))]
    """

    def __init__(
        self,
        shapes: Iterable[LayerShape],
        total_blocks: int,
        *,
        block_size: int = 16,
        dtype: npt.DTypeLike = "float32",
        debug: bool = False,
    ) -> None:
        shapes = tuple(shapes)
        if not shapes:
            raise ValueError("shapes: expected one for each layer, got none")
        groups = []
        self._place: list[tuple[int, int]] = [(0, 0)] * len(shapes)
        for number, shape in enumerate(dict.fromkeys(shapes)):
            if shape.window is not None and shape.window < 1:
                raise ValueError(f"shapes: expected windows of 1 or more, got {shape.window}")
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
        self.prefixes = ModelPrefixes(group.store for group in groups)

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
        """Bytes of K and V in the blocks that somebody holds, `prefixes` among them."""
        return sum(group.nbytes_held for group in self.groups)

    def place_of(self, layer: int) -> tuple[int, int]:
        """The number of a layer's group, and the layer's number in that group's store."""
        return self._place[layer]

    def group_of(self, layer: int) -> LayerGroup:
        return self.groups[self._place[layer][0]]

    def blocks_for(self, n_positions: int) -> int:
        """Blocks of a store that ``n_positions`` take at most; a window makes it fewer."""
        return -(-n_positions // self.block_size)

    def __repr__(self) -> str:
        groups = ", ".join(f"{len(group.layers)} layers of window {group.window}" for group in self.groups)
        return f"{type(self).__name__}({groups}; {self.free_block_count} of {self.total_blocks} blocks free)"
