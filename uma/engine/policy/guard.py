"""The latency guard: a stream past its deadline suspends prefill for the tick, and prefill comes back only when the
streams are well inside their deadlines again (hysteresis), or when it has waited for its maximum.
"""

from __future__ import annotations

from collections.abc import Iterable

from uma.engine.policy.state import Row

LATE = 1.5
"""Time since a stream's last token, or between its last two, as a multiple of its `target_tbt_ms`: above it the stream
is late."""
CALM = 1.0
"""Multiple of the target below which prefill resumes."""
MOST_SUSPENDED_TICKS = 3
"""Maximum ticks in a row without prefill: a machine too slow for its targets must still read prompts."""


class LatencyGuard:
    """Says each tick whether prefill can run."""

    __slots__ = ("_is_suspended", "_ticks")

    def __init__(self) -> None:
        self._is_suspended = False
        self._ticks = 0

    def allows_prefill(self, decoding: Iterable[Row], now_ms: float, pace_ms: float = 0.0) -> bool:
        """Whether prefill can be part of this tick. Background rows suspend none, nor do rows without a reader, and a
        target counts as `pace_ms` where it is shorter: no token is meant to come sooner.
        """
        worst = max(
            (
                max(now_ms - row.last_token_ms, row.last_gap_ms) / max(row.target_tbt_ms, pace_ms)
                for row in decoding
                if row.lane >= 0 and row.has_reader and not row.is_paused
            ),
            default=0.0,
        )
        self._is_suspended = worst > (CALM if self._is_suspended else LATE)
        if not self._is_suspended:
            self._ticks = 0
            return True
        self._ticks += 1
        if self._ticks > MOST_SUSPENDED_TICKS:
            self._ticks = 0
            return True
        return False
