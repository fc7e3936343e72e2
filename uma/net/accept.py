"""Accept loop of a listener, which survives a process without free file descriptors."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

import trio

with suppress(ImportError):  # Windows
    import resource

NO_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
RETRY_ACCEPT_SEC = 0.1
ACCEPTS_AT_ONCE = 32
"""Maximum number of connections that are accepted before other tasks run. With one, a client that connects beside many
others waits as many passes of the loop, which took 15 s beside 80 large bodies a second."""
RESERVED_FILES = 32
"""File descriptors that connections leave to the rest of the process: libraries open files on first use, snapshots are
written, child processes are started."""


async def accept_forever(
    listener: socket.socket, admit: Callable[[socket.socket], None], note: Callable[[OSError], None]
) -> None:
    """Hand each new connection to `admit`, until cancelled. When only the reserved file descriptors are left, `note` is
    called once, and further clients wait in the listener's backlog. Raises `OSError` where the listener itself is
    broken.
    """
    is_short = False
    while True:
        await trio.lowlevel.wait_readable(listener.fileno())
        try:
            for _ in range(ACCEPTS_AT_ONCE):
                _check_files(listener)
                sock, _ = listener.accept()
                is_short = False
                admit(sock)
        except (BlockingIOError, ConnectionAbortedError):
            continue
        except OSError as error:
            if error.errno not in NO_RESOURCES:
                raise
            if not is_short:
                note(error)
            is_short = True
            await trio.sleep(RETRY_ACCEPT_SEC)


def _check_files(listener: socket.socket) -> None:
    """Raise `OSError` (EMFILE) where a new connection would take one of the reserved file descriptors."""
    if sys.platform == "win32":
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    spare = os.dup(listener.fileno())  # the kernel gives out the lowest free number
    os.close(spare)
    if spare >= limit - min(RESERVED_FILES, limit // 2):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
