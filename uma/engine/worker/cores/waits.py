"""Time for which batches stood still because a thread that computes them waited for a core (`cpu` of `uma explain`).

llama.cpp's compute threads meet at barriers, so a batch waits whenever one of them does. The kernel counts the waits of
each thread; how far they overlap it does not say, so they are taken to be independent.
"""

from __future__ import annotations

import math
import threading
from pathlib import Path

import attrs

from uma.engine.clock import now_ms
from uma.engine.worker.cores.counters import PROC, waiting_ms

MIN_MS = 20.0
"""Minimum length of a sample (ms): requests that change their status together share one."""
COST_FACTOR = 100.0
"""Minimum length of a sample as a multiple of what taking it costs, so that many threads take no more than 1 %."""


@attrs.define(slots=True)
class CpuWaits:
    """Counts the time for which compute threads waited for a core. `sample` belongs to the decode thread."""

    total_ms: float = 0.0
    """Any thread can read it, and `share`. It stays 0 where the system does not count."""
    share: float = 0.0
    """Share of the last sample for which a compute thread waited."""
    _proc: Path = PROC
    _last: dict[str, float] = attrs.field(factory=dict)
    _last_ms: float = -math.inf
    _due_ms: float = -math.inf

    def sample(self, now: float, least_ms: float = MIN_MS) -> None:
        """Count the waiting time since the last sample, unless that is less than `least_ms` ago."""
        if now < max(self._due_ms, self._last_ms + least_ms):
            return
        # Other Python threads of this process are left out: no batch waits for them.
        others = {str(thread.native_id) for thread in threading.enumerate()} - {str(threading.get_native_id())}
        waits = waiting_ms(self._proc, others) or {}
        passed_ms = max(now - self._last_ms, 1.0)
        shares = (max(0.0, ms - self._last.get(thread, ms)) / passed_ms for thread, ms in waits.items())
        if self._last:
            self.share = 1 - math.prod(1 - min(share, 1.0) for share in shares)
            self.total_ms += passed_ms * self.share
        self._last, self._last_ms = waits, now
        self._due_ms = now + COST_FACTOR * (now_ms() - now) if waits else math.inf
