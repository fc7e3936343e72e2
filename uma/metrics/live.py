"""Live figures of a server: what the page's live view and `uma top` show, each defined here alone. Pure.

Speeds and times are of the difference between two snapshots of the metrics, so a snapshot that comes late, or not at
all, falsifies nothing. `/metrics` has the counters and gauges that they are made of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import attrs

from uma.types import Activity

WINDOW_SEC = 60.0
"""Time over which shares and percentiles are told."""
FEW = 20
"""Count of times below which there are no percentiles of them."""
RATE_SEC = 3.0
"""Time over which a speed is told: long enough to be read, short enough to be of now."""


@attrs.frozen
class Percentiles:
    """Times in milliseconds, interpolated within a histogram's bucket as Prometheus does; one that lies beyond the last
    bound is that bound. None: they are too few for percentiles.
    """

    count: int
    last: float
    p50: float | None
    p95: float | None
    p99: float | None


@attrs.frozen
class LiveFigures:
    """What a server does at one moment."""

    running: int
    """Requests that have a slot: `active_sequences` of `/metrics`."""
    waiting_interactive: int
    """Requests of this lane without a slot, those that were preempted included; all lanes are `queued_requests`."""
    waiting_normal: int
    waiting_background: int
    written_per_sec: float
    """Tokens generated a second."""
    read_per_sec: float
    """Tokens of prompts computed a second."""
    cached_share: float | None
    """Part of the last minute's prompts that came from the cache, by tokens, or of all since the start; None: there
    were none."""
    first_token_ms: Percentiles | None
    """Times to a first token of the last minute, or of all since the start; None: there were none, or of several models
    too few for percentiles, and the last one's model is not known."""
    between_tokens_ms: Percentiles | None
    """Times between two tokens, likewise."""
    slot_every_ms: float | None
    """Usual time until another slot is free; None: not known, or each of several models has slots of its own."""

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return self.waiting_interactive + self.waiting_normal + self.waiting_background


@attrs.define
class LiveSeries:
    """The metrics of one server within the last minute."""

    _snapshots: deque[tuple[float, Mapping[str, Any]]] = attrs.field(factory=deque, init=False)

    def figures(self, at_sec: float, metrics: Mapping[str, Any], activity: Activity | None, slots: int) -> LiveFigures:
        """The figures of now, by the newest metrics. Without `activity`, as of a server that stops, all wait in the
        normal lane. `slots` are `Limits.max_sequences`; 0: of several models.
        """
        snapshots = self._snapshots
        if snapshots and metrics.get("requests_total", 0) < snapshots[-1][1].get("requests_total", 0):
            snapshots.clear()  # the server was started again, and its counters with it
        snapshots.append((at_sec, metrics))
        while snapshots[0][0] < at_sec - WINDOW_SEC:
            snapshots.popleft()
        service_ms = metrics.get("service_ms_ewma", 0.0)
        untold = (0, metrics.get("queued_requests", 0), 0)
        interactive, normal, background = untold if activity is None else _waiting_by_lane(activity)
        return LiveFigures(
            metrics.get("active_sequences", 0),
            interactive,
            normal,
            background,
            self._per_second("tokens_generated_total"),
            self._per_second("prefill_tokens_total"),
            self._share("cached_tokens_total", "prompt_tokens_total"),
            self._percentiles("ttft_ms", slots),
            self._percentiles("inter_token_ms", slots),
            service_ms / slots if service_ms and slots else None,
        )

    def _per_second(self, name: str) -> float:
        at_sec, now = self._snapshots[-1]
        recent = [snapshot for snapshot in self._snapshots if snapshot[0] >= at_sec - RATE_SEC]
        then_sec, then = (recent if len(recent) > 1 else list(self._snapshots)[-2:])[0]
        grown: float = now.get(name, 0) - then.get(name, 0)
        return max(0.0, grown) / max(at_sec - then_sec, 1e-3)

    def _share(self, part: str, whole: str) -> float | None:
        then, now = self._snapshots[0][1], self._snapshots[-1][1]
        if now.get(whole, 0) == then.get(whole, 0):
            then = {}
        total = now.get(whole, 0) - then.get(whole, 0)
        return (now.get(part, 0) - then.get(part, 0)) / total if total else None

    def _percentiles(self, name: str, slots: int) -> Percentiles | None:
        metrics = self._snapshots[-1][1]
        now, then = (snapshot.get(f"{name}_buckets", {}) for snapshot in (metrics, self._snapshots[0][1]))
        if now.get("inf", 0) == then.get("inf", 0):
            then = {}
        counts = {bound: count - then.get(bound, 0) for bound, count in now.items()}
        count = counts.pop("inf", 0)
        upper = sorted((float(bound), below) for bound, below in counts.items())
        if not count or (count < FEW and not slots):
            return None
        found = [None if count < FEW else _percentile(upper, share * count) for share in (0.5, 0.95, 0.99)]
        return Percentiles(count, metrics.get(f"{name}_last", 0.0), *found)


def _waiting_by_lane(activity: Activity) -> tuple[int, int, int]:
    """Requests without a slot: interactive, normal, background."""
    preempted = [request.priority for request in activity.running if request.is_preempted]
    return (
        activity.waiting_interactive + preempted.count(1),
        activity.waiting_normal + preempted.count(0),
        activity.waiting_background + preempted.count(-1),
    )


def _percentile(upper: list[tuple[float, int]], rank: float) -> float:
    """The value of this rank, by cumulative counts of rising bounds."""
    low, below = 0.0, 0
    for bound, up_to in upper:
        if up_to >= rank:
            return low + (bound - low) * (rank - below) / max(1, up_to - below)
        low, below = bound, up_to
    return low
