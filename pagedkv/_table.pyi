from typing_extensions import disjoint_base

from pagedkv.store import PagedKvStore

@disjoint_base
class BlockTable:
    @property
    def store(self) -> PagedKvStore | None: ...
