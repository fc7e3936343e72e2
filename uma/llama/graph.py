"""Aborts the running graph of llama.cpp, and measures its progress, by the abort callback after each node.

A compute thread calls it, so a Python function would need the GIL each time. It gets one pointer as its argument.
`sem_trywait` of the C library fits: it atomically decrements a semaphore, and fails once that is 0. So the semaphore's
value counts nodes, and setting it to 0 aborts. On systems without such semaphores (macOS, Windows) `strlen` is used,
which cannot count: it returns 0 for an empty string, and 1 where the first byte is set.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

from uma import posix

_MOST = 2**31 - 1
"""Initial value of the semaphore: more nodes than any batch has."""
_STATE_BYTES = 64
"""Size of the buffer; a `sem_t` takes at most half of it."""
CHUNK_TOKENS = 64
"""Tokens in a chunk of linear attention, whose graphs have more nodes for each chunk."""

NODES_PER_LAYER = 64
"""Assumed nodes of a layer before any batch was counted. Graphs have fewer (plain attention 17, sliding windows 22,
linear attention 35)."""

_LIBC = ctypes.PyDLL(posix.LIBC)  # holds the GIL: these calls take less time than releasing it


class RunningGraph:
    """Graph of the running batch. `stop` and `progress` can be used from any thread."""

    def __init__(self, n_layers: int, *, is_counted: bool, alike_tokens: int = CHUNK_TOKENS) -> None:
        """Batches with the same multiple of `alike_tokens` have the same number of nodes. Without chunks that is the
        size of a ubatch. Without `is_counted` the progress stays 0: a GPU does not call the callback.
        """
        self._state = ctypes.create_string_buffer(_STATE_BYTES)
        self.is_counted = is_counted and sys.platform != "win32" and not _LIBC.sem_init(self._state, 0, _MOST)
        """Whether progress is measured."""
        self._n_layers, self._alike_tokens = n_layers, alike_tokens
        self._nodes: dict[int, int] = {}
        """Maximum nodes seen, by multiple of `alike_tokens`; key 0: batches of one token."""
        self._expected = 0
        """Expected nodes of the running batch, rather too many; 0: none runs."""

    @property
    def callback(self) -> Any:
        """llama.cpp's abort callback, to be called with `address`."""
        return _LIBC.sem_trywait if self.is_counted else _LIBC.strlen

    @property
    def address(self) -> int:
        """Address of the callback's argument: this object must live as long as it can be called."""
        return ctypes.addressof(self._state)

    def stop(self) -> None:
        """Abort the running batch within one node, and any later one until `start`."""
        if self.is_counted:
            _LIBC.sem_init(self._state, 0, 0)
        else:
            self._state[0] = b"\1"

    def start(self) -> None:
        """Allow the next batch, and count from 0. Not while a batch is running."""
        if self.is_counted:
            _LIBC.sem_init(self._state, 0, _MOST)
        else:
            self._state[0] = b"\0"

    def compute(self, n_tokens: int, compute: Callable[[], int]) -> int:
        """Call `compute`, which computes `n_tokens`, and return its result: 0 for success. After `start`."""
        if not self.is_counted:
            return compute()
        alike = 0 if n_tokens == 1 else -(-n_tokens // self._alike_tokens)
        self._expected = self._nodes.get(alike) or self._most_nodes() * max(1, alike)
        code = compute()
        # Reset now: until the next batch is counted from 0, its progress would seem complete.
        self._expected = 0
        if not code:
            self._nodes[alike] = max(self._nodes.get(alike, 0), self._count())
        return code

    def _most_nodes(self) -> int:
        """Maximum nodes for `alike_tokens` in the batches so far."""
        known = [-(-nodes // max(1, alike)) for alike, nodes in self._nodes.items()]
        return max(known, default=NODES_PER_LAYER * self._n_layers)

    @property
    def progress(self) -> float:
        """Completed fraction of the running batch, from 0 to 1; too low for the first batch of its size. 0 where none
        runs.
        """
        expected = self._expected
        return min(1.0, self._count() / expected) if expected else 0.0

    def _count(self) -> int:
        left = ctypes.c_int()
        _LIBC.sem_getvalue(self._state, ctypes.byref(left))
        return _MOST - left.value if left.value else 0  # 0 left: it was stopped
