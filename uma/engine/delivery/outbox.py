"""Events on their way from the decode thread to the readers, handed over many at a time.

Handing over wakes the Trio thread, that wakes the readers, and all of them take time from the cores that compute. Where
a token takes a few milliseconds that is felt, so tokens may wait here for those of the next ticks, but never for longer
than their reader would mind: first tokens and last events do not wait at all.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

from uma.errors import UmaError
from uma.types import Event

HOLD_SHARE = 0.4
"""A token waits for at most this part of its stream's `target_tbt_ms`."""
AT_ONCE = -math.inf
"""A due time: before anything else is computed."""

HANDOVER_SEC = 0.002
"""The decode thread waits so long at most until events that are due at once were taken. Where it computes with every
core there is, whoever has to be woken by then may be left waiting for the end of the next batch."""

Delivery = tuple[Any, Event | UmaError]
"""A request's stream, and what it is to be given."""

Deliver = Callable[[list[Delivery], threading.Event | None], None]
"""Hands events over to the Trio thread, which sets the event, if there is one, when it has taken them."""


class Outbox:
    """Events in order, each with the time by which it has to be on its way. Belongs to the decode thread."""

    __slots__ = ("_deliver", "_held", "_taken", "due_ms")

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._taken = threading.Event()
        self._held: list[Delivery] = []
        self.due_ms = math.inf
        """When the first of what is here has to be on its way."""

    def add(self, stream: Any, event: Event | UmaError, due_ms: float = AT_ONCE) -> None:
        """Take an event in; whatever is here goes with it when it is due."""
        self._held.append((stream, event))
        self.due_ms = min(self.due_ms, due_ms)

    def flush_due(self, when_ms: float) -> None:
        """Hand everything over if any of it is due before `when_ms`."""
        if self.due_ms < when_ms:
            self.flush()

    def flush(self) -> None:
        """Hand everything over."""
        is_urgent, self.due_ms = self.due_ms == AT_ONCE, math.inf
        if not self._held:
            return
        held, self._held = self._held, []
        if not is_urgent:
            self._deliver(held, None)
            return
        self._taken.clear()
        self._deliver(held, self._taken)
        self._taken.wait(HANDOVER_SEC)
