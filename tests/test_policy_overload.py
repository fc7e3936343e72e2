"""When to try again."""

from __future__ import annotations

import pytest

from uma.engine.intake.overload import LEAST_RETRY_MS, full_queue_retry_ms


@pytest.mark.parametrize(("waiting", "service_ms"), [(8_170, 500.0), (8_170, 0.0), (1_024, 2_000.0)])
def test_a_full_queue_is_tried_again_once_half_of_it_is_worked_off(waiting: int, service_ms: float) -> None:
    retry = full_queue_retry_ms(waiting, 1_024, service_ms, 64)
    ended = retry / (service_ms or 1_000.0) * 64
    assert ended == pytest.approx(waiting - 512, abs=1)


def test_a_hint_is_never_so_short_that_trying_again_is_all_there_is_to_do() -> None:
    assert full_queue_retry_ms(1, 1, 0.001, 64) == LEAST_RETRY_MS
