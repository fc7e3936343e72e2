"""HTTP/1.1 on one connection, by h11: one request after another, each with an answer that has an id."""

from __future__ import annotations

import re

import h11
import trio
from starlette.types import Scope

from uma.http.call import MAX_UNREAD_BYTES, Call, Host, identified
from uma.http.exchange import Header

MAX_HEAD_BYTES = 65_536
"""Longest request line and headers together."""


class Http1:
    """What is said on a connection. Malformed HTTP is answered, and ends it."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._call: _Call | None = None
        self._room = trio.lowlevel.ParkingLot()
        self._is_over = False

    @property
    def is_behind(self) -> bool:
        """Whether what has come waits for the application, or for the end of the answer before it, and is enough."""
        if self._call is None or self._is_over:
            return False
        return self._call.unread_bytes + len(self.h11.trailing_data[0]) >= MAX_UNREAD_BYTES

    async def room(self) -> None:
        """Wait while `is_behind`."""
        while self.is_behind:
            await self._room.park()

    def feed(self, data: bytes) -> None:
        """Take what has come."""
        if not self._is_over:
            self.h11.receive_data(data)
            self._advance()

    def leave(self) -> None:
        """The client is gone, or has closed its sending half."""
        self._is_over = True
        if self._call is not None:
            self._call.leave()

    def drain(self) -> None:
        """The server stops: end with the answer that runs."""
        if self._call is None:
            self.host.close()

    def made_room(self) -> None:
        """The application has taken a part of what waits for it."""
        self._room.unpark_all()

    def _advance(self) -> None:
        while not self._is_over:
            try:
                event = self.h11.next_event()
            except h11.RemoteProtocolError as error:
                self._refuse(error.error_status_hint)
                return
            if isinstance(event, h11.Request):
                self._begin(event)
            elif isinstance(event, h11.Data) and self._call is not None:
                self._call.add(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage) and self._call is not None:
                self._call.end_body()
            else:
                return  # more is needed, or an answer is waited for

    def _begin(self, given: h11.Request) -> None:
        request = in_origin_form(given)
        headers = list(request.headers)
        names = {name for name, _ in headers}
        if not request.http_version.startswith(b"1."):
            self._refuse(505)  # HTTP/2's preface reads as a request of version 2.0
        elif {b"content-length", b"transfer-encoding"} <= names:
            # A proxy before this server can take another one of them for the body's end (RFC 9112, 6.1).
            self._refuse(400)
        elif len(request.target) + sum(len(name) + len(value) for name, value in headers) > MAX_HEAD_BYTES:
            self._refuse(431)  # h11 minds it only while the head has no end
        elif any(name == b"upgrade" and value.strip().lower() == b"websocket" for name, value in headers):
            self._refuse(403)
        else:
            version = request.http_version.decode()
            self._call = _Call(self, request.method.decode().upper(), request.target, headers, version)
            self.host.start(self._call)

    def _refuse(self, status: int) -> None:
        scope: Scope | None = None
        if self._call is not None:
            scope = self._call.scope
            self._call.leave()
        if self.h11.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            headers = [(b"content-length", b"0"), (b"connection", b"close")]
            headers += identified(self.host.lines, status, scope)
            self.say(h11.Response(status_code=status, headers=headers))
            self.say(h11.EndOfMessage())
        self._is_over = True
        self.host.close()

    def say(self, event: h11.Event) -> None:
        """Send a part of an answer."""
        self.host.post(self.h11.send(event) or b"")

    def was_answered(self) -> None:
        """The answer is whole: the next request's turn has come, if the connection can have one."""
        self._call = None
        if self.host.is_draining or self.h11.our_state is not h11.DONE or self.h11.their_state is not h11.DONE:
            self._is_over = True
            self.host.close()
        else:
            self.h11.start_next_cycle()
            self.host.rest()
            self._advance()
        self._room.unpark_all()


class _Call(Call):
    """A request over HTTP/1.1."""

    def __init__(self, http: Http1, method: str, target: bytes, headers: list[Header], version: str) -> None:
        super().__init__(http.host, method, target, headers, version)
        self._http = http

    def _is_asked_for(self) -> None:
        # Only now: a client whose request is refused by its head is not asked to send the body.
        if not self.is_over and self._http.h11.they_are_waiting_for_100_continue:
            self._http.say(h11.InformationalResponse(status_code=100, headers=[]))

    def _was_taken(self, count: int) -> None:
        self._http.made_room()

    def _begin(self, status: int, headers: list[Header]) -> None:
        self._http.say(h11.Response(status_code=status, headers=headers))

    async def _write(self, data: bytes, *, is_last: bool) -> None:
        if data:
            self._http.say(h11.Data(data=data))
        if is_last:
            self.is_over = True
            self._http.say(h11.EndOfMessage())
            self._http.was_answered()
        await self._http.host.room()

    def _post(self, data: bytes) -> bool:
        if self._http.host.is_full:
            return False
        self._http.say(h11.Data(data=data))
        return True

    def abandon(self) -> None:
        """See `Call`. The client sees a part of an answer, or 500."""
        self.is_over = True
        if self.status == 0:
            headers = [(b"content-length", b"0"), (b"connection", b"close")]
            self._begin(500, headers + identified(self._http.host.lines, 500, self.scope))
        self._http.leave()
        self._http.host.close()


_ABSOLUTE_FORM = re.compile(rb"https?://([^/?#@]*)(.*)", re.IGNORECASE)


def in_origin_form(request: h11.Request) -> h11.Request:
    """The request with a path as its target. Where that is a whole address, as for a proxy, its host and port take the
    place of `Host` (RFC 9112, 3.2.2).
    """
    found = _ABSOLUTE_FORM.fullmatch(request.target)
    if found is None:
        return request
    authority, path = found.groups()
    headers = [(name, value) for name, value in request.headers.raw_items() if name.lower() != b"host"]
    return h11.Request(
        method=request.method,
        target=path if path.startswith(b"/") else b"/" + path,
        headers=[(b"host", authority), *headers],
        http_version=request.http_version,
    )
