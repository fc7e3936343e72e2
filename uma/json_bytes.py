"""JSON in bytes, as orjson writes it, with numbers as they are written: `json_text` says how these are held."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import orjson

from uma import json_text

BLOCK_BYTES = 65_536
"""Bytes looked at in one go, which takes less than the interpreter's lock is held anyway (5 ms)."""
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
        if not is_balanced(error.doc.encode("utf-8", "replace")):
            return "is not JSON: its brackets do not match"
        return (
            f"is nested too deep: over {MAX_DEPTH:,} lists and objects in one another at character {error.pos:,}; "
            "send one with fewer"
        )
    return f"is not JSON: {error}"


def is_balanced(data: bytes) -> bool:
    """Whether as many lists and objects end as begin in a text. One that is JSON is balanced."""
    begun = ended = 0
    for block in outside_strings(data):
        begun += block.count(b"[") + block.count(b"{")
        ended += block.count(b"]") + block.count(b"}")
    return begun == ended


def outside_strings(data: bytes) -> Iterator[bytes]:
    """The text without what stands between quotes, in pieces."""
    start, in_string = 0, False
    while start < len(data):
        block = data[start : start + BLOCK_BYTES]
        if (len(block) - len(block.rstrip(b"\\"))) % 2:
            block = data[start : start + BLOCK_BYTES + 1]  # an escape is not cut
        start += len(block)
        pieces = block.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        yield b"".join(pieces[in_string::2])
        in_string ^= len(pieces) % 2 == 0


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
