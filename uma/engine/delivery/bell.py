"""What the Trio thread's delivery sleeps on: rung by the decode thread, or by itself at a time that was set.

Linux has timers that are files. With one, both are the same wakeup, and neither costs more than a socket's. Trio's own
way to wait for a time cancels what waits: an exception goes up through every frame, which costs twice as much on caches
that a batch has emptied. Elsewhere the bell is a pair of sockets, since Windows waits for
nothing else, and its time is Trio's.

It is rung with the GIL held. A call that gives up the GIL has the Trio thread take it, and the decode thread, which has
a batch ready, waits until all events are dealt with.
"""

from __future__ import annotations

import ctypes
import math
import os
import socket
import sys
import time
from typing import Protocol

import trio

from uma.engine.clock import now_ms

RING_NS = 50_000
"""Time between a ring that is not urgent and the wakeup, where a timer makes it: the decode thread begins its batch and
gives up the GIL meanwhile. A Trio thread that is woken before takes a core twice, the first time in vain."""
MAX_RINGS = 4096
"""Bytes taken from a socket at once: far more rings than can have come."""

_send = ctypes.PyDLL("ws2_32" if sys.platform == "win32" else None).send
"""The C library's, called without giving up the GIL, as the timer's: none of these calls waits."""
_send.argtypes = (ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)


class Bell(Protocol):
    """One thread rings, one task of Trio's sets the time and waits. Times are the engine's (`clock.now_ms`)."""

    def ring(self, *, is_urgent: bool) -> None:
        """Wake the task at once, or where it is not urgent, soon."""

    def ring_at(self, at_ms: float) -> None:
        """Wake the task at this time, and not at the one that was set before, or at once where it sleeps on one that
        only it can set.
        """

    def set(self, at_ms: float) -> None:
        """Ring at this time, and not at the one that was set before; never where it is infinite.

        It can take back a ring that came before: look for what was posted between this call and `wait`.
        """

    async def wait(self) -> None:
        """Sleep until it is rung. `set` must have been called since the last time."""

    def close(self) -> None:
        """Free it, once nothing rings it or waits any more."""


def new_bell() -> Bell:
    """The best that this system has."""
    return TimerBell() if sys.platform == "linux" else SocketBell()


class SocketBell:
    """A bell of any system."""

    def __init__(self) -> None:
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._rope.setblocking(False)
        self._at_ms = math.inf

    def ring(self, *, is_urgent: bool) -> None:
        """See `Bell.ring`."""
        _send(self._rope.fileno(), b"!", 1, 0)  # (one that is full is a bell that rings)

    def ring_at(self, at_ms: float) -> None:
        """See `Bell.ring_at`."""
        self.ring(is_urgent=False)

    def set(self, at_ms: float) -> None:
        """See `Bell.set`."""
        self._at_ms = at_ms

    async def wait(self) -> None:
        """See `Bell.wait`."""
        if self._at_ms == math.inf:
            await self._rung()
            return
        with trio.move_on_after(max(0.0, self._at_ms - now_ms()) / 1000):
            await self._rung()

    async def _rung(self) -> None:
        await trio.lowlevel.wait_readable(self._bell)
        self._bell.recv(MAX_RINGS)

    def close(self) -> None:
        """See `Bell.close`."""
        self._bell.close()
        self._rope.close()


class _Timer(ctypes.Structure):
    """`struct itimerspec`. Without an interval it rings once."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("interval_sec", "interval_nsec", "sec", "nsec"))
    sec: int
    nsec: int


if sys.platform == "linux":
    _OF_TIMER = (time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
else:
    _OF_TIMER = (0, 0)
ABSOLUTE = 1
"""`TFD_TIMER_ABSTIME`."""


class TimerBell:
    """A bell of Linux: a timer that is a file. Setting it makes it unreadable until its time has come."""

    def __init__(self) -> None:
        create = ctypes.PyDLL(None, use_errno=True).timerfd_create
        self._timer = int(create(*_OF_TIMER))
        if self._timer < 0:
            error = ctypes.get_errno()
            raise OSError(error, f"no timer for the delivery of events: {os.strerror(error)}")
        self._settime = ctypes.PyDLL(None).timerfd_settime
        self._settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.POINTER(_Timer), ctypes.c_void_p)
        self._urgent, self._soon, self._at = _Timer(nsec=1), _Timer(nsec=RING_NS), _Timer()

    def ring(self, *, is_urgent: bool) -> None:
        """See `Bell.ring`."""
        self._settime(self._timer, 0, self._urgent if is_urgent else self._soon, None)

    def ring_at(self, at_ms: float) -> None:
        """See `Bell.ring_at`."""
        self.set(at_ms)

    def set(self, at_ms: float) -> None:
        """See `Bell.set`."""
        # At 0 it never rings.
        ns = 0 if at_ms == math.inf else max(1, int(at_ms * 1e6))
        self._at.sec, self._at.nsec = divmod(ns, 10**9)
        self._settime(self._timer, ABSOLUTE, self._at, None)

    async def wait(self) -> None:
        """See `Bell.wait`."""
        await trio.lowlevel.wait_readable(self._timer)

    def close(self) -> None:
        """See `Bell.close`."""
        os.close(self._timer)
