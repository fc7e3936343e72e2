"""One request's events on their way to the reader: bounded, in order, ended by exactly one `Finished` or error."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from uma.errors import UmaError
from uma.types import Event, Finished, Token

if TYPE_CHECKING:
    from uma.engine.worker.loop import DecodeWorker

CREDITS = 64
"""Events a reader may be behind before its sequence pauses."""


class RequestStream:
    """`types.EventStream` of an engine. One task reads it; the Trio thread alone touches it.

    The decode thread spends a credit for each event and stops at none; they come back as the reader reads. So what is
    held here never exceeds `CREDITS` tokens and the last event, and a slow reader pauses its own sequence alone.
    """

    def __init__(self, key: int, worker: DecodeWorker, forget: Callable[[int], None]) -> None:
        self._key = key
        self._worker = worker
        self._forget = forget
        self._events: deque[Event | UmaError] = deque()
        self._reader: trio.lowlevel.Task | None = None
        self._read = 0
        self._is_over = False
        self.tap: Callable[[Token], bool] | None = None
        """See `types.EventStream.tap`."""

    def deliver(self, event: Event | UmaError) -> None:
        """For the engine: the next event has come."""
        if self.tap is not None and type(event) is Token and not self._events and self.tap(event):
            self._count_read()
            return
        self._events.append(event)
        if isinstance(event, Finished | UmaError):
            self._is_over = True
            self._forget(self._key)
        if self._reader is not None:
            reader, self._reader = self._reader, None
            trio.lowlevel.reschedule(reader)

    def cancel(self) -> None:
        """See `types.EventStream.cancel`."""
        if not self._is_over:
            self._worker.cancel(self._key)

    def abandon(self) -> None:
        """For the engine: nobody reads any more."""
        self.tap = None
        self.cancel()
        self._events.clear()
        self._forget(self._key)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Event:
        """See `types.EventStream.__anext__`."""
        if self._events:
            # What came together is read together: whoever reads without end waits after `CREDITS` events at the latest.
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
        if self._read == CREDITS // 2 and not self._is_over:
            self._worker.credit(self._key, self._read)
            self._read = 0

    async def _wait(self) -> None:
        self._reader = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._reader = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
