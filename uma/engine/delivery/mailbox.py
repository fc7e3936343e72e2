"""Way from the decode thread to the Trio thread, by one bell (`bell`): events by the batch, and functions to call
there.

Trio's own way, `TrioToken.run_sync_soon`, gives up the GIL while it writes to a socket, and the decode thread waits for
it. This bell is rung with the GIL held: the Trio thread gets it when `llama_decode` begins, and works during the batch.
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
    """`post` and `call` belong to the decode thread, everything else to the Trio thread."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        """Told of each delivery, where there is one."""
        self._mail: deque[tuple[list[Delivery], threading.Event | None] | Callable[[], object]] = deque()
        self._bell = Bell()
        self._early: dict[float, list[RequestStream]] = {}
        """The streams that have to release an event, by time: with one pace for all, one time is that of many."""
        self._times: list[float] = []
        """Their times: a heap."""
        self._looks_ms = math.inf
        """When the Trio thread looks here next, or sooner; infinite: once it is rung."""
        self._is_closed = False

    def post(self, deliveries: list[Delivery], taken: threading.Event | None) -> None:
        """Have events delivered soon; `taken` is set when they are, and their readers have had a turn.

        Events that are due after others that wait are no reason to wake the Trio thread. It says when it looks before
        it looks a last time and sleeps (`run`), and the mail is here before that is read: one of both sees the other.
        """
        self._mail.append((deliveries, taken))
        self._wake(min(not_before_ms for *_, not_before_ms in deliveries) if taken is None else 0.0)

    def call(self, function: Callable[[], object]) -> None:
        """Have a function called soon, behind all that was posted before. A fault in it ends the engine.

        The Trio thread can use it, too: once the decode thread has ended.
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
                # First the tasks that it woke have their turns, and write their frames.
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
        """Deliver what is here; returns the events to be set for it. A fault in one stream ends that stream alone."""
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
        """Give out what is early, once no other thread posts and none runs it: what comes then is given out at once."""
        self._is_closed = True
        self._empty_at_once()
        self._bell.close()

    def _empty_at_once(self) -> None:
        self.empty()
        self._release(math.inf)


class Reply(Generic[T]):
    """One answer of the decode thread to tasks."""

    def __init__(self, mailbox: Mailbox, value: T) -> None:
        """`value` stands until there is an answer."""
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
