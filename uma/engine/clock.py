"""The engine's clock."""

from __future__ import annotations

import time


def now_ms() -> float:
    """Milliseconds since some moment, the same on both threads."""
    return time.perf_counter() * 1000
