"""What every target offers, and how a server process is started and ended without a trace."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Protocol

import attrs
import trio

from benchmarks.samples import Ask, Sample


class Target(Protocol):
    """A running server."""

    @property
    def name(self) -> str:
        """As tables show it: the server, and its configuration."""

    @property
    def pid(self) -> int:
        """The server's process."""

    async def ask(self, ask: Ask, sample: Sample) -> None:
        """Send a request and fill `sample` until its end. A refusal is `sample.fail`, not an exception."""


@attrs.frozen
class Process:
    """A server process and the file that holds what it printed."""

    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.popen.pid

    def tail(self) -> str:
        """The last lines it printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])


def environment() -> dict[str, str]:
    """This process's variables without UMA's: settings of the user's own must not change what is measured."""
    return {name: value for name, value in os.environ.items() if not name.startswith("UMA_")}


class StartError(Exception):
    """A server ended before it answered, or did not answer in time. Quotes its last lines."""


Probe = Callable[[], Awaitable[bool]]

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""With this in its environment the GNU C library asks for huge pages for large memory: for targets that do not."""


@asynccontextmanager
async def server_process(
    command: Sequence[str],
    is_ready: Probe,
    *,
    timeout_s: float = 60,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
) -> AsyncIterator[Process]:
    """Run a server for the block; it is ready when `is_ready` says so, and gone after. Raises `StartError`."""
    with tempfile.NamedTemporaryFile(prefix="uma-bench-", suffix=".log") as log:
        process = Process(_spawn(command, log.file, env, cwd), Path(log.name))
        try:
            await _wait_ready(process, is_ready, timeout_s)
            yield process
        finally:
            with trio.CancelScope(shield=True):
                await _stop(process.popen)


def _spawn(
    command: Sequence[str], log: IO[bytes], env: dict[str, str] | None, cwd: Path | None
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=cwd)


async def _wait_ready(process: Process, is_ready: Probe, timeout_s: float) -> None:
    with trio.move_on_after(timeout_s):
        while process.popen.poll() is None:
            if await is_ready():
                return
            await trio.sleep(0.05)
        raise StartError(f"{process.popen.args!r} ended with {process.popen.returncode}:\n{process.tail()}")
    raise StartError(f"{process.popen.args!r} did not answer within {timeout_s:.0f} s:\n{process.tail()}")


async def _stop(popen: subprocess.Popen[bytes]) -> None:
    popen.terminate()
    with trio.move_on_after(10):
        await trio.to_thread.run_sync(popen.wait, abandon_on_cancel=True)
    if popen.poll() is None:
        popen.kill()
        popen.wait()


def free_port() -> int:
    """A TCP port that is free right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
