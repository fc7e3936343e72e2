"""The form of a log line: `key=value` pairs, one line an event. Where lines go is decided elsewhere."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import orjson

from uma.net.harmful import TABLE, json_escape

_PLAIN = re.compile(r"[\w.,:;/@%+*()\[\]<>#~-]+", re.ASCII)


def logfmt(fields: Mapping[str, Any]) -> str:
    """`key=value` pairs on one line; a value with spaces, quotes or control characters is written as a JSON string."""
    return " ".join(f"{key}={_value(value)}" for key, value in fields.items() if value is not None)


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    text = str(value)
    if _PLAIN.fullmatch(text):
        return text
    return visible(orjson.dumps(text.encode("utf-8", "replace").decode()).decode())


def visible(text: str) -> str:
    """`text` with what would end its line, or speak to a terminal, written as JSON's escapes."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if char.isprintable() and ord(char) not in TABLE else json_escape(char) for char in text)


def log(logger: logging.Logger, level: int, event: str, **fields: Any) -> None:
    """Log `event` with `fields`; costs next to nothing where the level is off."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", logfmt({"event": event, **fields}))
