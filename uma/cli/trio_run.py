"""Trio under a command: what signals mean, and one error out of the groups that nurseries make.

Ctrl-C cancels whatever the command says it should at that moment, and else the whole command. SIGTERM, where the
command does not say otherwise, and a terminal that goes away cancel the whole command, so that it frees all it holds.
Pressing Ctrl-C again ends it at once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import attrs
import trio

from uma import posix
from uma.cli import TERMINAL_GONE
from uma.cli.say import ERASE_LINE
from uma.cli.terminal import modes_of, set_modes
from uma.errors import sole_error

GRACE_SEC = 1.0
"""Maximum time in which work that was asked to stop can say how it ended."""
ENDING = posix.signals("SIGINT", "SIGTERM", "SIGHUP")


@attrs.define(eq=False)
class Stop:
    """How one piece of work is stopped: by asking politely first, and by cancelling it where that takes too long.

    The second call cancels at once; a third can end the process.
    """

    politely: Callable[[], None] | None = None
    """Makes the work end by itself soon; None: there is no such way."""
    grace_sec: float = GRACE_SEC
    """How long it can take to end by itself."""
    signals: Collection[int] = (signal.SIGINT,)
    """Signals that stop it and not the whole command."""
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    n_calls: int = 0
    stopped_by: int | None = None
    """The signal that it was stopped by first."""

    def __call__(self, number: int) -> None:
        self.n_calls += 1
        self.stopped_by = self.stopped_by or number
        if self.politely is None or self.n_calls > 1:
            self.scope.cancel()
        else:
            self.politely()
            self.scope.deadline = trio.current_time() + self.grace_sec

    @property
    def is_in_vain(self) -> bool:
        """Whether cancelling has not helped: a thread can be inside a computation that nothing interrupts."""
        return self.n_calls >= 3


@attrs.define(eq=False)
class Interrupts:
    """What Ctrl-C stops right now."""

    _everything: Stop
    _terminal: list[Any] | None
    """How standard input's terminal took what is typed when the command began; None where it was none."""
    _innermost: Stop | None = None
    _is_abrupt: bool = False

    @contextmanager
    def stopping(
        self,
        politely: Callable[[], None] | None = None,
        *,
        grace_sec: float = GRACE_SEC,
        signals: Collection[int] = (signal.SIGINT,),
    ) -> Iterator[Stop]:
        """A block that Ctrl-C, or another of these `signals`, stops instead of the whole command; it goes on after the
        block.
        """
        before, self._innermost = self._innermost, Stop(politely, grace_sec, signals)
        try:
            with self._innermost.scope:
                yield self._innermost
        finally:
            self._innermost = before

    @contextmanager
    def abruptly(self) -> Iterator[None]:
        """The block in which a model is loaded: any signal that stops nothing smaller ends the process at once, since
        what it holds need not be freed.
        """
        self._is_abrupt = True
        try:
            yield
        finally:
            self._is_abrupt = False

    def take(self, number: int) -> None:
        """Act on a signal."""
        is_inner = self._innermost is not None and number in self._innermost.signals
        stop = self._innermost if self._innermost is not None and is_inner else self._everything
        is_loading = self._is_abrupt and stop is self._everything
        if stop.is_in_vain or is_loading:
            bar = ERASE_LINE if os.isatty(2) else ""
            self._leave_now(number, f"{bar}uma: stopped while the model was loading\n" if is_loading else "")
        stop(number)

    def _leave_now(self, number: int, words: str) -> NoReturn:
        """End without waiting for threads. `words` come last: the thread that loads can write a line of its own."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        set_modes(0, self._terminal)
        with suppress(OSError):  # not by `sys.stderr`, which can be in the middle of a line
            os.write(2, words.encode())
        os._exit(128 + number)


def run(work: Callable[[Interrupts], Awaitable[int]]) -> int:
    """Run `work` to its end under Trio; its exit code, or 128 + the signal that ended it.

    Of an exception group, the first error is raised.
    """
    try:
        return trio.run(_supervised, work)
    except BaseExceptionGroup as group:
        # Tasks that were cancelled because of the first have nothing to add.
        sole = sole_error(group, or_first=True)
    raise sole


async def _supervised(work: Callable[[Interrupts], Awaitable[int]]) -> int:
    # A signal that our parent chose to ignore (nohup, a background job of a plain shell) stays ignored.
    heeded = [ending for ending in ENDING if signal.getsignal(ending) is not signal.SIG_IGN]
    code = 0
    with trio.open_signal_receiver(*heeded) as arrivals:
        async with trio.open_nursery() as nursery:
            everything, terminal = Stop(), modes_of(0)
            interrupts = Interrupts(everything, terminal)

            async def listen() -> None:
                async for number in arrivals:
                    interrupts.take(number)

            nursery.start_soon(listen)
            with everything.scope:
                code = await work(interrupts)
            nursery.cancel_scope.cancel()
    if everything.stopped_by is None and terminal is not None and modes_of(0) is None:
        return TERMINAL_GONE  # its SIGHUP can come later than the end of what is read
    return code if everything.stopped_by is None else 128 + everything.stopped_by
