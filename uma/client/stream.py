"""One running request of a client: the socket's reader puts its events in, the caller takes them out.

The buffer between the two is bounded, since a caller can be slower than the model. Up to the bound a slow caller has no
effect on other requests. Past it a request that others run beside is ended; where it is alone, the client stops reading
its socket, which is backpressure for the server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType

import attrs
import trio

from uma.errors import UmaError
from uma.net.wakeup import Wakeup
from uma.types import Event, Finished, Token

BUFFER_EVENTS = 8192
"""Maximum events of one request that wait for its caller. An answer of fewer tokens comes whole, however slow its
caller is."""


@attrs.define(eq=False)
class Stream:
    """An async context manager and iterator: `Token`s, then one `Finished`; an `UmaError` where the request failed."""

    id: str
    _start: Callable[[Stream], Awaitable[None]] | None
    """Sends the request, once; raises where that is not possible. It holds the request, whose files can be large."""
    _cancel: Callable[[Stream], None]
    """Tells the server to end the request. Never waits."""
    _end_thinking: Callable[[Stream], None]
    """Tells the server to close the model's thinking. Never waits."""
    shown_id: str | None = attrs.field(default=None, init=False)
    """The id that its events are given to the caller with, where that is another one than `id`, the wire's."""
    tap: Callable[[Token], bool] | None = attrs.field(default=None, init=False)
    """See `types.EventStream.tap`."""
    ignored: tuple[str, ...] = ()
    """See `types.EventStream.ignored`. A server tells it with the last event's warnings."""
    _events: deque[Event] = attrs.field(factory=deque, init=False)
    _error: UmaError | None = attrs.field(default=None, init=False)
    is_begun: bool = attrs.field(default=False, init=False)
    """Whether an event has come."""
    is_over: bool = attrs.field(default=False, init=False)
    """Whether the server has said its last word on it."""
    is_left: bool = attrs.field(default=False, init=False)
    """Whether the caller has left the block: late events are dropped."""
    _arrived: Wakeup = attrs.field(factory=Wakeup, init=False)
    _taken: Wakeup = attrs.field(factory=Wakeup, init=False)
    _ended: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)

    async def __aenter__(self) -> Stream:
        start, self._start = self._start, None
        assert start is not None, "a stream is entered once"
        await start(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.is_left = True
        self.tap = None
        self._events.clear()
        self._taken.ring()
        if not self.is_over:
            self._cancel(self)

    def cancel(self) -> None:
        """See `EventStream.cancel`. Never waits."""
        if not self.is_over:
            self._cancel(self)

    def end_thinking(self) -> None:
        """See `EventStream.end_thinking`. Never waits."""
        if not self.is_over:
            self._end_thinking(self)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Event:
        if self._events:
            await trio.lowlevel.checkpoint_if_cancelled()
        while not self._events:
            if self._error is not None:
                raise self._error
            if self.is_over or self.is_left:
                raise StopAsyncIteration
            await self._arrived.wait()
        event = self._events.popleft()
        if len(self._events) == BUFFER_EVENTS // 2:
            self._taken.ring()
        return event

    @property
    def is_full(self) -> bool:
        """Whether the bound is reached, and more is coming: time for the reader of the socket to wait for `room`."""
        return len(self._events) >= BUFFER_EVENTS and self._error is None and not self.is_over

    async def room(self) -> None:
        """Wait until the caller has taken half of what there is, or has left, or it is given up."""
        while self.is_full:
            await self._taken.wait()

    async def ended(self) -> None:
        """Wait for the server's last word."""
        while not self.is_over:
            await self._ended.park()

    def put(self, event: Event) -> None:
        """Hand an event to the caller. What the tap raises comes through: then `give_up` has to follow."""
        self.is_begun = True
        if self.shown_id is not None:
            event = attrs.evolve(event, id=self.shown_id)
        if self.tap is not None and type(event) is Token and not self._events and self.tap(event):
            return
        if type(event) is Finished:
            self._end()
        if not self.is_left and self._error is None:
            self._events.append(event)
            self._arrived.ring()

    def give_up(self, error: UmaError) -> None:
        """Cancel it at the server, and have the caller see an error behind the events that wait; no more are taken."""
        self.tap = None
        self._error = error
        self.cancel()
        self._taken.ring()
        self._arrived.ring()

    def fail(self, error: UmaError) -> None:
        """End it with an error, which the caller sees after the events that came before."""
        self._error = self._error or error
        self._end()

    def _end(self) -> None:
        self.is_over = True
        self._ended.unpark_all()
        self._arrived.ring()
