"""A proxy on loopback that keeps what a program asks of a server: the program is unmodified, and so is the server."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import attrs

_OF_A_CONNECTION = {"host", "connection", "accept-encoding", "transfer-encoding", "content-length"}


@attrs.frozen
class Asked:
    """A POST, and the id that the server has answered it with."""

    path: str
    body: Any
    request_id: str


@attrs.frozen
class Tap:
    """Where a program asks instead, and what it has asked so far, in the order of the answers."""

    url: str
    asked: list[Asked]


@contextmanager
def tapped(port: int) -> Iterator[Tap]:
    """A tap before the server on `port`. Answers are passed on whole, once they are complete."""
    asked: list[Asked] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            server = http.client.HTTPConnection("127.0.0.1", port)
            try:
                server.request(self.command, self.path, body, _kept(self.headers.items()))
                answer = server.getresponse()
                said = answer.read()
            finally:
                server.close()
            if self.command == "POST":
                asked.append(Asked(self.path, json.loads(body), answer.getheader("x-request-id", "")))
            self.send_response(answer.status)
            for name, value in _kept(answer.getheaders()).items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        do_POST = do_GET  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            yield Tap(f"http://127.0.0.1:{proxy.server_port}", asked)
        finally:
            proxy.shutdown()
            thread.join()


def _kept(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers if name.lower() not in _OF_A_CONNECTION}
