"""Process-wide start of llama.cpp: its backends (CPU, GPU) are found once, before the first file is read.

It is never shut down: the library's own shutdown only frees tables that another engine in this process can be using.
"""

from __future__ import annotations

import os
import sys
import threading
from functools import lru_cache
from pathlib import Path

import llama_cpp.llama_cpp as lib

from uma import cgroup
from uma.llama import log

_lock = threading.Lock()
_started = threading.Event()

SYS_CPU = Path("/sys/devices/system/cpu")
"""Linux's description of the CPUs."""
FAST_CAPACITY = 0.7
"""Minimum capacity of a core that is used for computing, as a fraction of the fastest core's."""

MAX_SEQUENCES: int = lib.llama_max_parallel_sequences()
"""Maximum sequence ids of one context: a constant of the library."""


def start() -> None:
    """Initialise llama.cpp, and redirect its log. Any thread, any number of times."""
    with _lock:
        if not _started.is_set():
            log.install()
            lib.llama_backend_init()
            _started.set()


def has_gpu() -> bool:
    """Whether llama.cpp has found a device other than CPUs. Starts llama.cpp."""
    start()
    return bool(lib.llama_supports_gpu_offload())


def core_count(root: Path = cgroup.ROOT) -> int:
    """Initial number of compute threads: one for each core that this process can use and its CPU quota fully covers.

    With more threads than the quota covers, all of them are stopped in each period while the others wait at a barrier.
    """
    return max(1, min(compute_cores(affinity()), int(available_cores(root))))


def affinity() -> frozenset[int]:
    """CPUs that this process can run on; hardware threads count singly."""
    if sys.platform == "linux":
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def available_cores(root: Path = cgroup.ROOT) -> float:
    """CPUs that this process can use at once: its affinity, or its control groups' quota where that is lower."""
    return max(0.1, min(len(affinity()), cgroup.cpu_quota(root)))


@lru_cache(maxsize=8)
def compute_cores(cpus: frozenset[int], sysfs: Path = SYS_CPU) -> int:
    """Number of threads that compute fastest on these CPUs while nothing else runs there.

    One for each physical core, because the hardware threads of a core share its arithmetic units; on a hybrid processor
    only for its fast cores, because they would wait for the slow ones at each barrier. All CPUs count where the system
    does not describe them.
    """
    fast = cpus & _fast_cpus(cpus, sysfs) or cpus
    cores = {_physical_core(cpu, sysfs) for cpu in fast}
    return max(1, len(cores))


def _physical_core(cpu: int, sysfs: Path) -> str:
    try:
        return (sysfs / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return f"cpu{cpu}"


def _fast_cpus(cpus: frozenset[int], sysfs: Path) -> frozenset[int]:
    """CPUs of the fast kind, from Linux's list for Intel's hybrid processors, or by the capacity that it states for
    Arm's.
    """
    try:
        return _cpu_list((sysfs.parent.parent / "cpu_core" / "cpus").read_text())
    except (OSError, ValueError):
        pass
    capacity: dict[int, int] = {}
    for cpu in cpus:
        try:
            capacity[cpu] = int((sysfs / f"cpu{cpu}" / "cpu_capacity").read_text())
        except (OSError, ValueError):
            return cpus
    most = max(capacity.values(), default=0)
    return frozenset(cpu for cpu, core in capacity.items() if core >= FAST_CAPACITY * most)


def _cpu_list(text: str) -> frozenset[int]:
    """Parse the kernel's notation of CPUs: `0-3,8`."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
