"""Coalesces wakeups: runs a callback once, just before Trio's next I/O wait."""

from __future__ import annotations

import time
from collections.abc import Callable

import trio


class WhenIdle(trio.abc.Instrument):
    """Calls `act` once after it is asked to: before Trio next waits for something to happen, or after `limit_sec` where
    it always has something to run. Belongs to the Trio thread; `act` must neither wait nor raise.

    A second request for it in the meantime means a burst, of which more can have reached the system but not Trio yet:
    then Trio polls once more first.
    """

    def __init__(self, act: Callable[[], None], limit_sec: float) -> None:
        self._act = act
        self._limit_sec = limit_sec
        self._due_sec = 0.0
        self._is_asked = self._is_asked_again = False

    def ask(self) -> None:
        """Run the callback once, soon, for all calls until then."""
        self._is_asked_again = self._is_asked
        if not self._is_asked:
            self._is_asked = True
            self._due_sec = time.monotonic() + self._limit_sec
            trio.lowlevel.add_instrument(self)

    def before_io_wait(self, timeout: float) -> None:
        """For Trio, each time round its loop: `timeout` is 0 while there are tasks to run."""
        is_due = time.monotonic() >= self._due_sec
        if timeout > 0 and self._is_asked_again and not is_due:
            self._is_asked_again = False
            trio.lowlevel.current_trio_token().run_sync_soon(_nothing)  # this wait ends at once
        elif timeout > 0 or is_due:
            self._is_asked = self._is_asked_again = False
            trio.lowlevel.remove_instrument(self)
            self._act()


def _nothing() -> None:
    """A turn of Trio's loop."""
