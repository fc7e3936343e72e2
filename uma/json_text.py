"""JSON that preserves the spelling of numbers.

JSON does not bound numbers, and allows several spellings of one. Python's parser refuses integers of more than 4,300
digits, and turns 1e999 into infinity and 1.10 into 1.1; orjson turns an integer over 64 bits into a float, and neither
writes what the other reads. So a number that would be written differently keeps its spelling: as a `Spelled` float, or
as a `Number` where it is neither a 64-bit integer nor a finite float. All others are Python's numbers.
"""

from __future__ import annotations

import json
import marshal
import math
import numbers
import re
import secrets
from typing import Any

_INT_DIGITS = 20
"""Maximum characters of a 64-bit integer, including a sign."""


class Spelled(float):
    """A float that keeps its spelling, because Python would write it differently: 1.10, 1E2, -0."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> Spelled:
        self = super().__new__(cls, text)
        self.text = text
        return self

    def __getnewargs__(self) -> tuple[str]:  # type: ignore[override]  # as a float's, but with the spelling
        return (self.text,)

    def __repr__(self) -> str:
        return self.text


class Number(numbers.Number):
    """A number that is neither a 64-bit integer nor a finite float, as its spelling."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Number) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


def loads(text: str) -> Any:
    """Value of a JSON text. Raises `ValueError` for invalid JSON, and `RecursionError` for too deep nesting."""
    return _READER.decode(text)


def dumps(value: Any, **options: Any) -> str:
    """JSON of a value with spelled numbers, as `json.dumps` writes it with these options; by default not in ASCII."""
    found: list[str] = []
    mark = secrets.token_hex(16)  # cannot occur in `value`
    try:
        marshal.dumps(value)  # raises for classes other than Python's own: a quick check for spelled numbers
    except ValueError:
        value = _marked(value, mark, found)
    text = json.dumps(value, **({"ensure_ascii": False} | options))
    return re.sub(rf'"{mark}([0-9]+)"', lambda place: found[int(place[1])], text) if found else text


def _marked(value: Any, mark: str, found: list[str]) -> Any:
    """`value` with a placeholder for each spelled number, whose spelling is added to `found`."""
    if isinstance(value, dict):
        return {key: _marked(member, mark, found) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(item, mark, found) for item in value]
    if isinstance(value, Spelled | Number):
        found.append(value.text)
        return f"{mark}{len(found) - 1}"
    return value


def _integer(text: str) -> int | Spelled | Number:
    if text == "-0":
        return Spelled(text)
    if len(text) <= _INT_DIGITS and -(2**63) <= (value := int(text)) < 2**64:
        return value
    return Number(text)


def _float(text: str) -> float | Number:
    value = float(text)
    if repr(value) == text and "e" not in text:  # orjson writes exponents differently
        return value
    return Spelled(text) if math.isfinite(value) else Number(text)


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")


SHORT_READER = json.JSONDecoder(parse_float=_float, parse_constant=_refuse)
"""Parser for JSON in which each integer fits 64 bits and none is -0."""
_READER = json.JSONDecoder(parse_float=_float, parse_int=_integer, parse_constant=_refuse)
