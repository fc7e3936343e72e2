"""A few slots for work in threads, given by lane: no interactive prompt waits behind a flood of background ones."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

import attrs
import trio


@attrs.define(eq=False)
class _Waiter:
    lane: int
    arrival: int
    granted: trio.Event = attrs.field(factory=trio.Event)


class LaneLimiter:
    """At most `slots` holders at a time; the next is the oldest of the highest lane that waits.

    Background work (a lane under 0) never takes the last slot, where there is more than one: a request of another lane
    then waits for no background work at all. Belongs to the Trio thread.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = slots
        self._waiting: list[_Waiter] = []
        self._arrivals = count()

    @property
    def waiting(self) -> int:
        """Tasks that wait for a slot."""
        return len(self._waiting)

    @asynccontextmanager
    async def slot(self, lane: int) -> AsyncIterator[None]:
        """Hold a slot for the block."""
        await self._acquire(lane)
        try:
            yield
        finally:
            self.release()

    def acquire_nowait(self, lane: int) -> None:
        """Take a slot; `release` gives it back. Raises `trio.WouldBlock` where none is free for this lane."""
        if self._free <= self._reserved_from(lane):
            raise trio.WouldBlock
        self._free -= 1

    def release(self) -> None:
        """Give a slot back."""
        self._free += 1
        self._grant()

    async def _acquire(self, lane: int) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        waiter = _Waiter(lane, next(self._arrivals))
        self._waiting.append(waiter)
        self._grant()
        try:
            await waiter.granted.wait()
        except trio.Cancelled:
            if waiter.granted.is_set():
                self.release()
            else:
                self._waiting.remove(waiter)
            raise

    def _grant(self) -> None:
        while self._waiting:
            first = max(self._waiting, key=lambda each: (each.lane, -each.arrival))
            if self._free <= self._reserved_from(first.lane):
                return
            self._waiting.remove(first)
            self._free -= 1
            first.granted.set()

    def _reserved_from(self, lane: int) -> int:
        return 1 if lane < 0 and self.slots > 1 else 0
