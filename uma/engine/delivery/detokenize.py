"""Text of tokens as it can be shown: whole characters, and nothing that could become a stop string.

Pure: bytes in, text out, so any split of a character or stop string over tokens can be tested.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """One sequence's output text. `push` returns the text that a token releases; after `stopped`, push no more.

    A token costs a search of the text held back, and for each stop string a comparison per matched character.
    """

    __slots__ = ("_decoder", "_firsts", "_held", "_matched", "_stops", "stopped", "stopped_by")

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = stops
        self._firsts = {stop[0] for stop in stops}
        self._held = ""
        self._matched = [0] * len(stops)
        """Number of characters of each stop string with which the text ends."""
        self.stopped = False
        """Whether a stop string came. The text given out ends just before it."""
        self.stopped_by: str | None = None
        """Stop string that came."""

    def push(self, piece: bytes) -> str:
        """Text that is certain with these bytes. Malformed bytes become U+FFFD."""
        text = self._decoder.decode(piece)
        if not self._held and self._firsts.isdisjoint(text):
            return text
        return self._release(text)

    @property
    def holds(self) -> bool:
        """Whether text is held back: `finish` would return more."""
        return self._held != "" or self._decoder.getstate()[0] != b""

    def finish(self) -> str:
        """Text held back, once no more tokens come: an unfinished character becomes U+FFFD."""
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
            # The stop string that is complete first counts: the result does not depend on the split into tokens.
            end, start = first[0], sum(first)
            self.stopped, self._held, self.stopped_by = True, "", text[start:end]
            return text[:start]
        matched = zip(self._stops, self._matched, strict=True)
        self._matched = [_begun(text, stop, most + len(more)) for stop, most in matched]
        keep = max(self._matched, default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _begun(text: str, stop: str, most: int) -> int:
    """Number of characters, at most `most`, of a stop string with which the text ends."""
    return next((size for size in range(min(most, len(stop)), 0, -1) if text.endswith(stop[:size])), 0)
