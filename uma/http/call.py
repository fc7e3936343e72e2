"""One request as the application sees it (ASGI), and its answer on the way to the protocol that brought it."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from email.utils import formatdate
from functools import lru_cache
from typing import Protocol
from urllib.parse import unquote

import trio
from starlette.types import Message, Scope

from uma.http.exchange import LINES, POST, Header, headers_of, id_of, new_id
from uma.net.throttle import ClientLines

logger = logging.getLogger("uma.http")

Address = tuple[str, int]
"""A host and a port."""

MAX_UNREAD_BYTES = 262_144
"""What is kept for an application that does not take it; beyond it the client's sending is held up."""
JOINED_BYTES = 4_096
"""Parts of a body that are shorter go together."""


class Host(Protocol):
    """The connection, as its protocol sees it."""

    scheme: str
    client: Address
    server: Address
    lines: ClientLines
    is_draining: bool
    """Whether the server is stopping: a connection without requests is closed."""

    @property
    def is_full(self) -> bool:
        """Whether the client is behind in reading."""
        ...

    def post(self, data: bytes) -> None:
        """Send soon. Never waits."""
        ...

    async def room(self) -> None:
        """Wait while the client is behind in reading."""
        ...

    def start(self, call: Call) -> None:
        """Have the application answer."""
        ...

    def rest(self) -> None:
        """No request runs: the connection is closed after a time."""
        ...

    def close(self) -> None:
        """Send what is posted, and close."""
        ...


class Call(ABC):
    """One request. Its protocol adds the body as it comes and knows how to send the answer."""

    def __init__(self, host: Host, method: str, target: bytes, headers: list[Header], http_version: str) -> None:
        """`target`: a path with its query, in ASCII."""
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
        self._is_asked_for()
        while True:
            if self._parts:
                data = self._parts.popleft()
                self.unread_bytes -= len(data)
                self._was_taken(len(data))
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
            self.status = message["status"]
            return
        data = b"" if self._has_no_body() else message.get("body", b"")
        await self._write(data, is_last=not message.get("more_body", False))

    def post(self, data: bytes) -> bool:
        """Send a part of the answer's body in this very turn. False, and nothing sent, where only `send` can: no answer
        has begun, or the client is behind in reading.
        """
        if self.is_over or self.status == 0 or self._has_no_body():
            return False
        return self._post(data)

    def _has_no_body(self) -> bool:
        return self.scope["method"] == "HEAD" or self.status in (204, 304)

    @abstractmethod
    def _is_asked_for(self) -> None:
        """The application wants the body."""

    @abstractmethod
    def _was_taken(self, count: int) -> None:
        """The application has taken so many bytes of the body."""

    @abstractmethod
    def _begin(self, status: int, headers: list[Header]) -> None:
        """Send the answer's head."""

    @abstractmethod
    async def _write(self, data: bytes, *, is_last: bool) -> None:
        """Send a part of the answer's body, and wait while the client is behind in reading."""

    @abstractmethod
    def _post(self, data: bytes) -> bool:
        """Post a part of an answer that has begun; see `post`."""

    @abstractmethod
    def abandon(self) -> None:
        """The application has ended, and the answer is not whole."""


def identified(lines: ClientLines, status: int, scope: Scope | None = None) -> list[Header]:
    """The headers of an answer that is not the application's, once it is in the log. `scope`: its request's, if one has
    come of it.
    """
    # A body can turn bad after its head has reached the application, which logs the same id.
    id = new_id() if scope is None else id_of(scope)
    lines.log(logger, logging.WARNING, "http.malformed", request=id, status=status)
    return [*headers_of(id), date()]


def date() -> Header:
    """The header that every answer of a server with a clock has (RFC 9110, 6.6.1)."""
    return _date(int(time.time()))


@lru_cache(maxsize=1)
def _date(seconds: int) -> Header:
    return b"date", formatdate(seconds, usegmt=True).encode()
