"""Turns of reproducible requests: one behind each tick, and a quarter of the time beside sequences of higher lanes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_world import make_row

from uma.engine.policy.isolated import IsolatedTurns
from uma.engine.policy.state import Row

TIMES = st.lists(st.floats(0.5, 200.0), min_size=50, max_size=200)


def batches(turns: IsolatedTurns, lane: int, others: Sequence[Row], ticks: Sequence[float], batch_ms: float) -> int:
    """Batches that a request of this lane has behind these ticks."""
    count = 0
    for tick_ms in ticks:
        turns.ticked(tick_ms)
        if turns.has_turn(lane, others):
            turns.computed(batch_ms)
            count += 1
    return count


@given(TIMES, st.floats(0.5, 2_000.0))
def test_beside_a_stream_of_a_higher_lane_it_has_a_quarter_of_the_time_at_most(
    ticks: list[float], batch_ms: float
) -> None:
    count = batches(IsolatedTurns(), 0, [make_row(1, lane=1)], ticks, batch_ms)
    assert 3 * batch_ms * (count - 1) <= sum(ticks) * (1 + 1e-9)
    assert count > 0


def test_it_is_never_starved() -> None:
    assert batches(IsolatedTurns(), -1, [make_row(1, lane=1)], [10.0] * 400, 10.0) >= 100


@pytest.mark.parametrize("others", [[], [make_row(1, lane=0)], [make_row(1, lane=1, is_paused=True)]])
def test_beside_its_own_lane_and_paused_streams_it_has_a_batch_behind_each_tick(others: list[Row]) -> None:
    assert batches(IsolatedTurns(), 0, others, [10.0] * 50, 10.0) == 50
