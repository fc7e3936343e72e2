"""Threads that choose the next tokens of a part of the rows, where a GPU computes and cores are idle.

On an H200 256 rows of a model with a vocabulary of 152,000 are computed in 13 ms. One thread takes longer than that to
find the likeliest tokens in their logits, and sampler chains take several times as long. Both are work of numpy and
llama.cpp, without the GIL. Where CPUs compute there are no helpers: llama.cpp's threads need the cores, and a step
takes far longer than its sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")

MAX_HELPERS = 7
"""Maximum helper threads: as many were tried, on 16 cores."""
MIN_LOGITS = 2**20
"""Minimum logits of a part, in those of greedy rows: a smaller part (0.2 to 0.4 ms) is not worth a helper, because
threads wait for each other's GIL: with a quarter of it 64 streams with a vocabulary of 32,000 had an eighth fewer
tokens a second."""
CHAIN_LOGITS = 16
"""Work of a sampler chain for a logit, in logits of greedy rows: with top-k 40, top-p, min-p and temperature 18 with a
vocabulary of 32,000 and 7 with 152,000 (AMD EPYC of family 25 model 1)."""


class RowHelpers:
    """Helper threads of the decode thread, which waits for them before it goes on. They start with the first use."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ThreadPoolExecutor | None = None

    def each_part(self, choose: Callable[[range], list[T]], rows: int, logits: int) -> list[T]:
        """What `choose` returns for all rows, in order. If `logits`, the work in logits of greedy rows, is worth it,
        several threads compute a part of the rows each.
        """
        parts = min(self.count + 1, logits // MIN_LOGITS, rows)
        if parts < 2:
            return choose(range(rows))
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.count, "uma-rows")
        ends = [rows * part // parts for part in range(parts + 1)]
        others = [self._pool.submit(choose, range(*pair)) for pair in pairwise(ends[1:])]
        found = choose(range(ends[1]))
        for other in others:
            found += other.result()
        return found

    def close(self) -> None:
        """End the helpers."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
