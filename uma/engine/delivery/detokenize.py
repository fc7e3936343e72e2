"""From tokens to text that may be shown: whole characters only, nothing that may yet become a stop string.

Pure: bytes in, text out, so that any split of a character or of a stop string over tokens can be tested.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """One sequence's output text. `push` gives the text that a token sets free; once `stopped`, push no more."""

    __slots__ = ("_decoder", "_held", "_longest", "_stops", "stopped")

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.stopped = False
        """A stop string came. The text given out ends just before it."""

    def push(self, piece: bytes) -> str:
        """The text that is certain once these bytes have come. Malformed bytes become U+FFFD."""
        text = self._decoder.decode(piece)
        if not self._stops:
            return text
        return self._release(self._held + text)

    def finish(self) -> str:
        """What is still held when no more tokens come: an unfinished character becomes U+FFFD."""
        if self.stopped:
            return ""
        text = self._decoder.decode(b"", final=True)
        if not self._stops:
            return text
        text = self._release(self._held + text)
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        # The stop string that is complete first counts, so that what is shown does not depend on where tokens end.
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = self._possible_stop(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
