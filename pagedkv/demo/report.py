"""The table at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence

from pagedkv.demo.config import Config
from pagedkv.demo.engine import Engine
from pagedkv.serving import Scheduler
from pagedkv.tiers import TieredPrefixes

_FLOAT32_BYTES = 4


def private_bytes(config: Config, lengths: Sequence[int]) -> int:
    """What contiguous caches would take, one a sequence, of so many positions each, with every layer whole."""
    row = config.n_kv_heads * (config.head_dim + config.v_head_dim) * _FLOAT32_BYTES
    return sum(lengths) * config.n_layers * row


def table(
    engine: Engine,
    scheduler: Scheduler,
    seconds: float,
    firsts: Sequence[float],
    private: int,
    tiered: TieredPrefixes | None = None,
) -> str:
    """What the run did and took.

    Parameters
    ----------
    seconds
        Time of the whole run.
    firsts
        Times of the requests' first tokens, in order.
    private
        `private_bytes` of the same requests.
    tiered
        Where K/V came from and went to, if there was a tier.
    """
    counts, stores = scheduler.counts, scheduler.stores
    n_shared = counts.positions_reused - counts.positions_loaded
    held = [
        f"{peak} of {group.store.total_blocks} ({len(group.layers)} layers that see "
        + ("everything)" if group.window is None else f"{group.window} positions)")
        for group, peak in zip(stores.groups, engine.peak_blocks, strict=True)
    ]
    rows = {
        "prefill": f"{engine.prefill.rate:.1f} tokens/s ({engine.prefill.tokens} prompt tokens computed)",
        "first token": f"after {firsts[0]:.2f} s; every request had one after {firsts[-1]:.2f} s",
        "decode": f"{engine.decode.rate:.1f} tokens/s ({counts.most_running} requests at once)",
        "K/V held": f"{_mib(engine.peak_bytes)} at most; private contiguous caches would have taken {_mib(private)}",
        "blocks held": f"at most {' and '.join(held)}",
        "shared": f"{n_shared} prompt tokens were not computed again, their blocks were there",
        "from the tier": f"{counts.positions_loaded} prompt tokens were not computed again",
        "preempted": f"{counts.preemptions} requests, for want of blocks",
        "attention": f"{engine.attention_seconds / seconds:.1%} of {seconds:.1f} s",
    }
    if tiered is None:
        del rows["from the tier"]
    else:
        stats = tiered.stats()
        loaded = f"{_mib(stats.loaded_bytes)} loaded in {stats.load_seconds:.2f} s"
        rows["from the tier"] += f"; {loaded}, {_mib(stats.stored_bytes)} stored in {stats.store_seconds:.2f} s"
    width = max(map(len, rows))
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows.items())


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.1f} MiB"
