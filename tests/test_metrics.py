"""Counters, histograms and the flat snapshot made of them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uma.metrics import EngineMetrics, Histogram
from uma.metrics.histogram import MS_BOUNDS, SIZE_BOUNDS


@given(st.lists(st.floats(0, 1e6)), st.sampled_from((MS_BOUNDS, SIZE_BOUNDS)))
def test_buckets_are_cumulative_and_their_last_is_the_count(values: list[float], bounds: tuple[int, ...]) -> None:
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    buckets = histogram.buckets()
    assert list(buckets) == [*(str(bound) for bound in bounds), "inf"]
    for bound in bounds:
        assert buckets[str(bound)] == sum(value <= bound for value in values)
    assert buckets["inf"] == histogram.count == len(values)
    assert histogram.sum == pytest.approx(sum(values))


def test_a_value_at_a_bound_belongs_to_it() -> None:
    histogram = Histogram((1, 2))
    for value in (1, 2, 2.001):
        histogram.observe(value)
    assert histogram.snapshot("x") == {
        "x_count": 3,
        "x_sum": 5.001,
        "x_last": 2.001,
        "x_buckets": {"1": 1, "2": 2, "inf": 3},
    }


def test_a_snapshot_is_flat_and_json_can_carry_it() -> None:
    metrics = EngineMetrics(kv_cells_total=512)
    metrics.tick(7, 3.5)
    metrics.ttft_ms.observe(12.0)
    snapshot = metrics.snapshot()
    assert json.loads(json.dumps(snapshot)) == snapshot
    nested = {name for name, value in snapshot.items() if isinstance(value, dict)}
    names = ("ttft_ms", "inter_token_ms", "decode_ms", "batch_size", "piece_lead_ms")
    assert nested == {f"{name}_buckets" for name in names}
    assert snapshot["kv_cells_total"] == 512
    assert (snapshot["batch_calls_total"], snapshot["last_batch_size"], snapshot["decode_ms_last"]) == (1, 7, 3.5)


@pytest.mark.parametrize(
    "name",
    [
        "tokens_generated_total", "batch_calls_total", "last_batch_size", "decode_ms_last", "decode_ms_ewma",
        "prompt_tokens_total", "queued_requests", "kv_cells_used", "kv_cells_total", "requests_stop",
        "requests_length", "requests_cancelled", "requests_error", "requests_rejected", "cache_hit_rate",
        "cache_hits", "cache_misses", "cache_evictable_size", "cache_protected_size", "cache_total_cached",
        "cache_total_capacity", "cache_evictions", "cache_node_count",
    ],
)  # fmt: skip
def test_what_the_design_promises_is_there_from_the_start(name: str) -> None:
    assert EngineMetrics().snapshot()[name] == 0


def test_the_average_begins_with_the_first_tick_and_follows_later_ones() -> None:
    metrics = EngineMetrics()
    metrics.tick(1, 10.0)
    assert metrics.decode_ms_ewma == 10.0
    metrics.tick(1, 20.0)
    assert metrics.decode_ms_ewma == 11.0


@pytest.mark.parametrize("reason", ["stop", "length", "cancelled", "error"])
def test_each_end_is_counted_by_its_reason(reason: str) -> None:
    metrics = EngineMetrics()
    metrics.finished(reason)
    ends = {name: metrics.snapshot()[f"requests_{name}"] for name in ("stop", "length", "cancelled", "error")}
    assert ends == {**dict.fromkeys(ends, 0), reason: 1}


def test_hit_rate_counts_hits_of_all_requests() -> None:
    metrics = EngineMetrics()
    metrics.cache.hits, metrics.cache.misses = 3, 1
    assert metrics.snapshot()["cache_hit_rate"] == 0.75
