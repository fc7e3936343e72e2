"""A bound on log lines that clients can bring about at no cost of their own."""

from __future__ import annotations

import logging
import time
from typing import Any

import attrs

from uma.server.logs import log


@attrs.define(eq=False)
class Throttle:
    """Bounds log lines to `burst` at once and `per_sec` in the long run, and counts those it does not let through.

    What a client gets refused costs it next to nothing, so without a bound one client could fill a disk.
    """

    burst: float
    per_sec: float
    suppressed: int = 0
    """Lines not let through since the last one that says how many there were."""
    _left: float = attrs.field(default=attrs.Factory(lambda self: self.burst, takes_self=True), init=False)
    _at_sec: float = attrs.field(factory=time.monotonic, init=False)

    def lets_through(self) -> bool:
        """Whether there is room for a line now, which then counts."""
        now = time.monotonic()
        self._left = min(self.burst, self._left + (now - self._at_sec) * self.per_sec)
        self._at_sec = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def log(self, logger: logging.Logger, level: int, event: str, **fields: Any) -> None:
        """Log a line if there is room for it; with it, how many were suppressed before."""
        if not self.lets_through():
            self.suppressed += 1
            return
        log(logger, level, event, **fields, suppressed=self.suppressed or None)
        self.suppressed = 0
