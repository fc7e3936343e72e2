"""The contract's load: what a report says, when it is due, when it is stale, and several ranks as one worker."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from uma.contracts.load import (
    CacheStats,
    EngineStats,
    KvStats,
    LoadReport,
    WorkerStats,
    exposition,
    has_changed,
    is_due,
    is_stale,
    report_of,
)

FIGURES: dict[str, Any] = {
    "active_sequences": 3, "queued_requests": 2, "kv_cells_used": 43, "kv_cells_total": 256, "cache_hit_rate": 0.25,
    "cache_evictable_size": 10,
}  # fmt: skip
ENGINE = EngineStats(5, 2, 1, 60, 1.0, 2.0, 3.0, 2, 256, 3)
CACHE = CacheStats(0.25, 1, 3, 10, 20, 30, 40, 0, 2)
REPORT = report_of(
    FIGURES, worker_id=7, timestamp_ms=1_000_000, total_slots=8, block_size=16, engine_stats=ENGINE, cache_stats=CACHE
)


def test_a_block_counts_as_soon_as_a_running_request_holds_one_of_its_cells() -> None:
    made = report_of(FIGURES, worker_id=7, timestamp_ms=1_000_000, total_slots=8, block_size=16)
    assert made == LoadReport(7, 1_000_000, WorkerStats(3, 8, 2), KvStats(3, 16, 33 / 256, 0.25))


def test_cells_of_nothing_but_cache_are_free() -> None:
    idle = FIGURES | {"active_sequences": 0, "kv_cells_used": 100, "cache_evictable_size": 100}
    made = report_of(idle, worker_id=7, timestamp_ms=1_000_000, total_slots=8, block_size=16)
    assert made.kv_stats == KvStats(0, 16, 0.0, 0.25)


@pytest.mark.parametrize(("age_ms", "expected"), [(0, False), (5_000, False), (5_001, True)])
def test_a_report_is_stale_after_five_seconds_and_says_nothing_but_its_time_then(age_ms: int, expected: bool) -> None:
    now_ms = REPORT.timestamp_ms + age_ms
    assert is_stale(REPORT, now_ms) is expected
    told = exposition(REPORT, now_ms)
    assert "uma_worker_report_timestamp_seconds 1000.0\n" in told
    assert ("uma_worker_request_active_slots 3\n" in told) is not expected
    assert ("uma_worker_kv_total_blocks 16\n" in told) is not expected
    assert ("uma_engine_avg_decode_time_ms 3.0\n" in told) is not expected
    assert ("uma_cache_node_count 2\n" in told) is not expected


@pytest.mark.parametrize(
    ("published_ms", "changed", "expected"),
    [(None, False, True), (901, True, False), (900, True, True), (1, False, False), (0, False, True)],
)
def test_a_report_is_due_after_100_ms_where_it_changed_and_after_1_000_ms_anyway(
    published_ms: int | None, changed: bool, expected: bool
) -> None:
    assert is_due(published_ms, 1_000, has_changed=changed) is expected


def test_a_worker_that_looks_now_and_then_publishes_before_the_second_is_over() -> None:
    assert is_due(0, 800, has_changed=False, slack_ms=200)
    assert not is_due(0, 799, has_changed=False, slack_ms=200)


def test_a_later_report_of_the_same_load_has_not_changed() -> None:
    later = attrs.evolve(REPORT, timestamp_ms=REPORT.timestamp_ms + 1)
    assert not has_changed(REPORT, later)
    assert has_changed(REPORT, attrs.evolve(later, worker_stats=WorkerStats(4, 8, 2)))
    assert has_changed(None, REPORT)
