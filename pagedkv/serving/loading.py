"""What a scheduler asks of a tier behind its prefix cache: `pagedkv.tiers.TieredPrefixes` has it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pagedkv import ModelStores, PrefixCache


class Came(Protocol):
    """What has come of a prompt."""

    @property
    def tokens(self) -> int: ...


class Coming(Protocol):
    """A prompt's beginning on its way to memory."""

    @property
    def is_done(self) -> bool: ...
    def wait(self) -> Came: ...
    def cancel(self) -> None: ...


class Tiered(Protocol):
    """A prefix cache with a tier behind it."""

    @property
    def prefixes(self) -> PrefixCache: ...
    @property
    def is_busy(self) -> bool: ...
    def load(self, tokens: npt.NDArray[np.int64], *, namespace: bytes | None) -> Coming: ...
    def store(self, tokens: npt.NDArray[np.int64], *, namespace: bytes | None) -> None: ...


def check_tiered(tiered: Any, stores: ModelStores) -> None:
    for name in ("load", "store"):
        if not callable(getattr(tiered, name, None)):
            raise TypeError(f"tiered: expected a TieredPrefixes or None, got {type(tiered).__name__}")
    if getattr(tiered, "prefixes", None) is not stores.prefixes:
        raise ValueError("tiered: expected one of the prefixes of these stores, got one of others")
