"""Whether a waiting request may start now. Asking changes nothing: no hit is counted, and no block is used."""

from __future__ import annotations

from collections.abc import Iterable

from pagedkv import ModelStores, Waiting, plan_admission
from pagedkv.prefix import common_length
from pagedkv.serving.requests import Request


def has_room(stores: ModelStores, request: Request, n_known: int, chunk: int, keep_free: list[int]) -> bool:
    """Whether every store has the blocks of a request, with eviction, when it starts on what is known of it."""
    n_new, n_bytes = len(request.tokens) - n_known, 0
    for group, n_kept in zip(stores.groups, keep_free, strict=True):
        asked = Waiting(
            request._ids[: n_known + 1 if n_known else 0],  # no more than what is known in all stores
            n_positions=n_known + group._growth(n_known, n_new, chunk),
            namespace=request.namespace,
            first_position=group._first_held(n_known),
        )
        [answer] = plan_admission(group.store, [asked], prefix=stores.prefixes, keep_free=n_kept)
        if not answer.can_start:
            return False
        n_bytes += (answer.n_blocks + n_kept) * group.block_nbytes
    # What it starts on can be evicted no more for what it takes.
    known = stores.prefixes._look_up(request._ids, request.namespace)[1] if n_known else ()
    for group, (_, idle) in zip(stores.groups, known, strict=False):
        n_bytes += int(idle[group._first_held(n_known) // stores.block_size :].sum()) * group.block_nbytes
    return n_bytes <= stores.nbytes - stores.nbytes_in_use


def is_about_to_be_known(stores: ModelStores, request: Request, prefilling: Iterable[Request]) -> bool:
    """Whether waiting for the prompts that are being computed spares it a block or more."""
    size = stores.block_size
    if request._awaited is not None:  # as it was found before, which spares comparing the tokens once more
        other, n_promised = request._awaited
        if other in prefilling and other.sequence.seq_len + size <= n_promised:
            return True
        request._awaited = None
    n_promised, best = 0, None
    for other in prefilling:
        if other.namespace == request.namespace:
            n_whole = len(other.tokens) // size * size
            n_common = min(common_length(request._ids, other._ids), len(request.tokens) - 1, n_whole)
            if n_common > n_promised:
                n_promised, best = n_common, other
    if best is None or n_promised < size + stores.prefixes._match(request._ids, request.namespace):
        return False
    request._awaited = best, n_promised
    return True
