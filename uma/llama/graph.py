"""What llama.cpp asks after each node of the graph that it computes: whether to break off. How often it has asked tells
how far it is.

A compute thread asks, so a Python function would need the GIL each time, and what it asks is given one pointer. The C
library's `sem_trywait` serves: it takes 1 from a semaphore, atomically, and fails where none is left. Where the system
has no such semaphores (macOS, Windows) it is `strlen`, which only asks: it finds 0 in an empty string, 1 where a byte
is set.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

from uma import posix

_MOST = 2**31 - 1
"""The largest value of a semaphore: more nodes than any batch has."""
_STATE_BYTES = 64
"""A `sem_t` takes at most half of it."""
CHUNK_TOKENS = 64
"""Tokens of a chunk of linear attention, whose graphs have more nodes the more chunks there are."""

NODES_PER_LAYER = 64
"""More than graphs have (plain attention 17, sliding windows 22, linear attention 35): before any is known."""

_LIBC = ctypes.PyDLL(posix.LIBC)  # keeps the GIL: each of these calls takes less time than giving it up


class RunningGraph:
    """Begins and ends with each batch; `stop` and `share` can be called from any thread."""

    def __init__(self, n_layers: int, *, is_counted: bool, alike_tokens: int = CHUNK_TOKENS) -> None:
        """Batches with as many times `alike_tokens`, the last one begun, have as many nodes: where there are no chunks
        as many as one graph takes. Without `is_counted` the share stays 0: a GPU does not ask.
        """
        self._state = ctypes.create_string_buffer(_STATE_BYTES)
        self.is_counted = is_counted and sys.platform != "win32" and not _LIBC.sem_init(self._state, 0, _MOST)
        """Whether there is a share."""
        self._n_layers, self._alike_tokens = n_layers, alike_tokens
        self._nodes: dict[int, int] = {}
        """The most that batches of so many `alike_tokens` had; 0: of one token."""
        self._expected = 0
        """How many the batch that is computed will have, or more; 0: none is computed."""

    @property
    def callback(self) -> Any:
        """llama.cpp's abort callback, to be given `address`."""
        return _LIBC.sem_trywait if self.is_counted else _LIBC.strlen

    @property
    def address(self) -> int:
        """Address of what the callback looks at: this object must live as long as it is called."""
        return ctypes.addressof(self._state)

    def stop(self) -> None:
        """Break off what is computed, within one node, and whatever comes before `start`."""
        if self.is_counted:
            _LIBC.sem_init(self._state, 0, 0)
        else:
            self._state[0] = b"\1"

    def start(self) -> None:
        """Let the next batch be computed, and count from 0. Not while one is."""
        if self.is_counted:
            _LIBC.sem_init(self._state, 0, _MOST)
        else:
            self._state[0] = b"\0"

    def compute(self, n_tokens: int, compute: Callable[[], int]) -> int:
        """What `compute` returns, 0 for a success; it computes so many tokens, after `start`."""
        if not self.is_counted:
            return compute()
        alike = 0 if n_tokens == 1 else -(-n_tokens // self._alike_tokens)
        self._expected = self._nodes.get(alike) or self._most_nodes() * max(1, alike)
        code = compute()
        # Before another batch begins, whose share would be all of it until it is counted from 0.
        self._expected = 0
        if not code:
            self._nodes[alike] = max(self._nodes.get(alike, 0), self._count())
        return code

    def _most_nodes(self) -> int:
        """What `alike_tokens` have at most."""
        known = [-(-nodes // max(1, alike)) for alike, nodes in self._nodes.items()]
        return max(known, default=NODES_PER_LAYER * self._n_layers)

    @property
    def progress(self) -> float:
        """Which part of the batch's nodes is done, from 0 to 1; of the first batch of its size a smaller one. 0 where
        none is computed.
        """
        expected = self._expected
        return min(1.0, self._count() / expected) if expected else 0.0

    def _count(self) -> int:
        left = ctypes.c_int()
        _LIBC.sem_getvalue(self._state, ctypes.byref(left))
        return _MOST - left.value if left.value else 0  # none left: it was stopped
