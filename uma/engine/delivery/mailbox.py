"""Way from the decode thread to the Trio thread: batches of events, and functions to call, with one wakeup (`bell`).

Not `TrioToken.run_sync_soon`: it releases the GIL while it writes to a socket, and the decode thread waits for it. The
bell is rung with the GIL held: the Trio thread gets it when `llama_decode` begins, and works during the batch.
"""

from __future__ import annotations

import heapq
import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import trio

from uma.engine.clock import now_ms
from uma.engine.delivery.bell import Bell
from uma.engine.delivery.outbox import Delivery
from uma.engine.delivery.stream import RequestStream
from uma.engine.recorder import TRIO, Recorder
from uma.errors import InternalError
from uma.net.link import turn

T = TypeVar("T")

_log = logging.getLogger("uma.engine")


class Mailbox:
    """Events and functions for the Trio thread. `post` and `call` belong to the decode thread, all else to Trio's."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        """Gets a span of each delivery, if there is one."""
        self._mail: deque[tuple[list[Delivery], threading.Event | None] | Callable[[], object]] = deque()
        self._bell = Bell()
        self._early: dict[float, list[RequestStream]] = {}
        """Streams that keep an event for a later time, by that time: with one pace for all, many share a time."""
        self._times: list[float] = []
        """Times in `_early`, as a heap."""
        self._looks_ms = math.inf
        """Latest time at which the Trio thread looks into the mailbox; infinite: when it is rung."""
        self._is_closed = False

    def post(self, deliveries: list[Delivery], taken: threading.Event | None) -> None:
        """Have events delivered soon; `taken` is set when they are, and their readers have had a turn.

        Events due after others that wait do not wake the Trio thread. No wakeup is lost: Trio's thread sets `_looks_ms`
        before it checks the mail a last time and sleeps (`run`), and mail is added here before `_looks_ms` is read.
        """
        self._mail.append((deliveries, taken))
        self._wake(min(not_before_ms for *_, not_before_ms in deliveries) if taken is None else 0.0)

    def call(self, function: Callable[[], object]) -> None:
        """Have a function called soon, behind all mail posted before. An exception in it ends the engine.

        After the decode thread has ended, the Trio thread can use it too.
        """
        self._mail.append(function)
        self._wake(0.0)

    def _wake(self, due_ms: float) -> None:
        if self._is_closed:
            self._empty_at_once()
        elif due_ms < self._looks_ms:
            self._looks_ms = due_ms
            self._bell.ring()

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Deliver what is posted, until cancelled."""
        sending = turn()
        while True:
            began = now_ms()
            with sending:
                waiting = self.empty()
                self._release(now_ms())
            if self.recorder is not None:
                self.recorder.span(TRIO, "deliver", began, now_ms())
            if waiting:
                # First the woken tasks have their turns, and write their frames.
                await trio.lowlevel.checkpoint()
                await trio.lowlevel.checkpoint()
                for taken in waiting:
                    taken.set()
            self._looks_ms = looks_ms = self._times[0] if self._times else math.inf
            if self._mail:
                await trio.lowlevel.checkpoint()
            else:
                await self._bell.wait(looks_ms)

    def empty(self) -> list[threading.Event]:
        """Deliver all mail; returns the events to set for it. An exception in one stream ends only that stream."""
        waiting = []
        while self._mail:
            mail = self._mail.popleft()
            if not isinstance(mail, tuple):
                mail()
                continue
            deliveries, taken = mail
            now = now_ms()
            for stream, event, not_before_ms in deliveries:
                try:
                    if stream.take(event, not_before_ms, now):
                        if not_before_ms in self._early:
                            self._early[not_before_ms].append(stream)
                        else:
                            self._early[not_before_ms] = [stream]
                            heapq.heappush(self._times, not_before_ms)
                except Exception as fault:  # noqa: BLE001  (whatever it is, it is this stream's alone)
                    _fail(stream, fault)
            if taken is not None:
                waiting.append(taken)
        return waiting

    def _release(self, until_ms: float) -> None:
        while self._times and self._times[0] <= until_ms:
            for stream in self._early.pop(heapq.heappop(self._times)):
                try:
                    stream.release(until_ms)
                except Exception as fault:  # noqa: BLE001  (whatever it is, it is this stream's alone)
                    _fail(stream, fault)

    def close(self) -> None:
        """Deliver everything now, and from now on at once. No other thread posts any more, and `run` has ended."""
        self._is_closed = True
        self._empty_at_once()
        self._bell.close()

    def _empty_at_once(self) -> None:
        self.empty()
        self._release(math.inf)


class Reply(Generic[T]):
    """An answer of the decode thread that tasks wait for."""

    def __init__(self, mailbox: Mailbox, value: T) -> None:
        """`value` is the answer until there is one."""
        self.value = value
        self.is_given = trio.Event()
        self._mailbox = mailbox

    def give(self, value: T) -> None:
        """Give the answer, on the decode thread."""
        self.value = value
        self._mailbox.call(self.is_given.set)

    async def wait(self) -> T:
        """The answer, once it is there."""
        await self.is_given.wait()
        return self.value


def _fail(stream: RequestStream, fault: Exception) -> None:
    _log.error("a stream failed: a fault while an event was delivered", exc_info=fault)
    stream.fail(InternalError(f"a fault ended this stream ({type(fault).__name__}: {fault})"))
