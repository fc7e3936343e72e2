"""The batch that a server runs just now, and the event that wakes the task which runs them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import trio

from uma.jobs import Runner, Tally

CANCEL_SEC = 30.0
"""Maximum time that the rows of a cancelled batch have to end. OpenAI gives 10 minutes; a row here can take an hour."""


@attrs.define(eq=False)
class BatchQueue:
    """Belongs to the Trio thread."""

    left: set[str] = attrs.field(factory=set, init=False)
    """Ids of batches that cannot go on, until they are tried again."""
    is_draining: bool = attrs.field(default=False, init=False)
    """The server is stopping."""
    _current: str | None = attrs.field(default=None, init=False)
    _runner: Runner | None = attrs.field(default=None, init=False)
    _rows: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    """The rows of the current one, from before any runs."""
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
        self._current, self._rows = batch_id, trio.CancelScope()
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
        if self._rows.deadline < math.inf:
            runner.stop()  # it was cancelled meanwhile
        with self._rows:
            return await runner.run()
        return False

    def stop(self, batch_id: str) -> None:
        """Begin no more rows of a batch that runs, and end those that do not end soon."""
        if self._current == batch_id:
            self._rows.deadline = min(self._rows.deadline, trio.current_time() + CANCEL_SEC)
            if self._runner is not None:
                self._runner.stop()

    def drain(self) -> None:
        """Begin no more rows at all: the server is stopping."""
        self.is_draining = True
        if self._runner is not None:
            self._runner.stop()

    def tally(self, batch_id: str) -> Tally | None:
        """How far a batch is, while it runs."""
        return self._runner.tally if self._runner is not None and self._current == batch_id else None
