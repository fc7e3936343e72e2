"""Requests that are being read: parsed or tokenized in a thread, and soon with an engine of this Trio thread.

A batch that reads several short rests of prompts takes hardly longer than one of them alone, where many tokens are
cached: so the first of a burst is not computed before those that are known to follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import trio

MAX_EXPECTED_BYTES = 65_536
"""Maximum size of a request that others are gathered with. Reading it takes some 5 ms; a longer one comes too late."""


@attrs.define(eq=False)
class Arrivals:
    """The requests that are being read. Belongs to one Trio thread."""

    expected: int = attrs.field(default=0, init=False)
    """How many there are, long ones not included."""

    @contextmanager
    def reading(self, size_bytes: int) -> Iterator[None]:
        """A block in which a request of about so many bytes is read."""
        counts = int(size_bytes <= MAX_EXPECTED_BYTES)
        self.expected += counts
        try:
            yield
        finally:
            self.expected -= counts


_ARRIVALS: trio.lowlevel.RunVar[Arrivals] = trio.lowlevel.RunVar("ARRIVALS")


def arrivals() -> Arrivals:
    """Those of the Trio thread that calls."""
    try:
        return _ARRIVALS.get()
    except LookupError:
        _ARRIVALS.set(found := Arrivals())
        return found
