"""A machine that is too slow for its readers: streams and prompts share the time, evenly and within bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_world import Asked, Machine, World, make_row

from uma.engine.policy.lead import NEARLY_LATE, choose_pacing
from uma.engine.policy.tuning import TUNING

BUDGET = 80.0
LARGE = Machine(base_ms=100.0, row_ms=8.0, token_ms=18.0, cell_ms=6e-4)
"""As a model of 8 B parameters on a few cores: a decode step alone takes longer than its reader's target."""


def decode_share(
    streams: int, prompts: int, *, step_ms: float = 150.0, prompts_lane: int = 0, **stream: object
) -> float:
    """Of the time, beside so many prompts."""
    rows = [make_row(key, **stream) for key in range(streams)]
    waiting = [make_row(100 + key, lane=prompts_lane, prefill_left=500) for key in range(prompts)]
    return step_ms / choose_pacing(rows, step_ms, budget_ms=BUDGET, prompts=waiting).pace_ms


@pytest.mark.parametrize(
    ("streams", "prompts", "share"), [(1, 1, 0.5), (1, 2, 1 / 3), (2, 3, 0.4), (8, 1, 0.5), (1, 60, 0.25)]
)
def test_streams_that_are_late_anyway_and_prompts_that_wait_share_the_time_evenly_within_bounds(
    streams: int, prompts: int, share: float
) -> None:
    assert decode_share(streams, prompts) == pytest.approx(share)


@given(st.integers(1, 64), st.integers(1, 64), st.floats(BUDGET, 5_000.0))
def test_no_number_of_prompts_takes_more_than_three_quarters_or_less_than_half(
    streams: int, prompts: int, step_ms: float
) -> None:
    assert 0.249 <= decode_share(streams, prompts, step_ms=step_ms) <= 0.501


def test_prompts_of_lower_lanes_take_nothing_from_a_stream_by_their_number() -> None:
    assert decode_share(1, 60, prompts_lane=-1) == decode_share(1, 1, prompts_lane=-1) == pytest.approx(0.8)


@pytest.mark.parametrize("step_ms", [10.0, 40.0, BUDGET * NEARLY_LATE])
def test_a_default_target_that_can_nearly_be_kept_is_not_given_up_for_many_prompts(step_ms: float) -> None:
    assert decode_share(1, 60, step_ms=step_ms) == decode_share(1, 1, step_ms=step_ms)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("step_ms", [30.0, 40.0, 60.0])
def test_a_target_that_cannot_be_met_makes_no_stream_slower_than_the_default_one(step_ms: float, named: bool) -> None:
    tight = decode_share(1, 4, step_ms=step_ms, target_tbt_ms=20.0, has_own_target=named)
    assert tight == decode_share(1, 4, step_ms=step_ms)


@given(st.floats(50.0, 150.0), st.integers(1, 8), st.integers(1, 8))
def test_a_pace_changes_little_with_a_step_s_predicted_time(step_ms: float, streams: int, prompts: int) -> None:
    before, after = (decode_share(streams, prompts, step_ms=each) for each in (step_ms, 1.01 * step_ms))
    assert after == pytest.approx(before, rel=0.1)


def crowd(count: int) -> tuple[World, list[Asked]]:
    """Prompts that came together, to their ends."""
    world = World.of_known(LARGE)
    asked = [world.ask(500, 200) for _ in range(count)]
    world.run(most_ticks=50_000)
    return world, asked


@pytest.mark.parametrize("count", [4, 8])
def test_first_tokens_of_a_crowd_take_no_more_than_twice_as_long_as_reading_and_each_stream_goes_on(count: int) -> None:
    world, asked = crowd(count)
    reading_ms = count * LARGE.prefill_ms(500, 0)
    assert max(each.given_ms[0] for each in asked) <= 2.1 * reading_ms
    gaps = [max(each.gaps_ms) / LARGE.decode_ms(count, world.cells) for each in asked]
    assert max(gaps) <= 1.1 / TUNING.late_decode_share, "in decode steps"
