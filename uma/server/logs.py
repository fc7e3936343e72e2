"""Log lines: one an event, with the session's and the request's id, as `key=value` or as a JSON object.

A log must never take the server down with it. Lines that cannot be written (a full disk, a terminal that is gone) are
counted, and the next line that can be written says how many were lost.
"""

from __future__ import annotations

import logging
import os
import textwrap
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import orjson

from uma.config import RuntimeConfig, is_debugging
from uma.errors import STOPPING, Ended, ShuttingDown
from uma.net.logfmt import LogEvent, log, logfmt, visible

__all__ = ["LineHandler", "json_line", "log", "logfmt", "logging_to", "text_line"]

STDERR = 2
Fields = Mapping[str, str]
NO_FIELDS: Fields = MappingProxyType({})

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
    """A copy without halves of characters and integers beyond 64 bits, which orjson refuses; rounded as in text."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, float):
        return round(value, 1)
    return str(value) if isinstance(value, int) and not -(2**63) <= value < 2**64 else value


def short_line(record: logging.LogRecord, more: Mapping[str, Any]) -> str:
    """`13:05 chat/completions 49 → 140 tokens, 3.8 tokens/s`: for a person at a terminal; empty where it tells of
    nothing that a person asked for, or what the start has said already.
    """
    fields = dict(record.msg.fields) if isinstance(record.msg, LogEvent) else {}
    event = fields.pop("event", "")
    code, message = fields.get("code", ""), fields.get("message", STOPPING)
    is_news = event != "http.failed" or record.levelno > logging.INFO
    if (code == ShuttingDown.code and message == STOPPING) or not is_news:
        return ""  # that it stops has been said, and how far it loads is shown
    if event in ("http.request", "request.finished"):
        told = _answered(event, fields)
    elif code == Ended.code:
        told = f"{fields.get('request') or _path_words(fields)} was ended, by `uma top` or the live view"
    elif event not in SENTENCES and (fields.get("status", 500) < 500 or code.startswith(OF_CLIENTS)):
        told = _refused(fields)
    else:
        told = _told(record, event, fields)
    told = " ".join(filter(None, [told, logfmt({**_traceback(record), **more})])) if told else ""
    return f"{datetime.fromtimestamp(record.created):%H:%M} {visible(told)}" if told else ""


OF_CLIENTS = ("E_PROTO_", "E_LIMIT_")
"""Beginnings of the codes of errors on the socket that are the client's own."""
SHOWN_BELOW = frozenset({"server.ready", "http.ready", "server.stopped", "http.draining", "http.stopped", "signal"})
"""Events of the server's life, which a terminal shows below its lines or in what is said at the start."""
SENTENCES = {
    "cache.disk_enabled": "",  # the start tells it
    "request.ended": "",  # its own failure tells it
    "model.asked": "asked to {to} {model}",
    "model.loading": "loading {model}",
    "model.loaded": "{model} is loaded, after {sec} s",
    "model.ended": "{model} has left memory: {reason}",
    "model.yielded": "{model} leaves for another program: {reason}",
    "model.too_large": "{reason}",
    "model.broken": "{reason}",
    "model.default_changed": "{model} answers now where no model is named, which {before} did before",
    "http.malformed": "a client sent what is no HTTP, as TLS to a plain port is: it got status {status}",
    "request.dropped": "the client of {request} has gone: it is ended",
}
"""Events of the log as a person at a terminal is told of them; empty: not at all."""


def _told(record: logging.LogRecord, event: str, fields: dict[str, Any]) -> str:
    level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
    if not event:
        return level + record.getMessage()
    if event in SENTENCES:
        told = SENTENCES[event].format_map(defaultdict(str, fields, sec=f"{fields.get('ms', 0) / 1000:.1f}"))
        told = told.rstrip(". ")
        return told and level + told
    if event == "server.draining":
        n = fields.get("requests")
        may = f"{n} request{'s' * (n != 1)} may finish, {fields['seconds']:g} s at most" if n else ""
        return may and f"stopping: {may}; Ctrl-C again ends at once"
    name = event.replace(".", " ").replace("_", " ")
    return "" if event in SHOWN_BELOW else f"{level}{fields.get('message') or f'{name} {logfmt(fields)}'.rstrip()}"


def _refused(fields: dict[str, Any]) -> str:
    """A client's own error: its status, and the first part of its message in what a line has columns for."""
    message = str(fields.get("message", "")).partition("; ")[0]
    told = " ".join(filter(None, [_path_words(fields), str(fields.get("status", "")), message]))
    return textwrap.shorten(told, REFUSED_CHARS, placeholder=" …")


def _path_words(fields: dict[str, Any]) -> str:
    path = fields.get("path", "")
    return path.removeprefix("/v1").removeprefix("/api").strip("/") or "socket"


def _answered(event: str, fields: dict[str, Any]) -> str:
    """An answer's tokens and speed. Failures have a line of their own, and of what only looks there is none."""
    path, status = fields.get("path", ""), fields.get("status", 200)
    failed = status >= 400 or "code" in fields
    if path.startswith("/ui/") or failed or fields.get("method") in ("GET", "HEAD", "OPTIONS"):
        return ""
    what = _path_words(fields)
    what += f" {fields['model']}" if fields.get("model") else ""
    if "completion" not in fields:
        return f"{what} in {fields.get('ms', 0) / 1000:.1f} s"
    pace = fields.get("tokens_per_second")
    speed = f", {pace:.3g} tokens/s" if pace else ""
    cut = ", cancelled" if fields.get("reason") == "cancelled" else ""
    return f"{what} {fields['prompt']:,} → {fields['completion']:,} tokens{speed}{cut}"


FORMATS: Mapping[str, MakeLine] = {"text": text_line, "json": json_line}
"""Makers of log lines by the words of `--log-format`."""


class LineHandler(logging.Handler):
    """Writes whole lines to a file descriptor, unbuffered, and outlives every failure to do so."""

    def __init__(self, fd: int, make_line: MakeLine = text_line, fields: Fields = NO_FIELDS) -> None:
        super().__init__()
        self._fields = fields
        self._fd = fd
        self._make_line = make_line
        self.lines_lost = 0
        """Lines that could not be written since the last one that could."""
        self.lines_lost_total = 0
        """Lines that could not be written, or not whole, since the start."""
        self._is_torn = False
        """Whether the last line was written in part: the next one begins with a newline."""

    def emit(self, record: logging.LogRecord) -> None:
        lost = {"lines_lost": self.lines_lost} if self.lines_lost else {}
        own = record.msg.fields if isinstance(record.msg, LogEvent) else {}
        line = self._make_line(record, {name: self._fields[name] for name in self._fields if name not in own} | lost)
        if line:
            self._write(f"{line}\n")

    def _write(self, text: str) -> None:
        data = ("\n" * self._is_torn + text).encode("utf-8", "replace")
        try:
            self._is_torn = os.write(self._fd, data) < len(data)
        except OSError:
            self.lines_lost += 1
            self.lines_lost_total += 1
        else:
            self.lines_lost = int(self._is_torn)
            self.lines_lost_total += self._is_torn


def lines_lost_total() -> int:
    """Lines that this process's log has lost since its start."""
    handlers = logging.getLogger("uma").handlers
    return sum(handler.lines_lost_total for handler in handlers if isinstance(handler, LineHandler))


class TerminalHandler(LineHandler):
    """Writes short lines to a terminal, and below them, once the server is ready, where it can be reached."""

    def __init__(self, fd: int, fields: Fields) -> None:
        super().__init__(fd, short_line, fields)
        self._address = self._below = ""

    def emit(self, record: logging.LogRecord) -> None:
        fields = record.msg.fields if isinstance(record.msg, LogEvent) else {}
        self._address = fields.get("url") or self._address or fields.get("socket", "")
        states = {"server.ready": "Ctrl-C ends the server", "server.draining": "it ends once what runs has ended"}
        if not self._fields and (state := states.get(fields.get("event", ""))) is not None:
            self._below = f"{visible(self._address)} · {state}"
            self._write("")
        super().emit(record)

    def _write(self, text: str) -> None:
        columns = COLUMNS
        with suppress(OSError):  # a terminal that is gone
            columns = os.get_terminal_size(self._fd).columns or COLUMNS
        lines = textwrap.wrap(text, columns, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        told = "".join(f"{line}\n" for line in lines)
        below = self._below[: columns - 1]  # of a line that wraps only the end would be erased
        super()._write(f"{ERASE_LINE}{told}\x1b[2m{below}\x1b[0m" if below else f"{ERASE_LINE}{told}")

    def close(self) -> None:
        """Take the address off the screen."""
        if self._below:
            self._below = ""
            self._write("")
        super().close()


REFUSED_CHARS = 74
"""Maximum characters of a refusal, which with its time are a line of a usual terminal."""
ERASE_LINE = "\r\x1b[2K"
COLUMNS = 80
"""Width of a terminal that does not tell its own."""


@contextmanager
def logging_to(
    config: RuntimeConfig, environ: Mapping[str, str] = os.environ, fields: Fields = NO_FIELDS
) -> Iterator[None]:
    """Send the log of every `uma` package to standard error, for the length of the block: in short lines where that is
    a terminal. Each has `fields` too.

    `UMA_DEBUG=1` shows everything, whatever `log_level` says, and so does a level of `debug`, with all fields.
    """
    root, level = logging.getLogger("uma"), "DEBUG" if is_debugging(environ) else config.log_level.upper()
    is_short = os.isatty(STDERR) and config.log_format == "text" and level != "DEBUG"
    handler = TerminalHandler(STDERR, fields) if is_short else LineHandler(STDERR, FORMATS[config.log_format], fields)
    before = root.level, root.propagate
    root.setLevel(level)
    root.propagate = False
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()
        root.setLevel(before[0])
        root.propagate = before[1]
