"""One request's events for its reader: bounded, in order, and ended by exactly one `Finished` or error."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

import trio

from uma.engine.delivery.outbox import EarlyEventBuffer
from uma.engine.delivery.pacing import RETURNED_EVENTS
from uma.errors import UmaError
from uma.types import Event, Finished, Token

LATE = 1.25
"""Time since the token before, as a multiple of `target_tbt_ms`, above which a token counts as late."""


class Control(Protocol):
    """A stream's commands to its sequence. Callable from the Trio thread at any time, also after the end."""

    def cancel(self) -> None:
        """End the sequence at the next tick boundary."""

    def end_thinking(self) -> None:
        """Close the sequence's thinking with its next token."""

    def credit(self, events: int) -> None:
        """Add credit: the reader has space for `events` more events."""


class Lateness:
    """Calls `on_late` for each of a sequence's tokens that reaches its reader late. Belongs to the Trio thread."""

    __slots__ = ("_last_ms", "_longest_ms", "_on_late")

    def __init__(self, target_tbt_ms: float, on_late: Callable[[], None]) -> None:
        self._longest_ms = LATE * target_tbt_ms
        self._on_late = on_late
        self._last_ms = 0.0

    def had_token(self, at_ms: float) -> None:
        """Take in that the stream was given its next token."""
        if self._last_ms and at_ms - self._last_ms > self._longest_ms:
            self._on_late()
        self._last_ms = at_ms


class RequestStream:
    """`types.EventStream` of an engine. One task reads it; only the Trio thread touches it.

    It buffers at most the credit window (`CREDITS`) and the last event. `on_end` is called once or twice when the
    request is over for the engine: its last event came, or its reader left. `on_drop` is called with the number of
    tokens that were computed ahead for a reader that has left; `lateness` observes when tokens are given.

    Tokens computed ahead of their time wait in `_early`, in order, until `release`.
    """

    def __init__(
        self,
        control: Control,
        on_end: Callable[[], None],
        on_drop: Callable[[int], None],
        lateness: Lateness | None = None,
    ) -> None:
        self._control = control
        self._lateness = lateness
        self._on_end = on_end
        self._early = EarlyEventBuffer(self.deliver, on_drop)
        self._events: deque[Event | UmaError] = deque()
        self._reader: trio.lowlevel.Task | None = None
        self._read = 0
        self._is_over = False
        self.tap: Callable[[Token], bool] | None = None
        """See `types.EventStream.tap`."""
        self.ignored: tuple[str, ...] = ()
        """See `types.EventStream.ignored`."""

    def take(self, event: Event | UmaError, not_before_ms: float, now_ms: float) -> bool:
        """Called by the engine with the next event. Returns whether it is kept for a later time."""
        return self._early.take(event, not_before_ms, now_ms)

    def release(self, until_ms: float) -> None:
        """Called by the engine: deliver what was kept until `until_ms`."""
        self._early.release(until_ms, until_ms)

    def deliver(self, event: Event | UmaError, at_ms: float = math.inf) -> None:
        """Called by the engine: the next event is due, at `at_ms`. After the last one, or `fail`, it is dropped."""
        if self._is_over:
            return
        if self._lateness is not None and type(event) is Token and at_ms < math.inf:
            self._lateness.had_token(at_ms)
        if isinstance(event, Finished):
            event = self._early.without_dropped(event)
        if self.tap is not None and type(event) is Token and not self._events and self.tap(event):
            self._count_read()
            return
        self._events.append(event)
        if isinstance(event, Finished | UmaError):
            self._is_over = True
            self._on_end()
        if self._reader is not None:
            reader, self._reader = self._reader, None
            trio.lowlevel.reschedule(reader)

    def fail(self, error: UmaError) -> None:
        """End the stream with an error, because an event could not be delivered. Called by the engine."""
        self.tap = None
        self._early.waiting.clear()
        self.cancel()
        self.deliver(error)

    def cancel(self) -> None:
        """See `types.EventStream.cancel`."""
        if self._is_over:
            return
        self._early.leave()
        if not self._is_over:
            self._control.cancel()

    def end_thinking(self) -> None:
        """See `types.EventStream.end_thinking`."""
        if not self._is_over:
            self._control.end_thinking()

    def abandon(self) -> None:
        """Called by the engine: the reader has left."""
        self.tap = None
        self.cancel()
        self._events.clear()
        self._on_end()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Event:
        """See `types.EventStream.__anext__`."""
        if self._events:
            # Events that came together are read together: a busy reader waits after a credit window at the latest.
            await trio.lowlevel.checkpoint_if_cancelled()
        while not self._events:
            if self._is_over:
                raise StopAsyncIteration
            await self._wait()
        event = self._events.popleft()
        if isinstance(event, UmaError):
            raise event
        self._count_read()
        return event

    def _count_read(self) -> None:
        self._read += 1
        if self._read == RETURNED_EVENTS and not self._is_over:
            self._control.credit(self._read)
            self._read = 0

    async def _wait(self) -> None:
        self._reader = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._reader = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
