"""Load report of a worker: slots and KV blocks for a router, figures of engine and cache for people.

Published every 100 to 1,000 ms with a timestamp. A report older than 5 s is stale, and must not be used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import attrs

from uma.constraints import Range

MIN_UPDATE_INTERVAL_MS = 100
MAX_UPDATE_INTERVAL_MS = 1000
STALE_THRESHOLD_MS = 5000

Count = Annotated[int, Range(0)]
Share = Annotated[float, Range(0, 1)]
Milliseconds = Annotated[float, Range(0)]


@attrs.frozen
class WorkerStats:
    """Requests that a worker is computing, can compute at once, and has waiting."""

    request_active_slots: Count
    request_total_slots: Count
    num_requests_waiting: Count = 0
    data_parallel_rank: Count | None = None


@attrs.frozen
class KvStats:
    """KV blocks of a worker, and those in use: blocks with a cell that a running request holds.

    Cells that only hold cached prefixes are free for the next request, so they are not counted.
    """

    kv_active_blocks: Count
    kv_total_blocks: Count
    gpu_cache_usage_perc: Share = 0.0
    """Fraction from 0 to 1. Dynamo chose the name, which says percent."""
    gpu_prefix_cache_hit_rate: Share = 0.0


@attrs.frozen
class EngineStats:
    """Figures of an engine: counters since its start, averages over finished requests, queue and concurrency."""

    total_requests: Count
    completed_requests: Count
    failed_requests: Count
    total_tokens_generated: Count
    avg_queue_time_ms: Milliseconds
    avg_prefill_time_ms: Milliseconds
    avg_decode_time_ms: Milliseconds
    queue_size: Count
    queue_capacity: Count
    concurrent_requests: Count


@attrs.frozen
class CacheStats:
    """Figures of a prefix cache: counters since its start, and its current content. Sizes are in tokens."""

    hit_rate: Share
    hits: Count
    misses: Count
    evictable_size: Count
    protected_size: Count
    total_cached: Count
    total_capacity: Count
    evictions: Count
    node_count: Count


@attrs.frozen
class LoadReport:
    """Load of one worker at one moment."""

    worker_id: int
    timestamp_ms: Count
    """Unix time."""
    worker_stats: WorkerStats
    kv_stats: KvStats
    engine_stats: EngineStats | None = None
    cache_stats: CacheStats | None = None


def report_of(
    snapshot: Mapping[str, Any],
    *,
    worker_id: int,
    timestamp_ms: int,
    total_slots: int,
    block_size: int,
    engine_stats: EngineStats | None = None,
    cache_stats: CacheStats | None = None,
) -> LoadReport:
    """Report from an engine's metrics. `total_slots` is the maximum of requests that are computed at once."""
    total = snapshot["kv_cells_total"]
    used = max(0, snapshot["kv_cells_used"] - snapshot["cache_evictable_size"])
    return LoadReport(
        worker_id,
        timestamp_ms,
        WorkerStats(snapshot["active_sequences"], total_slots, snapshot["queued_requests"]),
        KvStats(
            kv_active_blocks=-(-used // block_size),
            kv_total_blocks=total // block_size,
            gpu_cache_usage_perc=min(1.0, used / total) if total else 0.0,
            gpu_prefix_cache_hit_rate=snapshot["cache_hit_rate"],
        ),
        engine_stats,
        cache_stats,
    )


def cache_stats_of(snapshot: Mapping[str, Any]) -> CacheStats:
    """Cache figures of an engine's metrics."""
    return CacheStats(**{field.name: snapshot[f"cache_{field.name}"] for field in attrs.fields(CacheStats)})


@attrs.define
class RequestTimes:
    """Sums of the times of finished requests, from which `EngineStats` has its averages."""

    count: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0

    def add(self, queue_ms: float, prefill_ms: float, decode_ms: float) -> None:
        """Count one finished request."""
        self.count += 1
        self.queue_ms += queue_ms
        self.prefill_ms += prefill_ms
        self.decode_ms += decode_ms


def engine_stats_of(snapshot: Mapping[str, Any], times: RequestTimes, *, queue_capacity: int) -> EngineStats:
    """Engine figures of its metrics, with averages from `times`."""
    n = max(1, times.count)
    return EngineStats(
        total_requests=snapshot["requests_total"],
        completed_requests=snapshot["requests_stop"] + snapshot["requests_length"],
        failed_requests=snapshot["requests_error"] + snapshot["requests_rejected"],
        total_tokens_generated=snapshot["tokens_generated_total"],
        avg_queue_time_ms=times.queue_ms / n,
        avg_prefill_time_ms=times.prefill_ms / n,
        avg_decode_time_ms=times.decode_ms / n,
        queue_size=snapshot["queued_requests"],
        queue_capacity=queue_capacity,
        concurrent_requests=snapshot["active_sequences"],
    )


def is_stale(report: LoadReport, now_ms: int) -> bool:
    """Whether a report is too old for routing."""
    return now_ms - report.timestamp_ms > STALE_THRESHOLD_MS


def has_changed(before: LoadReport | None, now: LoadReport) -> bool:
    """Whether a report differs from the one before in more than its time."""
    return before is None or attrs.evolve(before, timestamp_ms=now.timestamp_ms) != now


def exposition(report: LoadReport, now_ms: int) -> str:
    """A report in Prometheus' text format, with a gauge for each figure; of a stale report only its time."""
    gauges: dict[str, float] = {"worker_report_timestamp_seconds": report.timestamp_ms / 1000}
    if not is_stale(report, now_ms):
        parts = {"worker": (report.worker_stats, report.kv_stats), "engine": (report.engine_stats,)}
        for part, several in (parts | {"cache": (report.cache_stats,)}).items():
            for stats in several:
                figures = {} if stats is None else attrs.asdict(stats)
                gauges |= {f"{part}_{name}": value for name, value in figures.items() if value is not None}
    return "".join(f"# TYPE uma_{name} gauge\numa_{name} {value}\n" for name, value in gauges.items())


def is_due(published_ms: int | None, now_ms: int, *, has_changed: bool, slack_ms: int = 0) -> bool:
    """Whether a worker must publish: at first, then every 100 ms while its load changes, otherwise every second.

    A worker that checks at intervals publishes the report of each second up to `slack_ms` early, and so never late.
    """
    if published_ms is None:
        return True
    interval_ms = MIN_UPDATE_INTERVAL_MS if has_changed else MAX_UPDATE_INTERVAL_MS - slack_ms
    return now_ms - published_ms >= interval_ms
