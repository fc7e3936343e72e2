"""Between memory and disk: snapshots that the decode thread gives up are written, those that a prompt needs are read.

The disk tier belongs to the Trio thread and the snapshot store to the decode thread; this file is the way between.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Awaitable, Callable

import trio

from uma.engine.kv.disk import DiskTier
from uma.engine.kv.events import KvListener
from uma.engine.kv.snapshots import Snapshot


class Archive:
    """A disk tier with a queue of snapshots to write. Belongs to the Trio thread, except `write_soon`."""

    def __init__(self, disk: DiskTier) -> None:
        self._disk = disk
        self._to_disk, self._queue = trio.open_memory_channel[Snapshot](math.inf)
        self._trio_token = trio.lowlevel.current_trio_token()

    def write_soon(self, snapshot: Snapshot) -> None:
        """On the decode thread: queue a snapshot to be written."""
        self._trio_token.run_sync_soon(self._to_disk.send_nowait, snapshot)

    def listen(self, listener: KvListener) -> None:
        """See `DiskTier.listen`."""
        self._disk.listen(listener)

    async def run(self) -> None:
        """Write what is queued; ends after `close`, once everything is written."""
        async for snapshot in self._queue:
            await self._disk.write(snapshot)

    def close(self) -> None:
        """Once the decode thread has ended: take what it queued last, and no more."""
        self._trio_token.run_sync_soon(self._to_disk.close)

    async def fetch(self, tokens: array[int], count_known: Callable[[array[int]], Awaitable[int]]) -> Snapshot | None:
        """The snapshot on disk that saves most of `tokens`; None where none saves clearly more than memory does.

        `count_known` tells how many tokens cells or memory hold; it is asked only where the disk has something.
        """
        if not self._disk.offers(tokens):
            return None
        return await self._disk.fetch(tokens, await count_known(tokens))
