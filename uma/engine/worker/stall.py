"""Breaks off a batch that other programs have brought to a standstill.

llama.cpp's compute threads meet at hundreds of barriers for each token. Where other programs suddenly want the cores, a
batch that began with all threads can take a hundred times as long as it should, and the number of threads can change
between two batches only. So a thread of its own looks at the batch that runs, some times a second while there is work,
and has llama.cpp abort one that takes far too long because its threads wait for cores. It is computed again at once,
with the threads for which there are cores then.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from uma.engine.clock import now_ms
from uma.engine.worker.schedstat import PROC, Unused, scheduled_ms
from uma.llama import backend
from uma.llama.context import Context

LEAST_MS = 100.0
"""Minimum duration of a batch to be aborted: the gain on a shorter one would not be seen."""
LOOK_SEC = LEAST_MS / 1000
"""Interval between two looks for a batch that takes long: a look takes time from the core that it wakes on."""
LOOK_AGAIN_SEC = LOOK_SEC / 2
"""Interval before the next look at a batch that has taken as long as that already."""
TOO_LONG = 2.0
"""Duration of a batch, as a multiple of its prediction, from which on it is examined."""
STARVED_SHARE = 0.8
"""Share of the time they want to run below which compute threads count as waiting for cores."""
REST_LOOKS = 10
"""Looks without a batch after which the thread rests until one runs."""
PAUSE_MS = 2_000.0
"""Minimum time between two aborted batches: where fewer threads do not help, a third try gains nothing."""


class _Running(NamedTuple):
    """A batch that is computed now."""

    began_ms: float
    expected_ms: float


class StallWatch:
    """Watches the batches of one context. `begin` and `end` belong to the decode thread."""

    def __init__(self, context: Context, *, proc: Path = PROC) -> None:
        self._context = context
        self._proc = proc
        self._running: _Running | None = None
        self._lock = threading.Lock()
        """Held while a batch is aborted, and while it ends: an abort is never meant for the batch after it."""
        self._is_aborted = False
        self._has_work = threading.Event()
        self._over = threading.Event()
        self._aborted_ms = -PAUSE_MS
        # A recurrent state cannot be put back to what it was before the batch; the text would be read from its start.
        self._is_able = context.model.memory in ("attention", "sliding-window")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at batches for the block, where the system tells of threads that wait for cores."""
        if not self._is_able or scheduled_ms(self._proc) is None:
            yield
            return
        thread = threading.Thread(target=self._look_until_over, name="uma-stall-watch")
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._has_work.set()
            thread.join()

    def begin(self, began_ms: float, expected_ms: float, threads: int) -> None:
        """A batch goes to llama.cpp, with so many threads. One thread alone waits for no other: it is not watched."""
        if threads > 1:
            self._running = _Running(began_ms, expected_ms)
            if not self._has_work.is_set():
                self._has_work.set()

    def end(self) -> bool:
        """The batch has come back; whether it was to be aborted. Perhaps that came too late: then it is whole, and the
        context must be told to `resume` all the same.
        """
        with self._lock:
            self._running, is_aborted, self._is_aborted = None, self._is_aborted, False
        return is_aborted

    # The watching thread

    def _look_until_over(self) -> None:
        suspect: _Running | None = None
        before = CpuTime(0.0, 0.0, 0.0)
        idle_looks = 0
        interval_sec = LOOK_SEC
        while not self._over.wait(interval_sec):
            running = self._running
            is_long = running is not None and now_ms() - running.began_ms > LOOK_AGAIN_SEC * 1000
            interval_sec = LOOK_AGAIN_SEC if is_long else LOOK_SEC
            idle_looks = 0 if running else idle_looks + 1
            if idle_looks > REST_LOOKS:
                idle_looks = 0
                self._has_work.clear()
                if self._running is None and not self._over.is_set():
                    self._has_work.wait()
            if running is None or not self._takes_too_long(running):
                suspect = None
            elif (now := CpuTime.take(self._proc)) is not None:
                if running is suspect and is_starved(before, now):
                    self._abort(running)
                suspect, before = running, now

    def _abort(self, running: _Running) -> None:
        with self._lock:
            if self._running is running:
                self._is_aborted = True
                self._aborted_ms = now_ms()
                self._context.request_retry()

    def _takes_too_long(self, running: _Running) -> bool:
        now = now_ms()
        took_ms = now - running.began_ms
        return took_ms > max(LEAST_MS, TOO_LONG * running.expected_ms) and now - self._aborted_ms > PAUSE_MS


class CpuTime(NamedTuple):
    """Counters of the kernel, in milliseconds since an arbitrary start."""

    running: float
    """Time of this process's threads on a core."""
    waiting: float
    """Time for which they were runnable without one."""
    stolen: float
    """Time that the host of a virtual machine took from the cores."""

    @classmethod
    def take(cls, proc: Path) -> CpuTime | None:
        """The counters of now; None where the system does not have them."""
        scheduled = scheduled_ms(proc)
        unused = Unused.take(proc / "stat", backend.affinity())
        return scheduled and cls(*scheduled, unused.stolen_ms if unused else 0.0)


def is_starved(before: CpuTime, now: CpuTime) -> bool:
    """Whether the threads of this process waited for other programs on this machine between two counts.

    Not where the host took time from a core: what runs there waits with it, and with fewer threads it would as well.
    """
    running_ms, waiting_ms = now.running - before.running, now.waiting - before.waiting
    return now.stolen <= before.stolen and running_ms < STARVED_SHARE * (running_ms + waiting_ms)
