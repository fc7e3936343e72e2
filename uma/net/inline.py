"""Which JSON texts are read and written on the Trio thread, and which in another.

Small ones, because the way to another thread takes longer than reading them; and longer ones that hold little beside
one text or one list of numbers, such as a prompt.
"""

from __future__ import annotations

SMALL_BYTES = 4_096
"""Maximum length of a text that is read on the Trio thread whatever it holds. The worst of this size, a chat of empty
messages, takes 1 to 2 ms, and a prompt 0.05 ms, where the way to another thread takes 0.3 to 0.8 ms."""
PLAIN_BYTES = 16_384
"""Maximum size of a text that is parsed inline where it holds few things, such as a prompt of 2,700 token ids."""
PLAIN_QUOTES, PLAIN_COMMAS, PLAIN_CONTAINERS = 128, 3_000, 16
"""Maximum counts of quotation marks, commas, brackets in such a text: it takes no longer than the worst of the small
ones, a list of numbers in a JSON schema 2 ms."""

MAX_POSITIONS = 100
"""Maximum tokens with log probabilities that are written inline. With 20 candidates each takes 50 µs."""
MAX_FRAME_BYTES = 65_536
"""Maximum size of a server's event that is read inline, in some 4 ms."""


def is_quick(payload: bytes) -> bool:
    """Whether to read a JSON text of a client on the Trio thread."""
    if len(payload) <= SMALL_BYTES:
        return True
    return (
        len(payload) <= PLAIN_BYTES
        and payload.count(b'"') <= PLAIN_QUOTES
        and payload.count(b",") <= PLAIN_COMMAS
        and payload.count(b"[") + payload.count(b"{") <= PLAIN_CONTAINERS
    )
