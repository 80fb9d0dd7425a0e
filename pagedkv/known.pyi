from collections.abc import Iterator
from typing import final

from pagedkv.stats import KnownBlock

@final
class Picture: ...

@final
class Walk:
    def __iter__(self) -> Iterator[KnownBlock]: ...
    def __next__(self) -> KnownBlock: ...
