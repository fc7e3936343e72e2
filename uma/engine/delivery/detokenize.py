"""Text of tokens that can be shown: whole characters only, nothing that can yet become a stop string.

Pure: bytes in, text out, so that any split of a character or of a stop string over tokens can be tested.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """One sequence's output text. `push` gives the text that a token sets free; once `stopped`, push no more.

    A character costs a few steps for each stop string, however long that is and however much of it has come.
    """

    __slots__ = ("_decoder", "_firsts", "_held", "_searches", "stopped", "stopped_by")

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._searches = tuple(map(_Search, stops))
        self._firsts = {stop[0] for stop in stops}
        self._held = ""
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
        text, seen = self._held + more, len(self._held)
        for end, char in enumerate(more, seen + 1):
            # The stop string that is complete first counts, so that what is shown does not depend on where tokens end.
            found = max((search.size for search in self._searches if search.ends_with(char)), default=0)
            if found:
                self.stopped, self._held = True, ""
                self.stopped_by = text[end - found : end]
                return text[: end - found]
        keep = max((search.matched for search in self._searches), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


class _Search:
    """Knuth, Morris and Pratt's search for one stop string, a character at a time.

    Its table of borders grows with the longest match there was, so that a long stop string costs nothing in advance.
    """

    __slots__ = ("_borders", "_stop", "matched", "size")

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = [0, 0]
        """Border of each beginning of the stop string: the length of its longest proper end that begins the string too.
        """
        self.size = len(stop)
        self.matched = 0
        """How much of the stop string the text ends with."""

    def ends_with(self, char: str) -> bool:
        """Take the next character. Returns whether the stop string is complete with it; then the search is over."""
        stop, matched = self._stop, self.matched
        while matched and stop[matched] != char:
            matched = self._border(matched)
        self.matched = matched = matched + (stop[matched] == char)
        return matched == self.size

    def _border(self, length: int) -> int:
        borders, stop = self._borders, self._stop
        while len(borders) <= length:
            char, border = stop[len(borders) - 1], borders[-1]
            while border and stop[border] != char:
                border = borders[border]
            borders.append(border + (stop[border] == char))
        return borders[length]
