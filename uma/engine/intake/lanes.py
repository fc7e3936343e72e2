"""A few slots for work in threads, granted by lane and, within a lane, to clients in turn.

No interactive prompt waits behind a flood of background ones, and none behind other clients' in its own lane.
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
"""Maximum flows (a client in a lane) remembered without waiters: clients that come and go take no memory while some
slot is always held."""


@attrs.define(eq=False)
class _Flow:
    """Demand of one client in one lane."""

    lane: int
    turn: float = 0.0
    """Virtual time at which its first waiter is due. A cancelled waiter gives its turn to the next."""
    waiting: dict[trio.Event, float] = attrs.field(factory=dict)
    """Waiters in order of arrival, with the costs of their work."""


@attrs.define(eq=False)
class Slot:
    """A slot held by a block, and by threads that began in it, until the last of these has ended.

    Trio takes it for these threads' limiter: it is told before one begins, and when one has ended, abandoned or not.
    """

    _release: Callable[[], None]
    at_end: Callable[[], None] | None = attrs.field(default=None, init=False)
    """Called just before the slot is granted to another holder."""
    _holders: int = attrs.field(default=1, init=False)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Call `work` in a thread, for the task of the block. A cancelled task does not wait for the thread, but the
        next holder of the slot does.
        """
        return await trio.to_thread.run_sync(work, limiter=cast(trio.CapacityLimiter, self), abandon_on_cancel=True)

    async def acquire_on_behalf_of(self, _: object) -> None:
        """Called by Trio before a thread begins."""
        self._holders += 1

    def release_on_behalf_of(self, _: object) -> None:
        """Called when a thread has ended, or the block."""
        self._holders -= 1
        if self._holders == 0:
            if self.at_end is not None:
                self.at_end()
            self._release()


class LaneLimiter:
    """Limiter of at most `slots` holders at a time. The next has the highest waiting lane, and there the client with
    the least service: start-time fair queueing (Goyal, Vin, Cheng 1996).

    Background work (a lane below 0) never takes the last of several slots, so that requests of other lanes never wait
    for it. Belongs to the Trio thread.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = slots
        self._clocks: dict[int, float] = {}
        """Virtual time by lane: turn of the flow that was granted last."""
        self._flows: dict[tuple[int, Hashable], _Flow] = {}
        """Flows by lane and client. Forgotten when no slot is held, or without waiters when there are many."""

    def __len__(self) -> int:
        """Flows that are remembered."""
        return len(self._flows)

    @property
    def waiting(self) -> int:
        """Tasks that wait for a slot."""
        return sum(len(flow.waiting) for flow in self._flows.values())

    @asynccontextmanager
    async def slot(self, lane: int, cost: float = 1.0) -> AsyncIterator[Slot]:
        """Hold a slot for the block. `cost` is the size of its work, in one unit for all."""
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
