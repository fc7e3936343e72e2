"""How far a job is, and how long the rest of it takes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeVar

import attrs

from uma.jobs.ask import Progress

T = TypeVar("T")

MAX_COUNTED = 20
"""Maximum fields without effect, reasons of failure and foreign names of models that are counted: rows can have as
many as they like."""
MAX_NAMED = 3
"""Maximum rows that are named for a reason of failure."""

CHANCE_WEIGHT = 9.0
"""How much of a running row's end is taken to be chance, for each unit of the scatter of rows' times or tokens, up to
all of it. Rows of one length end together, so one that runs has done the part of their mean time that it has run. Of
rows that differ the short ones end first, and their mean says too little of those that still run."""
OVERDUE = 1.25
"""How many times as long as those that have ended rows must have run so far, on average, to be of other lengths."""
SURENESS = 4.0
"""How many standard errors the growth of rows' times with their bytes must be from nothing to be believed."""


@attrs.frozen
class Begun:
    """A running row: when it was asked, and how large it is."""

    at_sec: float
    size_bytes: int


@attrs.define
class Line:
    """Straight line through points, by least squares: the time that rows take by their sizes."""

    n: int = 0
    x: float = 0.0
    """Sum of these; so are the next."""
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0

    def add(self, x: float, y: float) -> None:
        """Another point."""
        self.n += 1
        self.x += x
        self.y += y
        self.xx += x * x
        self.xy += x * y
        self.yy += y * y

    @property
    def r_squared(self) -> float:
        """The coefficient of determination: how much of y's spread the line explains, 0 to 1; 0 where that might be by
        chance.
        """
        spreads = self._spread(self.xx, self.x, self.x) * self._spread(self.yy, self.y, self.y)
        if self.n < 3 or spreads <= 0:
            return 0.0
        both = max(0.0, self._spread(self.xy, self.x, self.y)) ** 2 / spreads
        return min(both, 1.0) if both * (self.n - 2) >= SURENESS**2 * (1 - both) else 0.0

    @property
    def growth(self) -> float:
        """Slope at the mean x, in parts of the mean y for each part of that x, from 0 (y is the same for all x, or
        might be) to 1 (it grows as x does).
        """
        if not self.r_squared:
            return 0.0
        slope = self._spread(self.xy, self.x, self.y) / self._spread(self.xx, self.x, self.x)
        return min(slope * self.x / self.y, 1.0)

    @property
    def scatter(self) -> float:
        """Variance of y beside the line, in parts of the squared mean y."""
        return (1 - self.r_squared) * max(0.0, self._spread(self.yy, self.y, self.y)) / self.y**2

    def _spread(self, product: float, one: float, other: float) -> float:
        return self.n * product - one * other


@attrs.define
class Tally:
    """Counts of a job's rows, bytes and tokens, and the time that the rest takes, as they tell. Kept by one run of it,
    and of that run alone where an attribute says so.
    """

    rows: int = 0
    """Rows with a result."""
    failed: int = 0
    """Rows of these that failed."""
    reasons: Counter[str] = attrs.field(factory=Counter)
    """Why rows failed in this run, at most `MAX_COUNTED`: how many for each."""
    failed_rows: dict[str, list[int]] = attrs.field(factory=dict)
    """The first rows that failed for each of these reasons, from 1 on."""
    replaced: Counter[tuple[str, str]] = attrs.field(factory=Counter)
    """Models that rows named and those that answered instead, at most `MAX_COUNTED`: how many rows of this run."""
    ignored: Counter[str] = attrs.field(factory=Counter)
    """Fields of rows that had no effect in this run, at most `MAX_COUNTED`: how many rows had each."""
    begun_rows: int = 0
    """Rows that had a result before this run."""
    waiting: int = 0
    """Rows that wait to be asked again."""
    running: int = 0
    """Rows that are asked just now."""
    kept: int = 0
    """Rows that have ended, and whose results wait for those of earlier rows."""
    blocking_row: int = 0
    """The row for which these wait, from 1 on."""
    unwritten: int = 0
    """Rows that have ended, and whose results are not written yet: those that are `kept`, and what the disk gets."""
    unwritten_failed: int = 0
    """Rows of these that failed."""
    is_stopping: bool = False
    """No more rows begin."""
    total_bytes: int = 0
    """Bytes of the input; 0: not known."""
    total_rows: int = 0
    """Rows of the input, about; 0: not known."""
    is_counted: bool = False
    """Whether `total_rows` is counted, and no estimate."""
    input_bytes: int = 0
    """Bytes of the input up to the last row before which all have ended."""
    passed_rows: int = 0
    """Rows of the input up to the last one that was read."""
    passed_bytes: int = 0
    new_rows: int = 0
    """Rows of these that had no result before this run; so are the bytes."""
    new_bytes: int = 0
    asked_rows: int = 0
    """Rows of these that have to be asked: the others are bad, or their results taken over; so are the bytes."""
    asked_bytes: int = 0
    refused_rows: int = 0
    """Rows of these that were refused: they say nothing of the time that others take."""
    refused_bytes: int = 0
    loading: str = ""
    """The model that the rows wait for; see `RowAsk.loading`."""
    _ended_prompt_tokens: int = 0
    _ended_completion_tokens: int = 0
    _progress: dict[str, Progress] = attrs.field(factory=dict)
    """Progress of rows that run, by their requests' ids, when it was asked for last."""
    _times: Line = attrs.field(factory=Line)
    """The time that each row took which has ended, over its bytes."""
    _lengths: Line = attrs.field(factory=Line)
    """The tokens of each, read and written, over its bytes."""
    _began_sum: float = 0.0
    """Sum of the times at which the running rows began."""
    _last_began_sec: float = 0.0
    """When the last row began."""

    def passed(self, size_bytes: int, *, is_new: bool, is_asked: bool) -> None:
        """A row was read."""
        self.passed_rows += 1
        self.passed_bytes += size_bytes
        self.new_rows += is_new
        self.new_bytes += is_new * size_bytes
        self.asked_rows += is_asked
        self.asked_bytes += is_asked * size_bytes

    def begin(self, size_bytes: int, now: float | None = None) -> Begun:
        """A row is asked."""
        begun = Begun(time.monotonic() if now is None else now, size_bytes)
        self.running += 1
        self._began_sum += begun.at_sec
        self._last_began_sec = begun.at_sec
        return begun

    def end(self, begun: Begun, used: Progress | None, now: float | None = None) -> None:
        """Record a finished request; `used` is None if it is given up, or was refused."""
        self.running -= 1
        self._began_sum -= begun.at_sec
        if used is not None:
            self._times.add(begun.size_bytes, (time.monotonic() if now is None else now) - begun.at_sec)
            self._lengths.add(begun.size_bytes, used.prompt_tokens + used.completion_tokens)
            self._ended_prompt_tokens += used.prompt_tokens
            self._ended_completion_tokens += used.completion_tokens

    def note(self, progress: Mapping[str, Progress], loading: str = "") -> None:
        """How far the rows are that run, by their requests' ids; and the model that is loaded, where none is known."""
        self._progress, self.loading = dict(progress), "" if progress else loading

    def forget(self, id: str) -> None:
        """This request has ended."""
        self._progress.pop(id, None)

    @property
    def ended_rows(self) -> int:
        """Rows that have ended, with those whose results are still to be written."""
        return self.rows + self.unwritten

    @property
    def ended_failed(self) -> int:
        """Rows of these that failed."""
        return self.failed + self.unwritten_failed

    @property
    def is_held_up(self) -> bool:
        """Whether all rows that run wait for requests of others: one that waits for another row has that computed."""
        return bool(self._progress) and all(progress.waits for progress in self._progress.values())

    @property
    def prompt_tokens(self) -> int:
        """Read in this run."""
        return self._ended_prompt_tokens + sum(progress.prompt_tokens for progress in self._progress.values())

    @property
    def completion_tokens(self) -> int:
        """Written in this run."""
        return self._ended_completion_tokens + sum(progress.completion_tokens for progress in self._progress.values())

    def passed_all(self) -> None:
        """The input has been read to its end."""
        self.total_rows, self.is_counted = self.passed_rows, True

    @property
    def share(self) -> float | None:
        """How much of the input has ended; None where that is not known."""
        if self.is_counted:
            return min(1.0, self.ended_rows / self.total_rows) if self.total_rows else 1.0
        behind_bytes = self.kept * self.passed_bytes / max(self.passed_rows, 1)
        return min(1.0, (self.input_bytes + behind_bytes) / self.total_bytes) if self.total_bytes else None

    def fails(self, why: str, row: int) -> None:
        """A row failed in this run."""
        self.failed += 1
        _count(self.reasons, [why] if why else ())
        if why in self.reasons and len(named := self.failed_rows.setdefault(why, [])) < MAX_NAMED:
            named.append(row)

    def ignores(self, names: Iterable[str]) -> None:
        """A row had fields of these names, which had no effect."""
        _count(self.ignored, names)

    def replaces(self, asked: str, model: str) -> None:
        """A row that named the model `asked` was answered by another one."""
        _count(self.replaced, [(asked, model)])

    def seconds_left(self, began: float, now: float | None = None) -> float | None:
        """What the rest takes, if it goes on as since `began`, when the first row could begin: of a run that stops the
        rows that were begun. None where that is not known, as where the last rows run longer than others have.
        """
        ended = self._times
        if self.is_stopping and ended.n:
            left = self._last_began_sec + ended.y / ended.n - (time.monotonic() if now is None else now)
            return left if self.running and left > 0 else None
        if not ended.n or not ended.y or not self.total_bytes or not self.asked_rows:
            return None
        now = time.monotonic() if now is None else now
        rows, n_bytes = self._unread()
        to_answer = self.asked_rows - self.refused_rows
        if self.running and not rows and ended.n + self.running >= to_answer and self._is_overdue(now):
            return None
        # Refused rows count by their own bytes: one that is too long for the context says nothing of the others.
        rows = to_answer * (1 + rows / self.asked_rows)
        n_bytes = (self.asked_bytes - self.refused_bytes) * (1 + n_bytes / max(self.asked_bytes, 1))
        growth = ended.growth
        every = (1 - growth) * rows + growth * (n_bytes * ended.n / ended.x if ended.x else rows)
        return (now - began) * max(0.0, every / min(self._done(now), every) - 1)

    def _done(self, now: float) -> float:
        """What is done, of the rows that run too, in rows such as those that have ended.

        How far the running ones are is guessed by their time, and where their tokens are told by those too. Their time
        says too little while the first rows wait for each other's prompts; their tokens say too much where a prompt's
        are soon read. The truth is between.
        """
        by_time = self._done_by(self._times, self.running * now - self._began_sum)
        if not self._progress or not self._lengths.y:
            return by_time
        tokens = sum(progress.prompt_tokens + progress.completion_tokens for progress in self._progress.values())
        return (by_time + self._done_by(self._lengths, tokens)) / 2

    def _is_overdue(self, now: float) -> bool:
        """Whether the rows that run have run longer so far than those that have ended."""
        ended = self._times
        return self.running * now - self._began_sum > OVERDUE * self.running * ended.y / ended.n

    def _done_by(self, ended: Line, of_running: float) -> float:
        """Rows done, by times or by tokens: of those that have ended, and of all that run."""
        is_overdue = of_running > OVERDUE * self.running * ended.y / ended.n
        scatter = min(self._times.scatter, self._lengths.scatter) if self._lengths.y else self._times.scatter
        by_chance = 1.0 if is_overdue else min(1.0, CHANCE_WEIGHT * scatter)
        return ended.n * (ended.y + of_running) / (ended.y + by_chance * of_running)

    def _unread(self) -> tuple[float, float]:
        """Rows of the input that have not been read and will be asked, about, and their bytes."""
        n_bytes, rows = max(0.0, self.total_bytes - self.passed_bytes), max(0.0, self.total_rows - self.passed_rows)
        if not self.total_rows:
            rows = n_bytes * self.new_rows / self.new_bytes if self.new_bytes else 0.0
        asked = self.asked_rows / self.new_rows
        return rows * asked, n_bytes * asked


def _count(counts: Counter[T], found: Iterable[T]) -> None:
    counts.update(key for key in found if key in counts or len(counts) < MAX_COUNTED)
