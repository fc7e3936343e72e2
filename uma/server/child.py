"""The process of one model among several: a server whose one session is the socket on its standard input.

It ends with the supervisor: when that is killed, at once.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
from functools import partial
from pathlib import Path
from threading import Thread

import trio

from uma.config import RuntimeConfig
from uma.errors import ModelUnusable, UmaError
from uma.server.main import end_with, run_server
from uma.server.server import SilentServer
from uma.types import LoadProgress


def main() -> None:
    """The process, from its first line to its last."""
    sock, watched = socket.socket(fileno=os.dup(0)), os.dup(0)
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)  # what this process starts must not hold the socket open
    _end_with_peer(watched)
    config = RuntimeConfig(**json.loads(sys.argv[1]))
    sys.exit(end_with(run_server(config, make_server=partial(_OneSession, sock), log_fields={"model": sys.argv[2]})))


class _OneSession(SilentServer):
    """A server of one session, which it begins with."""

    def __init__(self, sock: socket.socket, progress: LoadProgress, config: RuntimeConfig) -> None:
        super().__init__(progress, config)
        self._sock = sock
        self.is_child = True
        self.max_session_requests = sys.maxsize  # it is the session of all clients, whose bounds are the parent's

    def farewell_of(self, error: UmaError) -> UmaError:
        """The supervisor is told why, as its clients are."""
        return ModelUnusable(error.message)

    def _begin(self, nursery: trio.Nursery) -> None:
        super()._begin(nursery)
        self._admit(nursery, self._sock)


def _end_with_peer(fd: int) -> None:
    """End this process when the other end of this socket is closed, whatever runs here: for systems without the signal
    of `posix.end_with_parent`, and for a parent that had ended before that was asked for.
    """
    Thread(target=_watch, args=(fd,), name="uma-parent", daemon=True).start()


def _watch(fd: int) -> None:
    if sys.platform == "win32":
        return
    watch = select.poll()
    watch.register(fd, 0)  # a hang-up is told unasked
    watch.poll()
    os._exit(1)
