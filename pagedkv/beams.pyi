from collections.abc import Iterable
from typing import SupportsIndex

from pagedkv._arrays import _Ints
from pagedkv._groups import _Groups, _Sequence
from pagedkv.sequence import PagedKvCache
from pagedkv.store import PagedKvStore

def reorder(
    store: PagedKvStore | _Groups,
    caches: Iterable[PagedKvCache | _Sequence],
    parents: Iterable[SupportsIndex] | _Ints,
) -> None: ...
