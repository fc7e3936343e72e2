"""Keys of cached prefixes with sets of LoRA adapters: the first token that is computed with a set has the set's number
above its own bits. For an aLoRA that is not the first token of the text.

So the prefix tree, the snapshots and the index of files distinguish texts of different sets from that token on, as they
distinguish different texts. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

TOKEN_BITS = 20
"""Bits of a token id: the largest vocabularies need two bits less."""
MAX_SETS = 2**11 - 1
"""Maximum number of sets, beside the empty one, whose number is 0."""


def keyed(tokens: Sequence[int], number: int, at: int = 0) -> array[int]:
    """A copy of `tokens` as computed with the set `number` from the token `at` on, which belongs to no picture."""
    found = array("i", tokens)
    if 0 <= at < len(found):
        found[at] |= number << TOKEN_BITS
    return found


def place_of(tokens: Sequence[int]) -> tuple[int, int]:
    """Number of the set that a text is computed with, and the index of the first such token."""
    if not tokens or tokens[0] >= 2**TOKEN_BITS:
        return (tokens[0] >> TOKEN_BITS, 0) if tokens else (0, 0)
    values = np.frombuffer(tokens, np.int32) if isinstance(tokens, array) else np.array(tokens, np.int32)
    at = int((values >= 2**TOKEN_BITS).argmax())
    number = max(0, tokens[at]) >> TOKEN_BITS
    return number, at if number else 0


def set_of(tokens: Sequence[int]) -> int:
    """Number of the set that a text is computed with."""
    return place_of(tokens)[0]


def plain(tokens: Sequence[int]) -> array[int]:
    """A copy of a text without the set's number."""
    found, (number, at) = array("i", tokens), place_of(tokens)
    if number:
        found[at] &= 2**TOKEN_BITS - 1
    return found
