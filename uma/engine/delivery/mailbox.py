"""From the decode thread to the Trio thread: events by the batch, and a bell.

Trio's own way, `TrioToken.run_sync_soon`, gives up the GIL while it writes to a socket. The Trio thread takes it, and
the decode thread, which has a batch ready, waits until all events are dealt with. This bell is rung with the GIL held:
the Trio thread gets it when `llama_decode` begins, and works while that computes.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque

import trio

from uma.engine.delivery.outbox import Delivery

_write = ctypes.PyDLL(None).write
"""The C library's, called without giving up the GIL: on a pipe that does not block it takes a microsecond."""
_write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
MOST_RINGS = 4096


class Mailbox:
    """`post` belongs to the decode thread, everything else to the Trio thread."""

    def __init__(self) -> None:
        self._mail: deque[tuple[list[Delivery], threading.Event | None]] = deque()
        self._bell, self._rope = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._rope, False)

    def post(self, deliveries: list[Delivery], taken: threading.Event | None) -> None:
        """Have events delivered soon; `taken` is set when they are, and their readers have had a turn."""
        self._mail.append((deliveries, taken))
        _write(self._rope, b"!", 1)  # (a pipe that is full is a bell that rings)

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Deliver what is posted, until cancelled."""
        while True:
            await trio.lowlevel.wait_readable(self._bell)
            os.read(self._bell, MOST_RINGS)
            waiting = self.empty()
            if waiting:
                # First those who were woken by it have their turns, and write what they have to write.
                await trio.lowlevel.checkpoint()
                await trio.lowlevel.checkpoint()
                for taken in waiting:
                    taken.set()

    def empty(self) -> list[threading.Event]:
        """Deliver what is here; returns the events to be set for it."""
        waiting = []
        while self._mail:
            deliveries, taken = self._mail.popleft()
            for stream, event in deliveries:
                stream.deliver(event)
            if taken is not None:
                waiting.append(taken)
        return waiting

    def close(self) -> None:
        """Once nobody posts or runs it any more."""
        os.close(self._bell)
        os.close(self._rope)
