"""Two watches over the cores: one sets the number of compute threads, the other aborts a batch that waits for cores.
`ComputeThreads` samples the kernel's counters a few times a second, between two batches, because a context's threads
can change only there; a sample takes some 0.1 ms. On systems without these counters all threads compute, and where a
GPU computes everything nothing is read. Pressure stall information (PSI) is not used: it does not say whether other
programs still use a core that this process has left to them, which decides when its threads come back.

An idle time never reduces the threads, even if other programs used the cores: a program of lower priority, or on other
cores, counts as load until threads wait for it. From time to time all threads are tried without an idle time, for a
full sample, because the kernel puts two of them on one core for the first tens of milliseconds. Not done: samples and
aborts of their own for the batches after an idle time. They won some tens of milliseconds once for each program that
came, and nothing beside one that comes and goes during decoding.

`StallWatch` aborts. llama.cpp's compute threads meet at hundreds of barriers for each token: when other programs
suddenly want the cores, a batch that began with all threads can take a hundred times as long as it should. So a
watching thread looks at the running batch some times a second, and has llama.cpp abort one that takes far too long
because its threads wait for cores. The batch is computed again at once, with as many threads as there are free cores.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from uma.engine.clock import now_ms
from uma.engine.worker.cores.counters import PROC, Counters
from uma.engine.worker.cores.threads import SAMPLE_MS, CpuSample, ThreadPolicy
from uma.llama import backend
from uma.llama.context import Context
from uma.metrics import EngineMetrics

REST_MS = 20.0
"""Minimum idle time (ms) after which a sample is taken."""
MIN_MS = 100.0
"""Minimum duration of a batch to be aborted: the gain on a shorter one would not be seen."""
LOOK_SEC = MIN_MS / 2000
"""Interval (s) between two looks at the running batch: a look takes time from the core on which it wakes."""
TOO_LONG = 2.0
"""Duration of a batch, as a multiple of its prediction, from which on it is examined."""
STARVED_SHARE = 0.8
"""Share of their runnable time below which compute threads count as waiting for cores."""
PAUSE_MS = 2_000.0
"""Minimum time (ms) between two aborts: where fewer threads do not help, a third try gains nothing."""

_log = logging.getLogger("uma.engine")


class ComputeThreads:
    """Sets a context's compute threads. Belongs to the decode thread, which calls `before_batch` for each batch."""

    def __init__(self, context: Context, metrics: EngineMetrics, *, proc: Path = PROC) -> None:
        self._context = context
        self._metrics = metrics
        self._proc = proc
        self._wanted = context.params.n_threads
        """Threads that the configuration names; 0: as many as compute fastest on the CPUs at hand."""
        self._policy = ThreadPolicy(self._wanted or backend.core_count())
        self.due_ms = now_ms() + SAMPLE_MS if context.computes_on_cpu else math.inf
        """When `before_batch` samples next; infinite: never."""
        self._last = Counters.take(proc, now_ms())
        metrics.compute_threads = self._policy.threads

    @property
    def load(self) -> float:
        """Threads of other programs that want to run beside this process's, as the last sample showed."""
        return self._policy.load

    def sample_next(self) -> None:
        """Sample before the next batch: the one before has shown that the number of threads is wrong."""
        if self.due_ms < math.inf:
            self.due_ms = 0.0

    def was_idle(self, idle_ms: float) -> None:
        """Take in that the decode thread was idle for `idle_ms`, until now."""
        if idle_ms >= REST_MS and self.due_ms < math.inf:
            self._sample(now_ms(), self._policy.observe_idle)

    def before_batch(self) -> int:
        """Sample, if it is time; returns the number of compute threads in force."""
        now = now_ms()
        if now >= self.due_ms:
            self._sample(now, self._policy.observe)
        return self._policy.threads

    def _sample(self, now: float, observe: Callable[[CpuSample], int]) -> None:
        reading, last = Counters.take(self._proc, now), self._last
        self._last = reading
        if reading is None:
            self.due_ms = math.inf
            return
        if last is not None:
            self._choose(reading.since(last, self._wanted), observe)
        self.due_ms = now + SAMPLE_MS

    def _choose(self, sample: CpuSample, observe: Callable[[CpuSample], int]) -> None:
        before, threads = self._policy.threads, observe(sample)
        load = self._metrics.neighbour_load = round(self._policy.load, 2)
        self._metrics.stolen_share = round(self._policy.stolen, 2)
        if threads != before:
            self._context.set_threads(threads)
            self._metrics.compute_threads = threads
            _log.debug("compute threads: %d instead of %d: other programs want %.1f cores", threads, before, load)


class _Running(NamedTuple):
    """A batch that is computed now."""

    began_ms: float
    expected_ms: float

    @property
    def takes_too_long(self) -> bool:
        """Whether it has run for far longer than predicted, for whatever reason."""
        return now_ms() - self.began_ms > max(MIN_MS, TOO_LONG * self.expected_ms)


class StallWatch:
    """Watches the batches of one context. `begin` and `end` belong to the decode thread."""

    def __init__(self, context: Context, *, is_able: bool = True) -> None:
        """`is_able`: an aborted batch can be computed again. If not, nothing is watched, because an abort would send
        every sequence of the batch back to its last checkpoint.
        """
        self._context = context
        self._running: _Running | None = None
        self._lock = threading.Lock()
        """Held while a batch is aborted, and while it ends: an abort is never meant for the batch after it."""
        self._is_aborted = False
        self._called = threading.Event()
        """Set to have the watching thread look before its interval is over."""
        self._is_over = False
        self._interval_sec: float | None = None
        """Time until the watching thread looks again; None: until a batch begins."""
        self._aborted_ms = -PAUSE_MS
        self._is_able = is_able

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch batches in this block, on systems that count how long threads wait for cores."""
        if not self._is_able or Counters.take(PROC, now_ms()) is None:
            yield
            return
        thread = threading.Thread(target=self._look_until_over, name="uma-stall-watch")
        thread.start()
        try:
            yield
        finally:
            self._is_over = True
            self._called.set()
            thread.join()

    def begin(self, began_ms: float, expected_ms: float, threads: int) -> None:
        """Note that a batch begins, with `threads` threads. A single thread waits for no other: it is not watched.

        `expected_ms` is 0 where nothing is predicted yet: the first batch beside busy programs is examined too.
        """
        if threads > 1:
            self._running = _Running(began_ms, expected_ms)
            if self._interval_sec is None:
                self._called.set()

    def end(self) -> bool:
        """Note that the batch has come back; returns whether it was aborted. It can be complete all the same, if the
        abort came too late. The context must `resume` in either case.
        """
        with self._lock:
            self._running, is_aborted, self._is_aborted = None, self._is_aborted, False
        return is_aborted

    # The watching thread

    def _look_until_over(self) -> None:
        suspect: _Running | None = None
        before: Counters | None = None
        while True:
            self._called.wait(self._interval_sec)
            # Event and interval are cleared before `_running` is read: a batch that begins in between sets the event.
            self._called.clear()
            if self._is_over:
                return
            self._interval_sec = None
            if (running := self._running) is not None:
                self._interval_sec = LOOK_SEC
            is_examined = running is not None and running.takes_too_long and now_ms() - self._aborted_ms > PAUSE_MS
            now = Counters.take(PROC, now_ms()) if is_examined else None
            if running is None or now is None:
                suspect = before = None
                continue
            if running is suspect and before is not None and is_starved(before, now):
                self._abort(running)
            suspect, before = running, now

    def _abort(self, running: _Running) -> None:
        with self._lock:
            if self._running is running:
                self._is_aborted = True
                self._aborted_ms = now_ms()
                self._context.request_retry()


def is_starved(before: Counters, now: Counters) -> bool:
    """Whether the threads of this process waited for other programs between two readings of the counters.

    Not where the host took time from a core: what runs there waits with it, and with fewer threads it would as well.
    """
    return now.stolen_ms <= before.stolen_ms and now.since(before, 1).cpu_fraction < STARVED_SHARE
