"""JSON in bytes, as orjson writes it, with numbers as they are written: `json_text` says how these are held."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import orjson

from uma import json_text

MAX_DEPTH = 1_024
"""Most lists and objects in one another that orjson reads."""


def loads(data: bytes) -> Any:
    """What a JSON text in UTF-8 holds. Raises `orjson.JSONDecodeError`, which is a `ValueError`."""
    # Integers are mostly token ids, by the 100,000: they are looked at one by one only where some must be.
    readers: list[Callable[[str], Any]] = [json_text.loads]
    if b"-0" not in data:
        readers.insert(0, json_text.SHORT_READER.decode)
    for read in readers:
        with suppress(ValueError, RecursionError, orjson.JSONEncodeError):
            return _checked(read(data.decode()))
    # It is no JSON, or nested more deeply than anything whose numbers are passed on.
    return orjson.loads(data)


def fault(error: ValueError) -> str:
    """What is wrong with a text that `loads` has refused, to be said behind what the text is."""
    if isinstance(error, orjson.JSONDecodeError) and "limit" in error.msg:  # "depth limit exceeded"
        return (
            f"is nested too deep: over {MAX_DEPTH:,} lists and objects in one another at character {error.pos:,}; "
            "send one with fewer"
        )
    return f"is not JSON: {error}"


def _checked(value: Any) -> Any:
    """`value` itself. Raises `orjson.JSONEncodeError` for integers beyond 64 bits, halves of characters, and what is
    nested too deeply.
    """
    dumps(value)
    return value


def dumps(value: Any, option: int = 0) -> bytes:
    """JSON of a value whose numbers can hold their spelling. Raises `orjson.JSONEncodeError`."""
    return orjson.dumps(value, default=as_written, option=option)


def as_written(strange: Any) -> orjson.Fragment:
    """Default hook of `orjson.dumps`: a number that holds its spelling. Raises `TypeError` for anything else."""
    if not isinstance(strange, json_text.Spelled | json_text.Number):
        raise TypeError
    return orjson.Fragment(strange.text)


def verbatim(text: str) -> orjson.Fragment:
    """A JSON text as a part of a larger one, on one line."""
    return orjson.Fragment(text.replace("\n", " ").replace("\r", " "))
