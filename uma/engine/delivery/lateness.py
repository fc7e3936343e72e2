"""Tokens that reach their reader late, counted where they do: on the Trio side, after all that could hold them up."""

from __future__ import annotations

from collections.abc import Callable

LATE = 1.25
"""Time since the token before, as a multiple of `target_tbt_ms`, above which a token counts as late."""


class Lateness:
    """Watches one sequence's tokens and calls `on_late` for each that is late. Belongs to the Trio thread."""

    __slots__ = ("_last_ms", "_longest_ms", "_on_late")

    def __init__(self, target_tbt_ms: float, on_late: Callable[[], None]) -> None:
        self._longest_ms = LATE * target_tbt_ms
        self._on_late = on_late
        self._last_ms = 0.0

    def had_token(self, at_ms: float) -> None:
        """The stream was given its next token."""
        if self._last_ms and at_ms - self._last_ms > self._longest_ms:
            self._on_late()
        self._last_ms = at_ms
