"""A model's blocks: one store for all layers of a kind.

Layers of one store share a block table, so they hold and drop the same positions. A layer with a sliding
window needs its last positions only, a full one needs all: hence a store for each window.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsIndex

from pagedkv import PagedKvStore, PrefixCache
from pagedkv._arrays import as_size
from pagedkv._keys import as_count
from pagedkv.serving.prefixes import ModelPrefixes
from pagedkv.shapes import LayerShape, group_layers

if TYPE_CHECKING:
    from pagedkv._arrays import _DType


@dataclass(frozen=True)
class LayerGroup:
    """The layers of one shape, the store of their K/V, and what is known of it. `ModelStores` makes it.

    Attributes
    ----------
    shape : LayerShape
        What these layers have in common.
    layers : tuple of int
        The model's numbers of these layers; the store counts them from 0 in this order.
    store : PagedKvStore
        Of all of them.
    prefix : PrefixCache
        That of the store.

    Notes
    -----
    Threads: a plain value, but for its store.

    Examples
    --------
    >>> from pagedkv.serving import LayerShape, ModelStores
    >>> [group] = ModelStores([LayerShape(8, n_kv_heads=1, head_dim=4)] * 3, total_blocks=4).groups
    >>> group.layers, group.window, group.shape.first_needed(20)
    ((0, 1, 2), 8, 13)
    """

    shape: LayerShape
    layers: tuple[int, ...]
    store: PagedKvStore
    prefix: PrefixCache

    @property
    def window(self) -> int | None:
        """How many positions a query of these layers sees, itself included; None: all."""
        return self.shape.window

    @property
    def row_dtype(self) -> str:
        """What rows are handed to the store as without being converted twice: its dtype if that is a float."""
        return self.store.dtype if self.store.dtype in ("float16", "bfloat16") else "float32"

    # A sequence grows by `chunk` positions at a time, and gives back whole blocks that its window has left behind.

    def _first_held(self, seq_len: int) -> int:
        """Of a sequence of so many positions: where the block begins that has the first one it still needs."""
        return self.shape.first_needed(seq_len) // self.store.block_size * self.store.block_size

    def _growth(self, seq_len: int, n_new: int, chunk: int) -> int:
        """The positions beyond ``seq_len`` for which it must have blocks, so as never to hold more at once."""
        n_held = seq_len - self._first_held(seq_len)
        return self.shape.most_held(n_held + n_new, chunk, self.store.block_size) - n_held

    def _most_blocks(self, n_positions: int, chunk: int | None) -> int:
        """The most that it holds on its way there."""
        size = self.store.block_size
        return -(-self.shape.most_held(n_positions, n_positions if chunk is None else chunk, size) // size)

    @property
    def n_blocks_in_use(self) -> int:
        """Blocks that are neither free nor known only to the prefix cache, which gives them up when asked."""
        # Another thread may have a block counted as both.
        return max(0, self.store.total_blocks - self.store.free_block_count - self.prefix.evictable_block_count)


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
    dtype : str or dtype-like, optional
        That of `PagedKvStore`: "float32", "float16", "bfloat16" or "int8".
    debug : bool, optional
        As for `PagedKvStore`.

    Attributes
    ----------
    groups : tuple of LayerGroup
        The layers of each kind, their window, and their `PagedKvStore`.
    prefixes : ModelPrefixes
        What is known of token ids in these stores.

    Raises
    ------
    TypeError, ValueError
        No layers, or something else; a window below 1; numbers as for `PagedKvStore`.

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
        dtype: _DType = "float32",
        debug: bool = False,
    ) -> None:
        if not isinstance(shapes, Iterable):
            raise TypeError(f"shapes: expected a LayerShape for each layer, got {type(shapes).__name__}")
        shapes = tuple(shapes)
        if not shapes:
            raise ValueError("shapes: expected one for each layer, got none")
        groups = []
        self._place: list[tuple[int, int]] = [(0, 0)] * len(shapes)
        for layer, shape in enumerate(shapes):
            if not isinstance(shape, LayerShape):
                raise TypeError(f"shapes[{layer}]: expected a LayerShape, got {type(shape).__name__}")
            if shape.window is not None:
                as_size(shape.window, f"shapes[{layer}].window", 1, sys.maxsize)
        for number, (shape, layers) in enumerate(group_layers(shapes).items()):
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
            groups.append(LayerGroup(shape, layers, store, PrefixCache(store, window=shape.window)))
        self.groups = tuple(groups)
        self.prefixes = ModelPrefixes(group.prefix for group in groups)
        self._stores = tuple([group.store for group in groups])

    @property
    def n_layers(self) -> int:
        """Layers of the model."""
        return len(self._place)

    @property
    def block_size(self) -> int:
        """Positions of a block."""
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
    def nbytes_in_use(self) -> int:
        """Bytes of K and V in the blocks that sequences hold; what only `prefixes` knows is given up when asked."""
        return sum(group.n_blocks_in_use * (group.store.nbytes // group.store.total_blocks) for group in self.groups)

    def place_of(self, layer: int) -> tuple[int, int]:
        """The number of a layer's group, and the layer's number in that group's store.

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
        IndexError, TypeError
            ``layer`` out of range, or no integer.
        """
        index = as_size(layer, "layer", -sys.maxsize, sys.maxsize)
        if not 0 <= index < self.n_layers:
            raise IndexError(f"layer: expected 0 to {self.n_layers - 1}, got {index}")
        return self._place[index]

    def group_of(self, layer: int) -> LayerGroup:
        """The group that a layer belongs to. Arguments and errors as for `place_of`."""
        return self.groups[self.place_of(layer)[0]]

    def blocks_for(self, n_positions: SupportsIndex, *, chunk: SupportsIndex | None = None) -> int:
        """The most blocks that a sequence holds in one of the stores while it grows to so many positions.

        Parameters
        ----------
        n_positions : int
            Of one sequence.
        chunk : int, optional
            Who grows by that many at a time and drops what is left behind needs no more than a window and a chunk
            where there is a window. Without it, it grows at once.

        Returns
        -------
        int

        Raises
        ------
        TypeError, ValueError
            No numbers; a ``chunk`` below 1.
        """
        n = as_count(n_positions, "n_positions")
        piece = None if chunk is None else as_size(chunk, "chunk", 1, sys.maxsize)
        return max([group._most_blocks(n, piece) for group in self.groups])

    def __repr__(self) -> str:
        groups = ", ".join(f"{len(group.layers)} layers of window {group.window}" for group in self.groups)
        return f"{type(self).__name__}({groups}; {self.free_block_count} of {self.total_blocks} blocks free)"
