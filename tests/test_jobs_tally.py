"""How long the rest of a job takes, as it is told while the job runs: over jobs of many kinds, simulated."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

import attrs
import pytest

from uma.jobs import Tally
from uma.jobs.ask import Progress
from uma.jobs.tally import Begun

ROWS, AT_ONCE, BLOCK = 4_000, 56, 256
PROMPT, ANSWER = 50, 50
"""Tokens of a prompt, and of an answer for each unit of its row's time."""
FROM, UP_TO = 0.05, 0.9
"""Of the rows: at the end single slow ones decide."""
Rows = Sequence[tuple[int, float]]
"""Their bytes, and how long each takes beside as many others as can run."""


@attrs.define
class Job:
    """One run of a job, in which the machine does as much in a second however few rows run."""

    rows: Rows
    before: int = 0
    """Rows that had a result before."""
    is_asked: Callable[[int], bool] = lambda _: True
    """Whether a row has to be asked; else its result is taken over."""
    is_counted: bool = True
    """The number of rows is known."""
    is_told: bool = False
    """The tokens of rows that run are known."""
    is_staggered: bool = False
    """The first rows begin together, and each waits until the prompts of those before it are read."""
    now: float = 0.0
    _tally: Tally = attrs.field(init=False)
    _ready: deque[tuple[int, float]] = attrs.field(factory=deque)
    _next: int = 0
    _number: count[int] = attrs.field(factory=count)
    """Of rows that end at the same moment, the earlier one comes first."""

    def said(self) -> list[tuple[float, float]]:
        """What it says is left, and what was, each time that a row has ended."""
        self._tally = Tally(total_bytes=sum(each for each, _ in self.rows))
        self._tally.total_rows = len(self.rows) if self.is_counted else 0
        for size_bytes, _ in self.rows[: self.before]:
            self._tally.passed(size_bytes, is_new=False, is_asked=False)
        self._next = self.before
        todo = sum(map(self.is_asked, range(self.before, len(self.rows))))
        running, work = [self._begin(0.0) for _ in range(AT_ONCE)], 0.0
        heapq.heapify(running)
        told: list[tuple[float, float]] = []
        for ended in range(1, todo + 1):
            end, number, begun = heapq.heappop(running)
            self.now += (end - work) * (len(running) + 1) / AT_ONCE
            work = end
            self._tally.end(begun, self._progress(number, 0.0), self.now)
            if ended + len(running) < todo:
                heapq.heappush(running, self._begin(work))
            if self.is_told:
                self._tally.note({f"{number}": self._progress(number, end - work) for end, number, _ in running})
            if FROM * todo <= ended <= UP_TO * todo:
                left = self._tally.seconds_left(0.0, self.now)
                assert left is not None
                told.append((left, self.now))
        return [(left, self.now - at) for left, at in told]

    def _progress(self, number: int, rest: float) -> Progress:
        """A row's prompt is soon read; the rest of its time is its answer's."""
        took = self.rows[self.before + number][1]
        return Progress(PROMPT, round(ANSWER * max(0.0, took - rest)))

    def _begin(self, work: float) -> tuple[float, int, Begun]:
        while not self._ready:
            block = range(self._next, min(self._next + BLOCK, len(self.rows)))
            for index in block:
                self._tally.passed(self.rows[index][0], is_new=True, is_asked=self.is_asked(index))
            self._ready += [self.rows[index] for index in block if self.is_asked(index)]
            self._next = block.stop
        size_bytes, took = self._ready.popleft()
        number = next(self._number)
        if self.is_staggered and number < AT_ONCE:
            took *= 0.8 + 0.8 * number / AT_ONCE
        return work + took, number, self._tally.begin(size_bytes, self.now)


def right(job: Job) -> float:
    """The share of the moments at which what it says is within a fifth of what was."""
    said = job.said()
    return sum(abs(left - rest) <= 0.2 * rest for left, rest in said) / len(said)


KINDS: dict[str, Callable[[random.Random], float]] = {
    "of one length, which end together": lambda chance: 1.0,
    "nearly of one length": lambda chance: chance.uniform(0.9, 1.1),
    "up to three times as long": lambda chance: chance.uniform(0.5, 1.5),
    "short and nine times as long": lambda chance: chance.choice((0.2, 1.8)),
    "that end by chance": lambda chance: chance.expovariate(1),
    "some of them far longer": lambda chance: chance.lognormvariate(0, 0.8),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("begun", [0, ROWS // 2], ids=["anew", "gone on with"])
@pytest.mark.parametrize("is_told", [False, True], ids=["by time", "by tokens too"])
def test_the_time_left_is_right_within_a_fifth_after_a_twentieth_of_the_rows(
    kind: str, begun: int, is_told: bool
) -> None:
    chance = random.Random(3)
    rows = [(chance.randrange(80, 120), KINDS[kind](chance)) for _ in range(begun + ROWS)]
    assert right(Job(rows, before=begun, is_told=is_told)) >= 0.95


COSTS: dict[str, Callable[[int], float]] = {
    "as long as they are": lambda size_bytes: size_bytes / 2_500,
    "alike": lambda size_bytes: 1.0,
    "partly as long as they are": lambda size_bytes: 0.5 + size_bytes / 5_000,
}


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("order", ["any", "shortest first", "longest first"])
def test_rows_in_order_of_their_length_are_no_surprise(cost: str, order: str) -> None:
    chance = random.Random(4)
    sizes = [chance.randrange(50, 5_000) for _ in range(ROWS)]
    if order != "any":
        sizes.sort(reverse=order == "longest first")
    assert right(Job([(each, COSTS[cost](each) * chance.uniform(0.95, 1.05)) for each in sizes])) >= 0.95


@pytest.mark.parametrize("groups", [2, 16])
def test_rows_that_are_brought_together_by_how_they_begin_are_no_surprise(groups: int) -> None:
    chance, rows = random.Random(6), []
    for _ in range(0, ROWS, BLOCK):
        kinds = sorted(chance.randrange(groups) for _ in range(BLOCK))
        rows += [(100, 0.5 + kind / groups) for kind in kinds]
    assert right(Job(rows)) >= 0.95


def test_results_that_are_taken_over_cost_nothing() -> None:
    chance = random.Random(7)
    failed = set(chance.sample(range(10 * ROWS), ROWS))
    rows = [(100, chance.uniform(0.8, 1.2)) for _ in range(10 * ROWS)]
    assert right(Job(rows, is_asked=failed.__contains__)) >= 0.95


def test_without_a_count_of_the_rows_it_follows_from_their_bytes() -> None:
    chance = random.Random(8)
    rows = [(chance.randrange(50, 150), chance.uniform(0.5, 1.5)) for _ in range(ROWS)]
    assert right(Job(rows, is_counted=False)) >= 0.95


def test_rows_alike_that_began_together_are_no_surprise() -> None:
    rows = [(100, 1.0)] * (8 * AT_ONCE)
    assert right(Job(rows, is_staggered=True, is_told=True)) >= 0.95


def test_a_row_that_ends_at_once_does_not_end_the_job() -> None:
    tally = Tally(total_bytes=800)
    for _ in range(8):
        tally.passed(100, is_new=True, is_asked=True)
    first, *_ = [tally.begin(100, 0.0) for _ in range(7)]
    tally.end(first, Progress(), 0.1)
    assert tally.seconds_left(0.0, 100.0) == pytest.approx(700)
    tally.end(tally.begin(100, 99.0), None, 99.5)
    tally.refused_rows, tally.refused_bytes = 1, 100
    assert tally.seconds_left(0.0, 100.0) is None, "all that is left runs, and longer than any that has ended"


def test_a_refused_row_of_many_bytes_does_not_make_the_others_long() -> None:
    tally = Tally(total_bytes=100_900)
    for at, size_bytes in enumerate((100_000, *(100 + at for at in range(9)))):
        tally.passed(size_bytes, is_new=True, is_asked=True)
        if at:
            tally.end(tally.begin(size_bytes, 0.0), Progress(5, 5), 1.0 + at / 10) if at < 9 else tally.begin(100, 1.0)
    tally.refused_rows, tally.refused_bytes = 1, 100_000
    assert (tally.seconds_left(0.0, 1.9) or 0.0) < 1


def test_rows_that_are_refused_at_once_do_not_count() -> None:
    tally = Tally(total_bytes=1_000, total_rows=10)
    for at in range(6):
        tally.passed(100, is_new=True, is_asked=True)
        begun = tally.begin(100, 0.0)
        if at < 3:
            tally.end(begun, None, 0.01)
            tally.refused_rows += 1
            assert tally.seconds_left(0.0, 0.01) is None, "nothing is known of the others"
        else:
            tally.end(begun, Progress(5, 5), 10.0)
    assert tally.seconds_left(0.0, 10.0) == pytest.approx(10.0 * 2 / 3), "half of the four left are refused, too"


def test_nothing_is_said_before_a_row_has_ended_or_of_a_pipe() -> None:
    for total_bytes in (2_000, 0):
        tally = Tally(total_bytes=total_bytes)
        for _ in range(10):
            tally.passed(100, is_new=True, is_asked=True)
        begun = tally.begin(100, 0.0)
        assert tally.seconds_left(0.0, 1.0) is None
        tally.end(begun, Progress(), 1.0)
        assert tally.seconds_left(0.0, 1.0) == (19.0 if total_bytes else None)


def test_a_job_that_stops_tells_how_long_the_rows_take_that_still_run() -> None:
    tally = Tally(total_bytes=1_000, total_rows=1_000)
    tally.end(tally.begin(10, now=0.0), Progress(5, 5), now=20.0)
    tally.begin(10, now=25.0)
    tally.is_stopping = True
    assert tally.seconds_left(0.0, 30.0) == 15.0
    assert tally.seconds_left(0.0, 50.0) is None, "longer than the others"
