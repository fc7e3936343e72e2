"""KV events: which blocks a worker has cached, as a sequence of numbered changes.

A subscriber that applies all of them knows exactly what the worker's prefix tree holds. Parents are stored before their
children and removed after them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import attrs

from uma.constraints import Length, Range
from uma.contracts.request import Tokens

Hash = Annotated[int, Range(-(2**63), 2**63 - 1)]
Hashes = Annotated[tuple[Hash, ...], Length(1, None, "hashes")]


@attrs.frozen(kw_only=True)
class BlockStored:
    """Blocks that were cached, each the parent of the next."""

    block_hashes: Hashes
    token_ids: Tokens
    """Tokens of all these blocks in order."""
    block_size: Annotated[int, Range(1)]
    parent_block_hash: Hash | None = None
    """Hash of the block before the first of these; None where that one begins a sequence."""
    lora_id: int | None = None
    type: Literal["BlockStored"] = "BlockStored"


@attrs.frozen(kw_only=True)
class BlockRemoved:
    """Blocks that are no longer cached."""

    block_hashes: Hashes
    type: Literal["BlockRemoved"] = "BlockRemoved"


@attrs.frozen(kw_only=True)
class AllBlocksCleared:
    """All blocks were removed."""

    type: Literal["AllBlocksCleared"] = "AllBlocksCleared"


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared
KV_EVENTS: dict[str, type[KvEvent]] = {cls.__name__: cls for cls in (BlockStored, BlockRemoved, AllBlocksCleared)}


@attrs.frozen
class SequencedEvent:
    """An event with its number. A worker's events are numbered from 1 without gaps."""

    sequence: int
    event: KvEvent
