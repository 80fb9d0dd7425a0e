from collections.abc import Sequence
from typing import Protocol

from pagedkv.sequence import PagedKvCache
from pagedkv.store import PagedKvStore

class _Groups(Protocol):
    @property
    def stores(self) -> tuple[PagedKvStore, ...]: ...
    @property
    def places(self) -> Sequence[tuple[int, int]]: ...
    @property
    def windows(self) -> Sequence[int | None]: ...

class _Sequence(Protocol):
    @property
    def caches(self) -> tuple[PagedKvCache, ...]: ...
