"""Log lines: one an event, with the session's and the request's id, as `key=value` or as a JSON object.

A log must never take the server down with it. Lines that cannot be written (a full disk, a terminal that is gone) are
counted, and the next line that can be written says how many were lost.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import orjson

from uma.config import RuntimeConfig, is_debugging
from uma.net.logfmt import LogEvent, log, logfmt, visible

__all__ = ["LineHandler", "json_line", "log", "logfmt", "logging_to", "text_line"]

STDERR = 2

MakeLine = Callable[[logging.LogRecord, Mapping[str, Any]], str]
"""One line of a record, without its end, and of what else is logged."""


def text_line(record: logging.LogRecord, more: Mapping[str, Any]) -> str:
    """`2026-01-31T12:00:00.123Z info uma.server event=… …`: always exactly one line."""
    parts = [record.getMessage(), logfmt({**_traceback(record), **more})]
    return f"{_time(record)} {record.levelname.lower()} {record.name} {visible(' '.join(filter(None, parts)))}"


def json_line(record: logging.LogRecord, more: Mapping[str, Any]) -> str:
    """A JSON object on one line: `time` (RFC 3339), `level`, `logger`, `message`, and of an event its fields, whose
    message is its name where it has no other.
    """
    fields = record.msg.fields if isinstance(record.msg, LogEvent) else {}
    own = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name}
    message = fields["event"] if fields else record.getMessage()
    line = {**own, "message": message, **fields, **_traceback(record), **more, **own}
    return visible(orjson.dumps({name: _writable(value) for name, value in line.items()}, default=str).decode())


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _traceback(record: logging.LogRecord) -> dict[str, Any]:
    fault = record.exc_info[1] if record.exc_info else None
    return {} if fault is None else {"traceback": "".join(traceback.format_exception(fault)).rstrip()}


def _writable(value: Any) -> Any:
    """A copy without halves of characters and integers beyond 64 bits, which orjson refuses."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return str(value) if isinstance(value, int) and not -(2**63) <= value < 2**64 else value


FORMATS: Mapping[str, MakeLine] = {"text": text_line, "json": json_line}
"""Makers of log lines by the words of `--log-format`."""


class LineHandler(logging.Handler):
    """Writes whole lines to a file descriptor, unbuffered, and outlives every failure to do so."""

    def __init__(self, fd: int, make_line: MakeLine = text_line) -> None:
        super().__init__()
        self._fd = fd
        self._make_line = make_line
        self.lines_lost = 0
        """Lines that could not be written since the last one that could."""

    def emit(self, record: logging.LogRecord) -> None:
        line = self._make_line(record, {"lines_lost": self.lines_lost} if self.lines_lost else {})
        try:
            os.write(self._fd, line.encode("utf-8", "replace") + b"\n")
        except OSError:
            self.lines_lost += 1
        else:
            self.lines_lost = 0


@contextmanager
def logging_to(config: RuntimeConfig, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Send the log of every `uma` package to standard error, for the length of the block.

    `UMA_DEBUG=1` shows everything, whatever `log_level` says.
    """
    handler, root = LineHandler(STDERR, FORMATS[config.log_format]), logging.getLogger("uma")
    before = root.level, root.propagate
    root.setLevel(logging.DEBUG if is_debugging(environ) else config.log_level.upper())
    root.propagate = False
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before[0])
        root.propagate = before[1]
