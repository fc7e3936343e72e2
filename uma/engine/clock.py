"""The engine's clock."""

from __future__ import annotations

import time


def now_ms() -> float:
    """Milliseconds since an arbitrary moment, comparable between threads."""
    return time.perf_counter() * 1000
