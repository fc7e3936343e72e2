"""The cheapest way for one task to wait for another: it is used twice for each token of each stream."""

from __future__ import annotations

import attrs
import trio


@attrs.define(eq=False)
class Wakeup:
    """A single task sleeps, any other wakes it. A `ring` while no task sleeps has no effect.

    So check the condition before `wait`, and again after it. Belongs to one Trio thread.
    """

    _sleeper: trio.lowlevel.Task | None = attrs.field(default=None, init=False)

    @property
    def is_awaited(self) -> bool:
        """Whether a task sleeps here."""
        return self._sleeper is not None

    def ring(self) -> None:
        """Wake the sleeper, if there is one."""
        if self._sleeper is not None:
            sleeper, self._sleeper = self._sleeper, None
            trio.lowlevel.reschedule(sleeper)

    async def wait(self) -> None:
        """Sleep until the next `ring`. Raises `trio.BusyResourceError` where another task already sleeps here."""
        if self._sleeper is not None:
            raise trio.BusyResourceError("another task waits here already")
        self._sleeper = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._sleeper = None
        return trio.lowlevel.Abort.SUCCEEDED
