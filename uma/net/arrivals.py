"""Requests that are being read: received, parsed or tokenized, and soon with an engine of this Trio thread.

A batch that reads several short rests of prompts takes hardly longer than one of them alone, where many tokens are
cached: so the first of a burst is not computed before those that are known to follow.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import trio

try:
    # Where pytest is installed `trio.testing` imports all of it for a class that nothing here uses: 6 MiB, and a tenth
    # of a second of each start. It has this function from there.
    from trio._core import wait_all_tasks_blocked  # type: ignore[attr-defined]
except ImportError:  # a Trio that has it elsewhere
    from trio.testing import wait_all_tasks_blocked

MAX_EXPECTED_BYTES = 65_536
"""Maximum size of a request that others are gathered with. Reading it takes some 5 ms; a longer one comes too late."""
SOON_SEC = 0.01
"""Time within which the rest of a request is expected that has come in part. Its client has handed it over as a whole,
and was interrupted while the system took it; one that takes longer sends slowly."""


@attrs.define(eq=False)
class Arrivals:
    """The requests that are being read. Belongs to one Trio thread."""

    _reading: int = attrs.field(default=0, init=False)
    """Requests that are parsed or tokenized, long ones not included."""
    _rest_until_sec: dict[object, float] = attrs.field(factory=dict, init=False)
    """Time until which the rest of a request is expected that has come in part, by sender."""

    _changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)
    """Where tasks wait until fewer requests are being read."""

    @property
    def expected_until_sec(self) -> float:
        """Until when on `time.monotonic` another request is expected: a moment that is over where none is, infinity
        where one is there and only has to be read.
        """
        return math.inf if self._reading else max(self._rest_until_sec.values(), default=-math.inf)

    async def gathered(self) -> None:
        """Wait until all requests that have reached this machine are with an engine, and no task has anything to do."""
        while True:
            # Trio looks once more at its sockets before this returns: what has reached the system was read.
            await wait_all_tasks_blocked()
            left_sec = self.expected_until_sec - time.monotonic()
            if left_sec <= 0:
                return
            with trio.move_on_after(left_sec):
                await self._changed.park()

    @contextmanager
    def receiving(self, sender: object) -> Iterator[None]:
        """A block in which `sender` can tell of what comes in part."""
        try:
            yield
        finally:
            self.came_whole(sender)

    def came_in_part(self, sender: object) -> None:
        """A part of a request has come: the rest is expected, for a time that further parts do not prolong."""
        if sender not in self._rest_until_sec:
            self._rest_until_sec[sender] = time.monotonic() + SOON_SEC

    def came_whole(self, sender: object) -> None:
        """The request has come to its end."""
        if self._rest_until_sec.pop(sender, None) is not None:
            self._changed.unpark_all()

    @contextmanager
    def reading(self, size_bytes: int) -> Iterator[None]:
        """A block in which a request of about so many bytes is read."""
        counts = int(size_bytes <= MAX_EXPECTED_BYTES)
        self._reading += counts
        try:
            yield
        finally:
            self._reading -= counts
            self._changed.unpark_all()


_ARRIVALS: trio.lowlevel.RunVar[Arrivals] = trio.lowlevel.RunVar("ARRIVALS")


def arrivals() -> Arrivals:
    """Arrivals of the Trio thread that calls."""
    try:
        return _ARRIVALS.get()
    except LookupError:
        _ARRIVALS.set(found := Arrivals())
        return found
