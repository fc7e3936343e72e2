"""How far a job is: one line on a terminal, a line now and then elsewhere, or events for programs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import attrs
import trio

from uma.cli import say, words
from uma.cli.sanitize import sanitize_line
from uma.cli.table import cell_len
from uma.figures import figure
from uma.jobs import Tally

LINE_SEC = 0.5
"""Time between two looks where one line is replaced."""
LINES_SEC = 10.0
"""Time between two looks where every look leaves a line."""
FIRST_SEC = 0.5
"""Time until the first."""
BAR_CELLS = 10
"""Length of the bar of a whole job."""
LOOK_SEC = 1.0
"""Maximum time that the source is waited for to tell how far the rows are that run."""


@attrs.define(eq=False)
class Speed:
    """Speed of a job, of its tally and the clock, and the line that tells how far it is."""

    tally: Tally
    _began_sec: float = attrs.field(factory=time.monotonic, init=False)

    @property
    def elapsed_sec(self) -> float:
        """Time since the first row could begin."""
        return time.monotonic() - self._began_sec

    @property
    def tokens_per_sec(self) -> float:
        """Generated tokens a second, of this run."""
        return self.tally.completion_tokens / max(self.elapsed_sec, 1e-3)

    @property
    def rows_per_minute(self) -> float:
        """Rows that have ended a minute, of this run."""
        return 60 * (self.tally.ended_rows - self.tally.begun_rows) / max(self.elapsed_sec, 1e-3)

    def line(self, columns: int | None = None) -> str:
        """`1,024 of 2,000 rows (51 %) · 40 running · 210 tokens/s · 62 rows/min · 0:16:31 · 3 failed`, and of a row for
        which many wait `1 running (row 14; 16 wait for it)`. In less than so many `columns` it has what fits, in this
        order: rows a minute, the speed, and how many run, which comes before the speed where many wait.
        """
        tally, tokens, pace = self.tally, self.tally.completion_tokens, self.rows_per_minute
        since = timedelta(seconds=round(self.elapsed_sec))
        running = tally.running - tally.waiting
        runs = f"{running:,} {'queued' if tally.is_held_up else 'running'}"
        runs = sanitize_line(tally.loading) or runs
        # Beside many rows some that end before earlier ones are the rule, and nothing to say.
        if is_blocked := tally.kept > tally.running > 0:
            runs += f" (row {tally.blocking_row:,}; {tally.kept:,} wait for it)"
        rate = f"{figure(self.tokens_per_sec)} tokens/s" if tokens else ""
        if tally.prompt_tokens and not tokens:
            rate = f"{words.tokens(tally.prompt_tokens, 'prompt ')} read"
        parts = [
            self._rows(),
            runs if running else "",
            rate,
            f"{pace:,.{0 if pace >= 10 else 1}f} rows/min · {since}" if pace else "",
            f"{tally.ended_failed:,} failed" if tally.ended_failed else "",
            f"{tally.waiting:,} wait to be asked again" if tally.waiting else "",
        ]
        optional = (3, 2) if tally.loading else (3, 1, 2) if is_blocked else (3, 2, 1)
        shown = ["" if at in optional else part for at, part in enumerate(parts)]
        for at in optional:
            wider = [*shown[:at], parts[at], *shown[at + 1 :]]
            shown = shown if columns is not None and cell_len(_joined(wider)) >= columns else wider
        return _joined(shown)

    def _rows(self) -> str:
        tally = self.tally
        ended = tally.ended_rows
        rows = f"{ended:,} of {tally.total_rows:,} rows" if tally.total_rows else words.rows(ended)
        return f"{rows} ({tally.share:.0%})" if ended and tally.share is not None else rows


def _joined(parts: list[str]) -> str:
    return " · ".join(filter(None, parts))


class Lines:
    """Progress as lines on standard error, each of which stays."""

    period_sec = LINES_SEC

    def look(self, speed: Speed) -> None:
        """Show how far it is now."""
        say.note(speed.line())

    def tell(self, text: str) -> None:
        """Write a line that stays."""
        say.note(text)

    def end(self, speed: Speed, *, is_done: bool) -> None:
        """Say the last word."""
        tally, tokens = speed.tally, speed.tally.completion_tokens
        now = f", {tally.rows - tally.begun_rows:,} of them now" if tally.begun_rows else ""
        took = f"{now} in {words.time_span(speed.elapsed_sec)}"
        rate = f", {words.tokens(tokens)}, {figure(speed.tokens_per_sec)} tokens/s" if tokens else ""
        failed = f", {tally.failed:,} failed" if tally.failed else ""
        say.note(f"{'done: ' if is_done else ''}{words.rows(tally.rows)}{took}{rate}{failed}")


class OneLine(Lines):
    """Progress as one line on a terminal, which is replaced, with a bar."""

    period_sec = LINE_SEC

    def look(self, speed: Speed) -> None:
        share, columns = speed.tally.share, say.passing_columns()
        bar = f"{words.blocks(int(100 * share), BAR_CELLS)} " if share else ""
        say.passing(bar + speed.line(None if columns is None else columns - len(bar)))


class Events(Lines):
    """Progress as lines of JSON on standard output, for programs."""

    period_sec = LINE_SEC

    def look(self, speed: Speed) -> None:
        self._write("progress", **self._figures(speed))

    def end(self, speed: Speed, *, is_done: bool) -> None:
        self._write("done" if is_done else "stopped", **self._figures(speed))

    def _figures(self, speed: Speed) -> dict[str, Any]:
        tally = speed.tally
        return {
            "rows": tally.rows,
            "ended": tally.ended_rows,
            "blocking_row": tally.blocking_row if tally.kept else None,
            "failed": tally.ended_failed,
            "rows_before": tally.begun_rows,
            "total_rows": tally.total_rows,
            "running": tally.running - tally.waiting,
            "waiting": tally.waiting,
            "prompt_tokens": tally.prompt_tokens,
            "completion_tokens": tally.completion_tokens,
            "tokens_per_second": round(speed.tokens_per_sec, 1),
            "share": tally.share,
            "seconds": round(speed.elapsed_sec, 1),
            "rows_per_minute": round(speed.rows_per_minute, 1),
        }

    def _write(self, event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}), file=sys.stdout, flush=True)


async def keep_showing(view: Lines, speed: Speed, look: Callable[[], Awaitable[None]]) -> None:
    """Tell how far a job is, again and again; to be cancelled. `look` has the tally know of the rows that run."""
    await trio.sleep(FIRST_SEC)
    while True:
        with trio.move_on_after(LOOK_SEC):
            await look()
        view.look(speed)
        await trio.sleep(view.period_sec)
