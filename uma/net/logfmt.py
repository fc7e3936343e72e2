"""Log lines as events with fields, written as `key=value` pairs.

`uma/server/logs.py` decides where lines go, and whether they are text or JSON.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import orjson

from uma.net.controls import TABLE, json_escape

_PLAIN = re.compile(r"[\w.,:;/@%+*()\[\]<>#~-]+", re.ASCII)


def logfmt(fields: Mapping[str, Any]) -> str:
    """`key=value` pairs on one line; a value with spaces, quotes or control characters is written as a JSON string, and
    a dict as an object.
    """
    return " ".join(f"{key}={_value(value)}" for key, value in fields.items() if value is not None)


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    if isinstance(value, dict):
        return visible(orjson.dumps(value).decode())
    text = str(value)
    if _PLAIN.fullmatch(text):
        return text
    return visible(orjson.dumps(text.encode("utf-8", "replace").decode()).decode())


def visible(text: str) -> str:
    """`text` with line breaks and characters that control a terminal written as JSON escapes."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if char.isprintable() and ord(char) not in TABLE else json_escape(char) for char in text)


@attrs.frozen
class LogEvent:
    """Message of a log record: an event and its fields. As text it is in `logfmt`'s form."""

    fields: Mapping[str, Any]
    """The event's name as `event`, then its fields, without those that are None."""

    def __str__(self) -> str:
        return logfmt(self.fields)


def log(logger: logging.Logger, level: int, event: str, *, fault: BaseException | None = None, **fields: Any) -> None:
    """Log `event` with `fields`, and the traceback of `fault`. Costs next to nothing where the level is off."""
    if logger.isEnabledFor(level):
        present = {name: value for name, value in fields.items() if value is not None}
        logger.log(level, LogEvent({"event": event, **present}), exc_info=fault)


@contextmanager
def unlogged(logger: str) -> Iterator[list[str]]:
    """A block whose log lines of this thread are collected in a list instead of logged, for a caller that reports them
    itself.
    """
    said, thread, logger_of_name = list[str](), threading.get_ident(), logging.getLogger(logger)

    def is_another_s(record: logging.LogRecord) -> bool:
        if record.thread == thread:
            said.append(record.getMessage())
        return record.thread != thread

    logger_of_name.addFilter(is_another_s)
    try:
        yield said
    finally:
        logger_of_name.removeFilter(is_another_s)
