"""Log of a worker's KV events, bounded, for subscribers that were disconnected.

The log keeps the last events and the blocks that all events add up to. A subscriber that was away for a short time gets
the events it missed. One that joins late, or missed more than the log keeps, gets a snapshot: an event that clears
everything, then all blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import attrs

from uma.contracts.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, SequencedEvent
from uma.errors import ContractViolation

CAPACITY_EVENTS = 4096
"""Default number of events kept for replay: several minutes at 32 streams and 16 tokens a block."""


@attrs.frozen
class HeldBlock:
    """A cached block: its parent's hash, and its own tokens."""

    parent: int | None
    token_ids: tuple[int, ...]


@attrs.define
class BlockIndex:
    """The cached blocks that a sequence of events adds up to, by hash."""

    blocks: dict[int, HeldBlock] = attrs.field(factory=dict)

    def apply(self, event: KvEvent) -> None:
        """Apply one event. Storing a block twice is harmless. Raises `ContractViolation` for an unknown parent or
        block.
        """
        match event:
            case BlockStored():
                self._store(event)
            case BlockRemoved():
                for name in event.block_hashes:
                    if self.blocks.pop(name, None) is None:
                        raise ContractViolation(f"BlockRemoved: block {name} was not stored")
            case AllBlocksCleared():
                self.blocks.clear()

    def _store(self, event: BlockStored) -> None:
        parent = event.parent_block_hash
        if parent is not None and parent not in self.blocks:
            raise ContractViolation(f"BlockStored: parent {parent} was not stored")
        for index, name in enumerate(event.block_hashes):
            start = index * event.block_size
            self.blocks[name] = HeldBlock(parent, event.token_ids[start : start + event.block_size])
            parent = name

    def as_events(self) -> Iterator[KvEvent]:
        """Events that build this index from nothing: one that clears everything, then each block after its parent."""
        yield AllBlocksCleared()
        # Insertion order: a parent is stored before its children, and a block that is stored again keeps its place.
        for name, block in self.blocks.items():
            yield BlockStored(
                block_hashes=(name,),
                token_ids=block.token_ids,
                block_size=len(block.token_ids),
                parent_block_hash=block.parent,
            )


@attrs.frozen
class CatchUp:
    """Events that bring a subscriber up to date, and the sequence number that it reaches by them."""

    events: tuple[KvEvent, ...]
    sequence: int
    is_snapshot: bool


@attrs.define
class EventLog:
    """KV events of one worker. Belongs to one thread."""

    capacity: int = CAPACITY_EVENTS
    sequence: int = attrs.field(default=0, init=False)
    """Sequence number of the last event; 0: there is none yet."""
    index: BlockIndex = attrs.field(factory=BlockIndex, init=False)
    _recent: deque[SequencedEvent] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._recent = deque(maxlen=self.capacity)

    def append(self, event: KvEvent) -> SequencedEvent:
        """Number an event and keep it."""
        self.index.apply(event)
        self.sequence += 1
        numbered = SequencedEvent(self.sequence, event)
        self._recent.append(numbered)
        return numbered

    def catch_up(self, after: int = 0) -> CatchUp:
        """All events after number `after`; a snapshot where they are no longer kept, or `after` was never assigned."""
        oldest = self._recent[0].sequence if self._recent else self.sequence + 1
        if oldest - 1 <= after <= self.sequence:
            return CatchUp(
                tuple(event.event for event in self._recent if event.sequence > after), self.sequence, is_snapshot=False
            )
        return CatchUp(tuple(self.index.as_events()), self.sequence, is_snapshot=True)


def merged(events: Sequence[KvEvent]) -> list[KvEvent]:
    """Merge events: a chain of blocks that are stored one after the other becomes one event, and so do consecutive
    removals.
    """
    out: list[KvEvent] = []
    for event in events:
        last = out[-1] if out else None
        if (
            isinstance(event, BlockStored)
            and isinstance(last, BlockStored)
            and event.parent_block_hash == last.block_hashes[-1]
            and event.block_size == last.block_size
            and not set(event.block_hashes) & set(last.block_hashes)
        ):
            out[-1] = attrs.evolve(
                last,
                block_hashes=(*last.block_hashes, *event.block_hashes),
                token_ids=(*last.token_ids, *event.token_ids),
            )
        elif isinstance(event, BlockRemoved) and isinstance(last, BlockRemoved):
            out[-1] = attrs.evolve(last, block_hashes=(*last.block_hashes, *event.block_hashes))
        else:
            out.append(event)
    return out
