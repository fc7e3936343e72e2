"""How tokens get to their readers: a few at a time where that is not felt, past a task that would only pass them
on, and in every case each once and in order.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, repeat
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from engine_world import answer, answers, ask, config_for
from hypothesis import given
from hypothesis import strategies as st

from harness import PATIENCE_SEC
from uma import Request, RuntimeConfig, open_engine
from uma.engine import Engine
from uma.engine.delivery.outbox import Deliver, Delivery, Outbox
from uma.engine.delivery.pacing import CREDITS, LOW_CREDITS
from uma.engine.delivery.stream import RequestStream
from uma.errors import UmaError
from uma.types import Event, Finished, RequestMetrics, Slo, Token, Usage

# In groups

BUILT_IN = RuntimeConfig(n_ctx=2_048, n_gpu_layers=0, threads=1, speculate="off")
IMPATIENT_MS = 0.001
PATIENT_MS = 3_600_000.0


def paced(request: Request, target_tbt_ms: float) -> Request:
    """A request whose reader wants a token each `target_tbt_ms`."""
    return attrs.evolve(request, slo=Slo(target_tbt_ms=target_tbt_ms))


class HandOvers:
    """What the decode thread handed over, call by call."""

    def __init__(self) -> None:
        self.calls: list[list[Event | UmaError]] = []
        self._changed = threading.Condition()

    def add(self, events: list[Event | UmaError]) -> None:
        """On the decode thread: another call."""
        with self._changed:
            self.calls.append(events)
            self._changed.notify_all()

    def wait_for(self, id: str, events: int) -> None:
        """In a thread: wait until so many were handed over for this request."""
        with self._changed:
            assert self._changed.wait_for(lambda: sum(map(len, self.of(id))) >= events, PATIENCE_SEC)

    def of(self, id: str) -> list[list[Event]]:
        """The calls in which there was something for this request, and what that was."""
        mine = [[event for event in call if getattr(event, "id", "") == id] for call in self.calls]
        return [call for call in mine if call]  # type: ignore[misc]


@pytest.fixture
def hand_overs(monkeypatch: pytest.MonkeyPatch) -> HandOvers:
    """Those of every engine that is opened from now on."""
    found = HandOvers()

    def watched(deliver: Deliver, *, waits: bool) -> Outbox:
        def record(deliveries: list[Delivery], *rest: Any) -> None:
            found.add([event for _, event, _ in deliveries])
            deliver(deliveries, *rest)

        return Outbox(record, waits=waits)

    monkeypatch.setattr("uma.engine.worker.loop.Outbox", watched)
    return found


async def warm(engine: Engine) -> None:
    """Let it learn how long its ticks take: as long as it does not know, nothing waits."""
    await answer(engine, ask(max_tokens=16, id="warm"))


async def test_a_reader_that_wants_each_token_at_once_is_given_each_by_itself(hand_overs: HandOvers) -> None:
    async with open_engine(BUILT_IN) as engine:
        await warm(engine)
        await answer(engine, paced(ask(max_tokens=40), IMPATIENT_MS))
    assert [len(call) for call in hand_overs.of("a")] == [*[1] * 39, 2], "the last event comes with the last token"


async def test_a_patient_reader_is_given_the_first_token_at_once_and_the_others_together(
    hand_overs: HandOvers,
) -> None:
    async with open_engine(BUILT_IN) as engine:
        await warm(engine)
        await answer(engine, paced(ask(max_tokens=40), PATIENT_MS))
    first, others = hand_overs.of("a")
    assert len(first) == 1
    assert [type(event) for event in others] == [*[Token] * 39, Finished]


async def test_a_first_token_never_waits_however_much_time_all_readers_have(hand_overs: HandOvers) -> None:
    requests = [paced(ask(f"Story {index}", 30, id=str(index)), PATIENT_MS) for index in range(6)]
    async with open_engine(attrs.evolve(BUILT_IN, max_sequences=3)) as engine:
        await warm(engine)
        hand_overs.calls.clear()
        await answers(engine, requests)
    begun: set[str] = set()
    for call in hand_overs.calls:
        is_first = []
        for event in call:
            assert isinstance(event, Token | Finished)
            is_first.append(event.id not in begun)
            begun.add(event.id)
        assert is_first == sorted(is_first), "a first token was still here when a later one came"
    assert begun == {request.id for request in requests}
    assert max(len(call) for call in hand_overs.of("0")) > 10, "nothing ever waited"


async def test_a_reader_that_reads_nothing_is_given_each_of_the_last_tokens_that_fit(
    hand_overs: HandOvers,
) -> None:
    async with open_engine(BUILT_IN) as engine:
        await warm(engine)
        async with engine.generate(paced(ask(max_tokens=200), PATIENT_MS)):
            await trio.to_thread.run_sync(hand_overs.wait_for, "a", CREDITS)
            sizes = [len(call) for call in hand_overs.of("a")]
    assert sizes == [1, CREDITS - LOW_CREDITS, *[1] * (LOW_CREDITS - 1)]


# Past the reader's task

FINISHED = Finished("a", "length", Usage(1, 0, 1), RequestMetrics(0, 0, 0, 0, 1, 0, 1), 0)


class Account:
    """The decode thread's side of a stream: events are credits spent, until the reader has made room for more."""

    def __init__(self) -> None:
        self.credits = CREDITS

    def credit(self, events: int) -> None:
        self.credits += events


class Seen:
    """What a stream's reader got, through the tap or by reading. The tap takes what `takes` says."""

    def __init__(self, takes: Iterator[bool]) -> None:
        self._takes = takes
        self.events: list[Event] = []
        self.tapped = 0

    def tap(self, token: Token) -> bool:
        if not next(self._takes):
            return False
        self.tapped += 1
        self.events.append(token)
        return True

    @property
    def token_ids(self) -> list[int]:
        return [event.token_id for event in self.events if isinstance(event, Token)]


@given(st.lists(st.tuples(st.sampled_from(["taken", "left", "read"]), st.integers(1, 80))), st.booleans())
async def test_what_a_tap_leaves_is_read_in_order_and_all_room_is_given_back(
    moments: list[tuple[str, int]], is_tapped: bool
) -> None:
    account: Any = Account()
    forgotten: list[int] = []
    stream = RequestStream(account, lambda: forgotten.append(7), lambda _: None)
    takes: list[bool] = []
    seen = Seen(iter(takes.pop, None))
    stream.tap = seen.tap if is_tapped else None
    came = 0
    for moment in [moment for moment, times in moments for _ in range(times)]:
        if moment == "read":
            if came > len(seen.events):
                seen.events.append(await stream.__anext__())
        elif account.credits:
            account.credits -= 1
            takes[:] = [moment == "taken"]
            stream.deliver(Token("a", str(came), came))
            came += 1
        assert seen.token_ids == list(range(len(seen.events)))
        unread, spent = came - len(seen.events), CREDITS - account.credits
        assert unread <= spent < unread + CREDITS // 2, "more or less room was given back than there is"
    stream.deliver(FINISHED)
    seen.events += [event async for event in stream]
    assert seen.token_ids == list(range(came))
    assert seen.events[-1] is FINISHED
    assert forgotten == [7]


chance = random.Random(1)
PATTERNS: dict[str, Callable[[], Iterator[bool]]] = {
    "all": lambda: repeat(True),
    "none": lambda: repeat(False),
    "every other": lambda: cycle([True, False]),
    "in runs": lambda: cycle([*[True] * 40, *[False] * 3]),
    "any": lambda: iter(partial(chance.choice, (True, True, False)), None),
}


@pytest.mark.parametrize("pattern", PATTERNS)
async def test_a_tap_and_a_reader_together_get_what_a_reader_alone_gets(tiny: Path, pattern: str) -> None:
    """Over far more tokens than there is room for at once, so that all of it has to be given back again and again."""
    n_tokens = 5 * CREDITS
    seen = Seen(PATTERNS[pattern]())
    async with open_engine(config_for(tiny)) as engine:
        expected = await answer(engine, ask(max_tokens=n_tokens))
        with trio.fail_after(PATIENCE_SEC):
            async with engine.generate(ask(max_tokens=n_tokens)) as stream:
                stream.tap = seen.tap
                async for event in stream:
                    seen.events.append(event)
    assert seen.token_ids == list(expected.token_ids)
    assert isinstance(seen.events[-1], Finished)
    assert (seen.tapped > 0, seen.tapped < n_tokens) == (pattern != "none", pattern != "all")
