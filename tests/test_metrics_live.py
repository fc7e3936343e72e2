"""Live figures: speeds, shares and percentiles of snapshots of the metrics."""

from __future__ import annotations

from typing import Any

import pytest

from uma.metrics import EngineMetrics, LiveFigures, LiveSeries
from uma.metrics.live import Percentiles
from uma.types import Activity, RunningRequest


def after(*snapshots: tuple[float, dict[str, Any]], activity: Activity | None = None, slots: int = 4) -> LiveFigures:
    """The figures behind the last of the snapshots."""
    series = LiveSeries()
    *before, (at_sec, metrics) = snapshots
    for then_sec, then in before:
        series.figures(then_sec, then, None, slots)
    return series.figures(at_sec, metrics, activity, slots)


def test_a_speed_is_of_the_last_moments_and_a_snapshot_that_never_came_falsifies_none() -> None:
    every = [(at / 2, {"tokens_generated_total": 25 * at + (1_000 if at > 10 else 0)}) for at in range(40)]
    assert after(*every).written_per_sec == pytest.approx(50)
    assert after(every[0], every[2], every[9]).written_per_sec == pytest.approx(50)
    assert after(every[0]).written_per_sec == 0


def test_the_share_from_the_cache_is_the_last_minute_s_by_tokens_or_that_of_all_where_it_brought_none() -> None:
    old = (0.0, {"prompt_tokens_total": 1_000, "cached_tokens_total": 900})
    new = (50.0, {"prompt_tokens_total": 1_400, "cached_tokens_total": 1_000})
    assert after(old, new).cached_share == pytest.approx(0.25)
    assert after(new, (120.0, new[1])).cached_share == pytest.approx(1_000 / 1_400)
    assert after((0.0, {})).cached_share is None


def test_percentiles_are_interpolated_and_what_is_beyond_the_last_bound_is_that_bound() -> None:
    metrics = {
        "ttft_ms_buckets": {"50": 0, "100": 20, "inf": 20},
        "inter_token_ms_buckets": {"10": 5, "60000": 5, "inf": 24},
    }
    found = after((0.0, metrics))
    assert found.first_token_ms is not None and found.between_tokens_ms is not None
    assert (found.first_token_ms.count, found.first_token_ms.p50) == (20, 75.0)
    assert (found.between_tokens_ms.count, found.between_tokens_ms.p50) == (24, 60_000)


def test_a_few_times_have_no_percentiles_but_a_last_one() -> None:
    metrics = EngineMetrics()
    for value in (9.0, 3_500.0):
        metrics.ttft_ms.observe(value)
    found = after((0.0, metrics.snapshot())).first_token_ms
    assert found == Percentiles(2, 3_500.0, None, None, None)
    assert after((0.0, metrics.snapshot()), slots=0).first_token_ms is None  # it could be any model's


def test_a_server_started_anew_begins_anew() -> None:
    old = (0.0, {"requests_total": 9, "tokens_generated_total": 5_000, "prompt_tokens_total": 5_000})
    found = after(old, (1.0, {"requests_total": 1, "tokens_generated_total": 3, "prompt_tokens_total": 8}))
    assert (found.written_per_sec, found.cached_share) == (0, 0)


def test_a_request_without_a_slot_waits_in_its_lane_also_one_that_had_one_before() -> None:
    running = [RunningRequest("a", priority, 9, 0, 9, 1, 5.0, is_preempted=priority < 0) for priority in (1, 0, -1)]
    metrics = {"active_sequences": 2, "queued_requests": 4, "service_ms_ewma": 8_000.0}
    found = after((0.0, metrics), activity=Activity(tuple(running), 1, 2, 0))
    assert (found.running, found.waiting) == (2, 4)
    assert (found.waiting_interactive, found.waiting_normal, found.waiting_background) == (1, 2, 1)
    assert found.slot_every_ms == 2_000
    old_server = after((0.0, metrics), slots=0)
    assert (old_server.waiting, old_server.slot_every_ms) == (4, None)
