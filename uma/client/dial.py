"""Dialling: from a path to a session. Dial, say hello, and clean up whatever way the block is left."""

from __future__ import annotations

import errno
import os
import shlex
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from uma import posix
from uma.client.client import Client, run_command
from uma.errors import ConnectionLost, Loading, sole_error
from uma.net.link import Link
from uma.net.place import objection
from uma.net.trio_only import require_trio
from uma.protocol.session import ClientSession
from uma.types import LoadState
from uma.version import __version__

HELLO_TIMEOUT_SEC = 10.0
"""A server answers hello without computing anything, and says every second that it is loading its model, so silence
means that something else listens there."""
MAX_UNSENT_BYTES = 4_194_304
"""Requests the server has not read yet; `generate` waits beyond it."""


@asynccontextmanager
async def connect(
    path: str | Path,
    *,
    client: str = f"uma/{__version__}",
    model: str | None = None,
    loads: bool = True,
    waits: bool = True,
    on_loading: Callable[[LoadState], None] = lambda _: None,
) -> AsyncIterator[Client]:
    """Open a session with the server on the Unix socket `path`. Leaving the block ends it and cancels its requests.

    `client` is the client's name in the server's log. `model` is the model for requests that name none; None is the
    default of a server with several models. A server with one other model answers with that one. With `loads=False` the
    session opens before a server of several models has loaded one; `Client.info` can then have only their names.

    `connect` waits while the server loads its model, and calls `on_loading` about once a second with the progress of
    the load. With `waits=False` it raises `Loading` instead.

    Raises `ConnectionLost` if no server answers (the message says how to start one), and also if `path` is in the
    default directory and another user could be listening there. Raises the server's error if it refuses the session
    (`TooManySessions`, `VersionMismatch`; `ShuttingDown` if its model cannot be loaded).
    """
    async with dialled(path, client=client) as session:
        session.say_hello(model, loads=loads)
        while (load := await _answer_to_hello(session, path)) is not None:
            if not waits:
                raise Loading(f"{path}: the model is still being loaded ({load.step}); try again", retry_after_ms=1000)
            on_loading(load)
        yield session


@asynccontextmanager
async def connect_child(sock: socket.socket, name: str, tell: Callable[[LoadState], None]) -> AsyncIterator[Client]:
    """Connect, as `connect` does, to a server of ours at the other end of `sock`, which is closed with the block.

    However long it says nothing, it is waited for. Requests of several clients, and so of equal ids, can use the
    session: the server is told whose each of them is (`net.client.CLIENT`).
    """
    link = _link(sock)
    async with _running(Client(name, link, ClientSession(client=f"uma/{__version__}"), is_shared=True)) as session:
        session.say_hello()
        while (load := await session.answer_to_hello()) is not None:
            tell(load)
        yield session


async def _answer_to_hello(session: Client, path: str | Path) -> LoadState | None:
    with trio.move_on_after(HELLO_TIMEOUT_SEC):
        return await session.answer_to_hello()
    # The time is over, but a process that had no turn meanwhile has not looked yet.
    await trio.lowlevel.checkpoint()
    if session.is_greeted:
        return await session.answer_to_hello()
    pid = session.server_pid
    ends = "Ctrl-C" if pid is None else f"`uma stop --now --socket {shlex.quote(str(path))}` or `kill -9 {pid}`"
    raise ConnectionLost(
        f"{path}: timeout: no answer within {HELLO_TIMEOUT_SEC:g} s; what listens there hangs, is no UMA server, or is "
        f"one with `--protocol newline`: {ends} ends that"
    )


@asynccontextmanager
async def dialled(path: str | Path, *, client: str = f"uma/{__version__}") -> AsyncIterator[Client]:
    """Connect without the hello: a plain session, whose one question can be the `health` of a loading server."""
    require_trio("connect")
    if (problem := objection(Path(path))) is not None:
        raise ConnectionLost(problem)
    sock = await _dial(Path(path))
    async with _running(Client(str(path), _link(sock), ClientSession(client=client))) as session:
        yield session


def _link(sock: socket.socket) -> Link:
    # A server can be busy for any time: a caller that has waited long enough can cancel.
    return Link(sock, MAX_UNSENT_BYTES, stall_timeout_sec=float("inf"))


@asynccontextmanager
async def _running(session: Client) -> AsyncIterator[Client]:
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.write)
            nursery.start_soon(session.read)
            yield session
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        # The tasks beside the block never raise, so this is the block's own; if that was a group, so it stays.
        sole = sole_error(group, levels=1)
    else:
        return
    finally:
        session.close()
    raise sole


async def _dial(path: Path) -> socket.socket:
    try:
        sock = posix.unix_socket()
    except OSError as error:
        raise ConnectionLost(f"{path}: {_why(error, path)}") from error
    try:
        sock.setblocking(False)
        while True:
            try:
                sock.connect(os.fspath(path))
            except BlockingIOError:  # a Unix socket's backlog is full: there is nothing to wait on but time
                await trio.sleep(0.01)
            else:
                return sock
    except OSError as error:
        sock.close()
        raise ConnectionLost(f"{path}: {_why(error, path)}") from error
    except trio.Cancelled:
        sock.close()
        raise


def _why(error: OSError, path: Path) -> str:
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED, errno.ENOTSOCK):
        return f"no server listens there; start one with `{run_command(str(path))}`"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "not permitted: the server belongs to another user, or its --socket-mode keeps you out"
    return str(error.strerror or error)
