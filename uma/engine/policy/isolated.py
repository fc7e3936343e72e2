"""When a request that is computed in a context of its own (a reproducible one) has its turn.

It takes turns with the ticks of all others, a batch behind each. While sequences of higher lanes run it has a share of
the time instead, so that their streams keep the rest of their speed.
"""

from __future__ import annotations

from collections.abc import Iterable

from uma.engine.policy.state import Row
from uma.engine.policy.tuning import TUNING


class IsolatedTurns:
    """Turns of such a request. Pure: times are passed in."""

    def __init__(self) -> None:
        self._owed_ms = 0.0
        """Time that ticks have first, where sequences of higher lanes run."""

    def ticked(self, took_ms: float) -> None:
        """A tick of the others took so long."""
        self._owed_ms = max(0.0, self._owed_ms - took_ms)

    def computed(self, took_ms: float) -> None:
        """A batch of the request took so long."""
        # Turn by turn, whatever ran, one such request of the background halved the speed of interactive streams.
        self._owed_ms = took_ms * (1.0 / TUNING.lower_isolated_share - 1.0)

    def has_turn(self, lane: int, others: Iterable[Row]) -> bool:
        """Whether a request of this lane computes a batch now, beside `others` that run."""
        return self._owed_ms == 0.0 or not any(row.lane > lane and not row.is_paused for row in others)
