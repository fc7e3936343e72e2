"""Tokens computed ahead reach their reader in order and in time; one that leaves is not charged for them."""

from __future__ import annotations

import math

import attrs
import pytest
import trio
import trio.testing
from engine_world import answer, ask, config_for, tokens_for
from hypothesis import given
from hypothesis import strategies as st

from harness import PATIENCE_SEC
from uma.engine import Engine, open_engine
from uma.engine.delivery.experience import Experience
from uma.engine.delivery.pacing import reader_ms
from uma.engine.delivery.stream import RequestStream
from uma.engine.policy.lead import SAFETY, longest_piece_ms, max_lead_ms, steps_before
from uma.errors import DecodeFailed
from uma.types import Finished, Pace, RequestMetrics, Token, Usage

PACE_MS = 80.0


class Sequence:
    """The other end of a stream: what it was asked to do."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self.dropped = 0
        self.stream = RequestStream(self, lambda: None, self._drop)

    def cancel(self) -> None:
        self.is_cancelled = True

    def credit(self, events: int) -> None:
        pass

    def _drop(self, tokens: int) -> None:
        self.dropped += tokens


def token(number: int) -> Token:
    return Token("r", str(number), number)


def finished(tokens: int) -> Finished:
    return Finished("r", "stop", Usage(5, 0, tokens), RequestMetrics(0, 0, 0, 0, 1, 0, 1), 0)


async def read(stream: RequestStream) -> list[object]:
    """What there is to read now."""
    found: list[object] = []

    async def take() -> None:
        async for event in stream:
            found.append(event)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    return found


async def test_events_wait_for_their_time_and_keep_their_order() -> None:
    stream = Sequence().stream
    for number in range(4):
        assert stream.keep(token(number), 100.0 * number)
    stream.release(250.0)
    assert await read(stream) == [token(0), token(1), token(2)]
    stream.release(250.0)
    assert stream.is_ahead
    stream.release(300.0)
    assert await read(stream) == [token(3)]


async def test_a_cancel_drops_what_was_computed_ahead_and_the_usage_says_what_was_given() -> None:
    sequence = Sequence()
    stream = sequence.stream
    stream.deliver(token(0))
    for number in (1, 2):
        stream.keep(token(number), 1e6)
    stream.cancel()
    assert sequence.is_cancelled
    assert stream.keep(token(3), 2e6), "it came after the cancel"
    stream.deliver(finished(4))
    *given_tokens, last = await read(stream)
    assert given_tokens == [token(0)]
    assert isinstance(last, Finished)
    assert (last.reason, last.usage.completion_tokens, sequence.dropped) == ("cancelled", 1, 3)


async def test_a_cancel_of_a_request_that_has_ended_ahead_of_time_needs_no_decode_thread() -> None:
    sequence = Sequence()
    sequence.stream.keep(token(0), 1e6)
    sequence.stream.keep(finished(1), 1e6)
    sequence.stream.cancel()
    (last,) = await read(sequence.stream)
    assert isinstance(last, Finished)
    assert (last.reason, last.usage.completion_tokens) == ("cancelled", 0)
    assert not sequence.is_cancelled


async def test_a_fault_waits_for_nothing_and_comes_after_what_was_computed() -> None:
    stream = Sequence().stream
    stream.keep(token(0), 1e6)
    error = DecodeFailed("it broke")
    assert not stream.keep(error, 0.0), "deliver it at once"
    stream.deliver(error)
    assert await stream.__anext__() == token(0)
    with pytest.raises(DecodeFailed):
        await stream.__anext__()


async def test_an_end_that_is_due_brings_all_tokens_before_it() -> None:
    stream = Sequence().stream
    stream.keep(token(0), 1e6)
    assert not stream.keep(finished(1), 0.0), "deliver it at once"
    stream.deliver(finished(1))
    assert await read(stream) == [token(0), finished(1)]


@given(st.lists(st.tuples(st.floats(0, 500), st.floats(0, 100))))
def test_readers_are_given_tokens_in_order_never_early_and_at_the_pace(steps: list[tuple[float, float]]) -> None:
    now, last = 1.0, 0.0
    for took_ms, pace_ms in steps:
        now += took_ms
        at = reader_ms(last, now, pace_ms)
        assert at >= now
        assert at >= last
        assert at in (now, last, last + pace_ms, now + max_lead_ms(pace_ms))
        assert at <= max(last, now + max_lead_ms(pace_ms)), "kept for longer than is of use"
        last = at


@given(st.floats(0, 500), st.floats(0, 1_000), st.floats(20, 100), st.floats(0.5, 15))
def test_the_steps_before_a_piece_supply_every_reader_until_after_it(
    piece: float, lead: float, pace: float, step: float
) -> None:
    steps = steps_before(piece, lead, pace, step)
    assert steps >= 1
    assert lead + steps * pace >= 0.999 * (steps * step + SAFETY * piece + step)
    assert piece <= longest_piece_ms(lead, pace, step, steps) + 1e-6 or SAFETY * piece + step > max_lead_ms(pace)


@given(st.lists(st.floats(0, 5_000), min_size=1).map(sorted))
def test_quality_of_experience_is_one_exactly_where_no_token_was_late(times: list[float]) -> None:
    experience = Experience(1_000.0, PACE_MS)
    for at in times:
        experience.had_token(at)
    is_in_time = all(at <= 1_000.0 + index * PACE_MS for index, at in enumerate(times))
    assert 0 <= experience.qoe <= 1
    if is_in_time:
        assert experience.qoe == 1
    elif len(times) > 1 and max(at - 1_000.0 - index * PACE_MS for index, at in enumerate(times)) > 50:
        assert experience.qoe < 1


def test_a_stream_that_stops_for_a_while_is_worth_less() -> None:
    even, frozen = Experience(0.0, PACE_MS), Experience(0.0, PACE_MS)
    for index in range(20):
        even.had_token(index * PACE_MS)
        frozen.had_token(index * PACE_MS + (2_000 if index > 4 else 0))
    assert even.qoe == 1
    assert frozen.qoe < 0.75


@attrs.frozen
class Reading:
    """A stream that was read while a long prompt was."""

    ids: list[int]
    finished: Finished
    pieces: int


async def beside_a_prompt(engine: Engine, *, pace: Pace = "auto", leave_after: int | None = None) -> Reading:
    """Read a stream while a prompt of 3,000 tokens is read; cancel it after so many tokens, if wanted."""
    request = attrs.evolve(ask("Once", 120, id="stream"), pace=pace)
    ids: list[int] = []
    last: Finished | None = None
    with trio.fail_after(PATIENCE_SEC):
        async with trio.open_nursery() as nursery, engine.generate(request) as stream:
            async for event in stream:
                if isinstance(event, Finished):
                    last = event
                    break
                assert isinstance(event, Token)
                ids.append(event.token_id)
                if len(ids) == 1:
                    nursery.start_soon(answer, engine, ask(tokens_for(3, 3_000), 1, id="document"))
                if len(ids) == leave_after:
                    stream.cancel()
    assert last is not None
    return Reading(ids, last, engine.snapshot()["batch_calls_total"])


async def test_a_stream_says_the_same_while_prompts_are_read_and_with_its_pace_off(tiny: object) -> None:
    config = config_for(tiny, n_ctx=8_192)  # type: ignore[arg-type]
    async with open_engine(config) as engine:
        alone = await answer(engine, ask("Once", 120))
        paces: tuple[Pace, ...] = ("auto", "off")
        for pace in paces:
            reading = await beside_a_prompt(engine, pace=pace)
            assert reading.ids == [event.token_id for event in alone.tokens]
            assert reading.finished.usage.completion_tokens == 120
            assert 0 <= reading.finished.metrics.qoe <= 1


async def test_usage_counts_what_a_reader_that_cancels_was_given(tiny: object) -> None:
    config = config_for(tiny, n_ctx=8_192)  # type: ignore[arg-type]
    async with open_engine(config) as engine:
        reading = await beside_a_prompt(engine, leave_after=20)
        metrics = engine.snapshot()
    usage = reading.finished.usage
    assert reading.finished.reason == "cancelled"
    assert len(reading.ids) == usage.completion_tokens
    assert metrics["tokens_generated_total"] == usage.completion_tokens + 1
    assert math.isfinite(metrics["lead_ms"])
