"""Whether the readers of answers ask again at once.

A program that talks with a model mostly does: its next request comes a few milliseconds behind the last token. A piece
of a long prompt that begins in between keeps it waiting until its end, a hundred times as long as the program took. So
such a piece leaves readers a moment, as long as those before them were back in theirs.
"""

from __future__ import annotations

import math

RETURN_MS = 15.0
"""Maximum time from a reader's last token to its next request, for which a piece is put off."""
LEARN = 0.3
"""Weight of the last reader in the share of those that came back in time."""
LEAST_SHARE = 0.5
"""Minimum share of readers that came back in time, for the next to be waited for."""


class Returns:
    """Learns from each end of an answer, and each request. Times are in milliseconds of one clock."""

    __slots__ = ("_out", "_share", "ended_ms")

    def __init__(self) -> None:
        self.ended_ms = -math.inf
        """When the last answer ended for its reader."""
        self._out = 0
        """Readers of answers that ended within `RETURN_MS` of each other, and that are not back."""
        self._share = 1.0

    def ended(self, at_ms: float, *, is_whole: bool = True) -> None:
        """An answer is over for its reader, at a time that can be ahead of now. One that is not whole was cancelled or
        has failed, and says nothing about what its reader does next.
        """
        self._settle(at_ms)
        self._out += is_whole
        self.ended_ms = max(self.ended_ms, at_ms)

    def came(self, at_ms: float) -> None:
        """A request with a reader has come."""
        self._settle(at_ms)
        if self._out:
            self._out -= 1
            self._share += LEARN * (1 - self._share)

    def until_ms(self, now_ms: float) -> float:
        """Until when a reader is likely to be back with its next request; not after now: none is."""
        self._settle(now_ms)
        return self.ended_ms + RETURN_MS if self._out and self._share >= LEAST_SHARE else -math.inf

    def _settle(self, now_ms: float) -> None:
        """Those that are not back by now have not come back in time."""
        if now_ms > self.ended_ms + RETURN_MS:
            self._share *= (1 - LEARN) ** self._out
            self._out = 0
