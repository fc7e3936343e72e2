"""The least that a server over HTTP does: `llama_decode` in a loop, and one `send` for each token.

One thread, blocking sockets, no scheduler, no text, no checks: it waits until as many requests have come as it has
sequences, reads their prompts together and answers them together, with the shortest event that the benchmarks' client
of llama-server takes. What it lacks of `raw` is the client's time and the kernel's, so that a server can have more only
by other batches or by weights that lie better. A program; it serves one burst after another until it is ended.
"""

from __future__ import annotations

import socket
import sys
from http.client import parse_headers
from typing import Any

import attrs
import orjson

from benchmarks.raw import Job, RawDecoder, arguments, opened

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
HEALTHY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@attrs.frozen
class _Asked:
    """A request that waits for the others of its burst."""

    connection: socket.socket
    prompt: list[int]
    max_tokens: int


def _next_request(listener: socket.socket) -> _Asked:
    """The next request for tokens; what asks for the server's health is answered."""
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection.makefile("rb") as lines:
            is_post = lines.readline().startswith(b"POST ")
            headers = parse_headers(lines)
            if is_post:
                body: dict[str, Any] = orjson.loads(lines.read(int(headers["Content-Length"])))
                return _Asked(connection, body["prompt"], body["n_predict"])
        connection.sendall(HEALTHY)
        connection.close()


def _event(token: int, *, is_last: bool) -> bytes:
    """A chunk that holds one event."""
    event = b'data: {"tokens":[%d],"stop":%s,"timings":{"cache_n":0}}\n\n' % (token, b"true" if is_last else b"false")
    return b"%x\r\n%b\r\n%b" % (len(event), event, END if is_last else b"")


def _serve(decoder: RawDecoder, burst: list[_Asked]) -> None:
    """Answer requests that all want the same number of tokens."""
    max_tokens = burst[0].max_tokens
    for each in burst:
        each.connection.sendall(HEAD)
    for number, tokens in enumerate(decoder.generate(Job([each.prompt for each in burst], max_tokens)), 1):
        for each, token in zip(burst, tokens.tolist(), strict=True):
            each.connection.sendall(_event(token, is_last=number == max_tokens))
    for each in burst:
        each.connection.close()


def main() -> int:
    """Serve bursts until the process is ended."""
    parser = arguments(__doc__)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    with opened(args) as decoder, socket.create_server(("127.0.0.1", args.port), backlog=args.streams) as listener:
        while True:
            _serve(decoder, [_next_request(listener) for _ in range(args.streams)])


if __name__ == "__main__":
    sys.exit(main())
