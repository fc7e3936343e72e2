"""How far a job is."""

from __future__ import annotations

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


@attrs.define
class Tally:
    """Counts of a job's rows, bytes and tokens, kept by one run of it; of that run alone where an attribute says so."""

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
    """Fields of rows, and options, that had no effect in this run, at most `MAX_COUNTED`: how many rows had each."""
    cut: int = 0
    """Answers of this run that a bound of tokens, or the context, has cut."""
    empty: Counter[str] = attrs.field(factory=Counter)
    """Columns of the template that rows of this run left empty, at most `MAX_COUNTED`: how many rows each."""
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
    total_rows: int | None = None
    """Rows of the input; None: not known."""
    passed_rows: int = 0
    """Rows of the input up to the last one that was read."""
    loading: str = ""
    """What the load does that the rows wait for; see `RowAsk.loading`."""
    _ended_prompt_tokens: int = 0
    _ended_completion_tokens: int = 0
    _progress: dict[str, Progress] = attrs.field(factory=dict)
    """Progress of rows that run, by their requests' ids, when it was asked for last."""

    def begin(self) -> None:
        """A row is asked."""
        self.running += 1

    def end(self, used: Progress | None) -> None:
        """Record a finished request; `used` is None if it is given up, or was refused."""
        self.running -= 1
        if used is not None:
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

    @property
    def share(self) -> float | None:
        """How much of the input has ended; None where that is not known."""
        if self.total_rows is None:
            return None
        return min(1.0, self.ended_rows / self.total_rows) if self.total_rows else 1.0

    def fails(self, why: str, row: int) -> None:
        """A row failed in this run."""
        self.failed += 1
        _count(self.reasons, [why] if why else ())
        if why in self.reasons and len(named := self.failed_rows.setdefault(why, [])) < MAX_NAMED:
            named.append(row)

    def ignores(self, names: Iterable[str]) -> None:
        """A row had fields of these names, which had no effect."""
        _count(self.ignored, names)

    def leaves_empty(self, names: Iterable[str]) -> None:
        """A row had nothing in these columns of the template."""
        _count(self.empty, names)

    def replaces(self, asked: str, model: str) -> None:
        """A row that named the model `asked` was answered by another one."""
        _count(self.replaced, [(asked, model)])


def _count(counts: Counter[T], found: Iterable[T]) -> None:
    counts.update(key for key in found if key in counts or len(counts) < MAX_COUNTED)
