"""How far a job is, and how long the rest of it takes."""

from __future__ import annotations

import time

import attrs

LIKENESS = 9.0
"""How fast the time that a row is expected to take moves, as rows' times differ, from the mean of those that have ended
towards what it would be if they came to their ends by chance: rows of one length end together, and until the first have
ended nothing else tells how far they are; of rows that differ the short ones end first, and say too little."""


@attrs.define
class Tally:
    """The figures of a job, and of the one run of it that keeps them."""

    rows: int = 0
    """With a result."""
    failed: int = 0
    """Of these."""
    why_failed: str = ""
    """Why the first of them failed in this run."""
    begun_rows: int = 0
    """Rows that had a result before this run."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Of this run."""
    waiting: int = 0
    """Rows that wait to be asked again."""
    running: int = 0
    """Rows that are asked just now."""
    read_rows: int = 0
    """Rows that this run has read, to ask them."""
    read_bytes: int = 0
    """Of the input, up to the last of these."""
    input_bytes: int = 0
    """Of the input, up to the last row before which all have ended."""
    begun_bytes: int = 0
    """The same when this run's first row began."""
    _ended: int = 0
    _ended_sec: float = 0.0
    """Time that the rows which have ended took, all together; the next has the squares of it."""
    _ended_squares: float = 0.0
    _began_sum: float = 0.0
    """Of those that run: when they began, summed up."""

    def begin(self, now: float | None = None) -> float:
        """A row is asked; when that was, for `end`."""
        now = time.monotonic() if now is None else now
        self.running += 1
        self._began_sum += now
        return now

    def end(self, began: float, now: float | None = None) -> None:
        """That row has ended."""
        took = (time.monotonic() if now is None else now) - began
        self.running -= 1
        self._began_sum -= began
        self._ended += 1
        self._ended_sec += took
        self._ended_squares += took * took

    def seconds_left(self, began: float, total_bytes: int, now: float | None = None) -> float | None:
        """What the rest of an input of `total_bytes` takes, if it goes on as since `began`, when the first row could
        begin; None where that is not known.
        """
        if not self._ended or not total_bytes or self.read_bytes <= self.begun_bytes:
            return None
        now = time.monotonic() if now is None else now
        running_sec = self.running * now - self._began_sum
        mean = self._ended_sec / self._ended
        spread = max(0.0, self._ended_squares / self._ended / mean**2 - 1) if mean else 1.0
        by_chance = min(1.0, LIKENESS * spread)
        expected = mean + by_chance * running_sec / self._ended
        done = (self._ended_sec + running_sec) / expected if expected else self._ended
        done = min(max(done, self._ended), self._ended + self.running)
        unread = (total_bytes - self.read_bytes) * self.read_rows / (self.read_bytes - self.begun_bytes)
        return max(0.0, (now - began) * (unread + self.read_rows - done) / done)
