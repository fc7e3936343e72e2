"""Accepting connections, for as long as it takes and whatever the system has run out of."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

import trio

NO_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
RETRY_ACCEPT_SEC = 0.1


async def accept_forever(
    listener: socket.socket, admit: Callable[[socket.socket], None], note: Callable[[OSError], None]
) -> None:
    """Hand each connection to `admit`, until cancelled. `note` is called when no file descriptors are left: connections
    in the backlog then wait until another one ends. Raises `OSError` where the listener itself is broken."""
    while True:
        await trio.lowlevel.wait_readable(listener.fileno())
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            continue
        except OSError as error:
            if error.errno not in NO_RESOURCES:
                raise
            note(error)
            await trio.sleep(RETRY_ACCEPT_SEC)
            continue
        admit(sock)
