"""One connection over HTTP: `Http1` takes what the client says, and each request is a task."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Awaitable, Callable

import trio
from starlette.types import ASGIApp

from uma.http.http1 import Address, AsgiCall, Http1
from uma.http.transport import Transport
from uma.net.throttle import ClientLines

logger = logging.getLogger("uma.http")


class HttpConnection:
    """Serves one client. A `Host` for the protocol.

    It is read while requests run, so that a hang-up is noticed as soon as TCP brings it. Beyond a bound of what waits
    unread it is not read any more, and the system is asked whether the client is still there.
    """

    def __init__(self, app: ASGIApp, transport: Transport, lines: ClientLines, timeout_sec: float) -> None:
        """`lines`: for what is logged of this connection. `timeout_sec`: for TLS' handshake, for a request's head, and
        how long a connection without requests is kept.
        """
        self.scheme = transport.scheme
        self.client, self.server = _addresses(transport.link.sock)
        self.lines = lines
        self.is_draining = False
        self._app = app
        self._transport = transport
        self._timeout_sec = timeout_sec
        self._reading = trio.CancelScope()
        self._calls: trio.Nursery
        self._protocol = Http1(self)
        self._is_answered = False
        """The last of this side is said, and the client can still have something on its way."""

    async def run(self) -> None:
        """Serve until the client leaves, or `drain` and the last answer."""
        is_agreed = False
        with trio.move_on_after(self._timeout_sec):
            is_agreed = await self._transport.handshake()
        if not is_agreed:
            await self._transport.aclose(lingers=True)
            return
        async with trio.open_nursery() as self._calls:
            self.rest()
            with self._reading:
                await self._read()
            self._protocol.leave()
        await self._transport.aclose(lingers=self._is_answered)

    def drain(self) -> None:
        """The server stops: end with the answers that run."""
        self.is_draining = True
        self._protocol.drain()

    @property
    def is_full(self) -> bool:
        """See `Host`."""
        return self._transport.is_full

    def post(self, data: bytes) -> None:
        """See `Host`."""
        self._transport.post(data)

    async def room(self) -> None:
        """See `Host`."""
        await self._transport.room()

    def start(self, call: AsgiCall) -> None:
        """See `Host`."""
        self._reading.deadline = math.inf
        self._calls.start_soon(self._answer, call)

    def rest(self) -> None:
        """See `Host`."""
        self._reading.deadline = trio.current_time() + self._timeout_sec

    def close(self) -> None:
        """See `Host`."""
        self._is_answered = True
        self._reading.cancel()

    async def _answer(self, call: AsgiCall) -> None:
        try:
            await self._app(call.scope, call.receive, call.send)
        except Exception as fault:  # noqa: BLE001  (whatever it is, it is this request's alone)
            self.lines.log(logger, logging.ERROR, "http.crashed", fault=fault)
        if not call.is_over:
            call.abandon()

    async def _read(self) -> None:
        while data := await self._transport.receive():
            self._protocol.feed(data)
            if self._protocol.is_behind and await self._hangs_up_before(self._protocol.room):
                return

    async def _hangs_up_before(self, room: Callable[[], Awaitable[None]]) -> bool:
        is_hung_up = False

        async def watch() -> None:
            nonlocal is_hung_up
            await self._transport.hung_up()
            is_hung_up = True
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await room()
            nursery.cancel_scope.cancel()
        return is_hung_up


def _addresses(sock: socket.socket) -> tuple[Address, Address]:
    """The client's and the server's address and port. Raises `OSError` where the client is gone."""
    (client, server) = (each[:2] for each in (sock.getpeername(), sock.getsockname()))
    return client, server
