"""Tokens computed ahead reach their reader in order and in time; one that leaves is not charged for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from engine_world import (
    HaltingContext,
    answer,
    answers,
    ask,
    config_for,
    halting_contexts,
    settled,
    tokens_for,
)
from hypothesis import given
from hypothesis import strategies as st

from harness import PATIENCE_SEC
from uma import RuntimeConfig
from uma.engine import Engine, open_engine
from uma.engine.delivery import bell as bell_module
from uma.engine.delivery import mailbox as mailbox_module
from uma.engine.delivery.answers import AnswerGroup, AnswerPort
from uma.engine.delivery.bell import Bell
from uma.engine.delivery.mailbox import Mailbox
from uma.engine.delivery.pacing import reader_ms
from uma.engine.delivery.stream import Lateness, RequestStream
from uma.engine.policy import lead
from uma.engine.policy.lead import longest_piece_ms, max_lead_ms, steps_before
from uma.engine.policy.tuning import TUNING, Tuning
from uma.errors import DecodeFailed, InternalError, UmaError
from uma.types import Event, EventStream, Finished, Grammar, Pace, Request, RequestMetrics, Slo, Token, Usage

PACE_MS = 80.0
NOW_MS = 1.0


class Sequence:
    """The other end of a stream: what it was asked to do."""

    def __init__(self, lateness: Lateness | None = None) -> None:
        self.is_cancelled = False
        self.dropped = 0
        self.stream = RequestStream(self, lambda: None, self._drop, lateness)

    def end_thinking(self) -> None:
        """Nothing is thought here."""

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
        assert stream.take(token(number), 50.0 + 100 * number, NOW_MS)
    stream.release(250.0)
    assert await read(stream) == [token(0), token(1), token(2)]
    stream.release(250.0)
    assert await read(stream) == []
    stream.release(350.0)
    assert await read(stream) == [token(3)]


async def test_what_is_due_takes_along_what_was_computed_ahead() -> None:
    stream = Sequence().stream
    assert all(stream.take(token(number), 100.0 + number, NOW_MS) for number in range(2))
    assert not stream.take(token(2), NOW_MS, NOW_MS), "no prompt is read any more, and it is sent as it comes"
    assert await read(stream) == [token(0), token(1), token(2)]


async def test_a_cancel_drops_what_was_computed_ahead_and_the_usage_says_what_was_given() -> None:
    sequence = Sequence()
    stream = sequence.stream
    stream.deliver(token(0))
    for number in (1, 2):
        stream.take(token(number), 1e6, NOW_MS)
    stream.cancel()
    assert sequence.is_cancelled
    assert not stream.take(token(3), 2e6, NOW_MS), "it came after the cancel"
    assert not stream.take(token(3), 0.0, NOW_MS), "it is due, but behind one that was dropped"
    stream.deliver(finished(5))
    *given_tokens, last = await read(stream)
    assert given_tokens == [token(0)]
    assert isinstance(last, Finished)
    assert (last.reason, last.usage.completion_tokens, sequence.dropped) == ("cancelled", 1, 4)


async def test_a_cancel_of_a_request_that_has_ended_ahead_of_time_needs_no_decode_thread() -> None:
    sequence = Sequence()
    sequence.stream.take(token(0), 1e6, NOW_MS)
    sequence.stream.take(finished(1), 1e6, NOW_MS)
    sequence.stream.cancel()
    (last,) = await read(sequence.stream)
    assert isinstance(last, Finished)
    assert (last.reason, last.usage.completion_tokens) == ("cancelled", 0)
    assert not sequence.is_cancelled


async def test_a_fault_waits_for_nothing_and_comes_after_what_was_computed() -> None:
    stream = Sequence().stream
    stream.take(token(0), 1e6, NOW_MS)
    error = DecodeFailed("it broke")
    assert not stream.take(error, 0.0, NOW_MS)
    assert await stream.__anext__() == token(0)
    with pytest.raises(DecodeFailed):
        await stream.__anext__()


async def test_an_end_that_is_due_brings_all_tokens_before_it() -> None:
    stream = Sequence().stream
    stream.take(token(0), 1e6, NOW_MS)
    assert not stream.take(finished(1), 0.0, NOW_MS)
    assert await read(stream) == [token(0), finished(1)]


@given(st.lists(st.tuples(st.floats(0, 500), st.floats(0, 100))))
def test_readers_are_given_tokens_in_order_never_early_and_at_the_pace(steps: list[tuple[float, float]]) -> None:
    now, last = 1.0, 0.0
    for took_ms, pace_ms in steps:
        now += took_ms
        at = reader_ms(last, now, pace_ms)
        assert at >= now
        assert at >= last or not pace_ms
        assert at in (now, last, last + pace_ms, now + max_lead_ms(pace_ms))
        assert at == now or pace_ms, "nothing is paced"
        assert at <= max(last, now + max_lead_ms(pace_ms)), "kept for longer than is of use"
        last = at


@given(st.floats(0, 10_000))
def test_sixteen_tokens_are_computed_ahead_if_they_last_for_two_seconds_at_most_and_eight_at_any_pace(
    pace_ms: float,
) -> None:
    assert max_lead_ms(pace_ms) >= 8 * pace_ms, "a slow reader's tokens cover less than a piece"
    assert max_lead_ms(pace_ms) <= max(8 * pace_ms, 2_000.0), "an answer ends seconds later than it could"
    assert max_lead_ms(pace_ms) == 16 * pace_ms or 16 * pace_ms > 2_000.0


@given(st.floats(0, 500), st.floats(0, 1_000), st.floats(20, 100), st.floats(0.5, 15))
def test_the_steps_before_a_piece_supply_every_reader_until_after_it(
    piece: float, lead_ms: float, pace: float, step: float
) -> None:
    steps = steps_before(piece, lead_ms, pace, step)
    assert steps >= 1
    assert lead_ms + steps * pace >= 0.999 * (steps * step + TUNING.safety * piece + step)
    is_covered = TUNING.safety * piece + step <= max_lead_ms(pace)
    assert piece <= longest_piece_ms(lead_ms, pace, step, steps) + 1e-6 or not is_covered


PROMPT = tokens_for(1, 12)
DOCUMENT = tokens_for(3, 3_000)
HOURS_MS = 1e7


class Watch:
    """What came of the tokens of the request `stream`, in order."""

    def __init__(self) -> None:
        self.given: list[int] = []
        self.ahead: list[int] = []
        """Those that came before their time."""

    def noted(self, event: Event | UmaError, is_kept: bool) -> bool:
        if is_kept and isinstance(event, Token) and event.id == "stream":
            self.ahead.append(event.token_id)
        return is_kept


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HaltingContext]]:
    """Those of the engines that are opened from now on."""
    yield from halting_contexts(monkeypatch)


@pytest.fixture
def far_ahead(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """While prompts are read, each token of a stream is due hours after the one before."""
    watch, take, deliver, take_of_several = Watch(), RequestStream.take, RequestStream.deliver, AnswerPort.take

    def watched_take(stream: RequestStream, event: Event | UmaError, not_before_ms: float, now_ms: float) -> bool:
        return watch.noted(event, take(stream, event, not_before_ms, now_ms))

    def watched_deliver(stream: RequestStream, event: Event | UmaError, *at_ms: float) -> None:
        if isinstance(event, Token) and event.id == "stream":
            watch.given.append(event.token_id)
        deliver(stream, event, *at_ms)

    def watched_port(port: AnswerPort, event: Event | UmaError, not_before_ms: float, now_ms: float) -> bool:
        return watch.noted(event, take_of_several(port, event, not_before_ms, now_ms))

    monkeypatch.setattr(AnswerPort, "take", watched_port)
    monkeypatch.setattr(RequestStream, "take", watched_take)
    monkeypatch.setattr(RequestStream, "deliver", watched_deliver)
    monkeypatch.setattr(lead, "TUNING", Tuning(longest_pace_ms=HOURS_MS))
    return watch


def patient(tiny: Path, **settings: Any) -> RuntimeConfig:
    """Settings with which no stream has to have its next token soon, and a document is read in several pieces."""
    return config_for(tiny, n_ctx=8_192, n_batch=512, tick_budget_ms=1e9, **settings)


async def beside_a_document(engine: Engine, request: Request) -> tuple[list[int], Finished | None]:
    """Read a stream while a prompt of 3,000 tokens is read, then cancel it and read to its end."""
    ids: list[int] = []

    async def read_document(stream: EventStream) -> None:
        await answer(engine, ask(DOCUMENT, 1, id="document"))
        stream.cancel()

    with trio.fail_after(PATIENCE_SEC):
        async with trio.open_nursery() as nursery, engine.generate(request) as stream:
            async for event in stream:
                if isinstance(event, Finished):
                    return ids, event
                assert isinstance(event, Token)
                ids.append(event.token_id)
                if len(ids) == 1:
                    nursery.start_soon(read_document, stream)
    return ids, None


async def left_beside_a_document(
    engine: Engine, context: HaltingContext, request: Request, *, cancels: bool = True
) -> list[Event]:
    """Begin a stream, then a prompt of 3,000 tokens. While the last piece of that is read, leave the stream, or cancel
    it and read all of it. The prompt is read to its end.

    The decode thread waits for both, so that neither depends on which thread has a core: for the prompt after a few
    tokens of the stream, and for the reader to leave when all tokens until then are with the stream.
    """

    async def read_document(task_status: trio.TaskStatus[None]) -> None:
        async with engine.generate(ask(DOCUMENT, 1, id="document", priority=request.priority)) as document:
            task_status.started()
            async for _ in document:
                pass

    events: list[Event] = []
    context.halt_at = len(PROMPT) + 4
    with trio.fail_after(PATIENCE_SEC):
        async with trio.open_nursery() as nursery:
            async with engine.generate(request) as stream:
                await context.halted()
                await nursery.start(read_document)
                context.is_there.clear()
                context.halt_at = len(DOCUMENT) - 1
                context.may_go_on.set()
                await context.halted()
                are_given = trio.Event()
                engine.worker.mailbox.call(are_given.set)  # in place of the decode thread, which waits
                await are_given.wait()
                if cancels:
                    stream.cancel()
                    context.may_go_on.set()
                    events = [event async for event in stream]
            context.may_go_on.set()
    return events


class Answers:
    """Two answers of one request, whose sequences do what they are told."""

    def __init__(self) -> None:
        self.dropped = 0
        self.sequences = [Sequence(), Sequence()]
        self.group = AnswerGroup(ask(PROMPT, id="r", n=2), self.sequences, lambda: None, self._drop)
        lateness = Lateness(PACE_MS, lambda: None)
        self.ports = [AnswerPort(self.group, index, lambda: None, lateness) for index in range(2)]

    def _drop(self, tokens: int) -> None:
        self.dropped += tokens


async def test_tokens_of_each_answer_wait_for_their_own_time() -> None:
    answers = Answers()
    one, other = answers.ports
    for number in range(3):  # several of one come before any of the other, as from one batch each
        assert one.take(token(number), 100.0 + 80 * number, NOW_MS)
    for number in range(3):
        assert other.take(attrs.evolve(token(number), index=1), 100.0 + 80 * number, NOW_MS)
    for number in range(3):
        for port in answers.ports:
            port.release(100.0 + 80 * number)
        assert await read(answers.group.stream) == [token(number), attrs.evolve(token(number), index=1)]
    assert not one.early.waiting and not other.early.waiting


async def test_what_was_computed_ahead_for_several_answers_is_dropped_with_them() -> None:
    answers = Answers()
    one, other = answers.ports
    one.deliver(token(1), 0.0)
    assert one.take(token(2), 100.0, NOW_MS)
    assert other.take(attrs.evolve(token(3), index=1), 100.0, NOW_MS)
    assert other.take(finished(1), 100.0, NOW_MS)
    answers.group.stream.cancel()
    assert all(each.is_cancelled for each in answers.sequences)
    assert not one.take(token(4), 100.0, NOW_MS)  # came late, and is dropped too
    one.deliver(finished(3), 0.0)
    given, last = await read(answers.group.stream)
    assert (given, answers.dropped) == (token(1), 3)
    assert isinstance(last, Finished)
    assert (last.reason, last.usage.completion_tokens) == ("cancelled", 1)
    assert [(each.reason, each.completion_tokens) for each in last.answers] == [("cancelled", 1), ("cancelled", 0)]


@pytest.mark.parametrize("have_ended", [False, True])
async def test_a_fault_in_one_answer_ends_all_of_them(have_ended: bool) -> None:
    answers = Answers()
    for port in answers.ports:
        assert port.take(token(1), 100.0, NOW_MS)
        assert not have_ended or port.take(finished(1), 100.0, NOW_MS)
    answers.ports[1].fail(InternalError("a fault"))
    with pytest.raises(ExceptionGroup) as caught:
        await read(answers.group.stream)
    assert caught.group_contains(InternalError)
    assert all(each.is_cancelled for each in answers.sequences)


async def test_a_stream_says_the_same_while_prompts_are_read(tiny: Path) -> None:
    async with open_engine(config_for(tiny, n_ctx=8_192)) as engine:
        by_itself = await answer(engine, ask(PROMPT, 600, id="stream"))
        ids, last = await beside_a_document(engine, ask(PROMPT, 600, id="stream"))
        metrics = await settled(engine)
    assert tuple(ids) == by_itself.token_ids[: len(ids)]
    assert last is not None
    assert metrics["piece_lead_ms_count"] > 0


@pytest.mark.parametrize("answers", [1, 2])
@pytest.mark.parametrize(("asked", "configured"), [("auto", "auto"), ("off", "auto"), ("auto", "off")])
async def test_tokens_wait_for_their_time_unless_the_request_or_the_configuration_turns_that_off(
    tiny: Path,
    far_ahead: Watch,
    contexts: list[HaltingContext],
    asked: Pace,
    configured: Pace,
    answers: int,
) -> None:
    async with open_engine(patient(tiny, pace=configured)) as engine:
        request = attrs.evolve(ask(PROMPT, 1_500, id="stream", n=answers, temperature=1.0), pace=asked)
        await left_beside_a_document(engine, contexts[0], request)
    assert bool(far_ahead.ahead) == (asked == configured == "auto")


async def test_a_background_stream_that_ends_ahead_of_its_time_is_given_its_end_at_once(
    tiny: Path, far_ahead: Watch
) -> None:
    async with open_engine(patient(tiny)) as engine:
        request = ask(PROMPT, 40, id="stream", priority=-1)
        document = ask(tokens_for(3, 3_000), 1, id="document", priority=-1)
        found = await answers(engine, [document, request])
    assert far_ahead.ahead
    assert len(found[1].tokens) == found[1].finished.usage.completion_tokens == 40


@pytest.mark.parametrize(
    ("cancels", "sampling"),
    [
        (True, {}),
        (True, {"stop": ("never said",)}),
        (False, {"grammar": Grammar(regex="[a-z ]*")}),
        (False, {"min_tokens": 3_000, "ignore_eos": False}),
    ],
)
async def test_tokens_that_a_reader_left_before_their_time_are_dropped_and_their_kv_is_kept(
    tiny: Path, far_ahead: Watch, contexts: list[HaltingContext], cancels: bool, sampling: dict[str, Any]
) -> None:
    async with open_engine(patient(tiny)) as engine:
        request = ask(PROMPT, 4_000, id="stream", **sampling)
        events = await left_beside_a_document(engine, contexts[0], request, cancels=cancels)
        given, ahead = far_ahead.given, list(far_ahead.ahead)
        follow_up = await answer(engine, ask((*PROMPT, *given, *ahead, 100), 1, id="follow-up"))
        metrics = engine.snapshot()  # what the stream was given and what it dropped came before the follow-up's token
    assert metrics["tokens_dropped_total"] >= len(ahead) >= 2
    dropped = metrics["tokens_dropped_total"]
    assert metrics["tokens_generated_total"] == len(given) + dropped + 2, "and one for each other request"
    assert follow_up.finished.usage.cached_tokens > len(PROMPT) + len(given)
    if cancels:
        *tokens, last = events
        assert isinstance(last, Finished)
        assert (last.reason, last.usage.completion_tokens) == ("cancelled", len(given))
        assert [each.token_id for each in tokens if isinstance(each, Token)] == given


@pytest.mark.parametrize(("target_ms", "is_late"), [(1e-6, True), (1e9, False)])
async def test_a_token_that_comes_later_than_its_target_is_counted(tiny: Path, target_ms: float, is_late: bool) -> None:
    async with open_engine(config_for(tiny)) as engine:
        await answer(engine, attrs.evolve(ask(max_tokens=40), slo=Slo(target_tbt_ms=target_ms)))
        assert bool(engine.snapshot()["tokens_late_total"]) == is_late


def given_to(stream: RequestStream, seen: list[tuple[float, int]]) -> RequestStream:
    """The stream, whose reader notes when it is given which token."""

    def tap(token: Token) -> bool:
        seen.append((1000 * trio.current_time(), token.token_id))
        return True

    stream.tap = tap
    return stream


@pytest.fixture
def mailbox(monkeypatch: pytest.MonkeyPatch) -> Mailbox:
    """One whose time is Trio's."""
    for module in (mailbox_module, bell_module):
        monkeypatch.setattr(module, "now_ms", lambda: 1000 * trio.current_time())
    return Mailbox()


async def test_one_timer_gives_the_early_events_of_all_streams_at_their_times_and_the_rest_at_the_end(
    mailbox: Mailbox, autojump_clock: trio.testing.MockClock
) -> None:
    seen: list[tuple[float, int]] = []
    late: list[float] = []
    streams = [given_to(Sequence(Lateness(80.0, lambda: late.append(trio.current_time()))).stream, seen) for _ in "abc"]
    events = [(0, 300.0), (1, 100.0), (2, 200.0), (0, 400.0), (1, 0.0), (2, 250.0)]
    mailbox.post([(streams[index], token(number), due) for number, (index, due) in enumerate(events)], None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mailbox.run)
        await trio.sleep(0.35)
        nursery.cancel_scope.cancel()
    due = [(0, 1), (0, 4), (200, 2), (250, 5), (300, 0)]  # the fifth is due at once, and takes along the second
    assert [(round(at_ms), number) for at_ms, number in seen] == due
    assert late == [], "each within its target of the one before"
    mailbox.close()
    assert [number for _, number in seen[len(due) :]] == [3]


async def test_events_that_are_due_after_others_that_wait_do_not_wake_the_thread_and_are_given_at_their_times(
    mailbox: Mailbox, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    rings, ring = list[float](), Bell.ring

    def rung(bell: Bell) -> None:
        rings.append(round(1000 * trio.current_time()))
        ring(bell)

    monkeypatch.setattr(Bell, "ring", rung)
    seen: list[tuple[float, int]] = []
    first, second, third = (given_to(Sequence().stream, seen) for _ in "abc")

    def posts(event: Token) -> bool:
        # As the decode thread can while the Trio thread is awake and has not yet said when it looks next.
        seen.append((1000 * trio.current_time(), event.token_id))
        if event.token_id == 3:
            mailbox.post([(third, token(2), 500.0)], None)
        return True

    second.tap = posts
    mailbox.post([(first, token(0), 100.0)], None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mailbox.run)
        await trio.testing.wait_all_tasks_blocked()
        mailbox.post([(second, token(1), 300.0)], None)
        await trio.sleep(0.2)
        assert rings == [0], "for the one with which nothing waited"
        mailbox.post([(second, token(3), 350.0), (first, token(4), 250.0)], None)
        assert rings == [0, 200], "one is due before the thread looks"
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert [(round(at_ms), number) for at_ms, number in seen] == [(100, 0), (250, 4), (300, 1), (350, 3), (500, 2)]
    mailbox.close()


async def test_a_token_counts_as_late_when_it_is_given_late_whatever_held_it_up(
    mailbox: Mailbox, autojump_clock: trio.testing.MockClock
) -> None:
    late: list[float] = []
    stream = given_to(Sequence(Lateness(80.0, lambda: late.append(trio.current_time()))).stream, [])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mailbox.run)
        for wait_sec in (0.0, 0.09, 0.11):
            await trio.sleep(wait_sec)
            mailbox.post([(stream, token(0), 0.0)], None)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert late == [pytest.approx(0.2)]
    mailbox.close()


async def test_a_tap_that_fails_on_an_early_event_ends_its_own_stream_alone(
    mailbox: Mailbox, autojump_clock: trio.testing.MockClock
) -> None:
    seen: list[tuple[float, int]] = []
    broken, whole = Sequence().stream, given_to(Sequence().stream, seen)

    def tap(_: Token) -> bool:
        raise ValueError("it broke")

    broken.tap = tap
    mailbox.post([(broken, token(0), 100.0), (whole, token(1), 100.0), (broken, token(2), 200.0)], None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mailbox.run)
        with pytest.raises(InternalError, match="it broke"):
            await broken.__anext__()
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert [number for _, number in seen] == [1]
    mailbox.close()
