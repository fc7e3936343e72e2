"""A histogram with fixed bounds: cheap enough to be fed once for each token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

MS_BOUNDS = (
    *(1, 2, 5, 10, 15, 20, 30, 40, 50, 65, 80, 100, 120, 150, 200, 300, 400, 500, 700),
    *(1_000, 1_500, 2_000, 3_000, 5_000, 7_000, 10_000, 15_000, 20_000, 30_000, 60_000),
)
SIZE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024, 2_048)


class Histogram:
    """Counts of observations by upper bound, their number and their sum, and the last of them."""

    __slots__ = ("bounds", "count", "counts", "last", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.count = 0
        self.sum = self.last = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.count += 1
        self.sum += value
        self.last = value

    def buckets(self) -> dict[str, int]:
        """Cumulative counts by upper bound, the last one `inf`: Prometheus's `le` buckets."""
        total = 0
        found: dict[str, int] = {}
        for bound, count in zip((*self.bounds, "inf"), self.counts, strict=True):
            total += count
            found[str(bound)] = total
        return found

    def snapshot(self, name: str) -> dict[str, object]:
        """`NAME_count`, `NAME_sum`, `NAME_buckets` and `NAME_last`."""
        ends = {f"{name}_count": self.count, f"{name}_sum": round(self.sum, 3), f"{name}_last": round(self.last, 3)}
        return {**ends, f"{name}_buckets": self.buckets()}
