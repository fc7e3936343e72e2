"""What tests of HTTP share: the real `uma run --http`, and raw connections to it."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

from harness import PATIENCE_SEC, ServerProcess, running_server


@attrs.frozen
class HttpServer:
    """A real server, and where its HTTP listens."""

    process: ServerProcess
    url: str

    @property
    def port(self) -> int:
        """Its port on 127.0.0.1."""
        return int(self.url.rpartition(":")[2])

    def connect(self) -> socket.socket:
        """A bare connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_SEC)


@contextmanager
def running_http(directory: Path, *flags: str, **environ: str) -> Iterator[HttpServer]:
    """`uma run --http` on a port of the system's choice, ready for clients; ended with the block."""
    with running_server(directory / "http.sock", "--http", "127.0.0.1:0", *flags, **environ) as process:
        ready = process.log.wait_for("event=http.ready")
        found = re.search(r"url=(\S+)", ready)
        assert found is not None
        yield HttpServer(process, found[1])
