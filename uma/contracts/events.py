"""KV events: which blocks a worker holds, as changes, in order, each with a sequence number.

A subscriber that applies them knows exactly what the worker's prefix tree holds. Parents are stored before their
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
