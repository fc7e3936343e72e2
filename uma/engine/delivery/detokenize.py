"""Text of tokens that can be shown: whole characters only, nothing that can yet become a stop string.

Pure: bytes in, text out, so that any split of a character or of a stop string over tokens can be tested.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """One sequence's output text. `push` gives the text that a token sets free; once `stopped`, push no more.

    A token costs a search of what is held, and for each stop string as many comparisons as characters of it had come.
    """

    __slots__ = ("_decoder", "_firsts", "_held", "_matched", "_stops", "stopped", "stopped_by")

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = stops
        self._firsts = {stop[0] for stop in stops}
        self._held = ""
        self._matched = [0] * len(stops)
        """How much of each stop string the text ends with."""
        self.stopped = False
        """A stop string came. The text given out ends just before it."""
        self.stopped_by: str | None = None
        """Which one."""

    def push(self, piece: bytes) -> str:
        """The text that is certain once these bytes have come. Malformed bytes become U+FFFD."""
        text = self._decoder.decode(piece)
        if not self._held and self._firsts.isdisjoint(text):
            return text
        return self._release(text)

    @property
    def holds(self) -> bool:
        """Whether some of the bytes that came have not been given out as text: `finish` would give more."""
        return self._held != "" or self._decoder.getstate()[0] != b""

    def finish(self) -> str:
        """What is still held when no more tokens come: an unfinished character becomes U+FFFD."""
        if self.stopped:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _release(self, more: str) -> str:
        text = self._held + more
        ends = ((at + len(stop), -len(stop)) for stop in self._stops if (at := text.find(stop)) >= 0)
        if (first := min(ends, default=None)) is not None:
            # The stop string that is complete first counts, so that what is shown does not depend on where tokens end.
            end, start = first[0], sum(first)
            self.stopped, self._held, self.stopped_by = True, "", text[start:end]
            return text[:start]
        matched = zip(self._stops, self._matched, strict=True)
        self._matched = [_begun(text, stop, most + len(more)) for stop, most in matched]
        keep = max(self._matched, default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _begun(text: str, stop: str, most: int) -> int:
    """How much of a stop string that is not in the text, at most so much, the text ends with."""
    return next((size for size in range(min(most, len(stop)), 0, -1) if text.endswith(stop[:size])), 0)
