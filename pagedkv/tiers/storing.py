"""From memory to a tier: what is known of prompts, on a thread, when its turn comes."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from pagedkv.tiers.counts import Counts
from pagedkv.tiers.keys import KeySpace
from pagedkv.tiers.prompts import GroupRecords, Ids
from pagedkv.tiers.tier import Tier
from pagedkv.tiers.worker import Patience, Worker

_MOST_COUNTED = 2**16  # blocks of which is known how often they were asked for


class _Known(NamedTuple):
    """A beginning that is known, or that was asked for."""

    ids: Ids
    namespace: bytes | None
    was_asked_for: bool


class Storer:
    """The thread that stores, what waits for it, and how often what was asked for.

    `known` and `records` are as those of the `Loader`; `blocks` is what makes a namespace's keys of single blocks.
    """

    def __init__(
        self,
        tier: Tier,
        known: Callable[[Ids, bytes | None], int],
        records: Callable[[Ids, bytes | None], Sequence[GroupRecords]],
        blocks: Callable[[bytes | None], KeySpace],
        counts: Counts,
        most: int,
        from_use: int,
    ) -> None:
        self._tier, self._known, self._records, self._blocks, self._counts = tier, known, records, blocks, counts
        self._from_use = from_use
        self._uses: OrderedDict[bytes, int] = OrderedDict()
        self._goes_on = True
        self._worker: Worker[_Known] = Worker(self._do, most, "pagedkv-store")
        self._patience = Patience()

    def forget(self) -> None:
        """As if nothing had been begun."""
        self._worker.forget()
        self._patience = Patience()

    def is_moving(self, seconds: float) -> bool:
        """Whether it stores, and has stored something in the last so many seconds."""
        return self._worker.is_moving(seconds)

    @property
    def n_waiting(self) -> int:
        return self._worker.n_waiting + (self._worker.doing is not None)

    def asked_for(self, ids: Ids, name: bytes | None) -> None:
        """Count it, if it matters."""
        if self._from_use > 1:
            self._put(_Known(ids, name, True))

    def keep(self, ids: Ids, name: bytes | None) -> None:
        """Store what is known of these tokens, when its turn comes."""
        self._put(_Known(ids, name, False))

    def _put(self, known: _Known) -> None:
        dropped = self._worker.put(known)
        if dropped is not None and not dropped.was_asked_for:
            self._counts.add(dropped=1)

    def end(self, seconds: float) -> bool:
        """Store what waits, for so long at most; whether all was. Then no more is stored than what is being written."""
        is_stored = self.wait(seconds)
        self._goes_on = False
        self._counts.add(dropped=sum(not known.was_asked_for for known in self._worker.drop_all()))
        return is_stored

    def wait(self, seconds: float) -> bool:
        """Until it does nothing, for so long at most; whether that is so."""
        return self._worker.wait(seconds)

    # --- on the thread ---

    def _do(self, known: _Known) -> None:
        started = time.perf_counter()
        try:
            if known.was_asked_for:
                self._use(known)
            elif self._patience.is_over:
                self._counts.add(dropped=1)
            else:
                self._store(known)
                self._patience.succeeded()
        except BaseException:  # of the tier, which may raise anything
            self._patience.failed()
            self._counts.add(errors=1)
        self._counts.add_seconds("store_seconds", time.perf_counter() - started)

    def _store(self, known: _Known) -> None:
        ids, name = known.ids, known.namespace
        n = self._known(np.append(ids, 0), name)
        if self._from_use > 1:
            n = min(n, self._used_enough(known))
        if not n:
            return
        for group in self._records(ids[:n], name):
            for moved in group.store(self._tier, n, lambda: not self._goes_on):
                self._worker.moved()
                if moved.wrong is not None:
                    self._counts.add(refused=1)
                    return
                self._counts.add(stored=1, stored_bytes=moved.nbytes)

    def _use(self, known: _Known) -> None:
        """Count that these tokens were asked for, block by block."""
        blocks = self._blocks(known.namespace).chunks(known.ids)
        for block in reversed(blocks):  # the last ones are forgotten first
            self._uses[block.key] = self._uses.pop(block.key, 0) + 1
        while len(self._uses) > _MOST_COUNTED:
            self._uses.popitem(last=False)

    def _used_enough(self, known: _Known) -> int:
        n = 0
        for chunk in self._blocks(known.namespace).chunks(known.ids):
            if self._uses.get(chunk.key, 0) < self._from_use:
                break
            n += chunk.n_tokens
        return n
