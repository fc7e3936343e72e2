"""A few slots for work in threads, given by lane and, within a lane, to clients in turns.

No interactive prompt waits behind a flood of background ones, and none behind another client's of its own lane.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from itertools import count

import attrs
import trio

from uma.net.client import CLIENT


@attrs.define(eq=False)
class _Waiter:
    lane: int
    turn: float
    arrival: int
    granted: trio.Event = attrs.field(factory=trio.Event)

    @property
    def order(self) -> tuple[int, float, int]:
        """Sorts waiters in the order in which they are served."""
        return -self.lane, self.turn, self.arrival


class LaneLimiter:
    """At most `slots` holders at a time. The next is of the highest lane that waits, and there of the client that has
    had least: start-time fair queueing (Goyal, Vin, Cheng 1996), the oldest first among equals.

    Background work (a lane under 0) never takes the last slot, where there is more than one: a request of another lane
    then waits for no background work at all. Belongs to the Trio thread.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = slots
        self._waiting: list[_Waiter] = []
        self._arrivals = count()
        self._clocks: dict[int, float] = {}
        """By lane, the turn that was served last."""
        self._ends: dict[tuple[int, Hashable], float] = {}
        """By lane and client, when its next turn begins. Forgotten once no slot is held."""

    @property
    def waiting(self) -> int:
        """Tasks that wait for a slot."""
        return len(self._waiting)

    @asynccontextmanager
    async def slot(self, lane: int, cost: float = 1.0) -> AsyncIterator[None]:
        """Hold a slot for the block, with work of this `cost`: any unit, but the same for all."""
        await self._acquire(lane, cost)
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

    async def _acquire(self, lane: int, cost: float) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        waiter = _Waiter(lane, self._next_turn(lane, cost), next(self._arrivals))
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

    def _next_turn(self, lane: int, cost: float) -> float:
        mine = lane, CLIENT.get()
        turn = max(self._clocks.get(lane, 0.0), self._ends.get(mine, 0.0))
        self._ends[mine] = turn + cost
        return turn

    def _grant(self) -> None:
        while self._waiting:
            first = min(self._waiting, key=lambda each: each.order)
            if self._free <= self._reserved_from(first.lane):
                return
            self._waiting.remove(first)
            self._free -= 1
            self._clocks[first.lane] = max(self._clocks.get(first.lane, 0.0), first.turn)
            first.granted.set()
        if self._free == self.slots:
            self._clocks.clear()
            self._ends.clear()

    def _reserved_from(self, lane: int) -> int:
        return 1 if lane < 0 and self.slots > 1 else 0
