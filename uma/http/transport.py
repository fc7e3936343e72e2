"""The bytes of a connection: writes gather in a bounded `Link`, with TLS around them where there is TLS."""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress

import trio

from uma.net.link import RECEIVE_BYTES, Link

LINGER_SEC = 1.0
"""After the answer the peer can still be sending its body. Reading on for a moment spares it a broken pipe before it
has read why."""

PLAIN = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\n"
    b"This port takes TLS alone: its address begins with https://\n"
)
"""Answer to a request of plain HTTP on a port with TLS."""


class Transport:
    """One connection. Belongs to a Trio thread; one task `receive`s, one runs `write`, any task can `post`."""

    def __init__(self, link: Link, context: ssl.SSLContext | None) -> None:
        """`context`: of the server's TLS; None for plain TCP."""
        self.link = link
        self._tls = None if context is None else _Tls(context)
        self._is_ending = False
        self._written = trio.Event()

    @property
    def scheme(self) -> str:
        """Scheme of the addresses that are asked for."""
        return "http" if self._tls is None else "https"

    async def handshake(self) -> bool:
        """Agree on TLS, where there is TLS. False where the peer does not."""
        if self._tls is None:
            return True
        while (is_done := self._tls.shake_hands()) is False:
            self.link.post(self._tls.to_send())
            if not (data := await self._received()):
                return False
            self._tls.incoming.write(data)
        self.link.post(self._tls.to_send())
        return is_done is True

    def post(self, data: bytes) -> None:
        """Send `data` soon. Never waits; await the link's `room` after it where that `is_full`."""
        self.link.post(data if self._tls is None else self._tls.sealed(data))

    async def receive(self) -> bytes:
        """What has come; `b""` where the peer has closed its sending half or is gone."""
        if self._tls is None:
            return await self._received()
        while True:
            opened, is_over = self._tls.opened()  # first of what has come with the handshake
            self.link.post(self._tls.to_send())
            if opened or is_over:
                return opened
            if not (data := await self._received()):
                return b""
            self._tls.incoming.write(data)

    async def _received(self) -> bytes:
        try:
            return await self.link.receive()
        except (OSError, trio.ClosedResourceError):  # closed in the very turn in which something came
            return b""

    async def write(self) -> None:
        """The writing task. Raises `OSError` or `ReaderStalledError` where the peer takes no more."""
        try:
            await self.link.write(lambda: self._is_ending)
        finally:
            self._written.set()

    async def aclose(self, *, lingers: bool) -> None:
        """Send what is posted, say that there is no more, and close. Nothing is received any more.

        `lingers`: wait for the peer's end for a moment, since it can have something on its way.
        """
        self._is_ending = True
        self.link.post(b"" if self._tls is None else self._tls.farewell())
        await self._written.wait()
        if lingers:
            await self._linger()
        self.link.close()

    async def _linger(self) -> None:
        try:
            self.link.sock.shutdown(socket.SHUT_WR)
        except OSError:
            return
        with trio.move_on_after(LINGER_SEC):
            while await self._received():
                pass


class _Tls:
    """TLS between two buffers, so that sealing is no step of its own that waits."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.object = context.wrap_bio(self.incoming, self._outgoing, server_side=True)

    def to_send(self) -> bytes:
        """What TLS itself has to say to the peer."""
        return self._outgoing.read()

    def shake_hands(self) -> bool | None:
        """Whether the handshake is done; None where it has failed."""
        try:
            self.object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            if error.reason == "HTTP_REQUEST":
                self._outgoing.read()  # an alert of TLS
                self._outgoing.write(PLAIN)
            return None
        return True

    def sealed(self, data: bytes) -> bytes:
        """`data` as it goes over the network."""
        if data:
            self.object.write(data)
        return self.to_send()

    def opened(self) -> tuple[bytes, bool]:
        """What was in the bytes that have come, and whether that was the end."""
        parts: list[bytes] = []
        try:
            while part := self.object.read(RECEIVE_BYTES):
                parts.append(part)
        except ssl.SSLWantReadError:
            return b"".join(parts), False
        except ssl.SSLError:
            pass
        return b"".join(parts), True

    def farewell(self) -> bytes:
        """That there is no more. The peer's own farewell is not waited for."""
        with suppress(ssl.SSLError):
            self.object.unwrap()
        return self.to_send()
