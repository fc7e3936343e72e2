"""How far a job is: one line on a terminal, a line now and then elsewhere, or events for programs."""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Protocol

import attrs
import trio

from uma.cli import say, words
from uma.jobs import Tally

LINE_SEC, LINES_SEC = 0.5, 10.0
"""Time between two looks, where the line is replaced, and where each look stays."""


@attrs.define(eq=False)
class Speed:
    """A job's figures, and what follows from them and the time."""

    tally: Tally
    total_bytes: int
    """Of the input; 0: not known."""
    _began_sec: float = attrs.field(factory=time.monotonic, init=False)

    @property
    def elapsed_sec(self) -> float:
        """Since the first row could begin."""
        return time.monotonic() - self._began_sec

    @property
    def tokens_per_sec(self) -> float:
        """Generated tokens a second, of this run."""
        return self.tally.completion_tokens / max(self.elapsed_sec, 1e-3)

    @property
    def seconds_left(self) -> float | None:
        """What the rest of the input takes; None where that is not known."""
        return self.tally.seconds_left(self._began_sec, self.total_bytes)

    @property
    def share(self) -> float | None:
        """How much of the input has results; None where that is not known."""
        return min(1.0, self.tally.input_bytes / self.total_bytes) if self.total_bytes else None

    def line(self) -> str:
        """`1,024 rows (51 %) · 40 running · 210 tokens/s · 2 min left · 3 failed`."""
        running = self.tally.running - self.tally.waiting
        tally, share, left = self.tally, self.share, self.seconds_left
        rows = f"{tally.rows:,} rows" + ("" if share is None or not tally.input_bytes else f" ({share:.0%})")
        return " · ".join(
            [
                rows,
                *([f"{running:,} running"] if running else []),
                *([f"{words.figure(self.tokens_per_sec)} tokens/s"] if tally.completion_tokens else []),
                *([] if left is None else [f"{words.time_span(left)} left"]),
                *([f"{tally.failed:,} failed"] if tally.failed else []),
                *([f"{tally.waiting:,} wait to be asked again"] if tally.waiting else []),
            ]
        )


class View(Protocol):
    """Where the progress is told."""

    period_sec: float

    def look(self, speed: Speed) -> None:
        """How far it is now."""

    def tell(self, text: str) -> None:
        """A line that stays."""

    def end(self, speed: Speed, *, is_done: bool) -> None:
        """The last word."""


class Lines:
    """Lines on standard error."""

    period_sec = LINES_SEC

    def look(self, speed: Speed) -> None:
        """See `View`."""
        say.note(speed.line())

    def tell(self, text: str) -> None:
        """See `View`."""
        say.note(text)

    def end(self, speed: Speed, *, is_done: bool) -> None:
        """See `View`."""
        tally, tokens = speed.tally, speed.tally.completion_tokens
        new = tally.rows - tally.begun_rows
        took = f"{new:,} of them now, in {words.time_span(speed.elapsed_sec)}"
        rate = f", {tokens:,} tokens, {words.figure(speed.tokens_per_sec)} tokens/s" if tokens else ""
        say.note(f"{'done: ' if is_done else ''}{tally.rows:,} rows have results, {took}{rate}")


class OneLine(Lines):
    """One line on a terminal, which is replaced."""

    period_sec = LINE_SEC

    def look(self, speed: Speed) -> None:
        """See `View`."""
        say.passing(speed.line())

    def tell(self, text: str) -> None:
        """See `View`."""
        say.passing()
        super().tell(text)

    def end(self, speed: Speed, *, is_done: bool) -> None:
        """See `View`."""
        say.passing()
        super().end(speed, is_done=is_done)


class Events:
    """Lines of JSON on standard output."""

    period_sec = LINE_SEC

    def look(self, speed: Speed) -> None:
        """See `View`."""
        self._write("progress", **self._figures(speed))

    def tell(self, text: str) -> None:
        """See `View`."""
        say.note(text)

    def end(self, speed: Speed, *, is_done: bool) -> None:
        """See `View`."""
        self._write("done" if is_done else "stopped", **self._figures(speed))

    def _figures(self, speed: Speed) -> dict[str, Any]:
        tally, left = speed.tally, speed.seconds_left
        return {
            "rows": tally.rows,
            "failed": tally.failed,
            "rows_before": tally.begun_rows,
            "waiting": tally.waiting,
            "prompt_tokens": tally.prompt_tokens,
            "completion_tokens": tally.completion_tokens,
            "tokens_per_second": round(speed.tokens_per_sec, 1),
            "share": speed.share,
            "seconds": round(speed.elapsed_sec, 1),
            "seconds_left": None if left is None else round(left, 1),
        }

    def _write(self, event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}), file=sys.stdout, flush=True)


async def keep_showing(view: View, speed: Speed) -> None:
    """Tell how far a job is, again and again; to be cancelled."""
    while True:
        await trio.sleep(view.period_sec)
        view.look(speed)
