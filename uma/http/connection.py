"""A TCP connection under Hypercorn's HTTP: writes gather in a bounded `Link`, and a peer that does not read is let go.

Hypercorn's own stream writes once for each piece and waits each time; through a link the pieces of one turn (status,
headers, several events) go out in one system call, and a reader that stalls ends its own connection alone.
"""

from __future__ import annotations

import logging
import socket
from typing import Any, cast

import h11
import trio
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.events import EndBody, Response, StreamClosed
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.ws_stream import WSStream
from hypercorn.trio.tcp_server import TCPServer
from starlette.types import Scope

from uma.http.exchange import POST, Header, headers_of, id_of, new_id
from uma.net.link import Link
from uma.net.logfmt import log

logger = logging.getLogger("uma.http")

LINGER_SEC = 1.0
"""After the answer the peer can still be sending its body. Reading on for a moment spares it a broken pipe before it
has read why."""


MAX_READ_BYTES = 65_536
MAX_PENDING_READS = 4
"""Reads that can wait until Hypercorn takes them; beyond it the client's sending is held up."""


class LinkStream(trio.abc.Stream):
    """A socket as Trio's streams are, over a `Link`. Sending waits only where the link is full."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._is_ending = False
        self._written = trio.Event()

    @property
    def socket(self) -> socket.socket:
        """For Hypercorn, which asks it for addresses."""
        return self.link.sock

    async def write(self) -> None:
        """The link's writing task. Raises `OSError` or `ReaderStalledError` where the peer takes no more."""
        try:
            await self.link.write(lambda: self._is_ending)
        finally:
            self._written.set()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Post `data`; wait while the link is full."""
        if self._is_ending:
            raise trio.ClosedResourceError
        self.link.post(bytes(data))
        await self.link.room()

    async def wait_send_all_might_not_block(self) -> None:
        """Wait while the link is full."""
        await self.link.room()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """What has come; `b""` where the peer has closed its sending half or is gone."""
        return await self.link.receive()

    async def aclose(self) -> None:
        """Send what is posted, say that there is no more, and close."""
        if self._is_ending:
            return
        self._is_ending = True
        self.link.post(b"")
        try:
            await self._written.wait()
            await self._linger()
        finally:
            self.link.close()

    async def _linger(self) -> None:
        try:
            self.link.sock.shutdown(socket.SHUT_WR)
        except OSError:
            return
        with trio.move_on_after(LINGER_SEC):
            while await self.link.receive():
                pass


class Http1(H11Protocol):
    """Hypercorn's HTTP/1.1, whose own answers, to malformed HTTP or an invalid handshake, have an id as all others."""

    @classmethod
    def in_place_of(cls, wrapper: ProtocolWrapper) -> Http1:
        """The protocol for a connection on which nothing has been read yet."""
        return cls(
            wrapper.app,
            wrapper.config,
            wrapper.context,
            wrapper.task_group,
            wrapper.state,
            wrapper.ssl,
            wrapper.client,
            wrapper.server,
            wrapper.send,
        )

    async def stream_send(self, event: StreamEvent) -> None:
        """As Hypercorn's, whose stream refuses an invalid WebSocket handshake itself and leaves the connection open."""
        if isinstance(event, Response) and not any(name == b"x-request-id" for name, _ in event.headers):
            headers = [*event.headers, *self._noted(event.status_code)]
            event = Response(event.stream_id, headers, event.status_code)
        await super().stream_send(event)
        if isinstance(event, EndBody) and isinstance(self.stream, WSStream):
            await super().stream_send(StreamClosed(event.stream_id))

    async def _send_error_response(self, status_code: int) -> None:
        headers = [(b"content-length", b"0"), (b"connection", b"close"), *self._noted(status_code)]
        headers += self.config.response_headers("h11")
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        await self._send_h11_event(h11.EndOfMessage())

    def _noted(self, status_code: int) -> list[Header]:
        """The headers of an answer that is not the app's, once it is in the log."""
        # A body can turn bad after its head has reached the app, which logs the same id.
        id = new_id() if self.stream is None else id_of(cast("Scope", self.stream.scope))
        log(logger, logging.WARNING, "http.malformed", request=id, status=status_code)
        return headers_of(id)


class HttpConnection(TCPServer):
    """Hypercorn's connection, which differs in four ways.

    Sending takes no lock, since posting to a link does not wait. A part of a body can be posted without a task's turn.
    Reading goes on while Hypercorn is busy with what was read (a pipelined request waits there for the one before
    it), so that a hang-up is always noticed. And malformed HTTP is answered with an id.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.state[POST] = self.post

    def post(self, data: bytes) -> bool:
        """Send a part of the body of the answer that runs. False, and nothing sent, where it must take the app's
        `send`: no answer has begun, the client is behind in reading, or the connection has TLS or HTTP/2.
        """
        stream, protocol = self._plain_stream(), self.protocol.protocol
        if not isinstance(stream, LinkStream) or stream.link.is_full or not isinstance(protocol, H11Protocol):
            return False
        http = protocol.connection
        if not isinstance(http, h11.Connection) or http.our_state is not h11.SEND_BODY:
            return False
        stream.link.post(http.send(h11.Data(data=data)))
        return True

    async def _read_data(self) -> None:
        if isinstance(self.protocol.protocol, H11Protocol):
            self.protocol.protocol = Http1.in_place_of(self.protocol)
        arrived, pending = trio.open_memory_channel[bytes](MAX_PENDING_READS)

        async def handle() -> None:
            async for data in pending:
                await self.protocol.handle(RawData(data))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(handle)
            await self._read_into(arrived)
            await self.protocol.handle(Closed())
            await self.idle_task.stop()  # else a connection would last until its keep-alive ends, without a client
            nursery.cancel_scope.cancel()

    async def _read_into(self, arrived: trio.MemorySendChannel[bytes]) -> None:
        while True:
            try:
                data = await self.stream.receive_some(MAX_READ_BYTES)
            except (trio.ClosedResourceError, trio.BrokenResourceError):
                return
            if not data:
                return
            await arrived.send(bytes(data))

    async def protocol_send(self, event: Event) -> None:
        """As Hypercorn's. TLS keeps its way, since encrypting is a step of its own."""
        if isinstance(event, RawData) and isinstance(stream := self._plain_stream(), LinkStream):
            stream.link.post(event.data)
            if stream.link.is_full:
                await stream.link.room()
            return
        await super().protocol_send(event)

    def _plain_stream(self) -> Any:
        return self.stream
