"""JSON as orjson reads and writes it, but for numbers that it would change: `json_text` says how these are held."""

from __future__ import annotations

import re
from typing import Any

import orjson

from uma import json_text

_WIDE = re.compile(json_text.WIDE.pattern.encode())


def loads(data: bytes) -> Any:
    """What a JSON text in UTF-8 holds. Raises `orjson.JSONDecodeError`, which is a `ValueError`."""
    if _WIDE.search(data) is None:
        return orjson.loads(data)
    try:
        value = json_text.loads(data.decode())
        dumps(value)  # refuses halves of characters, and what is nested too deeply
    except (ValueError, RecursionError, orjson.JSONEncodeError) as error:
        raise orjson.JSONDecodeError(str(error), "", 0) from None
    return value


def dumps(value: Any, option: int = 0) -> bytes:
    """JSON of a value that can hold `Number`s. Raises `orjson.JSONEncodeError`."""
    return orjson.dumps(value, default=as_written, option=option)


def as_written(strange: Any) -> orjson.Fragment:
    """For `orjson.dumps`: the JSON of a `Number`. Raises `TypeError` for anything else."""
    if not isinstance(strange, json_text.Number):
        raise TypeError
    return orjson.Fragment(strange.text)


def verbatim(text: str) -> orjson.Fragment:
    """A JSON text as a part of a larger one, on one line."""
    return orjson.Fragment(text.replace("\n", " ").replace("\r", " "))
