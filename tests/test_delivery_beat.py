"""Streams of one pace come to be given their tokens together, and no reader has to wait for it."""

from __future__ import annotations

import math

from engine_world import ask, sequence_for, tokens_for
from hypothesis import given
from hypothesis import strategies as st

from uma.engine.delivery.outbox import Delivery, Outbox
from uma.engine.delivery.pacing import AT_ONCE, BEAT_SHARE, LOW_CREDITS, ROUNDING_MS, Beat, due_ms, reader_ms
from uma.engine.worker.output import Output
from uma.engine.worker.sampling import Sampled
from uma.metrics import EngineMetrics


@given(
    st.lists(st.floats(1, 500), min_size=2, max_size=6),
    st.lists(st.floats(60, 250), min_size=1, max_size=3),
    st.floats(0, 1e9),
)
def test_streams_that_began_apart_are_given_their_tokens_together_after_a_few_of_them(
    firsts: list[float], paces: list[float], began_ms: float
) -> None:
    beat, due = Beat(), [began_ms + first for first in firsts]
    for pace_ms in paces:
        for _ in range(math.ceil(1 / BEAT_SHARE) + 1):
            # Each was computed before its time.
            before, due = due, [reader_ms(last, last, pace_ms, beat) for last in due]
            gaps = [now - last for last, now in zip(before, due, strict=True)]
            assert min(gaps) >= (1 - BEAT_SHARE) * pace_ms - ROUNDING_MS
            assert max(gaps) <= pace_ms + ROUNDING_MS
        phases = [(each - due[0]) / pace_ms for each in due]
        assert all(abs(phase - round(phase)) * pace_ms < ROUNDING_MS for phase in phases)


@given(st.floats(1, 1e9), st.floats(10, 250))
def test_a_stream_without_others_keeps_its_pace(began_ms: float, pace_ms: float) -> None:
    beat, last = Beat(), began_ms
    beat.near(began_ms - 40 * pace_ms, pace_ms)  # another has been there, long ago
    for _ in range(20):
        at = reader_ms(last, last, pace_ms, beat)
        assert abs(at - last - pace_ms) < ROUNDING_MS
        last = at


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 300), st.floats(1, 100)), max_size=40))
def test_no_token_is_given_before_it_is_computed_nor_out_of_order_nor_later_than_at_its_pace(
    steps: list[tuple[int, float, float]],
) -> None:
    beat, now, last = Beat(), 1.0, [0.0, 0.0, 0.0]
    for index, took_ms, pace_ms in steps:
        now += took_ms
        at = reader_ms(last[index], now, pace_ms, beat)
        assert max(now, last[index]) <= at <= max(now, last[index] + pace_ms) + ROUNDING_MS
        last[index] = at


@given(st.integers(-1, 2 * LOW_CREDITS), st.booleans())
def test_a_reader_nearly_out_of_credit_has_each_token_at_once_unless_it_is_kept_for_it(
    credits: int, is_early: bool
) -> None:
    due = due_ms(100.0, 32.0, is_first=False, is_early=is_early, credits=credits)
    assert due == (AT_ONCE if credits <= LOW_CREDITS and not is_early else 132.0)
    assert due_ms(100.0, 32.0, is_first=True, is_early=is_early, credits=credits) == AT_ONCE


class Letters:
    """A vocabulary in which each token is a letter, and none an end."""

    eog: frozenset[int] = frozenset()

    def piece(self, _: int) -> bytes:
        return b"a"


def test_the_events_of_several_streams_are_due_at_one_time_for_all() -> None:
    events: list[Delivery] = []
    outbox = Outbox(lambda handed, _: events.extend(handed))
    output = Output(Letters(), EngineMetrics(), outbox)  # type: ignore[arg-type]
    output.pace_ms = 72.0
    prompt = tokens_for(1, 12)
    request = ask(prompt, 64)
    streams = [sequence_for(request, prompt, key=key, stream=key, is_paced=True) for key in range(3)]
    for step in range(20):
        for stream in streams:
            output.accept(stream, (Sampled(1),), 1_000.0 + 20 * stream.key + 50 * step)
    outbox.flush()
    times = [[not_before for key, _, not_before in events if key == stream.key] for stream in streams]
    assert len({each for those in times for each in those[:3]}) == 9, "they begin apart"
    assert len({each for those in times for each in those[-6:]}) <= 8
