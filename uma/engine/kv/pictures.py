"""Pictures among tokens: each is a run of ids below zero, made of its hash.

So the prefix tree, the snapshots and comparisons treat pictures as text, and tell pictures of equal size apart. The
last id of a run contains its length and its number of positions: with M-RoPE it has fewer positions than tokens, so a
token's position is not its index. Then all tokens of a picture have one position for llama.cpp, which cannot cut it.
Such a picture is several runs, so that it is read in parts: the last has all positions, and the others are marked as
going on. Pure.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import attrs
import numpy as np

MIN_TOKENS = 4
"""Minimum tokens of a picture: all but the last contain its hash, 29 bits each."""
MAX_TOKENS, MAX_POSITIONS = 2**15 - 1, 2**14 - 1
"""Maximum that the last id of a run can contain."""

_HIGHEST = -2
"""The highest id; -1 is llama.cpp's null token."""
_HASH_BITS = 29
_IS_LAST = 1 << _HASH_BITS
_GOES_ON = 1 << _HASH_BITS + 1
_POSITION_BITS = 14


@attrs.frozen
class PictureRun:
    """Place of a picture in a prompt."""

    start: int
    end: int
    positions: int
    """Number of positions that it takes."""

    @property
    def mrope_delta(self) -> int:
        """Number of its tokens less its number of positions."""
        return self.end - self.start - self.positions


def ids_of(key: bytes, tokens: int, positions: int) -> array[int]:
    """Ids of a picture, or of a part of one, that `key` identifies. A part without positions is marked as going on.
    Raises `ValueError` for a size that ids cannot contain.
    """
    said = 0 if positions == tokens else positions
    if not MIN_TOKENS <= tokens <= MAX_TOKENS or not 0 <= said <= MAX_POSITIONS:
        raise ValueError(f"a picture of {tokens:,} tokens and {positions:,} positions cannot be a part of a prompt")
    digest = np.frombuffer(hashlib.shake_256(key).digest(4 * (tokens - 1)), np.uint32)
    ids = array("i", (_HIGHEST - (digest & (_IS_LAST - 1)).astype(np.int64)).tolist())
    ids.append(_HIGHEST - (_IS_LAST | (0 if positions else _GOES_ON) | tokens << _POSITION_BITS | said))
    return ids


def runs_in(tokens: Sequence[int]) -> tuple[PictureRun, ...]:
    """The pictures that are complete in a prompt."""
    data = np.asarray(tokens, np.int32)
    if not len(data) or data.min() >= 0:
        return ()
    return tuple(_run(int(data[at]), int(at) + 1) for at in np.flatnonzero(data <= _HIGHEST - _IS_LAST))


def _run(last: int, end: int) -> PictureRun:
    said = _HIGHEST - last - _IS_LAST
    tokens, positions = (said & _IS_LAST - 1) >> _POSITION_BITS, said & MAX_POSITIONS
    return PictureRun(end - tokens, end, 0 if said & _GOES_ON else positions or tokens)


def outside(tokens: Sequence[int], length: int) -> int:
    """`length`, or the beginning of the picture that would be cut there."""
    start = length
    for at in range(length, len(tokens)):
        if tokens[at] >= 0:
            break
        if tokens[at] <= _HIGHEST - _IS_LAST:
            start = min(length, _run(tokens[at], at + 1).start)
            break
    while 0 < start <= len(tokens) and tokens[start - 1] <= _HIGHEST - _IS_LAST - _GOES_ON:
        start = _run(tokens[start - 1], start).start
    return start


def position_in(tokens: Sequence[int], length: int) -> int:
    """`position_of` in a prompt."""
    return position_of(runs_in(tokens[:length]), length)


def position_of(runs: Sequence[PictureRun], length: int) -> int:
    """Position of the token behind the first `length`, which end with no part of a picture."""
    return length - sum(run.mrope_delta for run in runs if run.end <= length)
