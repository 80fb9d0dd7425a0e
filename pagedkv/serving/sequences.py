"""Sequences of a model, and the forward pass that makes them grow: a cache and a `Step` in every store."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn, SupportsIndex

import numpy.typing as npt

from pagedkv import PagedKvCache, Step
from pagedkv._arrays import as_size
from pagedkv._batch import truncate_all
from pagedkv._keys import as_count
from pagedkv.serving.stores import LayerGroup, ModelStores


def _each(method: Callable[..., object], *arguments: Iterable[object]) -> None:
    """The same for every store, as one call of compiled code: no interrupt comes between two stores."""
    deque(map(method, *arguments), maxlen=0)


def _check_stores(stores: object) -> None:
    if not isinstance(stores, ModelStores):
        raise TypeError(f"stores: expected a ModelStores, got {type(stores).__name__}")


@dataclass(eq=False)
class ModelSequence:
    """The K/V of one sequence: a `PagedKvCache` in every store of a model.

    Parameters
    ----------
    stores : ModelStores
        Those of the model.
    caches : list of PagedKvCache, optional
        One for each store, in the order of ``stores.groups``; new ones without it.

    Raises
    ------
    TypeError, ValueError
        No stores, something else than caches, or not as many.

    Notes
    -----
    `copy.copy` and `copy.deepcopy` do what `clone` does.

    Threads: belongs to one thread at a time, as its caches do.

    Examples
    --------
    >>> from pagedkv.serving import LayerShape, ModelSequence, ModelStores
    >>> stores = ModelStores([LayerShape(None, 1, 4), LayerShape(8, 1, 4)], total_blocks=8)
    >>> sequence = ModelSequence(stores)
    >>> sequence.seq_len, len(sequence.caches)
    (0, 2)
    """

    stores: ModelStores
    caches: list[PagedKvCache] = field(default_factory=list)

    def __post_init__(self) -> None:
        _check_stores(self.stores)
        if not isinstance(self.caches, (list, tuple)):
            raise TypeError(f"caches: expected a list of PagedKvCache, got {type(self.caches).__name__}")
        if not self.caches:
            self.caches = [PagedKvCache() for _ in self.stores.groups]
        if len(self.caches) != len(self.stores.groups):
            raise ValueError(f"caches: expected {len(self.stores.groups)}, one for each store, got {len(self.caches)}")
        for number, cache in enumerate(self.caches):
            if not isinstance(cache, PagedKvCache):
                raise TypeError(f"caches[{number}]: expected a PagedKvCache, got {type(cache).__name__}")

    @property
    def seq_len(self) -> int:
        """Positions whose K/V is there."""
        return self.caches[0].seq_len

    def clone(self) -> ModelSequence:
        """A second sequence with the same positions. It costs no blocks."""
        return ModelSequence(self.stores, [cache.clone() for cache in self.caches])

    def __copy__(self) -> ModelSequence:
        return self.clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelSequence:
        return self.clone()

    def __reduce__(self) -> NoReturn:
        raise TypeError("ModelSequence: cannot be pickled, it holds blocks of stores by id")

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
            cache.first_position <= group.shape.first_needed(n) for group, cache in self._places()
        )

    def truncate(self, n_positions: SupportsIndex) -> None:
        """Cuts the caches that are longer.

        Parameters
        ----------
        n_positions : int
            Positions that are left.

        Raises
        ------
        TypeError, ValueError, RuntimeError
            As for `PagedKvCache.truncate`. Nothing was changed.
        """
        truncate_all(tuple(self.caches), n_positions)

    def reserve(self, n_new: SupportsIndex, *, chunk: SupportsIndex | None = None) -> None:
        """Takes the blocks of so many positions in every store, or none.

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
            They are not free now. The sequence holds no reserved blocks.
        TypeError, ValueError
            No numbers; a ``chunk`` below 1.
        """
        n = as_count(n_new, "n_new")
        piece = None if chunk is None else as_size(chunk, "chunk", 1, sys.maxsize)
        try:
            for group, cache in self._places():
                cache.reserve(group.store, n if piece is None else group._growth(cache.seq_len, n, piece))
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
            if group.shape.window is not None:
                cache.drop_before(group.store, group.shape.first_needed(cache.seq_len))

    def release(self) -> None:
        """Gives every block back."""
        _each(PagedKvCache.release, self.caches, self.stores._stores)

    def _places(self) -> Iterator[tuple[LayerGroup, PagedKvCache]]:
        return zip(self.stores.groups, self.caches, strict=True)


class ForwardPass:
    """One `Step` in every store of a model: all layers of all sequences advance, or none does.

    It is open from its construction to `commit` or `rollback`; as a context manager it calls one of them.

    Parameters
    ----------
    stores : ModelStores
        Those of the model.
    sequences : iterable of ModelSequence
        The batch, in the order of its rows; each once.
    query_lens : int, or an iterable or integer array of them ``[len(sequences)]``
        New positions of each. One number stands for all.

    Attributes
    ----------
    query_lens : tuple of int
        One for each sequence.
    n_rows : int
        New positions of all sequences together: ``sum(query_lens)``.
    written : set of int
        The layers that are written.
    is_open : bool
        Neither committed nor rolled back.

    Raises
    ------
    PagedStoreExhausted
        A store has too few free blocks. Nothing was changed.
    TypeError, ValueError, RuntimeError
        As for `Step`; a sequence of other stores.

    Notes
    -----
    Threads: as a `Step`. While it is open, other uses of its sequences raise RuntimeError.

    Examples
    --------
    >>> import numpy as np
    >>> from pagedkv.serving import ForwardPass, LayerShape, ModelSequence, ModelStores
    >>> stores = ModelStores([LayerShape(None, 1, 4), LayerShape(8, 1, 4)], total_blocks=8)
    >>> sequence, rows = ModelSequence(stores), np.ones((3, 1, 4), np.float32)
    >>> with ForwardPass(stores, [sequence], [3]) as running:
    ...     for layer in range(stores.n_layers):
    ...         running.write(layer, rows, rows)
    ...         attended = running.attend(layer, rows)
    >>> sequence.seq_len
    3
    """

    is_open = False  # until it is: an interrupt may come before
    _steps: tuple[Step, ...] = ()
    _before: tuple[tuple[ModelSequence, int], ...] = ()

    def __init__(
        self,
        stores: ModelStores,
        sequences: Iterable[ModelSequence],
        query_lens: SupportsIndex | Iterable[SupportsIndex] | npt.NDArray[Any],
    ) -> None:
        _check_stores(stores)
        if not isinstance(sequences, Iterable):
            raise TypeError(f"sequences: expected several ModelSequence, got {type(sequences).__name__}")
        self.stores = stores
        self.sequences = tuple(sequences)
        for number, sequence in enumerate(self.sequences):
            if not isinstance(sequence, ModelSequence):
                raise TypeError(f"sequences[{number}]: expected a ModelSequence, got {type(sequence).__name__}")
            if sequence.stores is not stores:
                raise ValueError(f"sequences[{number}]: expected one of {stores!r}, got one of {sequence.stores!r}")
        if len(set(self.sequences)) < len(self.sequences):
            raise ValueError("sequences: expected each once, got one of them twice")
        lens: Any = tuple(query_lens) if isinstance(query_lens, Iterator) else query_lens
        self._before = tuple([(sequence, sequence.seq_len) for sequence in self.sequences])
        self._steps = tuple(
            [
                Step(group.store, [sequence.caches[number] for sequence in self.sequences], lens)
                for number, group in enumerate(stores.groups)
            ]
        )
        self.query_lens = self._steps[0].query_lens
        self.n_rows = self._steps[0].n_rows
        self.written: set[int] = set()
        try:
            self.is_open = True
            _each(Step.__enter__, self._steps)
        except BaseException:
            self.rollback()
            raise

    def __enter__(self) -> ForwardPass:
        return self

    def __exit__(self, error: object, value: object, traceback: object) -> None:
        """Commits, or rolls back after an exception; nothing if that was done before."""
        if self.is_open:
            if error is None:
                self.commit()
            else:
                self.rollback()

    @property
    def is_complete(self) -> bool:
        """Whether every layer has been written."""
        return len(self.written) == self.stores.n_layers

    def write(self, layer: int, k: npt.NDArray[Any], v: npt.NDArray[Any]) -> None:
        """Puts the new rows of one layer into its store, as `Step.write`.

        Parameters
        ----------
        layer : int
            By the model's number.
        k, v : array, float32
            ``[n_rows, n_kv_heads, head_dim]``, or flat.

        Raises
        ------
        IndexError, TypeError, ValueError, RuntimeError
            As for `Step.write`.
        """
        number, index = self.stores.place_of(layer)
        self._steps[number].write(index, k, v)
        self.written.add(layer)

    def attend(self, layer: int, q: npt.NDArray[Any], **options: Any) -> npt.NDArray[Any]:
        """Attention of the new rows of one layer, as `Step.attend`.

        Parameters
        ----------
        layer : int
            By the model's number.
        q : array, float32
            ``[n_rows, n_q_heads, head_dim]``.
        **options
            As for `Step.attend`. ``window`` is that of the layer's shape unless another is given.

        Returns
        -------
        out : float32 array ``[n_rows, n_q_heads, v_head_dim]``
            Or ``(out, lse)`` with ``return_lse``.

        Raises
        ------
        IndexError, TypeError, ValueError, RuntimeError
            As for `Step.attend`.
        """
        number, index = self.stores.place_of(layer)
        options.setdefault("window", self.stores.groups[number].window)
        attended: npt.NDArray[Any] = self._steps[number].attend(index, q, **options)
        return attended

    def commit(self) -> None:
        """Ends the pass: every sequence has grown by its query length.

        Raises
        ------
        RuntimeError
            A layer was not written, and everything was rolled back; the pass has ended before.
        """
        if not self.is_open:
            raise RuntimeError("the forward pass has ended")
        if self.n_rows and not self.is_complete:
            self.rollback()
            missing = sorted(set(range(self.stores.n_layers)) - self.written)
            raise RuntimeError(f"the forward pass did not reach layers {missing}; it was taken back")
        try:
            _each(Step.commit, self._steps)
            self.is_open = False
        except BaseException:
            self._take_back()
            raise

    def rollback(self) -> None:
        """Ends the pass, and leaves every sequence as it was. One that has ended stays as it is."""
        if self.is_open:
            self._take_back()

    def _take_back(self) -> None:
        """Undoes the pass, also one that is committed as long as nothing came after it."""
        self.is_open = False
        for step in self._steps:
            step.__exit__(GeneratorExit, None, None)  # one that is open is rolled back, others take no notice
        for sequence, length in self._before:
            sequence.truncate(length)
