"""Trio under a command: what signals mean, and one error out of the groups that nurseries make.

Ctrl-C cancels whatever the command says it should at that moment, and else the whole command. SIGTERM and a terminal
that goes away always cancel the whole command, so that everything it holds is given back. Whoever cannot wait for
that presses Ctrl-C once more.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import attrs
import trio

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@attrs.define(eq=False)
class Interrupts:
    """What Ctrl-C stops right now."""

    _everything: trio.CancelScope
    _innermost: trio.CancelScope | None = None
    stopped_by: int | None = None
    """The signal that ended the whole command."""

    @contextmanager
    def stops(self, scope: trio.CancelScope) -> Iterator[None]:
        """Within this block Ctrl-C cancels `scope` alone."""
        before, self._innermost = self._innermost, scope
        try:
            yield
        finally:
            self._innermost = before

    def take(self, number: int) -> None:
        """Act on a signal. A Ctrl-C that finds its scope cancelled already ends the process at once."""
        if number == signal.SIGINT and self._innermost is not None and not self._innermost.cancel_called:
            self._innermost.cancel()
        elif number == signal.SIGINT and self._everything.cancel_called:
            _leave_now(number)
        else:
            self.stopped_by = number
            self._everything.cancel()


def run(work: Callable[[Interrupts], Awaitable[int]]) -> int:
    """Run `work` to its end under Trio; its exit code, or 128 + the signal that ended it.

    An exception group of one error is raised as that error.
    """
    try:
        return trio.run(_supervised, work)
    except BaseExceptionGroup as group:
        sole = sole_error(group)
    raise sole


async def _supervised(work: Callable[[Interrupts], Awaitable[int]]) -> int:
    # A signal that our parent chose to ignore (nohup, a background job of a plain shell) stays ignored.
    heeded = [each for each in ENDING if signal.getsignal(each) is not signal.SIG_IGN]
    code = 0
    with trio.open_signal_receiver(*heeded) as arrivals:
        async with trio.open_nursery() as nursery:
            interrupts = Interrupts(nursery.cancel_scope)

            async def listen() -> None:
                async for number in arrivals:
                    interrupts.take(number)

            nursery.start_soon(listen)
            code = await work(interrupts)
            nursery.cancel_scope.cancel()
    return code if interrupts.stopped_by is None else 128 + interrupts.stopped_by


def sole_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group, at any depth: tasks that were cancelled because of it have nothing to add."""
    first = group.exceptions[0]
    return sole_error(first) if isinstance(first, BaseExceptionGroup) else first


def _leave_now(number: int) -> NoReturn:
    """End without waiting: a thread may be inside a long computation that nothing can interrupt."""
    os._exit(128 + number)
