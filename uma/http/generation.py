"""A body's way through the engine: its requests run side by side, its answer is streamed or gathered, and a client that
goes away ends all of it.

A stream's status goes out with its first bytes, so a request that fails before that still has a status of its own.
Tokens reach the answer in the turn that brings them (the stream's tap), and the connection where it takes them at once.
One task writes the beginning and the end, and all that has gathered meanwhile.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import attrs
import trio

from uma.errors import PromptTooLarge, UmaError
from uma.http.dialect import Writer
from uma.http.exchange import Exchange
from uma.http.telemetry import POLL_SEC, PromptState, Telemetry
from uma.http.usage import dropped_messages
from uma.net.faults import as_uma_error
from uma.net.metering import Meter, metered
from uma.net.wakeup import Wakeup
from uma.types import Event, EventStream, Finished, Prompt, ReasoningDelta, Request, Source, Token, ToolCallDelta

logger = logging.getLogger("uma.http")

T = TypeVar("T")

HEARTBEAT_SEC = 2.0
"""Maximum silence of a stream, after which it says that it is alive: proxies give up after 15 s and more."""
MAX_SILENT_SEC = 10.0
"""Maximum time for which an answer is not begun for the sake of a status of its own."""
MAX_UNSENT_BYTES = 65_536
"""Maximum bytes of one answer that wait for the writing task; beyond it the request is paused."""
MAX_AT_ONCE = 64
"""Maximum prompts of one body that the source has at once. The others wait here, so that one body does not fill the
queue of all clients."""
NO_BUFFERING = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
"""So that a proxy passes each event on at once."""


async def stream(source: Source, http: Exchange, writer: Writer) -> None:
    """Answer `http` with what is generated as it comes, as `writer` has it, and charge the account of its key.

    Raises the `UmaError` of a request that fails before the answer has begun; later errors are part of the stream.
    """
    async with http.connected():
        await _Streamed(http, writer).run(source)


async def gather(source: Source, http: Exchange, requests: Sequence[Request]) -> list[Finished]:
    """What each of the requests generates, charged to the account of the key. Writes nothing.

    Raises the `UmaError` of a request that fails, and `ClientGoneError` where the client went away meanwhile.
    """
    results = await http.unless_gone(partial(_gather, source, http, requests))
    if dropped := dropped_messages(results):
        http.extra_headers.append((b"x-uma-dropped-messages", str(dropped).encode()))
    return results


async def small_work(http: Exchange, ask: Callable[[], Awaitable[T]]) -> T:
    """`http.unless_gone` for work outside generation, such as tokenizing: to the key's bounds it is a body on its way.

    It is not counted as running: a page renders, and an agent counts tokens, beside the one answer that a key may have.
    """
    with http.sending():
        return await http.unless_gone(ask)


async def _gather(source: Source, http: Exchange, requests: Sequence[Request]) -> list[Finished]:
    results: list[Finished | None] = [None] * len(requests)

    async def follow(index: int, stream: EventStream, meter: Meter) -> None:
        async for event in stream:
            if isinstance(event, Finished):
                meter.usage = event.usage
                http.note(event)
                results[index] = event

    if (failure := await _ask_all(source, http, requests, follow)) is not None:
        raise failure
    return [each for each in results if each is not None]


async def _ask_all(
    source: Source,
    http: Exchange,
    requests: Sequence[Request],
    follow: Callable[[int, EventStream, Meter], Awaitable[None]],
) -> UmaError | None:
    """Ask for all requests, `MAX_AT_ONCE` at a time, and have `follow` read each one's events, charged to the account
    of the key. The first failure, which this returns, ends the others.
    """
    turns = trio.CapacityLimiter(MAX_AT_ONCE)
    failures: list[UmaError] = []

    async def one(index: int, siblings: trio.CancelScope | None) -> None:
        try:
            async with turns, source.generate(requests[index]) as stream, metered(stream, http.account) as meter:
                with http.generating(stream):
                    await follow(index, stream, meter)
        except UmaError as error:
            failures.append(_placed(error, index, len(requests)))
            if siblings is not None:
                siblings.cancel()

    if len(requests) == 1:
        await one(0, None)
    else:
        async with trio.open_nursery() as nursery:
            for index in range(len(requests)):
                nursery.start_soon(one, index, nursery.cancel_scope)
    return failures[0] if failures else None


def _placed(error: UmaError, index: int, requests: int) -> UmaError:
    """The error, which says of several prompts which one is too long."""
    if requests == 1 or not isinstance(error, PromptTooLarge):
        return error
    return error.of_prompt(f"prompt[{index}]")


@attrs.define(eq=False)
class _Streamed:
    """One streamed answer: each request's task pushes, the task that called `run` writes."""

    http: Exchange
    writer: Writer
    _unsent: list[bytes] = attrs.field(factory=list, init=False)
    _unsent_bytes: int = attrs.field(default=0, init=False)
    _work: Wakeup = attrs.field(factory=Wakeup, init=False)
    _room: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)
    _results: dict[int, Finished] = attrs.field(factory=dict, init=False)
    _began_at: float = attrs.field(factory=trio.current_time, init=False)
    _asked: int = attrs.field(default=0, init=False)
    """Requests that the source has been asked for."""
    _failure: UmaError | None = attrs.field(default=None, init=False)
    _is_open: bool = attrs.field(default=False, init=False)
    _is_over: bool = attrs.field(default=False, init=False)
    _wrote_at: float = attrs.field(factory=trio.current_time, init=False)

    async def run(self, source: Source) -> None:
        """Stream to the end. Raises the failure of a request, and a fault, where nothing has gone out yet."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._beat, source)
                nursery.start_soon(self._generate_all, source)
                await self._write()
                nursery.cancel_scope.cancel()
        except Exception as fault:
            if not self.http.is_started:
                raise
            await self._break_off(as_uma_error(fault, logger, "http.crashed", request=self.http.id))
        if self._failure is not None and not self.http.is_started:
            raise self._failure

    async def _break_off(self, error: UmaError) -> None:
        """End an answer that has begun, behind the events of its requests."""
        self._unsent.append(self.writer.failed(self.http.failed(error)))
        await self._write_unsent()
        await self.http.write(b"", is_last=True)

    async def _generate_all(self, source: Source) -> None:
        try:
            self._failure = await _ask_all(source, self.http, self.writer.requests, partial(self._follow, source))
        except UmaError as error:
            self._failure = error
        if self._failure is None:
            self._push(self.writer.end([self._results[index] for index in sorted(self._results)]))
        elif self.http.is_started or self._unsent:
            self._push(self.writer.failed(self.http.failed(self._failure)))
        self._is_over = True
        self._work.ring()

    async def _follow(self, source: Source, index: int, stream: EventStream, meter: Meter) -> None:
        """Tell all events of a request."""
        self._asked += 1
        telemetry = self.writer.telemetry
        if telemetry is not None or self.writer.counts_first:
            for event in await self._watched(source, index, stream, telemetry):
                await self._tell(index, event, meter)
        if telemetry is None:
            stream.tap = partial(self._take, index)
        async for event in stream:
            await self._tell(index, event, meter)

    async def _tell(self, index: int, event: Event, meter: Meter) -> None:
        self._open()
        if isinstance(event, Finished):
            meter.usage = event.usage
            self.http.note(event)
            self._results[index] = event
            end = self.writer.finished(index, event)
            if self.writer.keep is not None:
                await self.writer.keep(self.writer.answer)
            self._push(end)
        elif isinstance(event, Prompt):
            self._push(self.writer.prompt(index, event))
        else:
            self._push(self._said(index, event))
            while self._unsent_bytes >= MAX_UNSENT_BYTES:
                await self._room.park()

    async def _watched(
        self, source: Source, index: int, stream: EventStream, telemetry: Telemetry | None
    ) -> list[Event]:
        """The events that come before all is told of the prompt: the first, or more where its source tells nothing of
        it by then.

        Without `telemetry` the prompt is looked at with the first event, unless a sign of life has come before.
        """
        events: list[Event] = []
        is_begun = False
        while not is_begun:
            with trio.move_on_after(math.inf if telemetry is None else POLL_SEC):
                events.append(await anext(stream))
            is_begun = not all(isinstance(event, Prompt) for event in events)
            if telemetry is None and self.writer.prompt_state is not None:
                break
            state = await self._state(source, index)
            if is_begun and state is None:
                state = await self._state_untold(source, index, stream, events)
            if state is not None:
                self.writer.prompt_state = attrs.evolve(state, processed=state.total) if is_begun else state
                self._open()
                for fields in () if telemetry is None else telemetry.looked(index, self.writer.prompt_state):
                    self._push(self.writer.progress(index, fields))
        return events

    async def _state(self, source: Source, index: int) -> PromptState | None:
        """How far a prompt is; None where it waits, or its answer has ended."""
        running = (await source.activity(self.writer.requests[index].id)).running
        return next((PromptState.of(each) for each in running if each.id == self.writer.requests[index].id), None)

    async def _state_untold(self, source: Source, index: int, stream: EventStream, events: list[Event]) -> PromptState:
        """The state of a prompt that the source does not tell of, behind the first of the answer's `events`: by the
        last one, which is read too, or where the answer does not end now, by the prompt's tokens.
        """
        with trio.move_on_after(HEARTBEAT_SEC):
            while not isinstance(events[-1], Finished):
                events.append(await anext(stream))
        if isinstance(last := events[-1], Finished):
            return PromptState(last.usage.prompt_tokens, last.usage.cached_tokens, last.usage.prompt_tokens)
        total = len((await source.tokenize(self.writer.requests[index])).token_ids)
        return PromptState(total, 0, total)

    def _said(self, index: int, event: Token | ReasoningDelta | ToolCallDelta) -> bytes:
        return self.writer.token(index, event) if isinstance(event, Token) else self.writer.part(index, event)

    def _take(self, index: int, token: Token) -> bool:
        if self._unsent_bytes >= MAX_UNSENT_BYTES:
            return False
        self._open()
        self._push(self.writer.token(index, token))
        return True

    def _open(self) -> None:
        """Open the stream, before anything else but a sign of life."""
        if not self._is_open and not (self.writer.counts_first and self.writer.prompt_state is None):
            self._is_open = True
            self._push(self.writer.begin())

    def _push(self, data: bytes) -> None:
        if not data:
            return
        if not self._unsent and self.http.post(data):
            self._wrote_at = trio.current_time()
            return
        self._unsent.append(data)
        self._unsent_bytes += len(data)
        self._work.ring()

    async def _write(self) -> None:
        while True:
            if self._unsent:
                await self._write_unsent()
            elif self._is_over:
                break
            else:
                await self._work.wait()
        if self.http.is_started:
            await self.http.write(b"", is_last=True)

    async def _write_unsent(self) -> None:
        if not self.http.is_started:
            await self.http.start(200, self.writer.dialect.media_type, NO_BUFFERING)
        data = b"".join(self._unsent)
        self._unsent.clear()
        self._unsent_bytes = 0
        await self.http.write(data)
        self._wrote_at = trio.current_time()
        self._room.unpark_all()

    async def _beat(self, source: Source) -> None:
        due = self._wrote_at + HEARTBEAT_SEC
        while not self._is_over:
            await trio.sleep_until(due)
            if self._wrote_at + HEARTBEAT_SEC <= due and not self._unsent:
                progress = await self._progress(source)
                # The answer can have ended meanwhile, and a slow reader not have taken its end yet.
                if progress and not self._is_over:
                    self._wrote_at = trio.current_time()
                    self._open()
                    self._push(self.writer.heartbeat(progress))
            due, now = self._wrote_at + HEARTBEAT_SEC, trio.current_time()
            if due <= now:  # a reader that takes nothing leaves `_wrote_at` in the past, and this task must still sleep
                due = now + HEARTBEAT_SEC

    async def _progress(self, source: Source) -> str:
        """How far the prompts have been read. Nothing, for a while, where one can still be refused with a status of its
        own: the answer has not begun, and not all that can be with the source at once have been taken by it.
        """
        mine, at_once = {request.id for request in self.writer.requests}, min(len(self.writer.requests), MAX_AT_ONCE)
        may_wait = not self._is_open and trio.current_time() < self._began_at + MAX_SILENT_SEC
        if may_wait and self._asked < at_once:
            return ""
        activity = await source.activity(next(iter(mine)) if len(mine) == 1 else "")
        running = [each for each in activity.running if each.id in mine]
        # Behind a gateway all are asked at once, and the server can still be counting their tokens. Of several only
        # the next that wait are listed, whosever they are: there the counts have to do.
        waiting = activity.waiting_interactive + activity.waiting_normal + activity.waiting_background
        is_taken = len({each.id for each in running}) + len(self._results) >= at_once or waiting > 0
        if may_wait and not is_taken:
            return ""
        if (await source.metrics()).get("paused_sec"):
            return "paused"
        if not running:
            return "waiting"
        self.writer.prompt_state = self.writer.prompt_state or PromptState.of(running[0])
        done, total = sum(each.computed_tokens for each in running), sum(each.prompt_tokens for each in running)
        return f"prompt {done}/{total} tokens"
