"""Hashes of KV blocks: the one that Dynamo's router matches (xxh3), and chained FNV-1a.

A sequence is cut into whole blocks of `block_size` tokens, from its first token on; an incomplete last block has no
hash. All hashes travel as signed 64-bit numbers. `docs/contracts.md` has both algorithms and test vectors.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Literal

import xxhash

Algorithm = Literal["xxh3", "fnv1a"]

DYNAMO_SEED = 1337
FNV_OFFSET = 0xCBF29CE484222325
FNV_PRIME = 0x100000001B3
_MASK = 2**64 - 1


def content_hash(token_ids: Sequence[int]) -> int:
    """Hash that Dynamo's router computes of a block's tokens: xxh3_64 of little-endian u32, with seed 1337.

    Unsigned and not chained: equal blocks have equal hashes, wherever they stand.
    """
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(token_ids)}I", *token_ids), seed=DYNAMO_SEED)


def xxh3_block_hash(token_ids: Sequence[int], parent_hash: int | None) -> int:
    """Chained hash of a block, signed. For the first block its `content_hash`; for a later one xxh3_64 (seed 1337) of
    the parent's hash and its own `content_hash`, both as little-endian u64.
    """
    own = content_hash(token_ids)
    if parent_hash is None:
        return _signed(own)
    return _signed(xxhash.xxh3_64_intdigest(struct.pack("<QQ", parent_hash & _MASK, own), seed=DYNAMO_SEED))


def fnv1a_block_hash(token_ids: Sequence[int], parent_hash: int | None) -> int:
    """Chained hash of a block by 64-bit FNV-1a, signed.

    The hashed bytes: the parent's hash as little-endian u64 where there is a parent, then each token as little-endian
    u32.
    """
    data = b"" if parent_hash is None else struct.pack("<Q", parent_hash & _MASK)
    value = FNV_OFFSET
    for byte in data + struct.pack(f"<{len(token_ids)}I", *token_ids):
        value = (value ^ byte) * FNV_PRIME & _MASK
    return _signed(value)


BLOCK_HASHES = {"xxh3": xxh3_block_hash, "fnv1a": fnv1a_block_hash}


def chain(token_ids: Sequence[int], block_size: int, algorithm: Algorithm = "xxh3") -> list[int]:
    """Chained hashes of all whole blocks of a sequence, in order."""
    name = BLOCK_HASHES[algorithm]
    names: list[int] = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        names.append(name(token_ids[start : start + block_size], names[-1] if names else None))
    return names


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
