"""KV events of whole blocks: numbered, and replayable, for routers.

The ledger turns changed runs of tokens into blocks, on the decode thread. The feed numbers the events, and keeps them
for subscribers, on the Trio thread.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence

import attrs
import trio
import xxhash

from uma.contracts.blocks import BLOCK_HASHES, Algorithm
from uma.contracts.event_log import CatchUp, EventLog, merged
from uma.contracts.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from uma.engine.kv.adapter_keys import keyed, place_of, plain
from uma.engine.kv.events import Run, Tier

TIERS = (Tier.CELLS, Tier.MEMORY)
"""Tiers that report: their prefixes can be used at once."""


@attrs.define
class _Held:
    """A block that is held: its name, and the number of times that each of `TIERS` holds it."""

    name: int
    counts: list[int] = attrs.field(factory=lambda: [0] * len(TIERS))


class BlockLedger:
    """A `KvListener` that reports a block when it is held for the first time, and when its last holder drops it.

    Belongs to the decode thread, on which `report` is called, and must return at once. The first `skip` tokens of each
    sequence are in no block: they are put before the tokens that a frontend sees.
    """

    def __init__(
        self, block_size: int, algorithm: Algorithm, report: Callable[[KvEvent], None], *, skip: int = 0
    ) -> None:
        self._skip = skip
        self._size = block_size
        self._name = BLOCK_HASHES[algorithm]
        self._report = report
        self._held: dict[bytes, _Held] = {}
        """Blocks by a digest of all tokens up to their end: one pass of a fast hash over the prefix finds a block,
        where the chain of names would have to be hashed block by block."""

    def stored(self, tier: Tier, run: Run) -> None:
        """See `KvListener`."""
        if self._completes_none(run):
            return
        tokens, names = self._counted(run), list[int]()
        data, first = memoryview(tokens).cast("B"), 0
        for end in self._ends_in(run):
            held = self._held.get(key := _digest(data, end))
            if held is None:
                parent = self._held[_digest(data, end - self._size)].name if end > self._size else None
                held = self._held[key] = _Held(self._name(tokens[end - self._size : end], parent))
                first = first or end
                names.append(held.name)
            held.counts[TIERS.index(tier)] += 1
        if names:
            self._report_stored(tokens, first, data, names)

    def removed(self, tier: Tier, run: Run) -> None:
        """See `KvListener`."""
        if self._completes_none(run):
            return
        data = memoryview(self._counted(run)).cast("B")
        gone: list[int] = []
        for end in reversed(self._ends_in(run)):
            held = self._held[key := _digest(data, end)]
            held.counts[TIERS.index(tier)] -= 1
            if not any(held.counts):
                del self._held[key]
                gone.append(held.name)
        if gone:
            self._report(BlockRemoved(block_hashes=tuple(gone)))

    def cleared(self, tier: Tier) -> None:
        """See `KvListener`."""
        gone: list[int] = []
        for key, held in list(self._held.items()):
            held.counts[TIERS.index(tier)] = 0
            if not any(held.counts):
                del self._held[key]
                gone.append(held.name)
        if not self._held:
            self._report(AllBlocksCleared())
        elif gone:
            # Blocks are in the order in which they were stored, so in reverse no child outlives its parent.
            self._report(BlockRemoved(block_hashes=tuple(reversed(gone))))

    def _report_stored(self, tokens: Sequence[int], first: int, data: memoryview, names: list[int]) -> None:
        # A prefix is held from its first token on, so the new blocks are one chain up to the end of the run.
        begin, (number, at) = first - self._size, place_of(tokens)
        parent = self._held[_digest(data, begin)].name if begin else None
        # Blocks before an aLoRA begins are the base model's.
        before = min(len(names), max(0, at - begin) // self._size) if number else len(names)
        for part, lora_id in ((names[:before], None), (names[before:], number)):
            if not part:
                continue
            self._report(
                BlockStored(
                    block_hashes=tuple(part),
                    token_ids=tuple(plain(tokens[begin : begin + len(part) * self._size])),
                    block_size=self._size,
                    parent_block_hash=parent,
                    lora_id=lora_id,
                )
            )
            begin, parent = begin + len(part) * self._size, part[-1]

    def _counted(self, run: Run) -> array[int]:
        """Tokens of a run's sequence that blocks consist of, `keyed` like the sequence."""
        tokens = run.tokens()
        number, at = place_of(tokens) if self._skip else (0, 0)
        tokens = tokens[self._skip :]
        return keyed(tokens, number) if number and at < self._skip and tokens[0] >= 0 else tokens

    def _completes_none(self, run: Run) -> bool:
        """Whether no block ends in `run`, as for most decoded tokens: a fast check."""
        return (run.end - self._skip) // self._size <= max(0, run.start - self._skip) // self._size

    def _ends_in(self, run: Run) -> range:
        """Ends of the blocks whose last tokens are in `run`."""
        start, end = max(0, run.start - self._skip), run.end - self._skip
        return range((start // self._size + 1) * self._size, end + 1, self._size)


def _digest(data: memoryview, tokens: int) -> bytes:
    return xxhash.xxh3_128_digest(data[: 4 * tokens])


class KvFeed:
    """An engine's KV events, for any number of subscribers.

    What a subscriber has read describes the engine at one moment: the first events, which list what is held when the
    feed begins, are given all at once. Belongs to the Trio thread, except `post` and `begin`, which belong to the
    decode thread.
    """

    def __init__(self, call: Callable[[Callable[[], object]], None]) -> None:
        """`call` has the Trio thread call a function soon: `Mailbox.call`."""
        self._call = call
        self._posted: deque[KvEvent | Callable[[], None]] = deque()
        self._has_begun = False
        self._arrived = trio.lowlevel.ParkingLot()
        self.log = EventLog()

    def post(self, item: KvEvent | Callable[[], None]) -> None:
        """Pass on an event, or a function that the Trio thread calls when the log has exactly the events posted before
        it. Never waits.
        """
        self._posted.append(item)
        if self._has_begun:
            self._call(self._take)

    def begin(self) -> None:
        """Called when all that is held was reported: from now on events reach the log."""
        self._has_begun = True
        self._call(self._take)

    def _take(self) -> None:
        events: list[KvEvent] = []
        while self._posted:
            item = self._posted.popleft()
            if isinstance(item, KvEvent):
                events.append(item)
                continue
            self._append(events)
            events = []
            item()
        self._append(events)
        self._arrived.unpark_all()

    def _append(self, events: list[KvEvent]) -> None:
        for event in merged(events):
            self.log.append(event)

    async def changes(self, after: int = 0) -> CatchUp:
        """All changes after event number `after`; waits for one if there is none yet.

        A subscriber that has missed more events than the log keeps gets a snapshot instead.
        """
        while self.log.sequence == after:
            await self._arrived.park()
        return self.log.catch_up(after)
