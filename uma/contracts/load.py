"""What a worker tells of its load: slots and KV blocks for a router, engine and cache figures for people.

Published every 100 to 1,000 ms with a timestamp; a report older than 5 s is stale and says nothing about its worker.
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
    """How many requests one worker computes, could compute at once, and lets wait."""

    request_active_slots: Count
    request_total_slots: Count
    num_requests_waiting: Count = 0
    data_parallel_rank: Count | None = None


@attrs.frozen
class KvStats:
    """How many KV blocks one worker has, and how many of them running requests hold: each that has a cell in use.

    Cells that hold nothing but cached prefixes are free for the next request, and not counted.
    """

    kv_active_blocks: Count
    kv_total_blocks: Count
    gpu_cache_usage_perc: Share = 0.0
    """Share from 0 to 1, whatever its name says: the name is Dynamo's."""
    gpu_prefix_cache_hit_rate: Share = 0.0


@attrs.frozen
class EngineStats:
    """Figures of one engine: counters since its start, averages over finished requests, and what waits and runs now."""

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
    """Figures of one prefix cache: its use since start, and what it holds now. Sizes are tokens."""

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
    """Report of one worker at one moment: what its slots, KV blocks, engine and cache are about."""

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
    """A report from an engine's metrics; `total_slots` is how many requests are computed at once."""
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
    """The cache's part of an engine's metrics."""
    return CacheStats(**{field.name: snapshot[f"cache_{field.name}"] for field in attrs.fields(CacheStats)})


@attrs.define
class RequestTimes:
    """Sums of the times of finished requests, for the averages of `EngineStats`."""

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
    """The engine's part of its metrics, with the averages of `times`."""
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
    """Whether a report is too old to route by."""
    return now_ms - report.timestamp_ms > STALE_THRESHOLD_MS


def has_changed(before: LoadReport | None, now: LoadReport) -> bool:
    """Whether a report says anything else than the one before, its time aside."""
    return before is None or attrs.evolve(before, timestamp_ms=now.timestamp_ms) != now


def exposition(report: LoadReport, now_ms: int) -> str:
    """A report as Prometheus' text, a gauge for each figure. Of a stale one only its time: it says nothing more."""
    gauges: dict[str, float] = {"worker_report_timestamp_seconds": report.timestamp_ms / 1000}
    if not is_stale(report, now_ms):
        parts = {"worker": (report.worker_stats, report.kv_stats), "engine": (report.engine_stats,)}
        for part, several in (parts | {"cache": (report.cache_stats,)}).items():
            for stats in several:
                figures = {} if stats is None else attrs.asdict(stats)
                gauges |= {f"{part}_{name}": value for name, value in figures.items() if value is not None}
    return "".join(f"# TYPE uma_{name} gauge\numa_{name} {value}\n" for name, value in gauges.items())


def is_due(published_ms: int | None, now_ms: int, *, has_changed: bool, slack_ms: int = 0) -> bool:
    """Whether a worker should publish: at first, then every 100 ms while its load changes, and else every second.

    A worker that looks now and then publishes a second's report `slack_ms` early, and so never late.
    """
    if published_ms is None:
        return True
    interval_ms = MIN_UPDATE_INTERVAL_MS if has_changed else MAX_UPDATE_INTERVAL_MS - slack_ms
    return now_ms - published_ms >= interval_ms
