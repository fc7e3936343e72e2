"""A trace of a few seconds: what each thread of an engine did, and when, in Chrome's format, which Perfetto shows.

While none is recorded, each span costs a look at one attribute. The spans of a thread nest: each begins and ends within
the one around it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson
import trio

from uma.engine.clock import now_ms

MAX_VALUES = 400_000
"""Maximum spans of a trace, plus names of requests in them: later ones are dropped, and the trace says so. All of them
take some 60 MB."""
EVENTS_AT_ONCE = 500
"""Spans written in one piece: other threads get a turn between two pieces."""
DECODE, TRIO = "decode", "Trio"
"""Threads by name; threads that render prompts are called `render` and a number."""

Span = tuple[str | int, str, float, float, Mapping[str, Any]]


class Recorder:
    """Records spans until `close`. Any thread can add its own."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._left = MAX_VALUES
        self.began_ms = now_ms()
        self.ended_ms = 0.0

    def span(
        self, thread: str, name: str, began_ms: float, ended_ms: float, rows: Sequence[Any] = (), **figures: Any
    ) -> None:
        """Record what a thread, without a name this one, did from `began_ms` to `ended_ms`, for requests `rows`."""
        if self.ended_ms:
            return
        self._left -= 1 + len(rows)
        if self._left >= 0:
            args = {**figures, "rows": rows} if rows else figures
            self._spans.append((thread or threading.get_ident(), name, began_ms, ended_ms, args))

    def close(self) -> None:
        """End the recording: later spans are dropped."""
        self.ended_ms = now_ms()

    def __len__(self) -> int:
        return len(self._spans)

    def written(self) -> Iterator[bytes]:
        """The trace as JSON, in pieces, after `close`."""
        spans = sorted(self._spans, key=lambda span: (span[2], -span[3]))
        numbers: dict[str | int, int] = {DECODE: 1, TRIO: 2}
        for thread, *_ in spans:
            numbers.setdefault(thread, len(numbers) + 1)
        names = {thread: thread if isinstance(thread, str) else f"render {tid - 2}" for thread, tid in numbers.items()}
        headers: list[dict[str, Any]] = [_named(0, "process_name", "uma")]
        headers += [_named(tid, "thread_name", names[thread]) for thread, tid in numbers.items()]
        yield b'{"traceEvents":['
        yield b",\n".join(map(orjson.dumps, headers))
        for start in range(0, len(spans), EVENTS_AT_ONCE):
            events = (_event(span, numbers) for span in spans[start : start + EVENTS_AT_ONCE])
            yield b"".join(b",\n" + orjson.dumps(event, default=str) for event in events)
        seconds = (self.ended_ms - self.began_ms) / 1000
        other = {"seconds": round(seconds, 3), "is_cut": self._left < 0}
        yield b'],\n"displayTimeUnit":"ms","otherData":' + orjson.dumps(other) + b"}\n"


def _named(tid: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": tid, "name": what, "args": {"name": name}}


def _event(span: Span, numbers: Mapping[str | int, int]) -> dict[str, Any]:
    thread, name, began_ms, ended_ms, args = span
    began_ns = round(began_ms * 1e6)
    took_ns = max(0, round(ended_ms * 1e6) - began_ns)
    fields = {"ph": "X", "pid": 1, "tid": numbers[thread], "name": name, "ts": began_ns / 1000, "dur": took_ns / 1000}
    return fields | ({"args": args} if args else {})


class Turns(trio.abc.Instrument):
    """Records turns of the Trio thread: what it does between two waits."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._began_ms = 0.0

    def after_io_wait(self, timeout: float) -> None:
        """Begin a turn."""
        self._began_ms = now_ms()

    def before_io_wait(self, timeout: float) -> None:
        """End a turn. One that began before the trace is left out."""
        if self._began_ms:
            self._recorder.span(TRIO, "turn", self._began_ms, now_ms())
