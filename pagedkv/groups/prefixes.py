"""What is known of token ids in all stores of a model."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import EllipsisType
from typing import Protocol, SupportsIndex

import numpy as np
import numpy.typing as npt

from pagedkv._arrays import as_size
from pagedkv._keys import Tokens, as_namespace, as_token_ids, as_ttl
from pagedkv.prefix import PrefixCache, PrefixHandle, attach_all, insert_all
from pagedkv.sequence import PagedKvCache
from pagedkv.stats import PrefixStats


class HasCaches(Protocol):
    """A `ModelSequence`, which is made of stores that have these prefixes: they cannot import it."""

    @property
    def caches(self) -> tuple[PagedKvCache, ...]: ...


class ModelPrefixes:
    """A `PrefixCache` in every store of a model. A beginning is known as far as all of them know it.

    `ModelStores` makes it.

    Parameters
    ----------
    caches : iterable of PrefixCache
        One for each store of the model.

    Attributes
    ----------
    caches : tuple of PrefixCache
        One for each store, in the order of ``ModelStores.groups``.

    Notes
    -----
    K and V depend on the model's weights: models, adapters and versions that share the stores need a namespace each.

    All stores change or none does: whatever raises has changed nothing.

    Threads: as a `PrefixCache`.

    Examples
    --------
    >>> import numpy as np, pagedkv
    >>> from pagedkv import LayerShape, ModelSequence, ModelStores
    >>> stores = ModelStores([LayerShape(None, 1, 4)], total_blocks=8, block_size=2)
    >>> first, second = ModelSequence(stores), ModelSequence(stores)
    >>> with pagedkv.Step(stores, first, 3) as step:
    ...     step.write(0, *np.ones((2, 3, 4), np.float32))
    >>> stores.prefixes.insert([5, 6, 7], first)
    1
    >>> stores.prefixes.attach(second, [5, 6, 9]), second.seq_len
    (2, 2)
    """

    def __init__(self, caches: Iterable[PrefixCache]) -> None:
        self.caches = tuple(caches)

    # --- reading ---

    def match(self, tokens: Tokens, *, namespace: bytes | None = None) -> int:
        """How many of these tokens' positions `attach` would reuse. Changes nothing, and is no use of them.

        Parameters
        ----------
        tokens : list, tuple, range or integer array ``[n]``
            A prompt's token ids, 0 to 2**63 - 1.
        namespace : bytes, optional
            Where to look. None is one of its own.

        Returns
        -------
        int
            0 to ``n - 1``: one token at least is left to compute, for its logits.

        Raises
        ------
        TypeError, ValueError
            ``tokens`` or ``namespace`` of a wrong kind.
        """
        return self._match(as_token_ids(tokens), as_namespace(namespace))

    def _match(self, ids: npt.NDArray[np.int64], name: bytes | None) -> int:
        n, before = len(ids) - 1, -1
        while n != before:  # a window may need more for a shorter beginning than for a longer one
            before = n
            for cache in self.caches:
                n = cache._match(ids, n, name)
        return max(n, 0)

    def attach(self, sequence: HasCaches, tokens: Tokens, *, namespace: bytes | None = None) -> int:
        """Start an empty sequence on the longest beginning of ``tokens`` that is known in all stores.

        Parameters
        ----------
        sequence : ModelSequence
            Holds no blocks. It will have ``seq_len`` positions: what is returned.
        tokens : list, tuple, range or integer array ``[n]``
            A prompt's token ids.
        namespace : bytes, optional
            Where to look. None is one of its own.

        Returns
        -------
        int
            Positions reused, 0 to ``n - 1``.

        Raises
        ------
        TypeError, ValueError, RuntimeError
            As for `PrefixCache.attach`; a sequence of other stores. Nothing was changed, and no hit is counted.
        """
        ids, name, caches = as_token_ids(tokens), as_namespace(namespace), self._caches_of(sequence)
        if any(cache.capacity for cache in caches):
            raise ValueError(f"sequence: expected one that holds no blocks, got {sequence!r}")
        return attach_all(self.caches, caches, ids, name)

    def stats(self) -> PrefixStats:
        """Counters as a `PrefixStats`: blocks of all stores together, tokens and namespaces once."""
        held, evictable, names, hit, missed, inserted, evicted = zip(*(c.stats() for c in self.caches), strict=True)
        return PrefixStats(sum(held), sum(evictable), max(names), max(hit), max(missed), sum(inserted), sum(evicted))

    def check(self) -> None:
        """Raise `PagedKvError` if the books of a store do not balance. Walks over everything."""
        for cache in self.caches:
            cache.check()

    # --- changing ---

    def insert(
        self,
        tokens: Tokens,
        sequence: HasCaches,
        *,
        namespace: bytes | None = None,
        priority: SupportsIndex = 0,
        ttl: float | None = None,
        handles: Sequence[PrefixHandle] | None = None,
    ) -> int:
        """Remember the whole blocks of a sequence whose tokens these are.

        Called before ``sequence.drop_unneeded()``, it remembers what the windows are about to leave behind too.

        Parameters
        ----------
        tokens : list, tuple, range or integer array ``[n]``
            What the sequence's positions were computed from.
        sequence : ModelSequence
            It may be running, and go on.
        namespace : bytes, optional
            Where they can be found again. None is one of its own.
        priority, ttl : optional
            As for `PrefixCache.insert`.
        handles : sequence of PrefixHandle, optional
            One for each store, of a sequence that grows and is inserted again and again: only new tokens cost time.

        Returns
        -------
        int
            Blocks that were new under these tokens, in all stores together.

        Raises
        ------
        TypeError, ValueError
            As for `PrefixCache.insert`; a sequence of other stores. Nothing is known that was not before.
        """
        name, caches = as_namespace(namespace), self._caches_of(sequence)
        rank, seconds = as_size(priority, "priority", -sys.maxsize, sys.maxsize), as_ttl(ttl)
        marks = (None,) * len(self.caches) if handles is None else tuple(handles)
        if len(marks) != len(self.caches):
            raise ValueError(f"handles: expected {len(self.caches)}, one for each store, got {len(marks)}")
        return insert_all(self.caches, caches, tokens, name, rank, seconds, marks)

    def forget(self, tokens: Tokens, *, namespace: bytes | None = None, start: SupportsIndex = 0) -> int:
        """Forget the blocks of these tokens, and all that continues them: K/V that turned out to be wrong.

        Parameters
        ----------
        tokens : list, tuple, range or integer array ``[n]``
            A prompt's token ids, of which whole blocks are known.
        namespace : bytes, optional
            Where they are known. None is one of its own.
        start : int, optional
            The first position that is to be forgotten: with it the whole block that holds it.

        Returns
        -------
        int
            How many blocks have left the prefix caches, of all stores together.

        Raises
        ------
        TypeError, ValueError
            As for `PrefixCache.forget`.
        """
        ids = as_token_ids(tokens)
        return sum([cache.forget(ids, namespace=namespace, start=start) for cache in self.caches])

    def clear(self, *, namespace: bytes | EllipsisType | None = ...) -> int:
        """Forget one namespace, or all of them. What sequences hold stays theirs.

        Parameters
        ----------
        namespace : bytes or None, optional
            All of them without it; None is one of its own.

        Returns
        -------
        int
            How many blocks have left the prefix caches, of all stores together.

        Raises
        ------
        TypeError
            ``namespace`` is no bytes and not None.
        """
        return sum([cache.clear(namespace=namespace) for cache in self.caches])

    def _caches_of(self, sequence: HasCaches) -> tuple[PagedKvCache, ...]:
        """A sequence's caches, in the order of these."""
        prefixes = getattr(getattr(sequence, "stores", None), "prefixes", None)
        if not isinstance(prefixes, ModelPrefixes) or not hasattr(sequence, "caches"):
            raise TypeError(f"sequence: expected a ModelSequence, got {type(sequence).__name__}")
        if prefixes.caches != self.caches:
            raise ValueError(f"sequence: expected one of these stores, got {sequence!r}")
        return sequence.caches
