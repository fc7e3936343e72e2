"""When a model that has failed is started again: each failure in a row doubles the wait."""

from __future__ import annotations

from uma.supervisor.backoff import MAX_SEC, STEADY_SEC, Failures


def test_each_load_that_fails_doubles_the_wait_up_to_a_minute() -> None:
    failures, now, waits = Failures(), 0.0, []
    for _ in range(9):
        failures.note("broken", now, None)
        waits.append(failures.left_sec(now))
        now = failures.retry_at
    assert waits == [1, 2, 4, 8, 16, 32, MAX_SEC, MAX_SEC, MAX_SEC]


def test_a_process_that_was_loaded_starts_again_at_once_and_later_where_it_ends_again() -> None:
    failures = Failures()
    failures.note("ended", now=10, loaded_at=9)
    assert failures.left_sec(10) == 0
    failures.note("ended", now=12, loaded_at=11)
    assert failures.left_sec(12) == 2
    failures.note("ended", now=20 + STEADY_SEC, loaded_at=20)
    assert failures.left_sec(20 + STEADY_SEC) == 0
