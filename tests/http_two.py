"""A client of HTTP/2 that can do what no proper client does."""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import attrs
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, DataReceived, Event, ResponseReceived, StreamEnded, StreamReset
from http_server import Answered

from harness import PATIENCE_SEC

Header = tuple[bytes, bytes]
FRAME_BYTES = 16_384
"""Maximum that a frame has."""


@attrs.define
class Stream:
    """What has come on one stream."""

    status: int = 0
    headers: dict[str, str] = attrs.field(factory=dict)
    body: bytes = b""
    reset_by: int | None = None
    """The code that the server reset it with."""
    is_ended: bool = False

    @property
    def answer(self) -> Answered:
        """The answer as it would have come over HTTP/1.1."""
        return Answered(self.status, self.headers, self.body)


class Http2Client:
    """A connection without TLS that speaks HTTP/2 from its first byte, and checks nothing that it sends."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.settimeout(PATIENCE_SEC)
        config = H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False)
        self.http = H2Connection(config)
        self.streams: defaultdict[int, Stream] = defaultdict(Stream)
        self.unread: set[int] = set()
        """Streams whose window is never opened again."""
        self.is_closed = False
        self.http.initiate_connection()
        self._flush()

    def close(self) -> None:
        """Hang up."""
        self.sock.close()

    def begin(self, *fields: Header, is_whole: bool = True) -> int:
        """Send a head of nothing but `fields`; the stream's number."""
        id = self.http.get_next_available_stream_id()
        self.http.send_headers(id, fields, end_stream=is_whole)
        self._flush()
        return id

    def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        is_whole: bool = True,
        authority: str = "localhost",
        **headers: str,
    ) -> int:
        """Send a request; `body` as JSON unless it is bytes."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        given = {":method": method, ":scheme": "http", ":authority": authority, ":path": path}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        id = self.begin(*((name.encode(), value.encode()) for name, value in given.items()), is_whole=False)
        self.add(id, data, is_whole=is_whole)
        return id

    def add(self, id: int, data: bytes, *, is_whole: bool = False) -> None:
        """Send a piece of a body, whatever the server has said meanwhile."""
        for start in range(0, len(data) or 1, FRAME_BYTES):
            is_last = start + FRAME_BYTES >= len(data)
            self.http.send_data(id, data[start : start + FRAME_BYTES], end_stream=is_whole and is_last)
        self._flush()

    def reset(self, id: int) -> None:
        """Take a request back."""
        self.http.reset_stream(id)
        self._flush()

    def answer(self, id: int) -> Stream:
        """Read until a stream has ended, or the server has closed."""
        self.read_until(lambda: self.streams[id].is_ended)
        return self.streams[id]

    def read_until(self, is_there: Callable[[], bool]) -> None:
        """Read until something is there, or the server has closed."""
        while not (is_there() or self.is_closed):
            self.take(self.receive())

    def receive(self) -> bytes:
        """Bytes from the server, not yet understood; none where it has closed."""
        try:
            return self.sock.recv(65_536)
        except ConnectionResetError:
            return b""

    def take(self, data: bytes) -> None:
        """Understand what was received."""
        self.is_closed = self.is_closed or not data
        for event in self.http.receive_data(data):
            self._note(event)
        if not self.is_closed:
            self._flush()

    def _note(self, event: Event) -> None:
        if isinstance(event, ConnectionTerminated):
            self.is_closed = True
        elif isinstance(event, ResponseReceived):
            headers = {bytes(name).decode(): bytes(value).decode() for name, value in event.headers}
            stream = self.streams[event.stream_id]
            stream.status, stream.headers = int(headers.pop(":status")), headers
        elif isinstance(event, DataReceived):
            self.streams[event.stream_id].body += event.data
            if event.stream_id not in self.unread:
                self.http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif event.flow_controlled_length:
                self.http.increment_flow_control_window(event.flow_controlled_length)  # for the other streams
        elif isinstance(event, StreamReset | StreamEnded):
            stream = self.streams[event.stream_id]
            stream.is_ended = True
            if isinstance(event, StreamReset):
                stream.reset_by = int(event.error_code)

    def _flush(self) -> None:
        try:
            self.sock.sendall(self.http.data_to_send())
        except OSError:
            self.is_closed = True


@contextmanager
def http2(port: int) -> Iterator[Http2Client]:
    """A connection, closed with the block."""
    with closing(Http2Client(port)) as client:
        yield client
