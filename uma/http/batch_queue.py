"""Which batch of a server runs just now, and what wakes the task that runs them."""

from __future__ import annotations

import attrs
import trio

from uma.jobs import Runner, Tally


@attrs.define(eq=False)
class BatchQueue:
    """Belongs to the Trio thread."""

    _running: tuple[str, Runner] | None = attrs.field(default=None, init=False)
    _arrival: trio.Event = attrs.field(factory=trio.Event, init=False)
    _is_draining: bool = attrs.field(default=False, init=False)

    def arrived(self) -> None:
        """There is a batch to be run."""
        self._arrival.set()

    async def arrival(self) -> None:
        """Wait for the next one."""
        await self._arrival.wait()
        self._arrival = trio.Event()

    async def run(self, batch_id: str, runner: Runner) -> bool:
        """Run as `Runner.run` does, within reach of `cancel` and `drain`."""
        if self._is_draining:
            return False
        self._running = batch_id, runner
        try:
            return await runner.run()
        finally:
            self._running = None

    def cancel(self, batch_id: str) -> None:
        """Begin no more rows of a batch."""
        if self._running is not None and self._running[0] == batch_id:
            self._running[1].stop()
        self.arrived()  # one that waits has to be ended, too

    def drain(self) -> None:
        """Begin no more rows at all: the server is stopping."""
        self._is_draining = True
        if self._running is not None:
            self._running[1].stop()

    def tally(self, batch_id: str) -> Tally | None:
        """How far a batch is, while it runs."""
        return self._running[1].tally if self._running is not None and self._running[0] == batch_id else None
