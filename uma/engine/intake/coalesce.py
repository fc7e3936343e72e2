"""Coalesces wakeups: runs a callback once, just before Trio's next I/O wait with nothing known to follow."""

from __future__ import annotations

import time
from collections.abc import Callable

import trio


class WhenIdle(trio.abc.Instrument):
    """Calls `act` once after it is asked to: before Trio next waits for something to happen, but not before the moment
    that `expected_until_sec` gives on `time.monotonic`; in any case after `limit_sec`. Belongs to the Trio thread; both
    callables must neither wait nor raise.

    More of a burst can have reached the system but not Trio yet: so Trio polls once more after each request for it.
    """

    def __init__(
        self, act: Callable[[], None], limit_sec: float, expected_until_sec: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._act = act
        self._limit_sec = limit_sec
        self._expected_until_sec = expected_until_sec
        self._due_sec = 0.0
        self._is_asked = self._polls_again = self._has_timer = False

    def ask(self) -> None:
        """Run the callback once, soon, for all calls until then."""
        self._polls_again = True
        if not self._is_asked:
            self._is_asked = True
            self._due_sec = time.monotonic() + self._limit_sec
            trio.lowlevel.add_instrument(self)

    def before_io_wait(self, timeout: float) -> None:
        """For Trio, each time round its loop: `timeout` is 0 while there are tasks to run."""
        now_sec = time.monotonic()
        is_due = now_sec >= self._due_sec
        if timeout > 0 and not is_due:
            if self._polls_again:
                self._polls_again = False
                trio.lowlevel.current_trio_token().run_sync_soon(_nothing)  # this wait ends at once
                return
            if self._expected_until_sec() > now_sec:
                if not self._has_timer:
                    self._has_timer = True
                    trio.lowlevel.current_trio_token().run_sync_soon(self._start_timer)
                return
        if timeout > 0 or is_due:
            self._is_asked = self._polls_again = False
            trio.lowlevel.remove_instrument(self)
            self._act()

    def _start_timer(self) -> None:
        """Have Trio go round its loop when nothing more is expected, whatever happens until then."""
        trio.lowlevel.spawn_system_task(self._sleep, name="a burst's longest wait")

    async def _sleep(self) -> None:
        try:
            until_sec = min(self._due_sec, self._expected_until_sec())
            await trio.sleep(max(0.0, until_sec - time.monotonic()))
        finally:
            self._has_timer = False


def _nothing() -> None:
    """A turn of Trio's loop."""
