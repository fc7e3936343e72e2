"""JSON whose numbers pass as they are written, however large they are.

JSON bounds no number. Python's reader refuses integers of more than 4,300 digits and makes infinity of 1e999, orjson
makes a float of an integer beyond 64 bits, and neither writes what the other reads. Numbers that a parser would change
are `Number`s here, which hold their spelling; all others are Python's.
"""

from __future__ import annotations

import json
import math
import numbers
import re
import secrets
from typing import Any

WIDE = re.compile(r"[0-9]{19}|[0-9][eE]\+?[0-9]{3}")
"""What each number has that a parser could change. Texts can have it too, and only take longer to be read then."""
_INT_DIGITS = 20
"""Digits of the longest integer of 64 bits, or its sign and one less."""


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
    if WIDE.search(text) is None:
        return json.loads(text, parse_constant=_refuse)
    return json.loads(text, parse_int=_integer, parse_float=_float, parse_constant=_refuse)


def dumps(value: Any, **options: Any) -> str:
    """JSON of a value with `Number`s, as `json.dumps` writes it with these options, and not only in ASCII."""
    found: list[str] = []
    mark = secrets.token_hex(16)  # which no text in `value` can have

    def default(strange: Any) -> str:
        if not isinstance(strange, Number):
            raise TypeError(f"Object of type {type(strange).__name__} is not JSON serializable")
        found.append(strange.text)
        return f"{mark}{len(found) - 1}"

    wanted: dict[str, Any] = {"ensure_ascii": False, "default": default} | options
    text = json.dumps(value, **wanted)
    if not found:
        return text
    return re.sub(rf'"{mark}([0-9]+)"', lambda place: found[int(place[1])], text)


def _integer(text: str) -> int | Number:
    if len(text) <= _INT_DIGITS and -(2**63) <= (value := int(text)) < 2**64:
        return value
    return Number(text)


def _float(text: str) -> float | Number:
    value = float(text)
    return value if math.isfinite(value) else Number(text)


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")
