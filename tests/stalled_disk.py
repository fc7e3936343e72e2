"""A disk that takes no results of jobs until it is told to go on, for tests in this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import pytest
import trio


@attrs.define
class StalledDisk:
    """In place of `os.pwrite`; see the fixture `stalled_disk`."""

    is_asked: threading.Event = attrs.field(factory=threading.Event)
    goes_on: threading.Event = attrs.field(factory=threading.Event)

    async def asked(self) -> None:
        """Wait until something is to be written."""
        await trio.to_thread.run_sync(self.is_asked.wait)


@contextmanager
def stalling() -> Iterator[StalledDisk]:
    """A block in which the disk stalls, until it is told to go on."""
    disk, pwrite = StalledDisk(), os.pwrite

    def stalled(file: int, data: memoryview, at: int) -> int:
        if bytes(data[:6]) == b'{"id":':
            disk.is_asked.set()
            disk.goes_on.wait()
        return pwrite(file, data, at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", stalled)
        try:
            yield disk
        finally:
            disk.goes_on.set()
