"""Events on their way from the decode thread to the Trio thread, buffered and handed over many at a time.

`pacing` says when each event is due; the outbox keeps their order and hands all of them over when the first is due.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

from uma.engine.delivery.pacing import AT_ONCE
from uma.errors import UmaError
from uma.types import Event

HANDOVER_SEC = 0.002
"""Maximum time the decode thread waits until events that are due at once were taken. Without it the next batch, which
computes on every core, can keep the Trio thread from running until it ends. On a GPU it keeps nothing
from running, and the decode thread does not wait."""

Delivery = tuple[Any, Event | UmaError, float]
"""A request's stream, its next event, and the time before which the reader is not given it."""

Deliver = Callable[[list[Delivery], threading.Event | None], None]
"""Hands events over to the Trio thread, which sets the `threading.Event`, if there is one, once it has taken them."""


class Outbox:
    """Events in order, each with the time by which it must be handed over. Belongs to the decode thread."""

    __slots__ = ("_buffered", "_deliver", "_taken", "_waits", "due_ms")

    def __init__(self, deliver: Deliver, *, waits: bool = True) -> None:
        """Make an outbox whose `flush`, with `waits`, waits until what is due at once was taken."""
        self._deliver = deliver
        self._waits = waits
        self._taken = threading.Event()
        self._buffered: list[Delivery] = []
        self.due_ms = math.inf
        """When the first of the buffered events must be handed over."""

    def add(self, stream: Any, event: Event | UmaError, due_ms: float = AT_ONCE, not_before_ms: float = 0.0) -> None:
        """Buffer an event, to be handed over by `due_ms`; all that is buffered goes with it. The Trio side keeps it for
        its reader until `not_before_ms`.
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
