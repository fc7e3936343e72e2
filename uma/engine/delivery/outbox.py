"""Buffers of events between the threads: on the decode thread for those not due, on the Trio thread for early ones.

`pacing` says when each event is due. The outbox keeps their order and hands all of them over when the first is due, so
that the Trio thread is woken once. Events that come before their time at the reader wait in its `EarlyEventBuffer`: the
decode thread computes at that time, and cannot hand them over.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs

from uma.engine.delivery.pacing import AT_ONCE
from uma.errors import UmaError
from uma.types import Event, Finished, Token

HANDOVER_SEC = 0.002
"""Maximum time (s) that the decode thread waits until urgent events are taken. Without it the next batch, which
computes on every core, can keep the Trio thread from running until its end. On a GPU it does not, and the decode thread
does not wait."""

Delivery = tuple[Any, Event | UmaError, float]
"""A request's stream, its next event, and the time before which its reader must not get it."""

Deliver = Callable[[list[Delivery], threading.Event | None], None]
"""Hands events over to the Trio thread, which sets the `threading.Event`, if there is one, once it has taken them."""


class Outbox:
    """Events in order, each with the time by which it must be handed over. Belongs to the decode thread."""

    __slots__ = ("_buffered", "_deliver", "_taken", "_waits", "due_ms")

    def __init__(self, deliver: Deliver, *, waits: bool = True) -> None:
        """`waits`: whether `flush` waits until urgent events (due at once) are taken."""
        self._deliver = deliver
        self._waits = waits
        self._taken = threading.Event()
        self._buffered: list[Delivery] = []
        self.due_ms = math.inf
        """When the first of the buffered events must be handed over."""

    def add(self, stream: Any, event: Event | UmaError, due_ms: float = AT_ONCE, not_before_ms: float = 0.0) -> None:
        """Buffer an event, to be handed over by `due_ms`, with all that is buffered. The Trio side keeps it for its
        reader until `not_before_ms`.
        """
        self._buffered.append((stream, event, not_before_ms))
        self.due_ms = min(self.due_ms, due_ms)

    def flush_due(self, when_ms: float) -> None:
        """Hand everything over if any of it is due before `when_ms`."""
        if self.due_ms < when_ms:
            self.flush()

    def flush(self) -> None:
        """Hand everything over."""
        is_urgent, self.due_ms = self._waits and self.due_ms == AT_ONCE, math.inf
        if not self._buffered:
            return
        buffered, self._buffered = self._buffered, []
        if not is_urgent:
            self._deliver(buffered, None)
            return
        self._taken.clear()
        self._deliver(buffered, self._taken)
        self._taken.wait(HANDOVER_SEC)


@attrs.define(eq=False)
class EarlyEventBuffer:
    """Events computed ahead of their time, kept for one reader until they are due. Belongs to the Trio thread."""

    deliver: Callable[[Event | UmaError, float], None]
    """Called with an event that is due, and the time."""
    on_drop: Callable[[int], None]
    """Called with the number of tokens that were dropped."""
    waiting: deque[tuple[float, Event | UmaError]] = attrs.field(factory=deque, init=False)
    dropped: int = attrs.field(default=0, init=False)
    """Tokens that the reader was not given, because it cancelled before they were due."""
    _is_left: bool = attrs.field(default=False, init=False)

    def take(self, event: Event | UmaError, not_before_ms: float, now_ms: float) -> bool:
        """Deliver the next event, or keep it if it is early: then returns True.

        An event that is due is delivered at once, after all that were kept: a failure, say, or a token behind the last
        prompt, when nothing is paced any more. After `leave`, early tokens are dropped, and every token behind a
        dropped one.
        """
        is_due = not_before_ms <= now_ms
        if self._is_left and (self.dropped or not is_due) and self._drop(event):
            return False
        if is_due or self._is_left:
            self.release(math.inf, now_ms)
            self.deliver(event, now_ms)
            return False
        self.waiting.append((not_before_ms, event))
        return True

    def release(self, until_ms: float, now_ms: float) -> None:
        """Deliver the events that were kept until `until_ms`."""
        while self.waiting and self.waiting[0][0] <= until_ms:
            self.deliver(self.waiting.popleft()[1], now_ms)

    def leave(self) -> None:
        """Called when the reader cancels: tokens that wait are dropped, and other events delivered."""
        self._is_left = True
        waiting, self.waiting = self.waiting, deque()
        for _, event in waiting:
            if not self._drop(event):
                self.deliver(event, math.inf)

    def without_dropped(self, last: Finished) -> Finished:
        """The last event, without dropped tokens in its usage: with any, the request was cancelled."""
        if not self.dropped:
            return last
        usage = attrs.evolve(last.usage, completion_tokens=max(0, last.usage.completion_tokens - self.dropped))
        return attrs.evolve(last, reason="cancelled", usage=usage)

    def _drop(self, event: Event | UmaError) -> bool:
        """Drop a token; False for any other event."""
        if not isinstance(event, Token):
            return False
        self.dropped += 1
        self.on_drop(1)
        return True
