"""How much a JSON text holds, found out before it is parsed.

A parser holds the interpreter's lock, so all streams wait for it: 8 MB of text take a few milliseconds, but 8 MB of
empty lists take seconds. What holds more than any request needs is refused; the worst of the rest takes some tenths of
a second.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from uma.errors import BadRequest

BLOCK_BYTES = 65_536
"""Bytes looked at in one go, which takes less than the interpreter's lock is held anyway (5 ms)."""


@attrs.frozen
class Bounds:
    """What one text can hold."""

    containers: int = 65_536
    """Lists and objects. A conversation of as many messages as allowed has three for each."""
    members: int = 131_072
    """Members of objects. Such a conversation has four for each message."""
    commas: int = 524_288
    """Commas between items and members. OpenAI takes 300,000 token ids in one request."""


def check_size(data: bytes, bounds: Bounds = Bounds()) -> None:
    """Raise `BadRequest` where a JSON text holds more than `bounds`. It does not check that the text is JSON."""
    containers = members = commas = 0
    for block in _outside_strings(data):
        containers += block.count(b"[") + block.count(b"{")
        members += block.count(b":")
        commas += block.count(b",")
        if containers > bounds.containers:
            raise _too_much(f"{bounds.containers:,} lists and objects")
        if members > bounds.members:
            raise _too_much(f"{bounds.members:,} members of objects")
        if commas > bounds.commas:
            raise _too_much(f"{bounds.commas:,} items of lists and members of objects")


def _too_much(what: str) -> BadRequest:
    return BadRequest(f"the text holds more than {what}; send it in several requests")


def _outside_strings(data: bytes) -> Iterator[bytes]:
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
