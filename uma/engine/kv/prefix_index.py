"""Items by their tokens, found by the longest common prefix in logarithmic time.

Token ids written big-endian sort like their sequences, and in a sorted list the entry with the longest common prefix is
next to where the searched one would stand.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from uma.prefix import common_size

T = TypeVar("T")

ITEM_BYTES = 4
MAX_COMPARED = 64
"""Maximum items compared, where the nearest cannot be used for all the tokens that they have in common."""


class PrefixIndex(Generic[T]):
    """A mapping from token sequences to items."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._items: dict[bytes, T] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._items.values()))

    def put(self, tokens: array[int], item: T) -> None:
        """Add an item; it replaces one with exactly these tokens."""
        key = _key(tokens)
        if key not in self._items:
            insort(self._keys, key)
        self._items[key] = item

    def discard(self, tokens: array[int]) -> None:
        """Remove the item with these tokens, if there is one."""
        key = _key(tokens)
        if self._items.pop(key, None) is not None:
            del self._keys[bisect_left(self._keys, key)]

    def most_useful(self, tokens: array[int], usable: Callable[[T, int], int]) -> tuple[T, int] | None:
        """The item that saves computing most of `tokens`, and how many; never all, because the last gives the logits.

        `usable` says how many of the first tokens that an item has in common it can be used for.
        """
        key, most = _key(tokens), len(tokens) - 1
        after = bisect_left(self._keys, key)
        before, best = after - 1, None
        for _ in range(MAX_COMPARED):
            # The farther an item is in this order, the less it has in common.
            near = [(self._common(index, key), index) for index in (before, after) if 0 <= index < len(self._keys)]
            if not near or (common := min(max(near)[0], most)) <= (best[1] if best else 0):
                break
            index = max(near)[1]
            item = self._items[self._keys[index]]
            if (size := usable(item, common)) > (best[1] if best else 0):
                best = item, size
            before, after = before - (index == before), after + (index == after)
        return best

    def _common(self, index: int, key: bytes) -> int:
        return common_size(self._keys[index], key) // ITEM_BYTES

    def covering(self, tokens: array[int], usable: Callable[[T, int], int]) -> T | None:
        """An item that begins with all of `tokens`, and can be used for all of them."""
        key = _key(tokens)
        at = bisect_left(self._keys, key)
        for other in self._keys[at : at + MAX_COMPARED]:
            if not other.startswith(key):
                return None
            if usable(self._items[other], len(tokens)) == len(tokens):
                return self._items[other]
        return None

    def get(self, tokens: array[int]) -> T | None:
        """The item with exactly these tokens, if there is one."""
        return self._items.get(_key(tokens))

    def beginnings(self, tokens: array[int]) -> Iterator[tuple[T, int]]:
        """All items whose tokens are a prefix of `tokens`, or all of them, with their lengths; the longest first."""
        key = _key(tokens)
        while True:
            at = bisect_left(self._keys, key)
            if at < len(self._keys) and self._keys[at] == key:
                yield self._items[key], len(key) // ITEM_BYTES
                key = key[:-ITEM_BYTES]
                continue
            if at == 0:
                return
            before = self._keys[at - 1]
            common = common_size(before, key) // ITEM_BYTES * ITEM_BYTES
            # The entry just before is a prefix itself, or shows how long one can be at most.
            key = key[:common]
            if not key:
                return


def _key(tokens: array[int]) -> bytes:
    swapped = array("i", tokens)
    swapped.byteswap()
    return swapped.tobytes()
