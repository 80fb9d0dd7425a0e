"""The tokens of a request: a list for its user, an array for the books."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex, overload

import numpy as np
import numpy.typing as npt


class TokenIds(Sequence[int]):
    """Token ids that grow at the end: to be read like a list, without being one. `Scheduler.submit` makes it.

    An item is an int and a slice a list. ``numpy.asarray`` gives all ids as they lie there, without a copy.

    Parameters
    ----------
    ids : int64 array ``[n]``
        What it begins with. It is copied.

    Notes
    -----
    Threads: may be read by any thread while its scheduler goes on.

    Examples
    --------
    >>> import numpy as np
    >>> from pagedkv.serving import TokenIds
    >>> tokens = TokenIds(np.array([5, 6, 7]))
    >>> tokens, len(tokens), tokens[-1], tokens[1:], tokens == [5, 6, 7]
    ([5, 6, 7], 3, 7, [6, 7], True)
    """

    def __init__(self, ids: npt.NDArray[np.int64]) -> None:
        self._ids = np.array(ids, np.int64)  # the first `_n` are tokens, what follows is room
        self._n = len(self._ids)

    def __len__(self) -> int:
        return self._n

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: SupportsIndex | slice) -> int | list[int]:
        found: int | list[int] = self._ids[: self._n][index].tolist()
        return found

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        ids = self._ids[: self._n]
        if copy:
            return np.array(ids, dtype)
        ids.flags.writeable = False
        return np.asarray(ids, dtype)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return np.array_equal(self, other)
        return self[:] == list(other) if isinstance(other, (list, tuple, range)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self[:])

    def _put(self, at: int, token: int) -> None:
        """Writes the token that follows the first `at`. A second time it changes nothing."""
        if at == len(self._ids):
            ids = np.empty(2 * at + 16, np.int64)
            ids[:at] = self._ids
            self._ids = ids
        self._ids[at] = token
        self._n = at + 1  # last: who reads meanwhile finds what is there
