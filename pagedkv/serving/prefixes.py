"""What is known of token ids in all stores of a model."""

from __future__ import annotations

from collections.abc import Iterable
from types import EllipsisType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pagedkv import PagedKvStore, PrefixCache

if TYPE_CHECKING:
    from pagedkv.serving.sequences import ModelSequence


class ModelPrefixes:
    """A `PrefixCache` in every store of a model. A beginning is known as far as all of them know it.

    Of `ModelStores`, which makes it.

    Parameters
    ----------
    stores : iterable of PagedKvStore

    Attributes
    ----------
    caches : tuple of PrefixCache
        One for each store, in the order of ``ModelStores.groups``.

    Notes
    -----
    K and V depend on the model's weights: models, adapters and versions that share the stores need a namespace each.

    Threads: as a `PrefixCache`.

    Examples
    --------
    >>> import numpy as np
    >>> from pagedkv.serving import ForwardPass, LayerShape, ModelSequence, ModelStores
    >>> stores = ModelStores([LayerShape(None, 1, 4)], total_blocks=8, block_size=2)
    >>> first, second = ModelSequence(stores), ModelSequence(stores)
    >>> running = ForwardPass(stores, [first], [3])
    >>> running.write(0, *np.ones((2, 3, 4), np.float32))
    >>> running.commit()
    >>> stores.prefixes.insert([5, 6, 7], first)
    >>> stores.prefixes.attach(second, [5, 6, 9]), second.seq_len
    (2, 2)
    """

    def __init__(self, stores: Iterable[PagedKvStore]) -> None:
        self.caches = tuple(PrefixCache(store) for store in stores)

    def match(self, tokens: npt.ArrayLike, *, namespace: bytes | None = None) -> int:
        """How many of these tokens' positions `attach` would reuse; one at least is left to compute."""
        return min(cache.match(tokens, namespace=namespace) for cache in self.caches)

    def attach(self, sequence: ModelSequence, tokens: npt.ArrayLike, *, namespace: bytes | None = None) -> int:
        """Start an empty sequence on the longest beginning of ``tokens`` that is known in all stores.

        Arguments and errors as for `PrefixCache.attach`; returns the number of positions that are reused.
        """
        ids = np.asarray(tokens)
        try:
            n_reused = min(
                prefix.attach(cache, ids, namespace=namespace)
                for prefix, cache in zip(self.caches, sequence.caches, strict=True)
            )
            sequence.truncate(n_reused)
        except BaseException:
            sequence.release()
            raise
        return n_reused

    def insert(self, tokens: npt.ArrayLike, sequence: ModelSequence, *, namespace: bytes | None = None) -> None:
        """Remember the whole blocks of a sequence whose tokens these are.

        To be called before `ModelSequence.drop_unneeded`: what a window has dropped cannot be remembered.
        Arguments and errors as for `PrefixCache.insert`.
        """
        ids = np.asarray(tokens)
        for prefix, cache in zip(self.caches, sequence.caches, strict=True):
            prefix.insert(ids, cache, namespace=namespace)

    def clear(self, *, namespace: bytes | EllipsisType | None = ...) -> None:
        """Forget one namespace, or without it all of them."""
        for cache in self.caches:
            cache.clear(namespace=namespace)
