"""How long the rest of a job takes, as it is told while the job runs."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator

import pytest

from uma.jobs import Tally

ROWS, AT_ONCE, ROW_BYTES = 2_000, 128, 100
FROM, UP_TO = 0.05, 0.9
"""Of the rows: at the end single slow ones decide."""


def told(took: Callable[[random.Random], float]) -> Iterator[tuple[float, float]]:
    """What a job of rows that take so long each says is left, and what was, each time that a row has ended."""
    rng, tally = random.Random(5), Tally(read_rows=ROWS, read_bytes=ROWS * ROW_BYTES)
    running = [(took(rng), tally.begin(0.0)) for _ in range(AT_ONCE)]
    heapq.heapify(running)
    said: list[tuple[float, float]] = []
    now = 0.0
    for ended in range(1, ROWS + 1):
        now, began = heapq.heappop(running)
        tally.end(began, now)
        if ended + len(running) < ROWS:
            heapq.heappush(running, (now + took(rng), tally.begin(now)))
        if FROM * ROWS <= ended <= UP_TO * ROWS:
            left = tally.seconds_left(0.0, ROWS * ROW_BYTES, now)
            assert left is not None
            said.append((now, left))
    return ((left, now - at) for at, left in said)


@pytest.mark.parametrize(
    ("took", "share"),
    [
        (lambda rng: 1.0, 0.99),
        (lambda rng: rng.uniform(0.9, 1.1), 0.9),
        (lambda rng: rng.uniform(0.5, 1.5), 0.85),
        (lambda rng: rng.choice((0.2, 1.8)), 0.7),
    ],
    ids=["of one length", "nearly", "up to three times as long", "short and nine times as long"],
)
def test_the_time_left_is_mostly_right_within_a_fifth_after_a_twentieth_of_the_rows(
    took: Callable[[random.Random], float], share: float
) -> None:
    right = [abs(left - rest) <= 0.2 * rest for left, rest in told(took)]
    assert sum(right) / len(right) >= share


def test_nothing_is_said_before_a_row_has_ended_or_of_a_pipe() -> None:
    tally = Tally(read_rows=10, read_bytes=1_000)
    began = tally.begin(0.0)
    assert tally.seconds_left(0.0, 2_000, 1.0) is None
    tally.end(began, 1.0)
    assert tally.seconds_left(0.0, 2_000, 1.0) == 19.0
    assert tally.seconds_left(0.0, 0, 1.0) is None
