"""The batch that a server runs just now, and the event that wakes the task which runs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import trio

from uma.jobs import Runner, Tally


@attrs.define(eq=False)
class BatchQueue:
    """Belongs to the Trio thread."""

    left: set[str] = attrs.field(factory=set, init=False)
    """Ids of batches that cannot go on, until they are tried again."""
    is_draining: bool = attrs.field(default=False, init=False)
    """The server is stopping."""
    _current: str | None = attrs.field(default=None, init=False)
    _runner: Runner | None = attrs.field(default=None, init=False)
    _arrival: trio.Event = attrs.field(factory=trio.Event, init=False)

    def arrived(self) -> None:
        """There is a batch to be run."""
        self._arrival.set()

    async def arrival(self) -> None:
        """Wait for the next one."""
        await self._arrival.wait()
        self._arrival = trio.Event()

    @contextmanager
    def taking(self, batch_id: str) -> Iterator[None]:
        """A block in which a batch is the one that runs, and in which nothing else ends it."""
        self._current = batch_id
        try:
            yield
        finally:
            self._current = self._runner = None

    def is_current(self, batch_id: str) -> bool:
        """Whether this batch runs just now."""
        return self._current == batch_id

    async def run(self, runner: Runner) -> bool:
        """Run as `Runner.run` does, within reach of `stop` and `drain`."""
        if self.is_draining:
            return False
        self._runner = runner
        return await runner.run()

    def stop(self, batch_id: str) -> None:
        """Begin no more rows of a batch that runs."""
        if self._runner is not None and self._current == batch_id:
            self._runner.stop()

    def drain(self) -> None:
        """Begin no more rows at all: the server is stopping."""
        self.is_draining = True
        if self._runner is not None:
            self._runner.stop()

    def tally(self, batch_id: str) -> Tally | None:
        """How far a batch is, while it runs."""
        return self._runner.tally if self._runner is not None and self._current == batch_id else None
