"""How many threads compute, while other programs use the same cores.

llama.cpp's compute threads meet at a barrier after every operation, and wait there by spinning. Where another program
takes one of the cores, every operation lasts until the descheduled thread runs again: two threads beside one busy
program then compute several times slower than one thread alone. So the number of threads follows the cores that are
really free.

The model: with `k` compute threads and `load` runnable threads of other programs on `cores` cores, each runs for a
share `cores / (k + load)` of the time, and a batch advances while all `k` run. Hence `k * share ** (COUPLING * k)`.

On a virtual machine the host takes time as well, from each core independently and for tens of milliseconds at once.
With a `stolen` share of it, a batch has `(1 - stolen) ** k` left. Measured: with a third stolen two threads read
prompts 1.3 to 1.4 times as fast as one.

Alternatives tried, in tokens a second of 1 / 8 streams with 100 M parameters on 2 cores, beside endless loops:

                                    quiet       1 loop      2 loops
  2 threads                         154 / 353   36 / 18     54 / 156
  2, `OMP_WAIT_POLICY=passive`      58 / 258    63 / 200    57 / 112
  1 thread                          78 / 213    76 / 210    53 / 142

- A bounded spin (`GOMP_SPINCOUNT=1000`, some 30 µs) decoded three times as fast as libgomp's own setting with one core
  taken, and 15 to 30 % slower with both free. libgomp reads either variable once, when it is loaded.
- A threadpool of UMA's own (`llama_attach_threadpool`): in a build with OpenMP its `poll` is not read; in one without,
  barriers within a graph spin without a bound. A priority above normal is `SCHED_FIFO`, which takes privileges.
- Without the abort of a batch that has too many threads (`watch.py`), the longest wait for a token in 30 s was 0.18,
  3.0, 3.1, 0.9 s instead of 0.19, 0.26, 0.57, 1.1 s, beside a loop that ran for 3 s and rested for 3 s.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import attrs

COUPLING = 2.0
"""Exponent per thread. 1 would be threads that are descheduled independently; measured rates fall faster, because a
thread that comes back has to catch up before the others can go on."""
WORTH = 1.15
"""Minimum predicted gain, as a factor, for the number of threads to change: estimates of the load are this
uncertain."""
HOLD_MS = 500.0
"""Window (ms) whose highest load counts: threads are taken away at once, and added when the load has stayed low."""
TRY_ALL_MS = 5_000.0
"""Computing time (ms) with fewer threads after which all are tried for one sample; doubled after each failed try. Only
beside all of them it shows whether another program yields, by its priority or by its group's weight."""
LONGEST_TRY_MS = 80_000.0
"""Maximum of this time (ms): beside a program that does not yield, a try makes a stream wait 0.1 or 0.2 s."""
SAMPLE_MS = 120.0
"""Minimum length of a sample (ms): the kernel counts idle time in steps of 10 ms."""


@attrs.frozen
class CpuSample:
    """Use of the cores by this process and by other programs since the sample before."""

    wall_ms: float
    cores: float
    """CPUs that this process can use: its affinity, or what a container's quota pays for."""
    most: int
    """Threads that compute fastest on these CPUs while nothing else runs there."""
    running_ms: float
    """Time of this process's threads on a core, added up."""
    waiting_ms: float
    """Time for which they were runnable and waited for a core."""
    idle_ms: float | None
    """Time for which these cores had nothing to run, added up; None where the system has no counter."""
    stolen_ms: float = 0.0
    """Time for which these cores had something to run and the host of a virtual machine did not let them, added up."""
    quota_used_ms: float | None = None
    """CPU time of all processes that share this one's quota, this one included; None without a quota, or where it is
    unknown."""
    cpus: int | None = None
    """CPUs that `idle_ms` and `stolen_ms` are of: more than `cores` under a quota. None: as many."""

    @property
    def stolen(self) -> float:
        """Share of a core's busy time that the host of a virtual machine takes."""
        cpus = self.cores if self.cpus is None else self.cpus
        busy_ms = cpus * self.wall_ms - (self.idle_ms or 0.0)
        return min(1.0, self.stolen_ms / busy_ms) if busy_ms > 0 else 0.0

    @property
    def cpu_fraction(self) -> float:
        """Share of their runnable time for which the threads of this process did run."""
        wanted_ms = self.running_ms + self.waiting_ms
        return self.running_ms / wanted_ms if wanted_ms > 0 else 1.0

    @property
    def load(self) -> float:
        """Threads of other programs that want to run, on average.

        What they used of the cores, divided by the share that the scheduler gives to each runnable thread.
        """
        unused_ms = None if self.idle_ms is None else self.idle_ms + self.stolen_ms
        if self.quota_used_ms is not None:
            # Under a quota CPUs can be idle although it is used up: what is left of the quota counts then.
            left_ms = max(0.0, self.cores * self.wall_ms - self.quota_used_ms)
            unused_ms = left_ms if unused_ms is None else min(unused_ms, left_ms)
        if unused_ms is None:
            # Without the idle time, cores that this process left count as used by others only if its threads waited.
            unused_ms = 0.0 if self.cpu_fraction < 0.95 else self.cores * self.wall_ms
        used_ms = max(0.0, self.cores * self.wall_ms - unused_ms - self.running_ms)
        return used_ms / max(self.wall_ms, 1e-9) / max(self.cpu_fraction, 0.05)


def rate(threads: int, load: float, cores: float, stolen: float = 0.0) -> float:
    """Relative speed of `threads` compute threads beside `load` runnable threads of other programs."""
    share = min(1.0, cores / (threads + load))
    return float(threads * share ** (COUPLING * threads) * (1.0 - stolen) ** threads)


class _Observed(NamedTuple):
    """What a sample showed."""

    load: float
    stolen: float
    wall_ms: float


class ThreadPolicy:
    """Chooses the number of compute threads from what each sample shows. Pure: it never looks at a clock."""

    __slots__ = ("_fewer_ms", "_recent", "_try_after_ms", "load", "stolen", "threads")

    def __init__(self, threads: int) -> None:
        self.threads = threads
        """Threads to compute with."""
        self.load = 0.0
        """Load of other programs, in threads, at the last choice."""
        self.stolen = 0.0
        """Share of a busy core's time that the host takes, at the last choice."""
        self._recent: deque[_Observed] = deque()
        self._fewer_ms = 0.0
        """Computing time (ms) with fewer threads than all, so far."""
        self._try_after_ms = TRY_ALL_MS

    def observe(self, sample: CpuSample) -> int:
        """Take in a sample; returns the number of threads to compute with from now on, 1 to `sample.most`."""
        if sample.wall_ms < SAMPLE_MS:
            return self.threads
        self._recent.append(_Observed(sample.load, sample.stolen, sample.wall_ms))
        while len(self._recent) > 1 and sum(seen.wall_ms for seen in self._recent) - self._recent[0].wall_ms >= HOLD_MS:
            self._recent.popleft()
        self.load = max(seen.load for seen in self._recent)
        # The host takes its time in large pieces: the mean says more of the next batch than the worst sample does.
        self.stolen = sum(seen.stolen for seen in self._recent) / len(self._recent)
        before, self.threads = self.threads, self._best(sample, self.load)
        self._try_all(sample, before)
        return self.threads

    def _try_all(self, sample: CpuSample, before: int) -> None:
        """Try all threads, after a long time with fewer. `before` threads have computed until this sample."""
        if self.threads >= sample.most:
            self._fewer_ms = 0.0
            self._try_after_ms = TRY_ALL_MS if before >= sample.most else self._try_after_ms
            return
        self._fewer_ms += sample.wall_ms
        if self._fewer_ms >= self._try_after_ms:
            self.threads, self._fewer_ms = sample.most, 0.0
            self._try_after_ms = min(2 * self._try_after_ms, LONGEST_TRY_MS)
            # Loads that were seen with fewer threads must not decide after the try.
            self._recent.clear()

    def observe_idle(self, sample: CpuSample) -> int:
        """Take in a sample that ends with an idle time. A lower load replaces all samples before (see `observe`); a
        higher one is ignored: it tells neither the load of the next batch, nor what waiting for the other programs
        would cost.
        """
        if sample.wall_ms >= SAMPLE_MS and sample.load < self.load:
            self._recent.clear()
            self.observe(sample)
        return self.threads

    def _best(self, sample: CpuSample, load: float) -> int:
        """The best number of threads beside `load`, or the present one, unless the gain is at least `WORTH`."""

        def speed(threads: int) -> float:
            return rate(threads, load, sample.cores, self.stolen)

        best = max(range(1, sample.most + 1), key=speed)
        is_too_many = self.threads > sample.most
        return best if is_too_many or speed(best) > WORTH * speed(self.threads) else self.threads
