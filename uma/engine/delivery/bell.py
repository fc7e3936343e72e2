"""What the Trio thread sleeps on between deliveries: a pair of sockets that the decode thread rings, and a time.

It is rung with the GIL held. A call that gives up the GIL has the Trio thread take it, and the decode thread, which has
a batch ready, waits until all events are dealt with.

Why no timer that is a file (timerfd), set by either thread: it made a wakeup at a time 0.1 ms cheaper on caches that a
batch has emptied, which is less than a hundredth of a token's time, and Linux alone has it.
"""

from __future__ import annotations

import ctypes
import math
import socket
import sys

import trio

from uma.engine.clock import now_ms

MAX_RINGS = 4096
"""Bytes taken from a socket at once: far more rings than can have come."""

_send = ctypes.PyDLL("ws2_32" if sys.platform == "win32" else None).send
"""The C library's, called without giving up the GIL: it does not wait."""
_send.argtypes = (ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)


class Bell:
    """Any thread rings, one task of Trio's waits. Times are the engine's (`clock.now_ms`)."""

    def __init__(self) -> None:
        # Not a pipe: Windows waits for sockets alone.
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._rope.setblocking(False)

    def ring(self) -> None:
        """Wake the task, or have its next `wait` return at once."""
        _send(self._rope.fileno(), b"!", 1, 0)  # (one that is full is a bell that rings)

    async def wait(self, until_ms: float = math.inf) -> None:
        """Sleep until it is rung, or until this time."""
        if until_ms == math.inf:  # a deadline that passes is an exception through every frame: none without need
            await self._rung()
            return
        with trio.move_on_after(max(0.0, until_ms - now_ms()) / 1000):
            await self._rung()

    async def _rung(self) -> None:
        await trio.lowlevel.wait_readable(self._bell)
        self._bell.recv(MAX_RINGS)

    def close(self) -> None:
        """Free it, once nothing rings it or waits any more."""
        self._bell.close()
        self._rope.close()
