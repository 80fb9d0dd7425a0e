"""The shape of a layer's K/V, and what its window holds and sees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pagedkv._windows import first_needed, most_held


@dataclass(frozen=True)
class LayerShape:
    """What decides in which store a layer's K/V live.

    Attributes
    ----------
    window : int or None
        How many positions a query of the layer sees, itself included; None: all.
    n_kv_heads, head_dim : int
        Heads of K and V, and values of a K head.
    v_head_dim : int
        Values of a V head; 0, or not given: as many.

    Examples
    --------
    >>> from pagedkv.serving import LayerShape
    >>> LayerShape(window=512, n_kv_heads=1, head_dim=256) == LayerShape(512, 1, 256, v_head_dim=256)
    True
    """

    window: int | None
    n_kv_heads: int
    head_dim: int
    v_head_dim: int = 0

    def __post_init__(self) -> None:
        if not self.v_head_dim:
            object.__setattr__(self, "v_head_dim", self.head_dim)

    def first_needed(self, seq_len: int) -> int:
        """The first position that queries from position ``seq_len`` on can see.

        Parameters
        ----------
        seq_len : int
            Positions of the sequence so far.

        Returns
        -------
        int

        Raises
        ------
        TypeError
            No number.
        """
        return first_needed(self.window, seq_len)

    def most_held(self, n_positions: int, chunk: int = 1, block_size: int = 1) -> int:
        """The most positions that are held at once by who grows in pieces and drops what is left behind.

        Before a step ``window - 1`` positions are seen from its first new one. They begin anywhere in a block, at worst
        at its last row.

        Parameters
        ----------
        n_positions : int
            That it grows by.
        chunk : int, optional
            New positions of a step.
        block_size : int, optional
            Positions that are dropped together.

        Returns
        -------
        int
            At most ``n_positions``.

        Raises
        ------
        TypeError
            No number.
        """
        return most_held(self.window, n_positions, chunk, block_size)


@dataclass(frozen=True)
class ModelShapes:
    """What a decoder keeps of every position, layer by layer. `model_shapes` makes it.

    Attributes
    ----------
    name : str
        The ``model_type``, where there is one.
    layers : tuple of LayerShape
        One for each layer.
    sources : tuple of int
        For each layer the one whose K/V it attends to: itself, but for layers that keep none of their own.
    max_positions : int or None
        What the model was made for, where that is known.
    is_latent : bool
        Whether K and V are expanded from a latent.

    Examples
    --------
    >>> from pagedkv.shapes import model_shapes
    >>> shapes = model_shapes({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024})
    >>> shapes.name, len(shapes.kept), shapes.kept[0], shapes.max_positions
    ('gpt2', 12, LayerShape(window=None, n_kv_heads=12, head_dim=64, v_head_dim=64), 1024)
    """

    name: str
    layers: tuple[LayerShape, ...]
    sources: tuple[int, ...]
    max_positions: int | None
    is_latent: bool

    @property
    def kept(self) -> tuple[LayerShape, ...]:
        """Of the layers that keep K/V of their own."""
        return tuple(shape for layer, shape in enumerate(self.layers) if self.sources[layer] == layer)


def group_layers(shapes: Iterable[LayerShape]) -> dict[LayerShape, tuple[int, ...]]:
    """Layers of the same shape, which share a store.

    Parameters
    ----------
    shapes : iterable of LayerShape
        One for each layer.

    Returns
    -------
    dict of LayerShape to tuple of int
        The layers of each, in the order of their first one.

    Raises
    ------
    TypeError
        Something that cannot be a key.

    Notes
    -----
    Threads: a pure function.

    Examples
    --------
    >>> from pagedkv.shapes import LayerShape, group_layers
    >>> list(group_layers([LayerShape(8, 1, 4), LayerShape(None, 1, 4), LayerShape(8, 1, 4)]).values())
    [(0, 2), (1,)]
    """
    groups: dict[LayerShape, tuple[int, ...]] = {}
    for layer, shape in enumerate(shapes):
        groups[shape] = (*groups.get(shape, ()), layer)
    return groups
