"""KV events as a worker could send them, by hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from uma.contracts.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent


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
