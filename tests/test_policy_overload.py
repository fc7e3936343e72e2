"""When to try again."""

from __future__ import annotations

import pytest

from uma.engine.intake.overload import MIN_RETRY_MS, full_queue_retry_ms


@pytest.mark.parametrize(("waiting", "service_ms"), [(8_170, 500.0), (4_000, 0.0), (1_024, 2_000.0)])
def test_a_full_queue_is_tried_again_once_half_of_it_is_worked_off(waiting: int, service_ms: float) -> None:
    retry = full_queue_retry_ms(waiting, 1_024, service_ms, 64)
    ended = retry / (service_ms or 1_000.0) * 64
    assert ended == pytest.approx(waiting - 512, abs=1)


@pytest.mark.parametrize(
    ("service_ms", "ages_ms", "retry_ms"),
    [
        (0.0, [8_000.0, 9_000.0, 1.0], 8_000),
        (500.0, [8_000.0, 9_000.0], 8_500),
        (500.0, [600_000.0, 10.0, 20.0], 250),
        (0.0, [300_000.0] * 2, 60_000),
    ],
    ids=["none has ended", "longer than before", "one is long", "bounded"],
)
def test_what_runs_for_long_makes_the_hint_longer(service_ms: float, ages_ms: list[float], retry_ms: int) -> None:
    assert full_queue_retry_ms(2, 2, service_ms, 2, ages_ms) == retry_ms


def test_a_hint_is_never_so_short_that_trying_again_is_all_there_is_to_do() -> None:
    assert full_queue_retry_ms(1, 1, 0.001, 64) == MIN_RETRY_MS
