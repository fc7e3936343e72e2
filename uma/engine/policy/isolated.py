"""When a reproducible request, which has a context of its own, computes its next batch.

Its batches alternate with the ticks of all other requests. While sequences of higher lanes run, it has a share of the
time instead, so that their streams keep the rest of their speed.
"""

from __future__ import annotations

from collections.abc import Iterable

from uma.engine.policy.state import Row
from uma.engine.policy.tuning import TUNING


class IsolatedTurns:
    """Turns of reproducible requests. Pure: times are passed in."""

    def __init__(self) -> None:
        self._owed_ms = 0.0
        """Time (ms) that ticks get before the next batch, while sequences of higher lanes run."""

    def ticked(self, took_ms: float) -> None:
        """Count a tick of the other requests."""
        self._owed_ms = max(0.0, self._owed_ms - took_ms)

    def computed(self, took_ms: float) -> None:
        """Count a batch of the reproducible request."""
        # Not one batch a tick: a single reproducible background request then halved the speed of interactive streams.
        self._owed_ms = took_ms * (1.0 / TUNING.lower_isolated_share - 1.0)

    def has_turn(self, lane: int, others: Iterable[Row]) -> bool:
        """Whether a request of this lane computes a batch now, beside the rows `others` that run."""
        return self._owed_ms == 0.0 or not any(row.lane > lane and not row.is_paused for row in others)
