"""How long a session can say nothing. Kept apart from the reading, so that the rule stands in one place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

import attrs
import trio


@attrs.define(eq=False)
class IdleClock:
    """Cancels `scope` once a session has been idle, or half a frame unfinished, for `timeout_sec`.

    A session idles while nothing runs and no frame comes. Half a frame is on the clock from its first byte, whatever
    runs and however slowly the rest trickles in: otherwise a byte a minute would hold a session for ever.
    """

    timeout_sec: float
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    _half_since: float | None = attrs.field(default=None, init=False)
    _stands: bool = attrs.field(default=False, init=False)

    def update(self, *, is_idle: bool, is_mid_frame: bool, had_frame: bool) -> None:
        """Set the alarm again, after bytes have come (`had_frame`: a frame ended in them) or work has ended. Has no
        effect while the clock is `standing`.
        """
        if self._stands:
            return
        now = trio.current_time()
        if not is_mid_frame:
            self._half_since = None
        elif self._half_since is None or had_frame:
            self._half_since = now
        deadlines = [
            now + self.timeout_sec if is_idle else inf,
            inf if self._half_since is None else self._half_since + self.timeout_sec,
        ]
        self.scope.deadline = min(deadlines)

    @contextmanager
    def standing(self) -> Iterator[None]:
        """No alarm for the block, in which what has come is taken in: the client waits for the server. `update` has to
        follow.
        """
        self._stands, self.scope.deadline = True, inf
        try:
            yield
        finally:
            self._stands = False
