"""Quality of experience of a stream of tokens, as Andes (arXiv 2404.16283, section 3) defines it."""

from __future__ import annotations

import attrs


@attrs.define(slots=True)
class Experience:
    """Quality of experience of one stream, from the times of its tokens.

    The reader wants the first token at some time and the others at some pace, and reads no faster than that. Over the
    time until the last token is read, the tokens that it wanted to have read by then make one area, those that it could
    read make another: the quality is the second as a share of the first, 1 where it never waited. All times are
    milliseconds on the same clock.
    """

    _expected_ms: float
    """When the reader wants the next token."""
    _pace_ms: float
    _read_ms: float = 0.0
    """When the reader has the last one."""
    _tokens: int = 0
    _expected_sum_ms: float = 0.0
    _read_sum_ms: float = 0.0

    def had_token(self, given_ms: float) -> None:
        """The reader is given its next token."""
        ready_ms = self._read_ms + self._pace_ms if self._tokens else self._expected_ms
        self._read_ms = max(given_ms, ready_ms)
        self._read_sum_ms += self._read_ms
        self._expected_sum_ms += self._expected_ms
        self._expected_ms += self._pace_ms
        self._tokens += 1

    @property
    def qoe(self) -> float:
        """From 0 to 1; 1 before there is anything to compare."""
        whole = self._tokens * self._read_ms - self._expected_sum_ms
        had = self._tokens * self._read_ms - self._read_sum_ms
        return round(min(1.0, max(0.0, had / whole)), 4) if whole > 0 else 1.0
