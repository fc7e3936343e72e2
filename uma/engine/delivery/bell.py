"""Wakeup of the Trio thread for deliveries: a pair of sockets that the decode thread writes to, and a deadline.

It is rung with the GIL held. A call that releases the GIL would let the Trio thread take it, and the decode thread,
which has a batch ready, would wait until all events are handled.

Not a timer that is a file (timerfd), set by either thread: a timed wakeup was then 0.1 ms cheaper on caches that a
batch has emptied, less than a hundredth of a token's time, and only Linux has it.
"""

from __future__ import annotations

import ctypes
import math
import socket
import sys

import trio

from uma.engine.clock import now_ms

MAX_RINGS = 4096
"""Bytes read from the socket at once: far more than there can be."""

_send = ctypes.PyDLL("ws2_32" if sys.platform == "win32" else None).send
"""The C library's `send`, called without releasing the GIL: it does not block."""
_send.argtypes = (ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)


class Bell:
    """Any thread rings, one Trio task waits. Times are the engine's (`clock.now_ms`)."""

    def __init__(self) -> None:
        # Not a pipe: on Windows Trio can wait for sockets only.
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._rope.setblocking(False)

    def ring(self) -> None:
        """Wake the task, or have its next `wait` return at once."""
        _send(self._rope.fileno(), b"!", 1, 0)  # (if it is full, the task will wake anyway)

    async def wait(self, until_ms: float = math.inf) -> None:
        """Sleep until it is rung, or until this time."""
        if until_ms == math.inf:  # no cancel scope: a deadline that passes is an exception through every frame
            await self._rung()
            return
        with trio.move_on_after(max(0.0, until_ms - now_ms()) / 1000):
            await self._rung()

    async def _rung(self) -> None:
        await trio.lowlevel.wait_readable(self._bell)
        self._bell.recv(MAX_RINGS)

    def close(self) -> None:
        """Close the sockets, once nothing rings or waits any more."""
        self._bell.close()
        self._rope.close()
