from collections.abc import Iterable
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from pagedkv.sequence import PagedKvCache
from pagedkv.store import PagedKvStore

def reorder(
    store: PagedKvStore,
    caches: Iterable[PagedKvCache],
    parents: Iterable[SupportsIndex] | npt.NDArray[np.integer[Any]],
) -> None: ...
