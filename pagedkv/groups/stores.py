"""The blocks of a model: a store for all layers of a shape, and the budget that they share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, SupportsIndex

from pagedkv._arrays import as_size
from pagedkv._groups import bytes_of, resize_budget, share_budget
from pagedkv._keys import as_count
from pagedkv._windows import growth
from pagedkv.admission import fits_alone
from pagedkv.prefix import PrefixCache
from pagedkv.sequence import PagedKvCache
from pagedkv.shapes import LayerShape, group_layers
from pagedkv.stats import GroupStats
from pagedkv.store import PagedKvStore
from pagedkv.viz import BlockMap

if TYPE_CHECKING:
    from typing_extensions import Self

    from pagedkv._arrays import _DType


class _HasCaches(Protocol):
    """A `ModelSequence`: it knows its stores, which need not know it."""

    @property
    def caches(self) -> tuple[PagedKvCache, ...]: ...


@dataclass(frozen=True)
class LayerGroup:
    """The layers of one shape, and the store of their K/V. `ModelStores` makes it.

    Attributes
    ----------
    shape : LayerShape
        What these layers have in common.
    layers : tuple of int
        The model's numbers of these layers; the store counts them from 0 in this order.
    store : PagedKvStore
        Of all of them.

    Examples
    --------
    >>> from pagedkv import LayerShape, ModelStores
    >>> [group] = ModelStores([LayerShape(8, n_kv_heads=1, head_dim=4)] * 3, total_blocks=4).groups
    >>> group.layers, group.window, group.shape.first_needed(20)
    ((0, 1, 2), 8, 13)
    """

    shape: LayerShape
    layers: tuple[int, ...]
    store: PagedKvStore

    @property
    def window(self) -> int | None:
        """How many positions a query of these layers sees, itself included; None: all."""
        return self.shape.window

    @property
    def row_dtype(self) -> str:
        """What rows are handed to the store as without being converted twice: its dtype if that is a float."""
        return self.store.dtype if self.store.dtype in ("float16", "bfloat16") else "float32"

    @property
    def block_nbytes(self) -> int:
        """Bytes of K and V of one block, in all of these layers."""
        return self.store.nbytes // self.store.total_blocks

    @property
    def n_blocks_in_use(self) -> int:
        """Blocks that are neither free nor known only to the prefix cache, which gives them up when asked."""
        # Another thread may have a block counted as both.
        return max(0, self.store.stats().held_blocks - self.store.evictable_block_count)


class ModelStores:
    """The blocks of a model, shared by everybody who generates with it: a store for each shape of layer.

    Most models have one. Models that mix full and sliding-window attention have one for each window, models whose heads
    differ one for each width. All have one budget of bytes: made with ``total_blocks`` each store has as many of its
    own; made by `from_bytes` each takes of the budget what its sequences need. A block takes memory from its first use
    on.

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
        The layers of each shape, their window, and their `PagedKvStore`.
    stores : tuple of PagedKvStore
        Those of the groups.
    places : tuple of (int, int)
        For each layer of the model the number of its group, and the layer's number in that group's store.
    windows : tuple of int or None
        The window of each group.
    prefixes : PrefixCache
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
    >>> from pagedkv import LayerShape, ModelStores
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
        def make(shape: LayerShape, n_layers: int) -> PagedKvStore:
            return PagedKvStore(
                block_size,
                total_blocks,
                shape.n_kv_heads,
                shape.head_dim,
                v_head_dim=shape.v_head_dim,
                n_layers=n_layers,
                dtype=dtype,
                debug=debug,
            )

        self._make(self._shapes_of(shapes), make, None, None)

    @classmethod
    def from_bytes(
        cls,
        budget_bytes: SupportsIndex,
        shapes: Iterable[LayerShape],
        *,
        block_size: int = 16,
        dtype: _DType = "float32",
        debug: bool = False,
        max_bytes: SupportsIndex | None = None,
    ) -> Self:
        """Stores that share ``budget_bytes``: each may have all of it, as long as the others need nothing.

        What free blocks of one store still occupy is given back to the system when another one needs the memory.

        Parameters
        ----------
        budget_bytes : int
            Bytes for K and V of all layers together.
        shapes : iterable of LayerShape
            One for each layer, in the model's order. Where the class takes something else, that.
        block_size, dtype, debug : optional
            As for the class.
        max_bytes : int, optional
            The most that `resize` may make of it: address space, which costs no memory. ``budget_bytes`` without it.

        Returns
        -------
        ModelStores

        Raises
        ------
        TypeError, ValueError, MemoryError
            Not one block of each store fits; and as the class.

        Examples
        --------
        >>> from pagedkv import LayerShape, ModelStores
        >>> shapes = [LayerShape(window, n_kv_heads=1, head_dim=8) for window in (32, 32, 32, 32, 32, None)]
        >>> stores = ModelStores.from_bytes(1 << 20, shapes)
        >>> stores.nbytes, [store.total_blocks for store in stores.stores]       # each may have all of it
        (1048576, [204, 1024])
        """
        budget = as_size(budget_bytes, "budget_bytes", 1, sys.maxsize)
        most = budget if max_bytes is None else as_size(max_bytes, "max_bytes", budget, sys.maxsize)

        def make(shape: LayerShape, n_layers: int) -> PagedKvStore:
            return PagedKvStore.from_bytes(
                most,
                block_size,
                shape.n_kv_heads,
                shape.head_dim,
                v_head_dim=shape.v_head_dim,
                n_layers=n_layers,
                dtype=dtype,
                debug=debug,
            )

        stores = cls.__new__(cls)
        stores._make(stores._shapes_of(shapes), make, budget, most)
        return stores

    def _shapes_of(self, shapes: Any) -> tuple[LayerShape, ...]:
        """What the class was given, as shapes; a class that reads them from something else says how."""
        if not isinstance(shapes, Iterable):
            raise TypeError(f"shapes: expected a LayerShape for each layer, got {type(shapes).__name__}")
        found = tuple(shapes)
        if not found:
            raise ValueError("shapes: expected one for each layer, got none")
        for layer, shape in enumerate(found):
            if not isinstance(shape, LayerShape):
                raise TypeError(f"shapes[{layer}]: expected a LayerShape, got {type(shape).__name__}")
            if shape.window is not None:
                as_size(shape.window, f"shapes[{layer}].window", 1, sys.maxsize)
        return found

    def _make(
        self,
        shapes: tuple[LayerShape, ...],
        make: Callable[[LayerShape, int], PagedKvStore],
        budget: int | None,
        most: int | None,
    ) -> None:
        grouped = group_layers(shapes)
        self.stores = tuple([make(shape, len(layers)) for shape, layers in grouped.items()])
        self._least_bytes = sum([store.nbytes // store.total_blocks for store in self.stores])  # a block of each
        self._most_bytes = sum([store.nbytes for store in self.stores]) if most is None else most
        if budget is not None and budget < self._least_bytes:
            raise ValueError(
                f"budget_bytes: expected at least {self._least_bytes}, the bytes of a block of each store, got {budget}"
            )
        share_budget(self.stores, self._most_bytes if budget is None else budget)
        self.groups = tuple(
            [
                LayerGroup(shape, layers, store)
                for (shape, layers), store in zip(grouped.items(), self.stores, strict=True)
            ]
        )
        places = {
            layer: (number, index)
            for number, group in enumerate(self.groups)
            for index, layer in enumerate(group.layers)
        }
        self.places = tuple([places[layer] for layer in range(len(shapes))])
        self.windows = tuple([group.window for group in self.groups])
        self.prefixes = PrefixCache(self)  # which knows the stores alone: there is no circle

    # --- sizes ---

    @property
    def n_layers(self) -> int:
        """Layers of the model."""
        return len(self.places)

    @property
    def block_size(self) -> int:
        """Positions of a block."""
        return self.stores[0].block_size

    @property
    def total_blocks(self) -> int:
        """Blocks that all of the stores can have at once: as many in each."""
        return min(bytes_of(self.stores)[0] // self._least_bytes, *[store.total_blocks for store in self.stores])

    @property
    def free_block_count(self) -> int:
        """Blocks that can be taken in all of the stores at once: as many in each."""
        limit, held, _ = bytes_of(self.stores)
        return min((limit - held) // self._least_bytes, *[store.free_block_count for store in self.stores])

    @property
    def nbytes(self) -> int:
        """Bytes of K and V that the blocks of all stores may take together."""
        return bytes_of(self.stores)[0]

    @property
    def nbytes_in_use(self) -> int:
        """Bytes of K and V in the blocks that sequences hold; what only `prefixes` knows is given up when asked."""
        _, held, evictable = bytes_of(self.stores)
        return held - evictable

    def place_of(self, layer: SupportsIndex) -> tuple[int, int]:
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
        return self.places[index]

    def group_of(self, layer: SupportsIndex) -> LayerGroup:
        """The group that a layer belongs to. Arguments and errors as for `place_of`."""
        return self.groups[self.place_of(layer)[0]]

    # --- what fits ---

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
        return max(self._most_blocks(n_positions, chunk))

    def bytes_for(self, n_positions: SupportsIndex, *, chunk: SupportsIndex | None = None) -> int:
        """The most bytes of K and V that a sequence holds in all stores while it grows: what a budget is made of.

        Parameters
        ----------
        n_positions : int
            Of one sequence.
        chunk : int, optional
            By how many it grows at a time, dropping what is left behind. Without it, it grows at once.

        Returns
        -------
        int

        Raises
        ------
        TypeError, ValueError
            As for `blocks_for`.
        """
        blocks = self._most_blocks(n_positions, chunk)
        return sum([n * group.block_nbytes for n, group in zip(blocks, self.groups, strict=True)])

    def can_ever_fit(self, n_positions: SupportsIndex, *, chunk: SupportsIndex | None = None) -> bool:
        """Whether a sequence can grow to so many positions when nobody else holds anything.

        Parameters
        ----------
        n_positions : int
            Of one sequence.
        chunk : int, optional
            By how many it grows at a time, dropping what is left behind. Without it, it grows at once.

        Returns
        -------
        bool

        Raises
        ------
        TypeError, ValueError
            As for `blocks_for`.
        """
        return fits_alone(self.stores, self._most_blocks(n_positions, chunk))

    def _most_blocks(self, n_positions: SupportsIndex, chunk: SupportsIndex | None) -> list[int]:
        n = as_count(n_positions, "n_positions")
        piece = None if chunk is None else as_size(chunk, "chunk", 1, sys.maxsize)
        size = self.block_size
        return [-(-growth(window, 0, n, piece, size) // size) for window in self.windows]

    # --- looking after it ---

    def resize(self, budget_bytes: SupportsIndex) -> None:
        """Let the stores have more memory from now on, or less.

        Less evicts what has to go of what prefix caches hold, and gives the memory of free blocks back, as `trim` does.

        Parameters
        ----------
        budget_bytes : int
            Bytes for K and V of all layers together: a block of each store at least, at most what the stores were made
            for (see ``max_bytes`` of `from_bytes`).

        Raises
        ------
        TypeError, ValueError
            No such number; or less than the blocks that sequences hold. Nothing was changed.
        """
        resize_budget(self.stores, as_size(budget_bytes, "budget_bytes", self._least_bytes, self._most_bytes))

    def trim(self) -> int:
        """Give the memory of free blocks of all stores back to the system, as `PagedKvStore.trim` does.

        Returns
        -------
        int
            Bytes that were given back, of memory that had been written or not; 0 where the system is not Linux.
        """
        return sum([store.trim() for store in self.stores])

    def stats(self) -> GroupStats:
        """Counters of all stores together, in bytes and blocks, and of each store: a `GroupStats`."""
        each = tuple([store.stats() for store in self.stores])
        limit, held, evictable = bytes_of(self.stores)
        return GroupStats(
            nbytes=limit,
            free_bytes=limit - held,
            held_bytes=held,
            evictable_bytes=evictable,
            blocks_acquired=sum([stats.blocks_acquired for stats in each]),
            blocks_released=sum([stats.blocks_released for stats in each]),
            copies_on_write=sum([stats.copies_on_write for stats in each]),
            exhaustions=sum([stats.exhaustions for stats in each]),
            stores=each,
        )

    def block_map(
        self, sequences: Iterable[_HasCaches] | Mapping[Any, _HasCaches] = (), *, width: SupportsIndex = 64
    ) -> tuple[BlockMap, ...]:
        """Draw who holds which block: a `BlockMap` of each store, in the order of ``groups``.

        Parameters
        ----------
        sequences : iterable of ModelSequence, or a mapping of names to them, optional
            Sequences of these stores to draw beside the maps, block by block.
        width : int, optional
            As for `PagedKvStore.block_map`.

        Returns
        -------
        tuple of BlockMap

        Raises
        ------
        TypeError, ValueError
            No sequences; sequences of other stores; a width out of range.
        """
        each = self._caches_of(sequences)
        return tuple([store.block_map(caches, width=width) for store, caches in zip(self.stores, each, strict=True)])

    def check(self, sequences: Iterable[_HasCaches] = ()) -> None:
        """Raise `PagedKvError` if the books of a store do not balance. Walks over every block.

        Parameters
        ----------
        sequences : iterable of ModelSequence, optional
            Sequences of these stores: each of their blocks must be held, and by at least as many
            as name it among them.

        Raises
        ------
        PagedKvError
            Says which block is wrong, and how.
        TypeError, ValueError
            No sequences; sequences of other stores.
        """
        for store, caches in zip(self.stores, self._caches_of(sequences), strict=True):
            store.check(caches.values())

    def _caches_of(self, sequences: object) -> list[dict[Any, PagedKvCache]]:
        """The caches of some sequences, store by store and by their names."""
        if isinstance(sequences, Mapping):
            named = dict(sequences)
        elif isinstance(sequences, Iterable):
            named = dict(enumerate(sequences))
        else:
            raise TypeError(f"sequences: expected several ModelSequence, got {type(sequences).__name__}")
        for name, sequence in named.items():
            caches = getattr(sequence, "caches", None)
            if not isinstance(caches, tuple):
                raise TypeError(f"sequences[{name!r}]: expected a ModelSequence, got {type(sequence).__name__}")
            if len(caches) != len(self.stores):
                raise ValueError(f"sequences[{name!r}]: expected one of {self!r}, got {sequence!r}")
        return [{name: sequence.caches[g] for name, sequence in named.items()} for g in range(len(self.stores))]

    def __repr__(self) -> str:
        groups = ", ".join(f"{len(group.layers)} layers of window {group.window}" for group in self.groups)
        return f"{type(self).__name__}({groups}; {self.free_block_count} of {self.total_blocks} blocks free)"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__}: cannot be copied or pickled, sequences hold its blocks by id")
