"""Whether a waiting request may start now. Asking changes nothing: no hit is counted, and no block is used."""

from __future__ import annotations

from collections.abc import Iterable

from pagedkv import ModelStores, PendingRequest, plan_admission
from pagedkv.prefix import common_length
from pagedkv.serving.requests import Request


def has_room(stores: ModelStores, request: Request, chunk: int, shares: bool, keep_free: int) -> bool:
    """Whether the stores have the blocks of a request, with eviction, when it starts on what is known of it."""
    asked = PendingRequest(
        request._ids if shares else (), n_positions=len(request.tokens), namespace=request.namespace, chunk=chunk
    )
    return plan_admission(stores, [asked], prefix=stores.prefixes, keep_free=keep_free)[0].can_start


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
