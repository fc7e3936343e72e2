"""Bounds the number of values in a JSON text before it is parsed.

A parser holds the GIL, so it stops all streams: 8 MB of text take a few milliseconds, but 8 MB of empty lists take
seconds. A text with more values than any request needs is refused; the slowest accepted one takes some tenths of a
second.
"""

from __future__ import annotations

from uma.errors import BadRequest, InvalidJson, UmaError
from uma.json_bytes import is_balanced, outside_strings

MAX_CONTAINERS = 65_536
"""Maximum lists and objects of one text. A conversation with the maximum of messages has three for each."""
MAX_MEMBERS = 131_072
"""Maximum members of objects. Such a conversation has four for each message."""
MAX_COMMAS = 524_288
"""Maximum commas between items and members. OpenAI takes 300,000 token ids in one request."""


def check_size(data: bytes) -> None:
    """Raise `BadRequest` where a JSON text exceeds these bounds; `InvalidJson` where its brackets also show that it is
    not JSON. A text within the bounds is not checked for validity.
    """
    containers = members = commas = 0
    for block in outside_strings(data):
        containers += block.count(b"[") + block.count(b"{")
        members += block.count(b":")
        commas += block.count(b",")
        if containers > MAX_CONTAINERS:
            raise _too_much(data, f"{MAX_CONTAINERS:,} lists and objects")
        if members > MAX_MEMBERS:
            raise _too_much(data, f"{MAX_MEMBERS:,} members of objects")
        if commas > MAX_COMMAS:
            raise _too_much(data, f"{MAX_COMMAS:,} items of lists and members of objects")


def _too_much(data: bytes, what: str) -> UmaError:
    if not is_balanced(data):
        return InvalidJson("the text is not JSON: its brackets do not match")
    return BadRequest(f"the text holds more than {what}; send it in several requests")
