"""A bound on log lines that clients can bring about at no cost of their own."""

from __future__ import annotations

import logging
import time
from typing import Any

import attrs

from uma.net.logfmt import log

LINES_OF_ALL = 200
"""Maximum log lines that all clients together can bring about at once."""
LINES_OF_ALL_PER_SEC = 50.0
"""Maximum rate of such lines in the long run."""
LINES_OF_ONE = 20
"""Maximum log lines that one session or connection can bring about at once."""
LINES_OF_ONE_PER_SEC = 1.0
"""Maximum rate of its lines in the long run."""
MAX_LOGGED_CHARS = 400
"""Maximum logged characters of what a client has written, or of a message that quotes it."""


@attrs.define(eq=False)
class Throttle:
    """Bounds log lines to `burst` at once and `per_sec` in the long run, and counts those it does not let through.

    What a client gets refused costs it next to nothing, so without a bound one client could fill a disk.
    """

    burst: float = LINES_OF_ALL
    per_sec: float = LINES_OF_ALL_PER_SEC
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


@attrs.define(eq=False)
class ClientLines:
    """The log lines that one session or connection can bring about, bounded by its own throttle and that of all."""

    all: Throttle
    client: str | None = None
    """Address of the connection's client, which each line tells; None on a socket, where the user is known instead."""
    _own: Throttle = attrs.field(factory=lambda: Throttle(LINES_OF_ONE, LINES_OF_ONE_PER_SEC), init=False)

    def log(self, logger: logging.Logger, level: int, event: str, **fields: Any) -> None:
        """Log a line if there is room for it. Texts are cut to `MAX_LOGGED_CHARS`."""
        if not self._own.lets_through():
            self.all.suppressed += 1
            return
        self.all.log(
            logger, level, event, **{name: _cut(value) for name, value in fields.items()} | {"client": self.client}
        )


def _cut(value: Any) -> Any:
    return value[:MAX_LOGGED_CHARS] if isinstance(value, str) else value
