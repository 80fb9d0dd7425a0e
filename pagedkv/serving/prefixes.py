"""What is known of token ids in all stores of a model."""

from __future__ import annotations

from collections.abc import Iterable
from types import EllipsisType
from typing import TYPE_CHECKING

from pagedkv import PrefixCache
from pagedkv._keys import as_namespace, as_token_ids

if TYPE_CHECKING:
    from pagedkv._keys import Tokens
    from pagedkv.serving.sequences import ModelSequence


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

    def __init__(self, caches: Iterable[PrefixCache]) -> None:
        self.caches = tuple(caches)

    def match(self, tokens: Tokens, *, namespace: bytes | None = None) -> int:
        """How many of these tokens' positions `attach` would reuse; one at least is left to compute.

        Parameters
        ----------
        tokens : list, tuple, range or integer array ``[n]``
            A prompt's token ids, 0 to 2**63 - 1.
        namespace : bytes, optional
            Where to look. None is one of its own.

        Returns
        -------
        int
            0 to ``n - 1``.

        Raises
        ------
        TypeError, ValueError
            ``tokens`` or ``namespace`` of a wrong kind.
        """
        ids = as_token_ids(tokens)
        return min(cache.match(ids, namespace=namespace) for cache in self.caches)

    def attach(self, sequence: ModelSequence, tokens: Tokens, *, namespace: bytes | None = None) -> int:
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
            As for `PrefixCache.attach`. Nothing was changed.
        """
        ids, name = as_token_ids(tokens), as_namespace(namespace)
        if any(cache.capacity for cache in sequence.caches):
            raise ValueError(f"sequence: expected one that holds no blocks, got {sequence.caches}")
        # What one knows beyond the others is not taken: cutting it inside a block would leave that block shared, and
        # its copy would need one more than the sequence has room for.
        n_known = self.match(ids, namespace=name)
        try:
            n_reused = min(
                prefix._attach(cache, ids, n_known, name)
                for prefix, cache in zip(self.caches, sequence.caches, strict=True)
            )
            sequence.truncate(n_reused)
        except BaseException:
            sequence.release()
            raise
        return n_reused

    def insert(self, tokens: Tokens, sequence: ModelSequence, *, namespace: bytes | None = None) -> None:
        """Remember the whole blocks of a sequence whose tokens these are.

        To be called before ``sequence.drop_unneeded()``: what a window has dropped cannot be remembered.

        Parameters
        ----------
        tokens : list, tuple, range or integer array ``[n]``
            What the sequence's positions were computed from.
        sequence : ModelSequence
            It may be running, and go on.
        namespace : bytes, optional
            Where they can be found again. None is one of its own.

        Raises
        ------
        TypeError, ValueError
            As for `PrefixCache.insert`.
        """
        ids = as_token_ids(tokens)
        for prefix, cache in zip(self.caches, sequence.caches, strict=True):
            prefix.insert(ids, cache, namespace=namespace)

    def clear(self, *, namespace: bytes | EllipsisType | None = ...) -> None:
        """Forget one namespace, or all of them. What sequences hold stays theirs.

        Parameters
        ----------
        namespace : bytes or None, optional
            All of them without it; None is one of its own.

        Raises
        ------
        TypeError
            ``namespace`` is no bytes and not None.
        """
        for cache in self.caches:
            cache.clear(namespace=namespace)
