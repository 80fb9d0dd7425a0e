"""What pagedkv raises beyond TypeError, ValueError, IndexError, RuntimeError and MemoryError."""

from __future__ import annotations


class PagedKvError(Exception):
    """Base of the library's own errors.

    It is raised itself where the books of a store do not balance: by `PagedKvStore.check` and `PrefixCache.check`,
    and where a table names a block that somebody else gave back.

    Parameters
    ----------
    *args
        The message, as for every exception.

    Examples
    --------
    >>> import pagedkv
    >>> try:
    ...     pagedkv.PagedKvStore(16, 4, n_kv_heads=2, head_dim=64).acquire(5)
    ... except pagedkv.PagedKvError as error:
    ...     print(error)
    5 blocks needed, 4 of 4 free (never, whatever is released)
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)


class _Exhausted(PagedKvError):
    """A request for blocks that cannot be met now. Nothing was changed."""

    def __init__(self, needed: int, free: int, total: int) -> None:
        super().__init__(needed, free, total)
        self.needed = needed
        self.free = free
        self.total = total


class PagedStoreExhausted(_Exhausted):
    """A store has fewer free blocks than a request needs. Nothing was changed.

    A store with a `PrefixCache` evicts before it raises this: then even ``free + evictable`` are fewer
    than ``needed``, and nothing was evicted.

    Attributes
    ----------
    needed : int
        Blocks that the request asked for now.
    free : int
        Blocks that were free.
    total : int
        Blocks of the store.
    held : int
        Blocks that the asking sequences hold already, and would keep.
    evictable : int
        Blocks that the store's prefix cache could have given up.
    can_ever_fit : bool
        Whether the request could be met if everyone else gave their blocks back: False means
        that waiting is of no use.

    Notes
    -----
    Threads: ``free`` and ``evictable`` those of the moment when it was raised.

    Examples
    --------
    >>> import pagedkv
    >>> store, cache = pagedkv.PagedKvStore(16, 4, n_kv_heads=2, head_dim=64), pagedkv.PagedKvCache()
    >>> ids = store.acquire(3)
    >>> try:
    ...     cache.reserve(store, 40)
    ... except pagedkv.PagedStoreExhausted as full:
    ...     print(full.needed, full.free, full.can_ever_fit)
    3 1 True
    """

    def __init__(self, needed: int, free: int, total: int, held: int = 0, evictable: int = 0) -> None:
        super().__init__(needed, free, total)
        self.args = (needed, free, total, held, evictable)
        self.held = held
        self.evictable = evictable

    @property
    def can_ever_fit(self) -> bool:
        """Whether the request could be met if everyone else gave their blocks back."""
        return self.needed + self.held <= self.total

    def __str__(self) -> str:
        when = "not now" if self.can_ever_fit else "never, whatever is released"
        evictable = f" and {self.evictable} evictable" if self.evictable else ""
        return f"{self.needed} blocks needed, {self.free} of {self.total} free{evictable} ({when})"


class KvPoolExhausted(_Exhausted):
    """A `KvBlockPool` has fewer free blocks than a `KvCache` needs. Nothing was changed.

    Attributes
    ----------
    needed, free, total : int
        Blocks asked for, free, and in the pool.

    Notes
    -----
    Threads: ``free`` that of the moment when it was raised.

    Examples
    --------
    >>> import pagedkv
    >>> pool = pagedkv.KvBlockPool(block_size=16, total_blocks=2)
    >>> try:
    ...     pagedkv.KvCache.with_pool(2, 64, pool, max_seq_len=40)
    ... except pagedkv.KvPoolExhausted as full:
    ...     print(full.needed, full.free, full.total)
    3 2 2
    """

    def __str__(self) -> str:
        return f"{self.needed} blocks needed, {self.free} of {self.total} free in the pool"
