"""Common prefix of two texts, or of two lists of texts."""

from __future__ import annotations

from typing import TypeVar

Text = TypeVar("Text", str, bytes, list[str])


def common_size(one: Text, other: Text) -> int:
    """Length of the common prefix. By binary search over slices, which needs no Python step for each item."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
