"""Two watches over the cores: one chooses the number of compute threads between batches, one aborts a batch that waits.

`Neighbours` samples the kernel's counters a few times a second, between two batches, since a context's threads can
change there only; a sample takes some 0.1 ms. Systems without these counters keep all threads, and where a GPU computes
everything nothing is read. Pressure stall information (PSI) is not used: it does not say whether others still use a
core that this process has left to them, which decides when its threads come back.

After a rest in which other programs used the cores, all threads begin nevertheless: a program that yields by its
priority, or that works on other cores, looks like a neighbour until threads wait for it. From time to time all threads
are tried between two rests too, and then for a full sample: at first the kernel has two of them on one core, some tens
of milliseconds long. Counts and aborts of their own for the batches behind such a rest won some tens of milliseconds
once for each program that came, and nothing beside one that comes and goes while tokens are computed.

`StallWatch` aborts. llama.cpp's compute threads meet at hundreds of barriers for each token: where other programs
suddenly want the cores, a batch that began with all threads can take a hundred times as long as it should. So a thread
looks at the batch that runs, some times a second, and has llama.cpp abort one that takes far too long because its
threads wait for cores. It is computed again at once, with the threads for which there are cores then.
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
"""Minimum time without work that has a sample of its own."""
LEAST_MS = 100.0
"""Minimum duration of a batch to be aborted: the gain on a shorter one would not be seen."""
LOOK_SEC = LEAST_MS / 2000
"""Interval between two looks at the batch that runs: a look takes time from the core that it wakes on."""
TOO_LONG = 2.0
"""Duration of a batch, as a multiple of its prediction, from which on it is examined."""
STARVED_SHARE = 0.8
"""Share of the time they want to run below which compute threads count as waiting for cores."""
PAUSE_MS = 2_000.0
"""Minimum time between two aborted batches: where fewer threads do not help, a third try gains nothing."""

_log = logging.getLogger("uma.engine")


class Neighbours:
    """Sets the context's compute threads. Belongs to the decode thread; `before_batch` is called before each batch."""

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

    def ask_again(self) -> None:
        """Sample before the next batch: a batch has just shown that the number of threads is wrong."""
        if self.due_ms < math.inf:
            self.due_ms = 0.0

    def has_rested(self, rested_ms: float) -> None:
        """The decode thread had nothing to compute for so long, until now: a new sample begins."""
        if rested_ms >= REST_MS and self.due_ms < math.inf:
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
        """Whether that is so by now, whatever the reason."""
        return now_ms() - self.began_ms > max(LEAST_MS, TOO_LONG * self.expected_ms)


class StallWatch:
    """Watches the batches of one context. `begin` and `end` belong to the decode thread."""

    def __init__(self, context: Context, *, is_able: bool = True) -> None:
        """Make a watch. It is able to where an aborted batch can be computed again; else each of its sequences would be
        read from its last checkpoint.
        """
        self._context = context
        self._running: _Running | None = None
        self._lock = threading.Lock()
        """Held while a batch is aborted, and while it ends: an abort is never meant for the batch after it."""
        self._is_aborted = False
        self._called = threading.Event()
        """The watching thread must look again before its interval is over."""
        self._is_over = False
        self._interval_sec: float | None = None
        """How long the watching thread waits until it looks again; None: until a batch runs."""
        self._aborted_ms = -PAUSE_MS
        self._is_able = is_able

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at batches for the block, where the system counts how long threads wait for cores."""
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
        """A batch goes to llama.cpp, with so many threads. One thread alone waits for no other: it is not watched.

        `expected_ms` is 0 where nothing is known yet: the first batch beside busy programs is examined as soon as any.
        """
        if threads > 1:
            self._running = _Running(began_ms, expected_ms)
            if self._interval_sec is None:
                self._called.set()

    def end(self) -> bool:
        """The batch has come back; whether it was aborted. It can be whole all the same, where the abort came too late;
        the context must `resume` in either case.
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
            # Clear, and rest, before reading what was begun: what begins between calls, so that no batch is missed.
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
    """Whether the threads of this process waited for other programs on this machine between two counts.

    Not where the host took time from a core: what runs there waits with it, and with fewer threads it would as well.
    """
    return now.stolen_ms <= before.stolen_ms and now.since(before, 1).cpu_fraction < STARVED_SHARE
