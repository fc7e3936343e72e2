"""A few slots for work in threads, given by lane and, within a lane, to clients in turns.

No interactive prompt waits behind a flood of background ones, and none behind another client's of its own lane.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from typing import TypeVar, cast

import attrs
import trio

from uma.net.client import CLIENT

T = TypeVar("T")

MAX_FLOWS = 1_024
"""Maximum flows (a client in a lane) that are remembered without waiters, so that clients that come and go take no
memory while a slot is always held."""


@attrs.define(eq=False)
class _Flow:
    """What one client wants in one lane."""

    lane: int
    turn: float = 0.0
    """When its first waiter is due, on a clock that counts cost. A waiter that is cancelled leaves its turn behind."""
    waiting: dict[trio.Event, float] = attrs.field(factory=dict)
    """Waiters in order of arrival, each with the cost of its work."""


@attrs.define(eq=False)
class Slot:
    """A slot that is held by a block and by the threads that began in it, until the last of these has ended.

    It is what Trio asks before a thread begins, and tells on its own thread that one has ended, given up or not.
    """

    _release: Callable[[], None]
    at_end: Callable[[], None] | None = attrs.field(default=None, init=False)
    """Called just before another has the slot."""
    _holders: int = attrs.field(default=1, init=False)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """What `work` returns, called in a thread; for the task of the block. One that is cancelled does not wait for
        the thread, but the next holder of the slot does.
        """
        return await trio.to_thread.run_sync(work, limiter=cast(trio.CapacityLimiter, self), abandon_on_cancel=True)

    async def acquire_on_behalf_of(self, _: object) -> None:
        """A thread is about to begin."""
        self._holders += 1

    def release_on_behalf_of(self, _: object) -> None:
        """A thread has ended, or the block."""
        self._holders -= 1
        if self._holders == 0:
            if self.at_end is not None:
                self.at_end()
            self._release()


class LaneLimiter:
    """Limiter of at most `slots` holders at a time. The next is of the highest lane that waits, and there of the client
    that has had least: start-time fair queueing (Goyal, Vin, Cheng 1996).

    Background work (a lane under 0) never takes the last slot, where there is more than one: a request of another lane
    then waits for no background work at all. Belongs to the Trio thread.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = slots
        self._clocks: dict[int, float] = {}
        """Turn that was served last, by lane."""
        self._flows: dict[tuple[int, Hashable], _Flow] = {}
        """Flows by lane and client. Forgotten once no slot is held, or where there are many and none of it waits."""

    def __len__(self) -> int:
        """Flows that are remembered."""
        return len(self._flows)

    @property
    def waiting(self) -> int:
        """Tasks that wait for a slot."""
        return sum(len(flow.waiting) for flow in self._flows.values())

    @asynccontextmanager
    async def slot(self, lane: int, cost: float = 1.0) -> AsyncIterator[Slot]:
        """Hold a slot for the block, with work of this `cost`: any unit, but the same for all."""
        await self._acquire(lane, cost)
        slot = Slot(self._release)
        try:
            yield slot
        finally:
            slot.release_on_behalf_of(None)

    def _release(self) -> None:
        self._free += 1
        self._grant()

    async def _acquire(self, lane: int, cost: float) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        flow = self._flows.setdefault((lane, CLIENT.get()), _Flow(lane))
        if not flow.waiting:
            flow.turn = max(flow.turn, self._clocks.get(lane, 0.0))
        granted = trio.Event()
        flow.waiting[granted] = cost
        self._grant()
        try:
            await granted.wait()
        except trio.Cancelled:
            if granted.is_set():
                flow.turn -= cost  # it has used nothing
                self._release()
            else:
                del flow.waiting[granted]
            raise

    def _grant(self) -> None:
        while waiting := [flow for flow in self._flows.values() if flow.waiting]:
            flow = min(waiting, key=lambda flow: (-flow.lane, flow.turn))
            if self._free <= (flow.lane < 0 and self.slots > 1):
                return
            granted = next(iter(flow.waiting))
            self._free -= 1
            self._clocks[flow.lane] = max(self._clocks.get(flow.lane, 0.0), flow.turn)
            flow.turn += flow.waiting.pop(granted)
            granted.set()
        if self._free == self.slots:
            self._clocks.clear()
            self._flows.clear()
        elif len(self._flows) > MAX_FLOWS:
            self._flows = {key: flow for key, flow in self._flows.items() if flow.waiting}
