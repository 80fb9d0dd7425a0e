"""What Prometheus reads at `/metrics`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from pagedkv import LayerGroup
from pagedkv.serving import Scheduler
from pagedkv.tiers import TieredPrefixes, TieredStats

OUTCOMES = ("stop", "length", "cancelled", "failed", "refused", "overloaded", "shutdown")
_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_NEXT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """Counts that grow as things happen, and a look at scheduler and stores whenever somebody asks.

    Attributes
    ----------
    requests : dict of Counter
        By outcome, one of OUTCOMES.
    prompt_tokens, generated_tokens : Counter
    first_token, next_token : Histogram
        Seconds until a request's first token, and from each token to the next.
    """

    def __init__(self, scheduler: Scheduler, tiered: TieredPrefixes | None = None) -> None:
        self._registry = registry = CollectorRegistry()
        requests = Counter(
            "pagedkv_requests", "Continuations that have ended, and requests that were refused.", ["outcome"],
            registry=registry,
        )  # fmt: skip
        self.requests = {outcome: requests.labels(outcome) for outcome in OUTCOMES}
        self.prompt_tokens = Counter("pagedkv_prompt_tokens", "Tokens of prompts.", registry=registry)
        self.generated_tokens = Counter("pagedkv_generated_tokens", "Tokens generated.", registry=registry)
        self.first_token = Histogram(
            "pagedkv_time_to_first_token_seconds", "From the request to its first token.", buckets=_FIRST,
            registry=registry,
        )  # fmt: skip
        self.next_token = Histogram(
            "pagedkv_time_per_token_seconds", "From a token to the next.", buckets=_NEXT, registry=registry
        )
        registry.register(_State(scheduler, tiered))

    def render(self, accept: str) -> tuple[bytes, str]:
        """The text of all metrics, and its content type, in the format that the `Accept` header prefers."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _State(Collector):
    """Read when asked for; scheduler and stores keep count by themselves."""

    def __init__(self, scheduler: Scheduler, tiered: TieredPrefixes | None) -> None:
        self._scheduler = scheduler
        self._tiered = tiered

    def collect(self) -> Iterator[Metric]:
        counts = self._scheduler.counts
        yield GaugeMetricFamily("pagedkv_requests_running", "Requests in the batch.", len(self._scheduler.running))
        yield GaugeMetricFamily("pagedkv_requests_waiting", "Requests in the queue.", len(self._scheduler.waiting))
        yield CounterMetricFamily("pagedkv_preemptions", "Requests preempted for want of blocks.", counts.preemptions)
        yield CounterMetricFamily(
            "pagedkv_prefix_hit_tokens", "Tokens whose K/V was there when a request started.", counts.positions_reused
        )
        yield CounterMetricFamily(
            "pagedkv_prefix_missed_tokens", "Tokens that were left to compute.", counts.positions_missed
        )
        yield CounterMetricFamily(
            "pagedkv_restored_tokens",
            "Tokens whose K/V was still there when a preempted request started again.",
            counts.positions_restored,
        )
        yield CounterMetricFamily(
            "pagedkv_recomputed_tokens", "Tokens that were left to compute once more then.", counts.positions_recomputed
        )
        if self._tiered is not None:
            yield from _tier(self._tiered.stats(), counts.positions_loaded)
        blocks = GaugeMetricFamily("pagedkv_blocks", "Blocks of each store by state.", labels=["store", "state"])
        evicted = CounterMetricFamily("pagedkv_blocks_evicted", "Blocks forgotten for others.", labels=["store"])
        for number, group in enumerate(self._scheduler.stores.groups):
            name = "full" if group.window is None else f"window_{group.window}"
            for state, count in _states(group).items():
                blocks.add_metric([name, state], count)
            evicted.add_metric([name], self._scheduler.stores.prefixes.groups[number].stats().blocks_evicted)
        yield blocks
        yield evicted


def _states(group: LayerGroup) -> dict[str, int]:
    """Blocks that are free, that only the prefix cache holds, and that sequences hold."""
    store = group.store
    return {"free": store.free_block_count, "evictable": store.evictable_block_count, "held": group.n_blocks_in_use}


def _tier(stats: TieredStats, n_loaded: int) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "pagedkv_tier_loaded_tokens", "Tokens whose K/V the tier had when a request started.", n_loaded
    )
    for name, what in (
        ("loaded_bytes", "Bytes that were loaded."),
        ("load_seconds", "Time that loading took."),
        ("stored_bytes", "Bytes that were stored."),
        ("store_seconds", "Time that storing took."),
        ("corrupt", "Records that were not what they were asked for as."),
        ("refused", "Records that the tier did not take."),
        ("late", "Loads that had not ended at their deadline."),
        ("skipped", "Loads that were not tried."),
        ("dropped", "Prompts that were not stored."),
        ("errors", "Loads and stores that failed."),
    ):
        yield CounterMetricFamily(f"pagedkv_tier_{name}", what, getattr(stats, name))
