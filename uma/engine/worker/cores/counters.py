"""Linux's counters: how long this process ran, each of its threads waited for a core, and cores were idle."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Set
from pathlib import Path

import attrs

from uma import cgroup
from uma.engine.worker.cores.threads import CpuSample
from uma.llama import backend

PROC = Path("/proc")
if sys.platform == "linux":
    TICK_MS = 1000.0 / os.sysconf("SC_CLK_TCK")
else:
    TICK_MS = 10.0
"""The unit of /proc/stat."""


def waiting_ms(proc: Path = PROC, without: Set[str] = frozenset()) -> dict[str, float] | None:
    """How long each thread of this process was runnable without a core, by thread id; None where the kernel does not
    count. Threads of `without` are left out.
    """
    found: dict[str, float] = {}
    tasks, has_run = f"{proc}/self/task", False
    try:
        threads = os.listdir(tasks)  # noqa: PTH208  (a few times a second between two batches: paths take as long again)
    except OSError:
        return None
    for thread in threads:
        if thread in without:
            continue
        try:
            with open(f"{tasks}/{thread}/schedstat", "rb", buffering=0) as file:  # noqa: PTH123
                running_ns, waiting_ns, *_ = file.read(64).split()
            found[thread] = int(waiting_ns) / 1e6
            has_run = has_run or int(running_ns) > 0
        except (OSError, ValueError):  # a thread that has just ended
            continue
    return found if has_run else None


def unused_ms(stat: Path, cpus: frozenset[int]) -> tuple[float, float] | None:
    """Time for which these cores were idle or waited for disks, and time that the host of this virtual machine took
    from them, each summed over the cores; None where the system has no counters.
    """
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
    return idle * TICK_MS, stolen * TICK_MS


@attrs.frozen
class Counters:
    """The kernel's counters at one moment, in milliseconds since an arbitrary start."""

    wall_ms: float
    running_ms: float
    """CPU time of this process, threads that have ended included."""
    waiting_ms: Mapping[str, float] = attrs.field(factory=dict)
    """Time for which each of its threads was runnable without a core, by the thread's id."""
    idle_ms: float | None = None
    """Time for which the cores had nothing to run, added up; None where the system has no count."""
    stolen_ms: float = 0.0
    """Time that the host of a virtual machine took from the cores."""
    cpus: frozenset[int] = frozenset()
    cores: float = 1.0
    """CPUs that this process can use: its affinity, or what a quota pays for."""
    quota_use: cgroup.QuotaUse | None = None

    @classmethod
    def take(cls, proc: Path, now: float) -> Counters | None:
        """The counters now; None where the system does not have them."""
        cpus = backend.affinity()
        waiting = waiting_ms(proc)
        if waiting is None:
            return None
        # Not the sum over threads: an ended thread takes its part along, and its time would count as used by other
        # programs.
        running_ms = time.process_time() * 1000
        cores = backend.available_cores()
        quota_use = cgroup.quota_use() if cores < len(cpus) else None
        idle_ms, stolen_ms = unused_ms(proc / "stat", cpus) or (None, 0.0)
        return cls(
            wall_ms=now,
            running_ms=running_ms,
            waiting_ms=waiting,
            idle_ms=idle_ms,
            stolen_ms=stolen_ms,
            cpus=cpus,
            cores=cores,
            quota_use=quota_use,
        )

    def since(self, last: Counters, wanted: int) -> CpuSample:
        """Differences since `last`. The waits of threads that have ended meanwhile are not known."""
        waited_ms = sum(max(0.0, ms - last.waiting_ms.get(thread, 0.0)) for thread, ms in self.waiting_ms.items())
        is_known = self.cpus == last.cpus and self.idle_ms is not None and last.idle_ms is not None
        return CpuSample(
            wall_ms=self.wall_ms - last.wall_ms,
            cores=self.cores,
            most=wanted or backend.compute_cores(self.cpus),
            running_ms=max(0.0, self.running_ms - last.running_ms),
            waiting_ms=waited_ms,
            idle_ms=max(0.0, (self.idle_ms or 0.0) - (last.idle_ms or 0.0)) if is_known else None,
            stolen_ms=max(0.0, self.stolen_ms - last.stolen_ms) if is_known else 0.0,
            quota_used_ms=self.quota_use.since(last.quota_use) if self.quota_use else None,
            cpus=len(self.cpus),
        )
