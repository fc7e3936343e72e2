"""When a token is due, and when its reader is given it: the pure part of delivery."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from uma.engine.delivery.pacing import AT_ONCE, LOW_CREDITS, due_ms, reader_ms

ROUNDING_MS = 0.01


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 300), st.floats(1, 100)), max_size=40))
def test_no_token_is_given_before_it_is_computed_nor_out_of_order_nor_later_than_at_its_pace(
    steps: list[tuple[int, float, float]],
) -> None:
    now, last = 1.0, [0.0, 0.0, 0.0]
    for index, took_ms, pace_ms in steps:
        now += took_ms
        at = reader_ms(last[index], now, pace_ms)
        assert max(now, last[index]) <= at <= max(now, last[index] + pace_ms) + ROUNDING_MS
        last[index] = at


@given(st.integers(-1, 2 * LOW_CREDITS), st.booleans())
def test_a_reader_nearly_out_of_credit_has_each_token_at_once_unless_it_is_kept_for_it(
    credits: int, is_early: bool
) -> None:
    due = due_ms(100.0, 32.0, is_first=False, is_early=is_early, credits=credits)
    assert due == (AT_ONCE if credits <= LOW_CREDITS and not is_early else 132.0)
    assert due_ms(100.0, 32.0, is_first=True, is_early=is_early, credits=credits) == AT_ONCE
