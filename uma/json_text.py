"""JSON whose numbers pass as they are written.

JSON bounds no number, and gives one number many spellings. Python's reader refuses integers of more than 4,300 digits,
and makes infinity of 1e999 and 1.1 of 1.10; orjson makes a float of an integer beyond 64 bits, and neither writes what
the other reads. A number that a parser would write otherwise holds its spelling here: as a `Spelled` float, or as a
`Number` where it is neither a 64-bit integer nor a finite float. All others are Python's.
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
"""Digits of the longest integer of 64 bits, or its sign and one less."""


class Spelled(float):
    """A float that Python would write otherwise, as it is written: 1.10, 1E2, -0."""

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
    """A number that is no 64-bit integer and no finite float, as it is written."""

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
    """What a JSON text holds. Raises `ValueError` where it is none, `RecursionError` where it is nested too deeply."""
    return _READER.decode(text)


def dumps(value: Any, **options: Any) -> str:
    """JSON of a value with numbers as they were written, as `json.dumps` writes it with these options, and not only in
    ASCII.
    """
    found: list[str] = []
    mark = secrets.token_hex(16)  # which no text in `value` can have
    try:
        marshal.dumps(value)  # which takes no class but Python's own: a quick way to tell that there is none of ours
    except ValueError:
        value = _marked(value, mark, found)
    text = json.dumps(value, **({"ensure_ascii": False} | options))
    return re.sub(rf'"{mark}([0-9]+)"', lambda place: found[int(place[1])], text) if found else text


def _marked(value: Any, mark: str, found: list[str]) -> Any:
    """`value` with a text instead of each number that holds its spelling, which goes to `found`."""
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
    if repr(value) == text and "e" not in text:  # orjson has another form for exponents
        return value
    return Spelled(text) if math.isfinite(value) else Number(text)


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")


SHORT_READER = json.JSONDecoder(parse_float=_float, parse_constant=_refuse)
"""Reader of JSON where each integer has at most 64 bits and none is -0."""
_READER = json.JSONDecoder(parse_float=_float, parse_int=_integer, parse_constant=_refuse)
