"""llama.cpp's process-wide start: its backends (CPU, GPU) are found once, before the first file is read.

It is never taken down: the library's own teardown only frees tables that another engine in this process may be using.
"""

from __future__ import annotations

import os
import sys
import threading

import llama_cpp.llama_cpp as lib

from uma.llama import log

_lock = threading.Lock()
_started = threading.Event()

MAX_SEQUENCES: int = lib.llama_max_parallel_sequences()
"""Most sequence ids of one context: a constant of the library."""


def start() -> None:
    """Make llama.cpp ready and its log ours. Any thread, any number of times."""
    with _lock:
        if not _started.is_set():
            log.install()
            lib.llama_backend_init()
            _started.set()


def core_count() -> int:
    """The cores this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
