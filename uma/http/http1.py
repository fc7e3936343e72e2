"""HTTP/1.1 on one connection, by h11: one request after another, each a task with an answer that has an id."""

from __future__ import annotations

import logging
import math
import re
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from functools import lru_cache
from urllib.parse import unquote

import h11
import trio
from starlette.types import ASGIApp, Message, Scope

from uma.http.exchange import LINES, POST, Header, headers_of, id_of, new_id
from uma.http.transport import Transport
from uma.net.throttle import ClientLines

logger = logging.getLogger("uma.http")

Address = tuple[str, int]
"""A host and a port."""

MAX_UNREAD_BYTES = 262_144
"""What is kept for an application that does not take it; beyond it the client's sending is held up."""
JOINED_BYTES = 4_096
"""Parts of a body that are shorter go together."""


MAX_HEAD_BYTES = 65_536
"""Longest request line and headers together."""


class HttpConnection:
    """Serves one client, for which `Http1` says what it wants.

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
        """Whether the server is stopping: a connection without requests is closed."""
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
        """Whether the client is behind in reading."""
        return self._transport.link.is_full

    def post(self, data: bytes) -> None:
        """Send soon. Never waits."""
        self._transport.post(data)

    async def room(self) -> None:
        """Wait while the client is behind in reading."""
        await self._transport.link.room()

    def start(self, call: AsgiCall) -> None:
        """Have the application answer."""
        self._reading.deadline = math.inf
        self._calls.start_soon(self._answer, call)

    def rest(self) -> None:
        """No request runs: the connection is closed after a time."""
        self._reading.deadline = trio.current_time() + self._timeout_sec

    def close(self) -> None:
        """Send what is posted, and close."""
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
            await self._transport.link.hung_up()
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


class Http1:
    """What is said on a connection. Malformed HTTP is answered, and ends it."""

    def __init__(self, host: HttpConnection) -> None:
        self.host = host
        self.h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._call: AsgiCall | None = None
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
                self._refuse(error.error_status_hint, str(error))
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
            self._refuse(505, "another version than HTTP/1")  # HTTP/2's preface reads as a request of version 2.0
        elif {b"content-length", b"transfer-encoding"} <= names:
            # A proxy before this server can take another one of them for the body's end (RFC 9112, 6.1).
            self._refuse(400, "Content-Length and Transfer-Encoding in one request")
        elif len(request.target) + sum(len(name) + len(value) for name, value in headers) > MAX_HEAD_BYTES:
            self._refuse(431, f"a head over {MAX_HEAD_BYTES:,} bytes")  # h11 minds it only while the head has no end
        elif any(name == b"upgrade" and value.strip().lower() == b"websocket" for name, value in headers):
            self._refuse(403, "a WebSocket")
        else:
            version = request.http_version.decode()
            self._call = AsgiCall(self, request.method.decode().upper(), request.target, headers, version)
            self.host.start(self._call)

    def _refuse(self, status: int, reason: str) -> None:
        scope: Scope | None = None
        if self._call is not None:
            scope = self._call.scope
            self._call.leave()
        if self.h11.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            headers = [(b"content-length", b"0"), (b"connection", b"close")]
            headers += identified(self.host.lines, status, reason, scope)
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


class AsgiCall:
    """One request as the application sees it (ASGI), and its answer on the way to the client."""

    def __init__(self, http: Http1, method: str, target: bytes, headers: list[Header], http_version: str) -> None:
        """`target`: a path with its query, in ASCII."""
        self._http = http
        host = http.host
        path, _, query = target.partition(b"?")
        self.scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.1"},
            "http_version": http_version,
            "method": method,
            "scheme": host.scheme,
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": headers,
            "client": host.client,
            "server": host.server,
            "state": {POST: self.post, LINES: host.lines},
        }
        self.unread_bytes = 0
        """Bytes of the body that have come and were not taken yet."""
        self.status = 0
        """Status of the answer; 0 while it has not begun."""
        self.is_over = False
        """The answer is whole, or no client waits for it: what the application sends is dropped."""
        self._parts: deque[bytes] = deque()
        self._is_whole = False
        """The body has come to its end."""
        self._is_taken = False
        """The application knows that."""
        self._is_gone = False
        self._news = trio.lowlevel.ParkingLot()

    def add(self, data: bytes) -> None:
        """A part of the body has come. Small ones are kept together, since each has a cost of its own."""
        self.unread_bytes += len(data)
        if self._parts and len(self._parts[-1]) < JOINED_BYTES:
            data = self._parts.pop() + data
        if data:
            self._parts.append(data)
        self._news.unpark_all()

    def end_body(self) -> None:
        """The body has come to its end."""
        self._is_whole = True
        self._news.unpark_all()

    def leave(self) -> None:
        """The client is gone, or has taken the request back."""
        self._is_gone = self.is_over = True
        self._news.unpark_all()

    async def receive(self) -> Message:
        """ASGI's `receive`. What has come before the client's end comes before that here, too."""
        self._ask_for_body()
        while True:
            if self._parts:
                data = self._parts.popleft()
                self.unread_bytes -= len(data)
                self._http.made_room()
                return self._request(data)
            if self._is_whole and not self._is_taken:
                return self._request(b"")
            if self._is_gone:
                return {"type": "http.disconnect"}
            await self._news.park()

    def _request(self, data: bytes) -> Message:
        self._is_taken = self._is_whole and not self._parts
        return {"type": "http.request", "body": data, "more_body": not self._is_taken}

    async def send(self, message: Message) -> None:
        """ASGI's `send`. Waits while the client is behind in reading."""
        if self.is_over:
            return
        if message["type"] == "http.response.start":
            self._begin(message["status"], [*message.get("headers", ()), date()])
            return
        data = b"" if self._has_no_body() else message.get("body", b"")
        await self._write(data, is_last=not message.get("more_body", False))

    def post(self, data: bytes) -> bool:
        """Send a part of the answer's body in this very turn. False, and nothing sent, where only `send` can: no answer
        has begun, or the client is behind in reading.
        """
        if self.is_over or self.status == 0 or self._has_no_body() or self._http.host.is_full:
            return False
        self._http.say(h11.Data(data=data))
        return True

    def _has_no_body(self) -> bool:
        return self.scope["method"] == "HEAD" or self.status in (204, 304)

    def _ask_for_body(self) -> None:
        # Only now: a client whose request is refused by its head is not asked to send the body.
        if not self.is_over and self._http.h11.they_are_waiting_for_100_continue:
            self._http.say(h11.InformationalResponse(status_code=100, headers=[]))

    def _begin(self, status: int, headers: list[Header]) -> None:
        self._http.say(h11.Response(status_code=status, headers=headers))
        self.status = status

    async def _write(self, data: bytes, *, is_last: bool) -> None:
        if data:
            self._http.say(h11.Data(data=data))
        if is_last:
            self.is_over = True
            self._http.say(h11.EndOfMessage())
            self._http.was_answered()
        await self._http.host.room()

    def abandon(self) -> None:
        """The application has ended, and the answer is not whole: the client sees a part of it, or 500."""
        self.is_over = True
        if self.status == 0:
            headers = [(b"content-length", b"0"), (b"connection", b"close")]
            self._begin(500, headers + identified(self._http.host.lines, 500, "no answer was made", self.scope))
        self._http.leave()
        self._http.host.close()


def identified(lines: ClientLines, status: int, reason: str, scope: Scope | None = None) -> list[Header]:
    """The headers of an answer that is not the application's, once it is in the log. `scope`: its request's, if one has
    come of it.
    """
    # A body can turn bad after its head has reached the application, which logs the same id.
    id = new_id() if scope is None else id_of(scope)
    lines.log(logger, logging.WARNING, "http.malformed", request=id, status=status, reason=reason)
    return [*headers_of(id), date()]


def date() -> Header:
    """The header that every answer of a server with a clock has (RFC 9110, 6.6.1)."""
    return _date(int(time.time()))


@lru_cache(maxsize=1)
def _date(seconds: int) -> Header:
    return b"date", formatdate(seconds, usegmt=True).encode()


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
