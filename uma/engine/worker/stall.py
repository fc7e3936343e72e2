"""Breaks off a batch that other programs have brought to a standstill.

llama.cpp's compute threads meet at hundreds of barriers for each token. Where other programs suddenly want the cores, a
batch that began with all threads can take a hundred times as long as it should, and the number of threads can change
between two batches only. So a thread of its own looks at the batch that runs, some times a second while there is work,
and has llama.cpp abort one that takes far too long because its threads wait for cores. It is computed again at once,
with the threads for which there are cores then.

Just after a rest in which others used the cores, and while something else is still runnable, there is a reason to look
sooner: such a batch is aborted as soon as its threads are seen to wait.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from uma.engine.clock import now_ms
from uma.engine.worker.schedstat import PROC, CpuTime, runnable_threads
from uma.llama.context import Context

LEAST_MS = 100.0
"""Minimum duration of a batch to be aborted: the gain on a shorter one would not be seen."""
LOOK_SEC = LEAST_MS / 1000
"""Interval between two looks for a batch that takes long: a look takes time from the core that it wakes on."""
LOOK_AGAIN_SEC = LOOK_SEC / 2
"""Interval before the next look at a batch that has taken as long as that already."""
TOO_LONG = 2.0
"""Duration of a batch, as a multiple of its prediction, from which on it is examined."""
CLOSE_MS = 20.0
"""Minimum duration of a batch to be aborted where others are suspected to want the cores, and the interval between two
looks at it: some time slices of the scheduler, which counts a wait when it is over."""
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
    threads: int
    since: CpuTime | None
    """Where others are suspected to want the cores: the counters at the end of the rest before it."""

    @property
    def takes_too_long(self) -> bool:
        """Whether that is so by now, whatever the reason."""
        return now_ms() - self.began_ms > max(LEAST_MS, TOO_LONG * self.expected_ms)


class StallWatch:
    """Watches the batches of one context. `begin` and `end` belong to the decode thread."""

    def __init__(self, context: Context, *, proc: Path = PROC) -> None:
        self._context = context
        self._proc = proc
        self._running: _Running | None = None
        self._lock = threading.Lock()
        """Held while a batch is aborted, and while it ends: an abort is never meant for the batch after it."""
        self._is_aborted = False
        self._called = threading.Event()
        """The watching thread is to look again before its interval is over."""
        self._is_over = False
        self._interval_sec: float | None = LOOK_SEC
        """How long the watching thread waits until it looks again; None: until a batch runs."""
        self._aborted_ms = -PAUSE_MS
        # A recurrent state cannot be put back to what it was before the batch; the text would be read from its start.
        self._is_able = not context.model.has_states

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at batches for the block, where the system tells of threads that wait for cores."""
        if not self._is_able or CpuTime.take(self._proc) is None:
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

    def begin(self, began_ms: float, expected_ms: float, threads: int, since: CpuTime | None = None) -> None:
        """A batch goes to llama.cpp, with so many threads. One thread alone waits for no other: it is not watched.

        `since` are the counters of a moment behind which others are suspected to want the cores.
        """
        if threads > 1:
            self._running = _Running(began_ms, expected_ms, threads, since)
            interval_sec = self._interval_sec
            if interval_sec is None or (since is not None and interval_sec > CLOSE_MS / 1000):
                self._called.set()

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
        while True:
            self._called.wait(self._interval_sec)
            if self._interval_sec is None:
                idle_looks = 0
            # Clear before reading what was begun: a call that comes between the two costs one look, and none is lost.
            self._called.clear()
            if self._is_over:
                return
            running = self._running
            idle_looks = 0 if running else idle_looks + 1
            self._interval_sec = None if idle_looks > REST_LOOKS else _interval_sec(running)
            if self._interval_sec is None and self._running is not None:  # it began before it could see the rest
                self._interval_sec = LOOK_SEC
            if running is None or not self._is_examined(running):
                suspect = None
            elif (now := CpuTime.take(self._proc)) is not None:
                if (running is suspect and is_starved(before, now)) or self._is_taken(running, now):
                    self._abort(running)
                suspect, before = running if running.takes_too_long else None, now

    def _abort(self, running: _Running) -> None:
        with self._lock:
            if self._running is running:
                self._is_aborted = True
                self._aborted_ms = now_ms()
                self._context.request_retry()

    def _is_taken(self, running: _Running, now: CpuTime) -> bool:
        """Whether others are suspected, took cores from this batch and want them still.

        Two threads of ours on one core wait as well, until the scheduler moves one: then another core was idle.
        """
        since = running.since
        if since is None or not is_starved(since, now) or now.idle > since.idle:
            return False
        return runnable_threads(self._proc) > running.threads + 1  # the thread that looks is runnable too

    def _is_examined(self, running: _Running) -> bool:
        is_close = running.since is not None and now_ms() - running.began_ms >= CLOSE_MS
        return (is_close or running.takes_too_long) and now_ms() - self._aborted_ms > PAUSE_MS


def _interval_sec(running: _Running | None) -> float:
    """How long from one look, which saw this batch, to the next."""
    if running is None:
        return LOOK_SEC
    took_ms = now_ms() - running.began_ms
    if running.since is not None:
        return max(CLOSE_MS - took_ms if took_ms < CLOSE_MS else CLOSE_MS, 1.0) / 1000
    return LOOK_AGAIN_SEC if took_ms > LOOK_AGAIN_SEC * 1000 else LOOK_SEC


def is_starved(before: CpuTime, now: CpuTime) -> bool:
    """Whether the threads of this process waited for other programs on this machine between two counts.

    Not where the host took time from a core: what runs there waits with it, and with fewer threads it would as well.
    """
    running_ms, waiting_ms = now.running - before.running, now.waiting - before.waiting
    return now.stolen <= before.stolen and running_ms < STARVED_SHARE * (running_ms + waiting_ms)
