"""A bound on the memory that the bodies of all requests take together.

A body counts from its first byte until its answer begins: while it comes, while it waits for a thread that parses it,
and while what was made of it waits for the engine. Bounds of a connection or a body alone leave gigabytes to a client
that opens many connections, or many streams on one, and ends none of its bodies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import attrs

from uma.http.problem import BodiesFull

MAX_BODIES_BYTES = 64 * 2**20
"""Maximum bytes of all bodies together: eight of the longest that `max_frame_bytes` allows by default."""
CLIENTS = 2
"""Clients that it takes to fill the budget. One alone gets that part of it, and leaves the rest to others."""
RETRY_MS = 1000
"""Time after which a refused client is asked to come again."""


@attrs.define(eq=False)
class BodyBudget:
    """The bytes of all bodies of one server, and of each client. Belongs to one Trio thread."""

    most_bytes: int = MAX_BODIES_BYTES
    held_bytes: int = attrs.field(default=0, init=False)
    _of_client: Counter[Hashable] = attrs.field(factory=Counter, init=False)

    @classmethod
    def of(cls, max_body_bytes: int) -> BodyBudget:
        """A budget in which each client has space for a body of the maximum length."""
        return cls(max(MAX_BODIES_BYTES, CLIENTS * max_body_bytes))

    def check(self, client: Hashable, more_bytes: int) -> None:
        """Raise `BodiesFull` where so many more bytes of `client` do not fit now."""
        most = self.most_bytes // CLIENTS
        if self._of_client[client] + more_bytes > most:
            raise _full("this client's requests", most)
        if self.held_bytes + more_bytes > self.most_bytes:
            raise _full("all requests", self.most_bytes)

    def take(self, client: Hashable, more_bytes: int) -> None:
        """Count bytes that have come. Raises `BodiesFull` where they do not fit, and counts nothing."""
        self.check(client, more_bytes)
        self._of_client[client] += more_bytes
        self.held_bytes += more_bytes

    def give_back(self, client: Hashable, taken_bytes: int) -> None:
        """The memory of so many bytes is free again."""
        self.held_bytes -= taken_bytes
        self._of_client[client] -= taken_bytes
        if not self._of_client[client]:
            del self._of_client[client]


def _full(whose: str, most_bytes: int) -> BodiesFull:
    return BodiesFull(
        f"the bodies of {whose} can take {most_bytes:,} bytes together, and this one is more; send it again when some "
        "have been answered",
        retry_after_ms=RETRY_MS,
    )
