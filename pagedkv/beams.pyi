from collections.abc import Iterable
from typing import SupportsIndex

from pagedkv._arrays import _Ints
from pagedkv.sequence import PagedKvCache
from pagedkv.store import PagedKvStore

def reorder(
    store: PagedKvStore,
    caches: Iterable[PagedKvCache],
    parents: Iterable[SupportsIndex] | _Ints,
) -> None: ...
