"""JSON as bytes, by orjson, with the spelling of numbers preserved as in `json_text`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import orjson

from uma import json_text

BLOCK_BYTES = 65_536
"""Bytes processed at a time, in less time than the GIL's switch interval (5 ms)."""
MAX_DEPTH = 1_024
"""Maximum nesting of lists and objects that orjson reads."""


def loads(data: bytes) -> Any:
    """Value of a JSON text in UTF-8. Raises `orjson.JSONDecodeError`, which is a `ValueError`."""
    # First without a check of each integer: most are token ids, and there can be 100,000.
    readers: list[Callable[[str], Any]] = [json_text.loads]
    if b"-0" not in data:
        readers.insert(0, json_text.SHORT_READER.decode)
    for read in readers:
        with suppress(ValueError, RecursionError, orjson.JSONEncodeError):
            return _checked(read(data.decode()))
    # Invalid JSON (this raises), or nested too deeply for preserving the spelling of numbers.
    return orjson.loads(data)


def fault(error: ValueError) -> str:
    """Error of `loads` in words, for the end of a sentence about the text."""
    if isinstance(error, orjson.JSONDecodeError) and "limit" in error.msg:  # "depth limit exceeded"
        if not is_balanced(error.doc.encode("utf-8", "replace")):
            return "is not JSON: its brackets do not match"
        return (
            f"is nested too deep: over {MAX_DEPTH:,} lists and objects in one another at character {error.pos:,}; "
            "send one with fewer"
        )
    return f"is not JSON: {error}"


def is_balanced(data: bytes) -> bool:
    """Whether a text has as many opening as closing brackets. JSON is balanced."""
    begun = ended = 0
    for block in outside_strings(data):
        begun += block.count(b"[") + block.count(b"{")
        ended += block.count(b"]") + block.count(b"}")
    return begun == ended


def outside_strings(data: bytes) -> Iterator[bytes]:
    """The text without its strings, in pieces."""
    start, in_string = 0, False
    while start < len(data):
        block = data[start : start + BLOCK_BYTES]
        if (len(block) - len(block.rstrip(b"\\"))) % 2:
            block = data[start : start + BLOCK_BYTES + 1]  # do not cut an escape
        start += len(block)
        pieces = block.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        yield b"".join(pieces[in_string::2])
        in_string ^= len(pieces) % 2 == 0


def _checked(value: Any) -> Any:
    """`value`. Raises `orjson.JSONEncodeError` for integers over 64 bits, lone surrogates and too deep nesting."""
    dumps(value)
    return value


def dumps(value: Any, option: int = 0) -> bytes:
    """JSON of a value with spelled numbers. Raises `orjson.JSONEncodeError`."""
    return orjson.dumps(value, default=as_written, option=option)


def as_written(strange: Any) -> orjson.Fragment:
    """Default hook of `orjson.dumps` for a number with its spelling. Raises `TypeError` for anything else."""
    if not isinstance(strange, json_text.Spelled | json_text.Number):
        raise TypeError
    return orjson.Fragment(strange.text)


def verbatim(text: str) -> orjson.Fragment:
    """A JSON text as a part of a larger one, on one line."""
    return orjson.Fragment(text.replace("\n", " ").replace("\r", " "))
