"""Bound on the memory of large answers that wait for their clients to read them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import attrs

from uma.errors import Overloaded

MAX_UNREAD_BYTES = 256 * 2**20
"""Maximum bytes of large answers that wait to be read; over it, no further large answer is begun."""
RETRY_MS = 1_000
"""`retry_after_ms` of a refusal."""


@attrs.define
class Unread:
    """Unread large answers of one server. Belongs to one thread."""

    most_bytes: int = MAX_UNREAD_BYTES
    held_bytes: int = attrs.field(default=0, init=False)

    def check(self) -> None:
        """Raise `Overloaded` where clients must first read what was computed for them."""
        if self.held_bytes >= self.most_bytes:
            raise Overloaded(
                f"{self.held_bytes:,} bytes of answers wait for clients to read them; try again when they have",
                retry_after_ms=RETRY_MS,
            )

    @contextmanager
    def holding(self, size_bytes: int) -> Iterator[None]:
        """A block in which an answer of `size_bytes` waits to be read."""
        self.held_bytes += size_bytes
        try:
            yield
        finally:
            self.held_bytes -= size_bytes
