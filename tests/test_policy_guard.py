"""The latency guard: it suspends prefill for a late stream, with hysteresis, and never for long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from policy_world import make_row

from uma.engine.policy.guard import CALM, LATE, MOST_SUSPENDED_TICKS, LatencyGuard

TARGET = 100.0


def allows(guard: LatencyGuard, late: float, *, lane: int = 0, is_paused: bool = False) -> bool:
    """One tick with a stream that waits for `late` times its target."""
    row = make_row(1, lane=lane, target_tbt_ms=TARGET, last_token_ms=1_000.0, is_paused=is_paused)
    return guard.allows_prefill([row], 1_000.0 + late * TARGET)


def test_prefill_runs_while_streams_are_in_time() -> None:
    guard = LatencyGuard()
    assert guard.allows_prefill([], 0.0)
    assert all(allows(guard, LATE * part / 10) for part in range(11))


def test_a_late_stream_suspends_prefill_until_streams_are_well_in_time_again() -> None:
    between = (CALM + LATE) / 2
    guard = LatencyGuard()
    assert allows(guard, between), "the way up"
    assert not allows(guard, LATE + 0.1)
    assert not allows(guard, between), "the way down"
    assert allows(guard, CALM)
    assert allows(guard, between)


@given(st.lists(st.floats(0, 50), min_size=MOST_SUSPENDED_TICKS + 1, max_size=60))
def test_prefill_is_never_suspended_for_longer_than_the_bound(lateness: list[float]) -> None:
    guard = LatencyGuard()
    in_a_row = 0
    for late in lateness:
        in_a_row = 0 if allows(guard, late) else in_a_row + 1
        assert in_a_row <= MOST_SUSPENDED_TICKS


def test_background_and_paused_streams_make_no_other_wait() -> None:
    guard = LatencyGuard()
    assert allows(guard, 100 * LATE, lane=-1)
    assert allows(guard, 100 * LATE, is_paused=True)
    assert not allows(guard, 100 * LATE, lane=1)
