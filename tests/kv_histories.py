"""KV events as a worker could send them, by hypothesis, and a subscriber that applies them."""

from __future__ import annotations

import attrs
from hypothesis import strategies as st

from uma.contracts.event_log import BlockIndex, CatchUp
from uma.contracts.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, SequencedEvent


@st.composite
def histories(draw: st.DrawFn) -> list[KvEvent]:
    """Events as a worker could send them: parents are stored first, and only blocks without children are removed."""
    parents: dict[int, int | None] = {}
    events: list[KvEvent] = []
    for name in range(draw(st.integers(0, 30))):
        leaves = sorted(parents.keys() - set(parents.values()))
        match draw(st.sampled_from("sssrc")):
            case "s":
                parent = draw(st.sampled_from([None, *parents]))
                parents[name] = parent
                events.append(
                    BlockStored(block_hashes=(name,), token_ids=(name, 0), block_size=2, parent_block_hash=parent)
                )
            case "r" if leaves:
                gone = draw(st.sampled_from(leaves))
                del parents[gone]
                events.append(BlockRemoved(block_hashes=(gone,)))
            case "c":
                parents.clear()
                events.append(AllBlocksCleared())
    return events


@attrs.define
class Subscription:
    """A subscriber's end: applies events in order, and notices where some are missing."""

    index: BlockIndex = attrs.field(factory=BlockIndex)
    sequence: int = 0

    def take(self, numbered: SequencedEvent) -> bool:
        """Apply an event. False: some before it are missing, so nothing was applied; ask for `catch_up(sequence)`.

        An event that was seen already is skipped.
        """
        if numbered.sequence > self.sequence + 1:
            return False
        if numbered.sequence == self.sequence + 1:
            self.index.apply(numbered.event)
            self.sequence = numbered.sequence
        return True

    def catch_up(self, missed: CatchUp) -> None:
        """Apply what a log's `catch_up` gave."""
        for event in missed.events:
            self.index.apply(event)
        self.sequence = missed.sequence
