"""llama.cpp's process-wide start: its backends (CPU, GPU) are found once, before the first file is read.

It is never taken down: the library's own teardown only frees tables that another engine in this process may be using.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import llama_cpp.llama_cpp as lib

from uma.llama import log

_lock = threading.Lock()
_started = threading.Event()

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
"""Linux: the quota and period of this process's container, in microseconds of CPU time."""

MAX_SEQUENCES: int = lib.llama_max_parallel_sequences()
"""Most sequence ids of one context: a constant of the library."""


def start() -> None:
    """Make llama.cpp ready and its log ours. Any thread, any number of times."""
    with _lock:
        if not _started.is_set():
            log.install()
            lib.llama_backend_init()
            _started.set()


def has_gpu() -> bool:
    """Whether llama.cpp has found something else than CPUs to compute with."""
    start()
    return bool(lib.llama_supports_gpu_offload())


def core_count(cpu_max: Path = CPU_MAX) -> int:
    """The cores this process may use: those it may run on, and no more than its container's quota pays for."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text().split()
        return max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return cores
