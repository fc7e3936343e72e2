"""Whether the readers of answers ask again soon.

A program that talks with a model mostly does, and its next request waits for the end of a piece of a long prompt. So
pieces are shorter for a while after an answer, as long as readers are mostly back within that while.
"""

from __future__ import annotations

import math
from collections import deque

NEXT_REQUEST_MS = 2_000.0
"""Maximum time from a reader's last token to its next request, for which pieces are kept short."""
LEARN = 0.3
"""Weight of the last reader in the share of those that came back in time."""
LEAST_SHARE = 0.5
"""Minimum share of readers that came back in time, for the next to be expected."""


class Returns:
    """Learns from each end of an answer, and each request. Times are in milliseconds of one clock."""

    __slots__ = ("_ended_ms", "_out", "_share")

    def __init__(self) -> None:
        self._ended_ms = -math.inf
        """When the last answer ended for its reader."""
        self._out: deque[float] = deque()
        """When the answers of readers ended that can still be back in time."""
        self._share = 1.0

    def ended(self, at_ms: float, *, is_whole: bool = True) -> None:
        """An answer is over for its reader, at a time that can be ahead of now. One that is not whole was cancelled or
        has failed, and says nothing about what its reader does next.
        """
        self._ended_ms = max(self._ended_ms, at_ms)
        if is_whole:
            self._settle(self._ended_ms)
            self._out.append(self._ended_ms)

    def came(self, at_ms: float) -> None:
        """A request with a reader has come."""
        self._settle(at_ms)
        if self._out:
            self._out.popleft()
            self._share += LEARN * (1 - self._share)

    def are_usual(self, now_ms: float) -> bool:
        """Whether readers are mostly back within `NEXT_REQUEST_MS`."""
        self._settle(now_ms)
        return self._share >= LEAST_SHARE

    def next_expected_since_ms(self, now_ms: float) -> float:
        """When the last answer ended for its reader, where that was less than `NEXT_REQUEST_MS` ago and readers are
        mostly back within that time; or else minus infinity. It counts also where that one is back already: others will
        be.
        """
        is_next_expected = now_ms - self._ended_ms <= NEXT_REQUEST_MS and self.are_usual(now_ms)
        return self._ended_ms if is_next_expected else -math.inf

    def _settle(self, now_ms: float) -> None:
        """Those that are not back by now have not come back in time. All that this finds at once count as one reader:
        as many would have to return for a crowd that left to be forgotten.
        """
        were_out = len(self._out)
        while self._out and now_ms > self._out[0] + NEXT_REQUEST_MS:
            self._out.popleft()
        if len(self._out) < were_out:
            self._share *= 1 - LEARN
