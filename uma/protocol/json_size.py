"""How much a JSON text holds, found out before it is parsed.

A parser holds the interpreter's lock, so all streams wait for it: 8 MB of text take a few milliseconds, but 8 MB of
empty lists take seconds. What holds more than any request needs is refused; the worst of the rest takes some tenths of
a second.
"""

from __future__ import annotations

import attrs

from uma.errors import BadRequest, InvalidJson, UmaError
from uma.json_bytes import is_balanced, outside_strings


@attrs.frozen
class JsonBounds:
    """What one text can hold."""

    containers: int = 65_536
    """Lists and objects. A conversation of as many messages as allowed has three for each."""
    members: int = 131_072
    """Members of objects. Such a conversation has four for each message."""
    commas: int = 524_288
    """Commas between items and members. OpenAI takes 300,000 token ids in one request."""


def check_size(data: bytes, bounds: JsonBounds = JsonBounds()) -> None:
    """Raise `BadRequest` where a JSON text holds more than `bounds`, and `InvalidJson` where the brackets of such a one
    tell that it is no JSON. A text within the bounds is not checked.
    """
    containers = members = commas = 0
    for block in outside_strings(data):
        containers += block.count(b"[") + block.count(b"{")
        members += block.count(b":")
        commas += block.count(b",")
        if containers > bounds.containers:
            raise _too_much(data, f"{bounds.containers:,} lists and objects")
        if members > bounds.members:
            raise _too_much(data, f"{bounds.members:,} members of objects")
        if commas > bounds.commas:
            raise _too_much(data, f"{bounds.commas:,} items of lists and members of objects")


def _too_much(data: bytes, what: str) -> UmaError:
    if not is_balanced(data):
        return InvalidJson("the text is not JSON: its brackets do not match")
    return BadRequest(f"the text holds more than {what}; send it in several requests")
