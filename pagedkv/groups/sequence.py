"""A sequence of a model: a cache in every store."""

from __future__ import annotations

import sys
from typing import Any, NoReturn, SupportsIndex

from pagedkv._arrays import as_size
from pagedkv._batch import drop_before_all, release_all, reserve_all, truncate_all
from pagedkv._keys import as_count
from pagedkv._windows import growth
from pagedkv.contiguous import KvCache
from pagedkv.groups.stores import ModelStores
from pagedkv.sequence import PagedKvCache


class ModelSequence:
    """The K/V of one sequence: a `PagedKvCache` in every store of a model. All of them change, or none does.

    Parameters
    ----------
    stores : ModelStores
        Those of the model.
    caches : list or tuple of PagedKvCache, optional
        One for each store, in the order of ``stores.groups``; new ones without it.

    Attributes
    ----------
    stores : ModelStores
        As given.
    caches : tuple of PagedKvCache
        One for each store.

    Raises
    ------
    TypeError, ValueError
        No stores, something else than caches, or not as many.

    Notes
    -----
    `copy.copy` and `copy.deepcopy` do what `clone` does. It grows by `pagedkv.Step`.

    Threads: belongs to one thread at a time, as its caches do.

    Examples
    --------
    >>> import numpy as np, pagedkv
    >>> from pagedkv import LayerShape, ModelSequence, ModelStores
    >>> stores = ModelStores([LayerShape(None, 1, 4), LayerShape(8, 1, 4)], total_blocks=8)
    >>> sequence, rows = ModelSequence(stores), np.ones((3, 1, 4), np.float32)
    >>> with pagedkv.Step(stores, sequence, 3) as step:
    ...     for layer in range(stores.n_layers):
    ...         step.write(layer, rows, rows)
    ...         attended = step.attend(layer, rows)
    >>> sequence.seq_len, len(sequence.caches)
    (3, 2)
    """

    def __init__(self, stores: ModelStores, caches: list[PagedKvCache] | tuple[PagedKvCache, ...] = ()) -> None:
        if not isinstance(stores, ModelStores):
            raise TypeError(f"stores: expected a ModelStores, got {type(stores).__name__}")
        if not isinstance(caches, (list, tuple)):
            raise TypeError(f"caches: expected a list of PagedKvCache, got {type(caches).__name__}")
        self.stores = stores
        self.caches = tuple(caches) or tuple([PagedKvCache() for _ in stores.stores])
        if len(self.caches) != len(stores.stores):
            raise ValueError(f"caches: expected {len(stores.stores)}, one for each store, got {len(self.caches)}")
        for number, cache in enumerate(self.caches):
            if not isinstance(cache, PagedKvCache):
                raise TypeError(f"caches[{number}]: expected a PagedKvCache, got {type(cache).__name__}")

    # --- what it is ---

    @property
    def seq_len(self) -> int:
        """Positions whose K/V is there."""
        return self.caches[0].seq_len

    @property
    def capacity(self) -> int:
        """Positions that fit into the blocks held in every store, counted from position 0."""
        return min([cache.capacity for cache in self.caches])

    @property
    def first_position(self) -> int:
        """The first position that can still be read in all layers; above 0 after `drop_unneeded`."""
        return max([cache.first_position for cache in self.caches])

    def __repr__(self) -> str:
        n_blocks = [int((cache.block_table >= 0).sum()) for cache in self.caches]
        return f"{type(self).__name__}(seq_len={self.seq_len}, blocks={n_blocks})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("ModelSequence: cannot be pickled, it holds blocks of stores by id")

    # --- growing ---

    def blocks_needed_for(self, n_new: SupportsIndex) -> tuple[int, ...]:
        """How many blocks ``n_new`` more positions would take from each store, as `PagedKvCache.blocks_needed_for`.

        Parameters
        ----------
        n_new : int
            Positions, 0 or more.

        Returns
        -------
        tuple of int
            One for each store.

        Raises
        ------
        TypeError, ValueError, RuntimeError
            No number of positions; in use by a running call that writes.
        """
        each = zip(self.stores.stores, self.caches, strict=True)
        return tuple([cache.blocks_needed_for(store, n_new) for store, cache in each])

    def reserve(self, n_new: SupportsIndex, *, chunk: SupportsIndex | None = None) -> None:
        """Take the blocks of so many positions in every store, or none.

        Parameters
        ----------
        n_new : int
            Positions beyond ``seq_len``.
        chunk : int, optional
            Who grows by that many at a time and drops what is left behind needs no more than a window and a chunk
            where there is a window.

        Raises
        ------
        PagedStoreExhausted
            They are not free now. Nothing was changed.
        TypeError, ValueError, RuntimeError
            No numbers; a ``chunk`` below 1; in use by a running call.
        """
        n = as_count(n_new, "n_new")
        piece = None if chunk is None else as_size(chunk, "chunk", 1, sys.maxsize)
        size, length = self.stores.block_size, self.seq_len
        growths = []
        # No comprehension: CPython 3.11 loses `self` where there is no memory to begin one.
        for window in self.stores.windows:
            growths.append(growth(window, length, n, piece, size))
        reserve_all(self.stores.stores, self.caches, tuple(growths))

    def clone(self) -> ModelSequence:
        """A second sequence with the same positions. It costs no blocks."""
        return ModelSequence(self.stores, [cache.clone() for cache in self.caches])

    def __copy__(self) -> ModelSequence:
        return self.clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelSequence:
        return self.clone()

    # --- shrinking ---

    def can_truncate_to(self, n_positions: SupportsIndex) -> bool:
        """Whether all that a query from there on can see is still held.

        Parameters
        ----------
        n_positions : int
            Positions that are left.

        Returns
        -------
        bool

        Raises
        ------
        TypeError, ValueError
            No integer of at least 0.
        """
        n = as_count(n_positions, "n_positions")
        return n <= self.seq_len and all(
            [
                cache.first_position <= group.shape.first_needed(n)
                for group, cache in zip(self.stores.groups, self.caches, strict=True)
            ]
        )

    def truncate(self, n_positions: SupportsIndex) -> None:
        """Cut the caches that are longer, and give back the blocks past them, reserved ones too.

        Parameters
        ----------
        n_positions : int
            Positions that are left.

        Raises
        ------
        TypeError, ValueError, RuntimeError
            As for `PagedKvCache.truncate`. Nothing was changed.
        """
        truncate_all(self.caches, n_positions)

    def release_reserved(self) -> None:
        """Give back the blocks past the end."""
        truncate_all(self.caches, None)

    def drop_unneeded(self) -> None:
        """Give back what the windows have left behind."""
        n = self.seq_len
        drop_before_all(self.caches, tuple([group.shape.first_needed(n) for group in self.stores.groups]))

    def release(self) -> None:
        """Give every block back; the sequence is empty again."""
        release_all(self.caches)

    # --- reading ---

    def to_contiguous(
        self,
        layer: SupportsIndex,
        *,
        start: SupportsIndex = 0,
        stop: SupportsIndex | None = None,
        out: KvCache | None = None,
    ) -> KvCache:
        """Copy K/V of one layer, of all positions or a part, out of its store: `PagedKvCache.to_contiguous`.

        Parameters
        ----------
        layer : int
            By the model's number.
        start, stop, out : optional
            As for `PagedKvCache.to_contiguous`.

        Returns
        -------
        KvCache

        Raises
        ------
        IndexError, TypeError, ValueError, RuntimeError
            ``layer`` out of range; and as for `PagedKvCache.to_contiguous`.
        """
        number, index = self.stores.place_of(layer)
        cache, store = self.caches[number], self.stores.stores[number]
        return cache.to_contiguous(store, layer=index, start=start, stop=stop, out=out)
