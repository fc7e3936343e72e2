"""Sets of LoRA adapters in the keys of cached prefixes: the first token of a text that is computed with a set has the
set's number above its own bits.

So the tree of prefixes, the snapshots and the index of files keep texts of different sets apart, from their first token
on, as they keep different texts apart. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

TOKEN_BITS = 20
"""Bits of a token's id: the largest vocabularies have a quarter of as many tokens."""
MAX_SETS = 2**11 - 1
"""Maximum sets beside the empty one, whose number is 0."""


def keyed(tokens: Sequence[int], number: int) -> array[int]:
    """A copy of a text, which begins with a token and no picture, as that of a set."""
    found = array("i", tokens)
    if found:
        found[0] |= number << TOKEN_BITS
    return found


def set_of(tokens: Sequence[int]) -> int:
    """The number of the set that a text is computed with."""
    return max(0, tokens[0]) >> TOKEN_BITS if tokens else 0


def plain(tokens: Sequence[int]) -> array[int]:
    """A copy of a text as it is without a set."""
    found = array("i", tokens)
    if set_of(found):
        found[0] &= 2**TOKEN_BITS - 1
    return found
