"""Requests on their way to an engine of this Trio thread: being received, parsed or tokenized.

A batch of several short prompts whose prefixes are cached takes hardly longer than a batch of one. So the first request
of a burst is not computed before those that are known to follow.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import trio

try:
    # Not `trio.testing`: where pytest is installed, that imports all of pytest (6 MiB, 0.1 s of each start).
    # It re-exports this function.
    from trio._core import wait_all_tasks_blocked  # type: ignore[attr-defined]
except ImportError:  # a Trio that has it elsewhere
    from trio.testing import wait_all_tasks_blocked

MAX_EXPECTED_BYTES = 65_536
"""Maximum size of a request that others wait for. It is parsed in some 5 ms; waiting for a longer one would cost more
than a shared batch saves."""
SOON_SEC = 0.01
"""Maximum wait for the rest of a request that has come in part. A client hands a request to its system as a whole, so
the rest comes within milliseconds; one that takes longer sends slowly."""


@attrs.define(eq=False)
class Arrivals:
    """Requests that are being read. Belongs to one Trio thread."""

    _reading: int = attrs.field(default=0, init=False)
    """Requests that are being parsed or tokenized, without those over `MAX_EXPECTED_BYTES`."""
    _rest_until_sec: dict[object, float] = attrs.field(factory=dict, init=False)
    """Deadline for the rest of each request that has come in part, by sender."""

    _changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)
    """Where tasks wait until fewer requests are being read."""

    @property
    def expected_until_sec(self) -> float:
        """Time on `time.monotonic` until which another request is expected: infinity while a request is being parsed or
        tokenized, and a time in the past where none is expected.
        """
        return math.inf if self._reading else max(self._rest_until_sec.values(), default=-math.inf)

    async def gathered(self) -> None:
        """Wait until all requests that have reached this machine are submitted to an engine, and no task can run."""
        while True:
            # Trio polls its sockets once more before this returns, so everything that the kernel has received was read.
            await wait_all_tasks_blocked()
            left_sec = self.expected_until_sec - time.monotonic()
            if left_sec <= 0:
                return
            with trio.move_on_after(left_sec):
                await self._changed.park()

    @contextmanager
    def receiving(self, sender: object) -> Iterator[None]:
        """A block in which `sender` can report requests that have come in part."""
        try:
            yield
        finally:
            self.came_whole(sender)

    def came_in_part(self, sender: object) -> None:
        """Note that a part of a request has come. Its rest is expected for `SOON_SEC` from the first part on; further
        parts do not prolong that.
        """
        if sender not in self._rest_until_sec:
            self._rest_until_sec[sender] = time.monotonic() + SOON_SEC

    def came_whole(self, sender: object) -> None:
        """Note that the request of `sender` is complete, or that its connection has ended."""
        if self._rest_until_sec.pop(sender, None) is not None:
            self._changed.unpark_all()

    @contextmanager
    def reading(self, size_bytes: int) -> Iterator[None]:
        """A block in which a request of about `size_bytes` is parsed or tokenized."""
        counts = int(size_bytes <= MAX_EXPECTED_BYTES)
        self._reading += counts
        try:
            yield
        finally:
            self._reading -= counts
            self._changed.unpark_all()


_ARRIVALS: trio.lowlevel.RunVar[Arrivals] = trio.lowlevel.RunVar("ARRIVALS")


def arrivals() -> Arrivals:
    """The `Arrivals` of the calling Trio thread."""
    try:
        return _ARRIVALS.get()
    except LookupError:
        _ARRIVALS.set(found := Arrivals())
        return found
