"""What Linux counts: for every thread how long it ran and waited for a core, for every core how long it did nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from uma.llama import backend

PROC = Path("/proc")
TICK_MS = 1000.0 / os.sysconf("SC_CLK_TCK")
"""The unit of /proc/stat."""


def scheduled_ms(proc: Path = PROC) -> tuple[float, float] | None:
    """How long all threads of this process ran, and waited for a core; None where the kernel does not count."""
    running_ns = waiting_ns = 0
    tasks = f"{proc}/self/task"
    try:
        threads = os.listdir(tasks)  # noqa: PTH208  (a few times a second between two batches: paths take as long again)
    except OSError:
        return None
    for thread in threads:
        try:
            with open(f"{tasks}/{thread}/schedstat", "rb", buffering=0) as file:  # noqa: PTH123
                fields = file.read(64).split()
            running_ns += int(fields[0])
            waiting_ns += int(fields[1])
        except (OSError, ValueError, IndexError):  # a thread that has just ended
            continue
    return (running_ns / 1e6, waiting_ns / 1e6) if running_ns else None


def runnable_threads(proc: Path = PROC) -> int:
    """Threads on this machine that run or wait for a core just now, this one included; 0 where that is not told.

    `/proc/stat` tells the same number behind much that takes time to write on a machine with many cores.
    """
    try:
        with (proc / "loadavg").open("rb", buffering=0) as file:
            return int(file.read(128).split()[3].partition(b"/")[0])
    except (OSError, ValueError, IndexError):
        return 0


class CpuTime(NamedTuple):
    """Counters of the kernel, in milliseconds since an arbitrary start."""

    running: float
    """Time of this process's threads on a core."""
    waiting: float
    """Time for which they were runnable without one."""
    stolen: float
    """Time that the host of a virtual machine took from the cores."""
    idle: float = 0.0
    """Time for which the cores had nothing to run, added up."""

    @classmethod
    def take(cls, proc: Path) -> CpuTime | None:
        """The counters of now; None where the system does not have them."""
        scheduled = scheduled_ms(proc)
        return scheduled and cls.of(*scheduled, Unused.take(proc / "stat", backend.affinity()))

    @classmethod
    def of(cls, running_ms: float, waiting_ms: float, unused: Unused | None) -> CpuTime:
        """The same of counters that were read."""
        return cls(running_ms, waiting_ms, *((unused.stolen_ms, unused.idle_ms) if unused else (0.0, 0.0)))


class Unused(NamedTuple):
    """Time of some cores in which nothing was computed, added up."""

    idle_ms: float
    """They had nothing to run, or waited for disks."""
    stolen_ms: float
    """The host of this virtual machine did not let them run."""

    @classmethod
    def take(cls, stat: Path, cpus: frozenset[int]) -> Unused | None:
        """The counters of these cores; None where they are not to be had."""
        try:
            with stat.open("rb") as file:
                lines = file.read(256 * (max(cpus) + 2)).splitlines()
        except OSError:
            return None
        wanted = {b"cpu%d" % cpu for cpu in cpus}
        found = [fields for line in lines if len(fields := line.split()) > 5 and fields[0] in wanted]
        if len(found) != len(cpus):
            return None
        idle = sum(int(fields[4]) + int(fields[5]) for fields in found)
        stolen = sum(int(fields[8]) for fields in found if len(fields) > 8)
        return cls(idle * TICK_MS, stolen * TICK_MS)
