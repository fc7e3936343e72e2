"""KV events for Dynamo's router, whose publisher can report stored and removed blocks, but not a snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from uma.contracts.event_log import CatchUp
from uma.contracts.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent


@attrs.define
class RouterView:
    """Blocks that the router knows, so that a snapshot can be sent as the difference to them.

    A block that is evicted, but still known to the router, would attract requests to a worker that must compute it
    again.
    """

    _known: dict[int, None] = attrs.field(factory=dict, init=False)
    """Hashes of blocks, each after its parent."""

    def events_for(self, missed: CatchUp) -> Iterator[BlockStored | BlockRemoved]:
        """Events that bring the router up to date with `missed`, in order."""
        events: Iterable[KvEvent] = missed.events
        if missed.is_snapshot:
            held = {name for event in events if isinstance(event, BlockStored) for name in event.block_hashes}
            yield from self._removed([name for name in self._known if name not in held])
            # Each event of a snapshot has one block.
            events = [
                kv_event
                for kv_event in events
                if isinstance(kv_event, BlockStored) and not self._known.keys() >= {*kv_event.block_hashes}
            ]
        for event in events:
            match event:
                case BlockStored():
                    self._known.update(dict.fromkeys(event.block_hashes))
                    yield event
                case BlockRemoved():
                    yield from self._removed(reversed(event.block_hashes))
                case AllBlocksCleared():
                    yield from self._removed(list(self._known))

    def _removed(self, names: Iterable[int]) -> Iterator[BlockRemoved]:
        """Events for removed blocks: `names` has parents first, the events have children first."""
        gone = tuple(names)[::-1]
        for name in gone:
            del self._known[name]
        if gone:
            yield BlockRemoved(block_hashes=gone)
