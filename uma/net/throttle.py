"""Rate limits for log lines that clients can cause at no cost to themselves."""

from __future__ import annotations

import logging
import time
from typing import Any

import attrs

from uma.net.logfmt import log

LINES_OF_ALL = 200
"""Maximum burst of log lines that all clients together can cause."""
LINES_OF_ALL_PER_SEC = 50.0
"""Maximum sustained rate of such lines."""
LINES_OF_ONE = 20
"""Maximum burst of log lines that one session or connection can cause."""
LINES_OF_ONE_PER_SEC = 1.0
"""Maximum sustained rate of its lines."""
MAX_LOGGED_CHARS = 400
"""Maximum characters that are logged of a client's text, or of a message that quotes it."""


@attrs.define(eq=False)
class Throttle:
    """Token bucket for log lines: `burst` at once, `per_sec` sustained. Counts the lines that it suppresses.

    A refused request costs a client next to nothing, so without a bound one client could fill a disk.
    """

    burst: float = LINES_OF_ALL
    per_sec: float = LINES_OF_ALL_PER_SEC
    suppressed: int = 0
    """Lines suppressed since the last logged line that told their number."""
    _left: float = attrs.field(default=attrs.Factory(lambda self: self.burst, takes_self=True), init=False)
    _at_sec: float = attrs.field(factory=time.monotonic, init=False)

    def lets_through(self) -> bool:
        """Whether a line can be logged now; it then counts."""
        now = time.monotonic()
        self._left = min(self.burst, self._left + (now - self._at_sec) * self.per_sec)
        self._at_sec = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def log(self, logger: logging.Logger, level: int, event: str, **fields: Any) -> None:
        """Log a line if the bucket allows it, with the number of lines suppressed before it."""
        if not self.lets_through():
            self.suppressed += 1
            return
        log(logger, level, event, **fields, suppressed=self.suppressed or None)
        self.suppressed = 0


@attrs.define(eq=False)
class ClientLines:
    """Log lines of one session or connection, limited by a bucket of its own and by the one of all clients."""

    all: Throttle
    client: str | None = None
    """Address of the connection's client, which each line has; None on a Unix socket, where the user is logged
    instead."""
    _own: Throttle = attrs.field(factory=lambda: Throttle(LINES_OF_ONE, LINES_OF_ONE_PER_SEC), init=False)

    def log(self, logger: logging.Logger, level: int, event: str, **fields: Any) -> None:
        """Log a line if both buckets allow it. Texts are cut to `MAX_LOGGED_CHARS`."""
        if not logger.isEnabledFor(level):  # else probes would use up the buckets of what is logged
            return
        if not self._own.lets_through():
            self.all.suppressed += 1
            return
        self.all.log(
            logger, level, event, **{name: _cut(value) for name, value in fields.items()} | {"client": self.client}
        )


def _cut(value: Any) -> Any:
    return value[:MAX_LOGGED_CHARS] if isinstance(value, str) else value
