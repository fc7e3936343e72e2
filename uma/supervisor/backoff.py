"""When a model whose process has failed is started again. Pure: time is passed in."""

from __future__ import annotations

import math

import attrs

FIRST_SEC = 1.0
"""Time between a failure and the next start: each failure in a row doubles it."""
MAX_SEC = 60.0
"""Maximum of that time."""
STEADY_SEC = 60.0
"""A process that was loaded for so long has not failed by what it was loaded with: failures are counted from 1."""


@attrs.define
class Failures:
    """The failures of one model in a row: loads, and processes that ended by themselves."""

    n: int = 0
    why: str = ""
    """Reason of the last failure; empty once the model is loaded."""
    retry_at: float = -math.inf
    """No load is tried before."""

    def note(self, why: str, now: float, loaded_at: float | None) -> None:
        """Note a failure, as a process that was loaded since `loaded_at`, or (None) while it was loaded. After the
        first failure of a process that was loaded it can be started at once.
        """
        if loaded_at is not None and now - loaded_at >= STEADY_SEC:
            self.n = 0
        self.n += 1
        self.why = why
        is_lone = loaded_at is not None and self.n == 1
        self.retry_at = now if is_lone else now + min(MAX_SEC, FIRST_SEC * 2.0 ** (self.n - 1))

    def left_sec(self, now: float) -> float:
        """Time until a load is tried; 0: now."""
        return max(0.0, self.retry_at - now)
