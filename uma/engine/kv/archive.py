"""Between memory and disk: snapshots that the decode thread gives up are written, those that a prompt needs are read.

The disk tier belongs to the Trio thread and the snapshot store to the decode thread; this file is the way between.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Awaitable, Callable

from uma.engine.kv.disk import DiskTier
from uma.engine.kv.snapshots import Snapshot
from uma.net.wakeup import Wakeup

_log = logging.getLogger("uma.engine.kv.archive")

MAX_QUEUED_BYTES = 256 * 2**20
"""Maximum size of the snapshots that wait to be written. They take memory beside the memory tier: where that is
smaller, its size is the bound."""


class Archive:
    """A disk tier with a queue of snapshots to write. Belongs to the Trio thread.

    Where the disk is slower than snapshots come, those that wait longest are dropped, and counted: the newer ones are
    of conversations that are more likely to go on. One snapshot can wait however large it is.
    """

    def __init__(self, disk: DiskTier, max_queued_bytes: int) -> None:
        self._disk = disk
        self.max_queued_bytes = max_queued_bytes
        self._queue: deque[Snapshot] = deque()
        self.queued_bytes = 0
        self.dropped = 0
        """Snapshots that were never written."""
        self._has_work = Wakeup()
        self._is_closed = False

    def enqueue(self, snapshot: Snapshot) -> None:
        """Queue a snapshot to be written; the oldest are dropped until the rest is within the bound."""
        if not self._disk.fits(snapshot):
            self._drop(snapshot)
            return
        self._queue.append(snapshot)
        self.queued_bytes += snapshot.size_bytes
        while self.queued_bytes > self.max_queued_bytes and len(self._queue) > 1:
            self._drop(self._take())
        self._has_work.ring()

    def _take(self) -> Snapshot:
        snapshot = self._queue.popleft()
        self.queued_bytes -= snapshot.size_bytes
        return snapshot

    def _drop(self, snapshot: Snapshot) -> None:
        self.dropped += 1
        if self.dropped & (self.dropped - 1) == 0:  # the 1st, 2nd, 4th, 8th ...: the log of a slow disk stays short
            tokens = len(snapshot.tokens)
            _log.warning("cache_dir: a prefix of %d tokens was not written; %d so far", tokens, self.dropped)

    async def run(self) -> None:
        """Write what is queued; ends after `close`, once everything is written."""
        while True:
            while self._queue:
                await self._disk.write(self._take())
            if self._is_closed:
                return
            await self._has_work.wait()

    def close(self) -> None:
        """Once the decode thread has ended: `run` ends as soon as all that was queued is written."""
        self._is_closed = True
        self._has_work.ring()

    async def fetch(self, tokens: array[int], count_known: Callable[[array[int]], Awaitable[int]]) -> Snapshot | None:
        """The snapshot on disk that saves most of `tokens`; None where none saves clearly more than memory does.

        `count_known` gives how many tokens cells or memory hold; it is called only where the disk has something.
        """
        if not self._disk.offers(tokens):
            return None
        return await self._disk.fetch(tokens, await count_known(tokens))
