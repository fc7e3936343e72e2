"""Watches what other programs do with the cores, and has fewer threads compute while they need them.

Linux counts for every thread how long it ran and how long it was runnable without a core (`schedstat`), and for every
core how long it was idle, and on a virtual machine how long the host kept it waiting (`/proc/stat`); under a quota, how
much of it the control group used. Reading these takes some 0.1 ms, a few times a second, between two batches. Systems
without these counters keep all threads, and where a GPU computes everything nothing is read.

Linux's pressure stall information (PSI: `/proc/pressure/cpu`, a group's `cpu.pressure`) is not read: it tells for which
part of the time some thread of the machine or group waited for a core, and this process's own waits, those for a quota
that is used up included, are in `schedstat`. Neither tells whether others still use a core that this process has left
to them, which decides when its threads come back: idle time does, and under a quota what the group used of it.

The decode thread samples, since a context's threads can change between two of its batches only. After a rest it begins
a new sample: what others did meanwhile, as programs that take turns with this one do, is over. Where something else
is runnable still, they are suspected to go on. All threads begin nevertheless, since neither a program that yields to
this one by its priority or its group's weight, nor one that works elsewhere, can be told from a neighbour until
threads wait for it; but until the first full sample the batches are watched closely: what their threads wait says it
after some 20 ms, and a batch that waits so long is aborted (`worker/stall.py`).

It measures for this decision alone: benchmarks measure CPU time from outside (`benchmarks/measure.py`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

import attrs

from uma import cgroup
from uma.engine.clock import now_ms
from uma.engine.policy.threads import CpuSample, ThreadPolicy
from uma.engine.worker.schedstat import PROC, CpuTime, Unused, runnable_threads, scheduled_ms
from uma.engine.worker.stall import CLOSE_MS
from uma.llama import backend
from uma.llama.context import Context
from uma.metrics import EngineMetrics

SAMPLE_MS = 120.0
"""Minimum time between two samples."""
SAMPLE_COST_SHARE = 0.002
"""Maximum share of its time that the decode thread spends on samples between batches: where /proc is slow, they are
rarer."""
QUIET_SHARE = 0.95
"""Minimum CPU time of this process, as a share of all that its compute threads could have had, at which no other
program can have kept them from a core: then one clock is read (some 5 us) instead of all counters."""
QUIET_LOAD = 0.1
"""Maximum load of other programs, in threads, at which that is enough to know."""
MAX_QUIET_MS = 1_000.0
"""Maximum time between two samples while the process has its cores: only a sample sees CPUs or a quota that are added,
or, on some virtual machines, time that the host takes."""
REST_MS = 20.0
"""Minimum time without work that has a sample of its own."""
REST_COST_SHARE = 0.01
"""Maximum time of that sample, as a share of the rest: the batch after it waits for the sample."""
_log = logging.getLogger("uma.engine")


class Neighbours:
    """Sets the context's compute threads. Belongs to the decode thread; `before_batch` is called before each batch."""

    def __init__(self, context: Context, metrics: EngineMetrics, *, proc: Path = PROC) -> None:
        self._context = context
        self._metrics = metrics
        self._proc = proc
        self._wanted = max(context.params.n_threads, context.params.n_threads_batch)
        """Threads that the configuration names; 0: as many as compute fastest on the CPUs at hand."""
        self._policy = ThreadPolicy(self._wanted or backend.core_count())
        self.due_ms = now_ms() + SAMPLE_MS if context.computes_on_cpu else math.inf
        """When `before_batch` samples next; infinite: never."""
        self._cost_ms = 0.0
        """CPU time of the last sample."""
        self._last = _Reading.take(proc, now_ms())
        self._used_ms = math.inf
        """CPU time of this process when it was last looked at; infinite: a sample must be next."""
        self._sampled_ms = 0.0
        self.suspected: CpuTime | None = None
        """The counters at the end of a rest behind which others may go on; None where nothing is suspected."""
        self._is_asked = False
        """Something has shown since the rest, or the last look, that the number of threads is wrong."""
        metrics.compute_threads = self._policy.threads

    @property
    def load(self) -> float:
        """Threads of other programs that want to run beside this process's, as the last sample showed."""
        return self._policy.load

    def ask_again(self) -> None:
        """Sample before the next batch: something has just shown that the number of threads is wrong."""
        self._used_ms = math.inf
        self._is_asked = True
        if self.due_ms < math.inf:
            self.due_ms = 0.0

    def has_rested(self, rested_ms: float) -> None:
        """The decode thread had nothing to compute for so long, until now."""
        if rested_ms >= max(REST_MS, self._cost_ms / REST_COST_SHARE) and self.due_ms < math.inf:
            now, self.suspected, self._is_asked = now_ms(), None, False
            self._sample(now, self._observe_rest)
            if self.suspected is not None:
                self.due_ms = now + CLOSE_MS

    def before_batch(self) -> int:
        """Sample, if it is time; returns the number of compute threads in force."""
        now = now_ms()
        if now >= self.due_ms:
            if self.suspected is not None and now - self._sampled_ms < SAMPLE_MS:
                self._look_closely(now)
            elif self._has_its_cores(now):
                self.due_ms, self.suspected = now + SAMPLE_MS, None
            else:
                self.suspected = None
                self._sample(now, self._policy.observe)
        return self._policy.threads

    def _observe_rest(self, sample: CpuSample) -> int:
        threads = self._policy.observe_rest(sample)
        if self._policy.would_yield(sample) and runnable_threads(self._proc) > 1:
            self.suspected = None if self._last is None else self._last.cpu_time
        return threads

    def _look_closely(self, now: float) -> None:
        """Whether compute threads have waited for others since the rest: too soon for a sample, soon enough to tell."""
        self.due_ms = now + CLOSE_MS
        is_asked, self._is_asked = self._is_asked, False
        # Behind a batch all its threads spin for a moment still.
        if not is_asked and runnable_threads(self._proc) <= self._policy.threads:
            return
        reading, last, before = _Reading.take(self._proc, now), self._last, self._policy.threads
        if reading is None or last is None:
            return
        self._choose(reading.since(last, self._wanted), self._policy.observe_waits)
        if self._policy.threads != before:
            # The next sample is of these threads alone, and in full.
            self._last, self._sampled_ms, self._used_ms = reading, now, math.inf
            self.due_ms, self.suspected = now + SAMPLE_MS, None

    def _has_its_cores(self, now: float) -> bool:
        """Whether the compute threads have run all the while, so that a sample would show no other program."""
        policy, last, before_ms = self._policy, self._last, self._used_ms
        self._used_ms = time.process_time() * 1000
        used_ms = self._used_ms - before_ms
        wanted_ms = 0.0 if last is None else policy.threads * (now - last.wall_ms)
        if (
            last is None
            or used_ms < QUIET_SHARE * wanted_ms
            or now - self._sampled_ms > MAX_QUIET_MS
            or max(policy.load, policy.stolen) > QUIET_LOAD
        ):
            return False
        self._last = last.advanced(now, used_ms, wanted_ms)
        return True

    def _sample(self, now: float, observe: Callable[[CpuSample], int]) -> None:
        cpu_began = time.thread_time()
        self._used_ms, self._sampled_ms = time.process_time() * 1000, now
        reading, last = _Reading.take(self._proc, now), self._last
        self._last = reading
        if reading is None:
            self.due_ms = math.inf
            return
        if last is not None:
            self._choose(reading.since(last, self._wanted), observe)
        self._cost_ms = (time.thread_time() - cpu_began) * 1000
        self.due_ms = now + max(SAMPLE_MS, self._cost_ms / SAMPLE_COST_SHARE)

    def _choose(self, sample: CpuSample, observe: Callable[[CpuSample], int]) -> None:
        before, threads = self._policy.threads, observe(sample)
        load = self._metrics.neighbour_load = round(self._policy.load, 2)
        self._metrics.stolen_share = round(self._policy.stolen, 2)
        if threads != before:
            self._context.set_threads(threads)
            self._metrics.compute_threads = threads
            _log.debug("compute threads: %d instead of %d: other programs want %.1f cores", threads, before, load)


@attrs.frozen
class _Reading:
    """The kernel's counters at one moment, in milliseconds since an arbitrary start."""

    wall_ms: float
    cpus: frozenset[int]
    cores: float
    running_ms: float
    waiting_ms: float
    unused: Unused | None
    quota_use: cgroup.QuotaUse | None

    @classmethod
    def take(cls, proc: Path, now: float) -> _Reading | None:
        """The counters of now; None where the system does not have them."""
        cpus = backend.affinity()
        scheduled = scheduled_ms(proc)
        if scheduled is None:
            return None
        cores = backend.available_cores()
        quota_use = cgroup.quota_use() if cores < len(cpus) else None
        return cls(now, cpus, cores, *scheduled, Unused.take(proc / "stat", cpus), quota_use)

    @property
    def cpu_time(self) -> CpuTime:
        """The counters of waits alone."""
        return CpuTime.of(self.running_ms, self.waiting_ms, self.unused)

    def advanced(self, now: float, used_ms: float, wanted_ms: float) -> _Reading:
        """An estimate of the counters at `now`: since these, this process has had `used_ms` of CPU time, where its
        threads could have had `wanted_ms`.

        The difference counts as waited for, although others need not have used it: so the next sample shows no more of
        them than there are. What the cores did not use stays as it was.
        """
        quota_use = self.quota_use
        if quota_use is not None:
            quota_use = attrs.evolve(quota_use, used_ms=quota_use.used_ms + used_ms)
        return attrs.evolve(
            self,
            wall_ms=now,
            running_ms=self.running_ms + used_ms,
            waiting_ms=self.waiting_ms + max(0.0, wanted_ms - used_ms),
            quota_use=quota_use,
        )

    def since(self, last: _Reading, wanted: int) -> CpuSample:
        """What happened since `last`. Threads that ended meanwhile took their counts along."""
        unused, before = (self.unused, last.unused) if self.cpus == last.cpus else (None, None)
        return CpuSample(
            wall_ms=self.wall_ms - last.wall_ms,
            cores=self.cores,
            most=wanted or backend.compute_cores(self.cpus),
            running_ms=max(0.0, self.running_ms - last.running_ms),
            waiting_ms=max(0.0, self.waiting_ms - last.waiting_ms),
            idle_ms=max(0.0, unused.idle_ms - before.idle_ms) if unused and before else None,
            stolen_ms=max(0.0, unused.stolen_ms - before.stolen_ms) if unused and before else 0.0,
            quota_used_ms=self.quota_use.since(last.quota_use) if self.quota_use else None,
            cpus=len(self.cpus),
        )
