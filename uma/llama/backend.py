"""llama.cpp's process-wide start: its backends (CPU, GPU) are found once, before the first file is read.

It is never taken down: the library's own teardown only frees tables that another engine in this process can be using.
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
"""Linux: what kind of CPUs there are."""
FAST_CAPACITY = 0.7
"""Minimum capacity of a core to compute with it, as a share of the fastest core's."""

MAX_SEQUENCES: int = lib.llama_max_parallel_sequences()
"""Most sequence ids of one context: a constant of the library."""


def start() -> None:
    """Make llama.cpp ready, and its log ours. Any thread, any number of times."""
    with _lock:
        if not _started.is_set():
            log.install()
            lib.llama_backend_init()
            _started.set()


def has_gpu() -> bool:
    """Whether llama.cpp has found something else than CPUs to compute with. Starts llama.cpp."""
    start()
    return bool(lib.llama_supports_gpu_offload())


def core_count(root: Path = cgroup.ROOT) -> int:
    """Compute threads to begin with: one for each core that this process can use and that its quota pays for whole.

    With more threads than the quota pays for, all of them stop in each period while the others wait at a barrier.
    """
    return max(1, min(compute_cores(affinity()), int(available_cores(root))))


def affinity() -> frozenset[int]:
    """The CPUs that this process can run on, hardware threads counted singly."""
    if sys.platform == "linux":
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def available_cores(root: Path = cgroup.ROOT) -> float:
    """CPUs this process can use at the same time: its affinity, or its control groups' quota where that is less."""
    return max(0.1, min(len(affinity()), cgroup.cpu_quota(root)))


@lru_cache(maxsize=8)
def compute_cores(cpus: frozenset[int], sysfs: Path = SYS_CPU) -> int:
    """How many threads compute fastest on these CPUs while nothing else runs there.

    One for each physical core, because hardware threads of a core share its arithmetic units; and of a hybrid processor
    only its fast cores, because at each barrier they would wait for the slow ones. All CPUs count where the system does
    not describe them.
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
    """The cores of the fast kind: as Intel's hybrid processors list them, or by the capacity that Arm's state."""
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
    """`0-3,8` as the kernel writes it."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
