"""Decides which JSON texts are parsed and written on the Trio thread, and which in a worker thread.

A worker thread costs 0.3 to 0.8 ms. So small texts are parsed inline, and also longer texts that consist mostly of one
string or one list of numbers, such as a prompt.
"""

from __future__ import annotations

SMALL_BYTES = 4_096
"""Maximum size of a text that is always parsed inline. The slowest text of this size, a chat of empty messages, takes 1
to 2 ms, and a prompt 0.05 ms."""
PLAIN_BYTES = 16_384
"""Maximum size of a text that is parsed inline if it has few members and items, such as a prompt of 2,700 token ids."""
PLAIN_QUOTES, PLAIN_COMMAS, PLAIN_CONTAINERS = 128, 3_000, 16
"""Maximum counts of quotation marks, commas, opening brackets in such a text. Within them it takes no longer than the
slowest small text: a list of numbers in a JSON schema takes 2 ms."""

MAX_POSITIONS = 100
"""Maximum tokens with log probabilities that are written inline. A token with 20 candidates takes 50 µs."""
MAX_FRAME_BYTES = 65_536
"""Maximum size of a server's event that a client parses inline, in about 4 ms."""


def is_quick(payload: bytes) -> bool:
    """Whether to parse a client's JSON text on the Trio thread."""
    if len(payload) <= SMALL_BYTES:
        return True
    return (
        len(payload) <= PLAIN_BYTES
        and payload.count(b'"') <= PLAIN_QUOTES
        and payload.count(b",") <= PLAIN_COMMAS
        and payload.count(b"[") + payload.count(b"{") <= PLAIN_CONTAINERS
    )
