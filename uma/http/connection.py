"""A TCP connection under Hypercorn's HTTP: writes gather in a bounded `Link`, and a peer that does not read is let go.

Hypercorn's own stream writes once for each piece and waits each time; through a link the pieces of one turn (status,
headers, several events) go out in one system call, and a reader that stalls ends its own connection alone.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import h11
import trio
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol import ProtocolWrapper
from hypercorn.trio.tcp_server import TCPServer

from uma.http.exchange import LINES, POST
from uma.http.protocols import Http1, Protocols
from uma.net.link import Link
from uma.net.throttle import ClientLines

TAKE_UP_SEC = 1.0
"""Behind a client's end, maximum time for what it has sent before to reach its request."""
LINGER_SEC = 1.0
"""After the answer the peer can still be sending its body. Reading on for a moment spares it a broken pipe before it
has read why."""
MAX_READ_BYTES = 65_536
MAX_PENDING_READS = 4
"""Reads that can wait until Hypercorn takes them; beyond it the client's sending is held up, and only its hanging up is
still looked for."""


class LinkStream(trio.abc.Stream):
    """A socket as Trio's streams are, over a `Link`. Sending waits only where the link is full."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.lingers = True
        """Whether `aclose` waits for the peer's end, where there can be something on its way."""
        self._is_ending = False
        self._is_read = False
        self._written = trio.Event()
        self._peer_ended = trio.Event()

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
        """What has come; `b""` where the peer has closed its sending half or is gone. Behind the end it is dropped."""
        if self._is_read or self._peer_ended.is_set():  # `aclose` has taken over, or there is nothing more
            await self._peer_ended.wait()
            return b""
        self._is_read = True
        try:
            while True:
                data = await self.link.receive()
                if not data:
                    self._peer_ended.set()
                if not (data and self._is_ending):
                    return data
        except OSError:  # closed in the very turn in which something came
            raise trio.ClosedResourceError from None
        finally:
            self._is_read = False

    async def aclose(self) -> None:
        """Send what is posted, say that there is no more, and close."""
        if self._is_ending:
            return
        self._is_ending = True
        self.link.post(b"")
        try:
            await self._written.wait()
            if self.lingers:
                await self._linger()
        finally:
            self.link.close()
            self._peer_ended.set()

    async def _linger(self) -> None:
        try:
            self.link.sock.shutdown(socket.SHUT_WR)
        except OSError:
            return
        with trio.move_on_after(LINGER_SEC):
            if not self._is_read:  # else the connection's own task goes on reading and drops what comes
                await self.receive_some()
            await self._peer_ended.wait()


class HttpConnection(TCPServer):
    """Hypercorn's connection, which differs in four ways.

    Sending takes no lock, since posting to a link does not wait. A part of a body can be posted without a task's turn.
    Reading goes on while Hypercorn is busy with what was read (a pipelined request waits there for the one before
    it), and beyond a bound of that the socket is watched, so that a hang-up is noticed as soon as TCP brings it. And it
    speaks this server's `Protocols`.
    """

    def __init__(self, *args: Any, transport: LinkStream, max_body_bytes: int, lines: ClientLines) -> None:
        """`transport`: what the stream is, or what is under its TLS. `max_body_bytes`: as `Exchange` has it.
        `lines`: for what is logged of this connection.
        """
        self._transport = transport
        self._max_body_bytes = max_body_bytes
        self._is_over = False
        """The client has closed its sending half, or is gone."""
        super().__init__(*args)
        self.state[POST] = self.post
        self.state[LINES] = lines

    @property
    def protocol(self) -> Protocols:
        """What it speaks."""
        return self._protocol

    @protocol.setter
    def protocol(self, made: ProtocolWrapper) -> None:
        self._protocol = Protocols(made, self._transport.link.stall_timeout_sec, self._max_body_bytes)

    def post(self, data: bytes) -> bool:
        """Send a part of the body of the answer that runs. False, and nothing sent, where it must take the app's
        `send`: no answer has begun, the client is behind in reading, or the connection has TLS or HTTP/2.
        """
        stream, protocol = self._plain_stream(), self.protocol.protocol
        if not isinstance(stream, LinkStream) or stream.link.is_full or not isinstance(protocol, Http1):
            return False
        http = protocol.connection
        if not isinstance(http, h11.Connection) or http.our_state is not h11.SEND_BODY:
            return False
        stream.link.post(http.send(h11.Data(data=data)))
        return True

    async def _read_data(self) -> None:
        arrived, pending = trio.open_memory_channel[bytes](MAX_PENDING_READS)
        handled = trio.Event()

        async def handle() -> None:
            async for data in pending:
                await self.protocol.handle(RawData(data))
            handled.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(handle)
            await self._read_into(arrived)
            arrived.close()
            await self._taken_up(handled)
            self._is_over = True
            await self.protocol.handle(Closed())
            await self.idle_task.stop()  # else a connection would last until its keep-alive ends, without a client
            nursery.cancel_scope.cancel()

    async def _taken_up(self, handled: trio.Event) -> None:
        """Wait until all that has come is handled, or a pipelined request waits for the one before it.

        A request that comes together with its client's end has to reach the app first: only then can that be told that
        nobody waits for the answer.
        """
        with trio.move_on_after(TAKE_UP_SEC):
            async with trio.open_nursery() as nursery:

                async def until(event: trio.Event) -> None:
                    await event.wait()
                    nursery.cancel_scope.cancel()

                nursery.start_soon(until, handled)
                nursery.start_soon(until, self.protocol.is_held_up)

    async def _read_into(self, arrived: trio.MemorySendChannel[bytes]) -> None:
        while True:
            try:
                data = await self.stream.receive_some(MAX_READ_BYTES)
            except (trio.ClosedResourceError, trio.BrokenResourceError):
                return
            if not data or await self._is_hung_up_before(arrived, bytes(data)):
                return

    async def _is_hung_up_before(self, arrived: trio.MemorySendChannel[bytes], data: bytes) -> bool:
        """Hand over what was read; True where the client hangs up while Hypercorn takes no more."""
        try:
            arrived.send_nowait(data)
        except trio.WouldBlock:
            return await self._hangs_up_before(partial(arrived.send, data))
        return False

    async def _hangs_up_before(self, handed_over: Callable[[], Awaitable[None]]) -> bool:
        is_hung_up = False

        async def watch() -> None:
            nonlocal is_hung_up
            await self._transport.link.hung_up()
            is_hung_up = True
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await handed_over()
            nursery.cancel_scope.cancel()
        return is_hung_up

    async def _initiate_server_close(self) -> None:
        """As Hypercorn's, for a connection without requests: its client is not waited for."""
        self._transport.lingers = False
        await super()._initiate_server_close()

    async def protocol_send(self, event: Event) -> None:
        """As Hypercorn's. TLS keeps its way, since encrypting is a step of its own."""
        if isinstance(event, Updated) and self._is_over:  # what ends now waits for no other request
            return
        if isinstance(event, RawData) and isinstance(stream := self._plain_stream(), LinkStream):
            stream.link.post(event.data)
            if stream.link.is_full:
                await stream.link.room()
            return
        await super().protocol_send(event)

    def _plain_stream(self) -> Any:
        return self.stream
