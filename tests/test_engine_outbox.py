"""The outbox: events wait for those of the next ticks, never past their time, and none is lost, doubled, overtaken."""

from __future__ import annotations

import math
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from uma.engine.delivery.outbox import Delivery, Outbox
from uma.engine.delivery.pacing import AT_ONCE
from uma.types import Token


def token(number: int) -> Token:
    return Token("r", str(number), number)


class Reader:
    """What an outbox has handed over, call by call; it takes everything at once."""

    def __init__(self) -> None:
        self.calls: list[list[Delivery]] = []
        self.is_waited_for: list[bool] = []
        self.outbox = Outbox(self._take)

    def _take(self, events: list[Delivery], taken: threading.Event | None) -> None:
        assert taken is None or not taken.is_set(), "the outbox would not wait for it"
        self.calls.append(events)
        self.is_waited_for.append(taken is not None)
        if taken is not None:
            taken.set()

    @property
    def given(self) -> list[Delivery]:
        return [each for call in self.calls for each in call]


def test_nothing_goes_before_it_is_due_and_all_goes_in_one_call_with_the_first_that_is() -> None:
    reader = Reader()
    for number, due_ms in enumerate((30.0, 20.0, 40.0)):
        reader.outbox.add("stream", token(number), due_ms)
    reader.outbox.flush_due(19.0)
    assert reader.calls == []
    reader.outbox.flush_due(21.0)
    assert reader.calls == [[("stream", token(0), 0.0), ("stream", token(1), 0.0), ("stream", token(2), 0.0)]]


def test_where_a_batch_keeps_nothing_from_running_nothing_is_waited_for() -> None:
    calls: list[threading.Event | None] = []
    outbox = Outbox(lambda _, taken: calls.append(taken), waits=False)
    outbox.add("stream", token(0), AT_ONCE)
    outbox.flush()
    assert calls == [None]


def test_what_cannot_wait_goes_at_the_next_chance_and_takes_along_what_could() -> None:
    reader = Reader()
    reader.outbox.add("patient", token(0), 1_000.0)
    reader.outbox.add("urgent", token(1), AT_ONCE)
    assert reader.calls == [], "handing over is for when the batch is done"
    reader.outbox.flush_due(-1e9)
    assert reader.calls == [[("patient", token(0), 0.0), ("urgent", token(1), 0.0)]]


def test_an_event_without_a_time_cannot_wait() -> None:
    reader = Reader()
    reader.outbox.add("stream", token(0))
    reader.outbox.flush_due(0.0)
    assert reader.given == [("stream", token(0), 0.0)]


def test_an_unknown_moment_is_later_than_all() -> None:
    reader = Reader()
    reader.outbox.add("stream", token(0), 1e12)
    reader.outbox.flush_due(math.inf)
    assert reader.given == [("stream", token(0), 0.0)]


def test_only_what_cannot_wait_is_waited_for() -> None:
    reader = Reader()
    for due_ms in (AT_ONCE, 10.0, AT_ONCE, AT_ONCE, 10.0):
        reader.outbox.add("stream", token(0), due_ms)
        reader.outbox.add("stream", token(1), 20.0)
        reader.outbox.flush_due(15.0)
    assert reader.is_waited_for == [True, False, True, True, False]


@pytest.mark.parametrize("due_ms", [AT_ONCE, 10.0])
def test_no_reader_that_takes_nothing_stops_the_decode_thread(due_ms: float) -> None:
    calls: list[list[Delivery]] = []
    outbox = Outbox(lambda events, taken: calls.append(events))
    for number in range(3):
        outbox.add("stream", token(number), due_ms)
        outbox.flush()
    assert calls == [[("stream", token(number), 0.0)] for number in range(3)]


def test_where_nothing_is_buffered_no_task_is_woken() -> None:
    reader = Reader()
    reader.outbox.flush()
    reader.outbox.flush_due(math.inf)
    assert reader.calls == []


def test_what_went_leaves_no_due_time_behind() -> None:
    reader = Reader()
    reader.outbox.add("stream", token(0), AT_ONCE)
    reader.outbox.flush_due(0.0)
    reader.outbox.add("stream", token(1), 100.0)
    reader.outbox.flush_due(50.0)
    assert reader.given == [("stream", token(0), 0.0)]


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 50))), st.integers(0, 60))
def test_delivery_may_add_more(events: list[tuple[int, float]], when: int) -> None:
    # As a hand-over that fails would: what it adds is neither lost nor given twice.
    given_events: list[Delivery] = []

    def deliver(events: list[Delivery], taken: threading.Event | None) -> None:
        given_events.extend(events)
        if taken is not None:
            taken.set()
        if len(given_events) == len(events):
            outbox.add("late", token(-1))

    outbox = Outbox(deliver)
    for number, (stream, due_ms) in enumerate(events):
        outbox.add(stream, token(number), due_ms)
    outbox.flush_due(float(when))
    outbox.flush()
    expected = [(stream, token(number), 0.0) for number, (stream, _) in enumerate(events)]
    assert [each for each in given_events if each[0] != "late"] == expected
    outbox.flush()
    assert len(given_events) == len(expected) + bool(expected)


class Ticks(RuleBasedStateMachine):
    """Ticks of any length, with any events, watched by a clock."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader()
        self.now_ms = 0.0
        self.added: list[Delivery] = []
        self.due_ms: list[float] = []

    @rule(stream=st.integers(0, 3), wait_ms=st.one_of(st.just(AT_ONCE), st.floats(0, 100)))
    def add(self, stream: int, wait_ms: float) -> None:
        event = token(len(self.added))
        self.added.append((stream, event, 0.0))
        self.due_ms.append(self.now_ms + wait_ms)
        self.reader.outbox.add(stream, event, self.now_ms + wait_ms)

    @rule(took_ms=st.floats(0.01, 60))
    def tick(self, took_ms: float) -> None:
        """Before a batch: hand over what would be late at its end."""
        self.now_ms += took_ms
        self.reader.outbox.flush_due(self.now_ms)
        held = self.due_ms[len(self.reader.given) :]
        assert all(due_ms >= self.now_ms for due_ms in held), "something was held past its time"

    @rule()
    def flush(self) -> None:
        self.reader.outbox.flush()
        assert len(self.reader.given) == len(self.added), "something was left behind"

    @invariant()
    def all_goes_once_and_in_order(self) -> None:
        given_events = self.reader.given
        assert given_events == self.added[: len(given_events)]
        assert all(self.reader.calls), "a reader was woken for nothing"


TestTicks = Ticks.TestCase
