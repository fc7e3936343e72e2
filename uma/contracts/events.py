"""KV events: which blocks a worker holds, as changes, in order, each with a sequence number.

A subscriber that applies them knows exactly what the worker's prefix tree holds. Parents are stored before their
children and removed after them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import attrs

from uma.constraints import Length, Range, show
from uma.contracts.parse import parse, to_json
from uma.contracts.request import Tokens
from uma.errors import BadRequest

Hash = Annotated[int, Range(-(2**63), 2**63 - 1)]
Hashes = Annotated[tuple[Hash, ...], Length(1, None, "hashes")]


@attrs.frozen(kw_only=True)
class BlockStored:
    """Blocks that are held from now on, each the next one's parent."""

    block_hashes: Hashes
    token_ids: Tokens
    """The tokens of these blocks, one block after the other."""
    block_size: Annotated[int, Range(1)]
    parent_block_hash: Hash | None = None
    """The block before the first of these; None where it begins a sequence."""
    lora_id: int | None = None
    type: Literal["BlockStored"] = "BlockStored"


@attrs.frozen(kw_only=True)
class BlockRemoved:
    """Blocks that are held no more."""

    block_hashes: Hashes
    type: Literal["BlockRemoved"] = "BlockRemoved"


@attrs.frozen(kw_only=True)
class AllBlocksCleared:
    """Nothing is held any more."""

    type: Literal["AllBlocksCleared"] = "AllBlocksCleared"


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared
KV_EVENTS: dict[str, type[KvEvent]] = {cls.__name__: cls for cls in (BlockStored, BlockRemoved, AllBlocksCleared)}


@attrs.frozen
class SequencedEvent:
    """An event as it travels. Of one worker, each number is one more than the last, from 1 on."""

    sequence: int
    event: KvEvent


def parse_event(value: Any) -> KvEvent:
    """A peer's event. Raises `BadRequest` with a line for each wrong field."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(kind, str) or kind not in KV_EVENTS:
        raise BadRequest.at("type", f"expected one of {', '.join(KV_EVENTS)}, not {show(kind)}")
    cls: type[Any] = KV_EVENTS[kind]
    event: KvEvent = parse(value, cls, _problems)
    return event


def event_to_json(event: KvEvent) -> dict[str, Any]:
    """An event as what JSON carries."""
    return {"type": event.type, **to_json(event)}


def _problems(event: KvEvent) -> Iterator[str]:
    if not isinstance(event, BlockStored):
        return
    expected = len(event.block_hashes) * event.block_size
    if len(event.token_ids) != expected:
        yield (
            f"token_ids: {len(event.token_ids)} tokens for {len(event.block_hashes)} blocks of {event.block_size}, "
            f"which take {expected}"
        )
    if len(set(event.block_hashes)) < len(event.block_hashes):
        yield "block_hashes: names a block twice"
