"""`uma stop`: end the server that listens on a socket, and wait until it is gone.

The process is the one that the kernel names as the socket's listener, and it must answer as a UMA server, or with
`--now` have been started as one. It is held by a handle (a pidfd) while it still answers, or is connected, so the
signal cannot reach another process that got its number later.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import attrs
import trio

from uma import posix
from uma.cli import say, words
from uma.cli.listening import is_server
from uma.cli.options import load_settings
from uma.cli.source import advising
from uma.cli.table import print_wrapped
from uma.cli.trio_run import Interrupts, run
from uma.client import Client, dialled
from uma.errors import ShuttingDown, TooManySessions, UmaError

STOPS = "was stopping"
AGAIN_SEC = 0.5
"""Time between the signals of `--now`: one lets requests finish, a further one ends the server at once. Without it, the
time after which the command says what it waits for."""
SILENT_SEC = 2.0
"""Wait of `--now` for an answer, after which the process that listens is ended without one."""
KILL_SEC = 2.5
"""Time of `--now` from the first signal to SIGKILL. A server ends within a second of the second signal."""
ANSWER_SEC = 10.0
"""Wait for an answer without `--now`."""
LOOK_SEC = 0.05
"""Interval of looking whether a process is gone, where processes have no handles (macOS)."""


class StopError(UmaError):
    """A server cannot be stopped from here. Says why and what to do."""

    code = "E_STOP"


@attrs.frozen
class Process:
    """A process that stays the same one, whatever becomes of its number."""

    pid: int
    _handle: int | None
    """A pidfd; None where the system has none."""

    @classmethod
    @contextmanager
    def held(cls, pid: int) -> Iterator[Process]:
        """The process that has this number now."""
        handle = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
        try:
            yield cls(pid, handle)
        finally:
            if handle is not None:
                os.close(handle)

    def signal(self, number: int) -> None:
        """Send a signal; nothing happens where the process is gone. Raises `StopError` where that is not permitted."""
        try:
            if sys.platform == "linux" and self._handle is not None:
                signal.pidfd_send_signal(self._handle, number)
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            pass
        except PermissionError:
            raise StopError(f"process {self.pid} belongs to another user: only that user can stop it") from None

    async def gone(self) -> None:
        """Wait until it has ended."""
        if self._handle is not None:
            await trio.lowlevel.wait_readable(self._handle)
            return
        while _exists(self.pid):  # noqa: ASYNC110  (there is nothing to wait on)
            await trio.sleep(LOOK_SEC)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    path = load_settings(options).config.socket
    return run(partial(_stop, path, options.now))


async def _stop(path: str, is_now: bool, _: Interrupts) -> int:
    with trio.move_on_after(SILENT_SEC) as patience, advising(path):
        async with dialled(path) as client:
            patience.deadline = math.inf
            pid = _pid(path, client)
            with Process.held(pid) as process:
                # An answer from here on proves that the handle is the server's: it had not ended when it was opened.
                found = await _found(path, client, is_now=is_now)
                if found != STOPS:  # a further signal would end what runs
                    process.signal(signal.SIGTERM)
                await _wait(process, is_now=is_now)
        print_wrapped(f"stopped process {pid}, which {found} on {path}")
        return 0
    raise StopError(
        f"{path}: timeout: too many sessions wait already, so the process that listens is not known; `ss -xlp` shows "
        "it, and `kill -9` ends it"
    )


async def _found(path: str, client: Client, *, is_now: bool) -> str:
    """What the server does, in words. Raises `StopError` where it does not answer, unless `is_now` and the process was
    started as a server: it hangs, or has `--protocol newline`.
    """
    with trio.move_on_after(SILENT_SEC if is_now else ANSWER_SEC):
        try:
            return "was loading its model" if (await client.health(probe=False)).status == "loading" else "served"
        except TooManySessions:
            return "served"
        except ShuttingDown:
            return STOPS
    if not is_now:
        raise StopError(words.hangs(path, ANSWER_SEC))
    if not is_server(pid := _pid(path, client)):
        raise StopError(f"{path}: process {pid}, which listens there, is no UMA server; `kill {pid}` ends it")
    return "did not answer"


def _pid(path: str, client: Client) -> int:
    """The server's process. Raises `StopError` for one that cannot be stopped from here."""
    if client.server_pid is None:
        raise StopError(f"{path}: the server runs in another container; stop it there")
    if client.server_pid == os.getpid():
        raise StopError(f"{path}: this very process listens there")
    return client.server_pid


async def _wait(process: Process, *, is_now: bool) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_insist if is_now else _explain, process)
        await process.gone()
        nursery.cancel_scope.cancel()


async def _insist(process: Process) -> None:
    with trio.move_on_after(KILL_SEC):
        while True:
            await trio.sleep(AGAIN_SEC)
            process.signal(signal.SIGTERM)
    for kill in posix.signals("SIGKILL"):  # it hangs, or was stopped (SIGSTOP)
        process.signal(kill)


async def _explain(process: Process) -> None:
    await trio.sleep(AGAIN_SEC)
    say.note(f"process {process.pid} lets running requests finish; `uma stop --now` does not wait for them")
