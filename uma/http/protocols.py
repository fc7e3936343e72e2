"""Hypercorn's protocols as this server needs them: every answer has an id that is in the log, and a client that errs
loses its request, not what else runs on its connection.

Hypercorn answers malformed HTTP and invalid WebSocket handshakes itself. Its HTTP/2 raises, which ends the connection
with a traceback, where a body goes on after its answer and where a method or a path is not ASCII, and a request with a
malformed head ends it too. Where a reader opens no window, it keeps whatever comes for it, without a bound.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, cast

import attrs
import h11
import trio
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, PriorityUpdated, RequestReceived, StreamReset, TrailersReceived
from h2.events import Event as H2Event
from h2.exceptions import InvalidBodyLengthError, ProtocolError
from h2.utilities import HeaderValidationFlags, validate_headers
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.events import Body, EndBody, Response, StreamClosed
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h2 import BUFFER_HIGH_WATER, H2Protocol
from hypercorn.protocol.h11 import H2CProtocolRequiredError, H2ProtocolAssumedError, H11Protocol
from hypercorn.protocol.ws_stream import WSStream
from hypercorn.trio.worker_context import EventWrapper
from starlette.types import Scope

from uma.http.exchange import LINES, Header, headers_of, id_of, new_id
from uma.net.link import FAIR_BYTES
from uma.net.throttle import ClientLines

logger = logging.getLogger("uma.http")


class Protocols(ProtocolWrapper):
    """The protocol that a connection speaks, which can change from HTTP/1.1 to HTTP/2 with its first bytes."""

    protocol: Http1 | Http2

    def __init__(self, made: ProtocolWrapper, stall_timeout_sec: float, max_body_bytes: int) -> None:
        """In place of the wrapper that Hypercorn has made for a connection on which nothing has been read yet."""
        self.__dict__.update(made.__dict__)
        self._stall_timeout_sec = stall_timeout_sec
        is_http2 = isinstance(made.protocol, H2Protocol)
        self.protocol = self._http2() if is_http2 else Http1(*self._arguments(), max_body_bytes=max_body_bytes)

    @property
    def is_held_up(self) -> trio.Event:
        """Set while a request waits for the end of the one before it, and what has come behind its head with it."""
        return self.protocol.is_held_up

    async def handle(self, event: Event) -> None:
        """As Hypercorn's."""
        upgrade: tuple[Any, ...] = ()
        try:
            await self.protocol.handle(event)
        except H2ProtocolAssumedError as error:
            data = error.data
        except H2CProtocolRequiredError as error:
            data, upgrade = error.data, (error.headers, error.settings)
        else:
            return
        # Outside the block: an error here would bring the request's bytes along, and into the log.
        self.protocol = self._http2()
        await self.protocol.initiate(*upgrade)
        await self.send(Updated(idle=self.protocol.idle))  # the head that has led here counted as a request
        if data:
            await self.protocol.handle(RawData(data))

    def _http2(self) -> Http2:
        return Http2(*self._arguments(), stall_timeout_sec=self._stall_timeout_sec)

    def _arguments(self) -> tuple[Any, ...]:
        names = ("app", "config", "context", "task_group", "state", "ssl", "client", "server", "send")
        return tuple(getattr(self, name) for name in names)


def noted(status: int, stream: Any, state: Mapping[str, Any]) -> list[Header]:
    """The headers of an answer that is not the app's, once it is in the log. `stream`: its request's, or None. `state`:
    the connection's.
    """
    # A body can turn bad after its head has reached the app, which logs the same id.
    id = new_id() if stream is None else id_of(cast("Scope", stream.scope))
    lines: ClientLines = state[LINES]
    lines.log(logger, logging.WARNING, "http.malformed", request=id, status=status)
    return headers_of(id)


def identified(event: Response, stream: Any, state: Mapping[str, Any]) -> Response:
    """The answer, with an id where it has none. `stream` and `state` as `noted` has them."""
    if any(name == b"x-request-id" for name, _ in event.headers):
        return event
    return Response(event.stream_id, [*event.headers, *noted(event.status_code, stream, state)], event.status_code)


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


class _Turn(EventWrapper):
    """Hypercorn's event for when a pipelined request can be read."""

    def __init__(self) -> None:
        super().__init__()
        self.is_awaited = trio.Event()

    async def wait(self) -> None:
        """As Hypercorn's."""
        self.is_awaited.set()
        await super().wait()

    async def set(self) -> None:
        """As Hypercorn's."""
        self.is_awaited = trio.Event()
        await super().set()


class Http1(H11Protocol):
    """Hypercorn's HTTP/1.1."""

    def __init__(self, *arguments: Any, max_body_bytes: int) -> None:
        """`max_body_bytes`: a longer body is refused by its length, so that its client is not asked to send it."""
        super().__init__(*arguments)
        self.can_read = self._turn = _Turn()
        self._max_body_bytes = max_body_bytes

    @property
    def is_held_up(self) -> trio.Event:
        """See `Protocols`."""
        return self._turn.is_awaited

    async def stream_send(self, event: StreamEvent) -> None:
        """As Hypercorn's, whose stream refuses an invalid WebSocket handshake itself and leaves the connection open."""
        if isinstance(event, Response):
            event = identified(event, self.stream, self.connection_state)
        await super().stream_send(event)
        if isinstance(event, EndBody) and isinstance(self.stream, WSStream):
            await super().stream_send(StreamClosed(event.stream_id))

    async def _create_stream(self, request: h11.Request) -> None:
        request = in_origin_form(request)
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in request.headers}:
            # A proxy before this server can take another one of them for the body's end (RFC 9112, 6.1).
            await self._refuse(400)
            return
        length = next((value for name, value in request.headers if name == b"content-length"), b"0")
        if int(length) > self._max_body_bytes and isinstance(self.connection, h11.Connection):
            # What is refused by its length is not asked for: h11 would say 100 with the first read.
            self.connection.client_is_waiting_for_100_continue = False
        head_bytes = len(request.target) + sum(len(name) + len(value) for name, value in request.headers)
        if head_bytes > self.config.h11_max_incomplete_size:  # h11 minds it only while the head has no end
            await self._refuse(431)
            return
        try:
            await super()._create_stream(request)
        except UnicodeDecodeError:  # in a WebSocket's handshake, before anything has come of it
            self.stream = None
            await self._refuse(400)

    async def _refuse(self, status_code: int) -> None:
        await self._send_error_response(status_code)
        await self.send(Closed())

    async def _send_error_response(self, status_code: int) -> None:
        headers = [(b"content-length", b"0"), (b"connection", b"close")]
        headers += noted(status_code, self.stream, self.connection_state)
        headers += self.config.response_headers("h11")
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        await self._send_h11_event(h11.EndOfMessage())


@attrs.define
class _Wait:
    """The wait of a stream for its reader."""

    scope: trio.CancelScope
    unsent_bytes: int
    """How little must be left before more time is given."""
    room: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)


class _Http2Connection(H2Connection):
    """h2's connection, which does not end for a malformed request. (RFC 9113, 8.1.1: that is an error of its stream.)

    It does not look at heads, which its owner does with `is_well_formed`.
    """

    def __init__(self, made: H2Connection) -> None:
        """In place of the connection that Hypercorn has made, on which nothing has been read yet."""
        super().__init__(H2Configuration(client_side=False, header_encoding=None, validate_inbound_headers=False))
        self.DEFAULT_MAX_INBOUND_FRAME_SIZE = made.DEFAULT_MAX_INBOUND_FRAME_SIZE
        self.local_settings = made.local_settings

    def _receive_frame(self, frame: Any) -> list[H2Event]:
        """As h2's. A stream whose body is not as long as its head says is reset."""
        try:
            return super()._receive_frame(frame)
        except InvalidBodyLengthError:
            id: int = frame.stream_id
            self.acknowledge_received_data(frame.flow_controlled_length, id)  # the connection's window is for all
            self.reset_stream(id, ErrorCodes.PROTOCOL_ERROR)
            return [StreamReset(stream_id=id, error_code=ErrorCodes.PROTOCOL_ERROR, remote_reset=False)]


def is_well_formed(head: RequestReceived | TrailersReceived) -> bool:
    """Whether a request's head, or what comes behind its body, is as RFC 9113 has it (8.2 and 8.3)."""
    is_trailer = isinstance(head, TrailersReceived)
    try:
        list(validate_headers(head.headers, HeaderValidationFlags(False, is_trailer, False, False)))
    except ProtocolError:
        return False
    return True


class Http2(H2Protocol):
    """Hypercorn's HTTP/2."""

    def __init__(self, *arguments: Any, stall_timeout_sec: float) -> None:
        """`stall_timeout_sec`: how long the reader of a stream can take for `FAIR_BYTES` while more waits for it."""
        super().__init__(*arguments)
        self.connection = _Http2Connection(self.connection)
        self.is_held_up = trio.Event()
        """See `Protocols`. Here none waits for another."""
        self._stall_timeout_sec = stall_timeout_sec
        self._waits: dict[int, _Wait] = {}

    async def handle(self, event: Event) -> None:
        """As Hypercorn's. At the connection's end nothing waits for a reader any more."""
        await super().handle(event)
        if isinstance(event, Closed):
            for buffer in list(self.stream_buffers.values()):
                await buffer.close()
            for wait in self._waits.values():
                wait.room.unpark_all()

    async def stream_send(self, event: StreamEvent) -> None:
        """As Hypercorn's. A stream whose reader stalls is reset, and its request is cancelled."""
        id = event.stream_id
        if isinstance(event, Response):
            event = identified(event, self.streams.get(id), self.connection_state)
        if isinstance(event, Body | EndBody):
            await self._send_in_time(event)
        else:
            await super().stream_send(event)
        if isinstance(event, EndBody) and isinstance(self.streams.get(id), WSStream):
            await super().stream_send(StreamClosed(id))

    async def _send_in_time(self, event: Body | EndBody) -> None:
        """Waits while more than two frames are unsent, at the end until all is sent."""
        id, added = event.stream_id, len(event.data) if isinstance(event, Body) else 0
        with trio.move_on_after(self._stall_timeout_sec) as patience:
            wait = self._waits[id] = _Wait(patience, self._unsent_bytes(id) + added - FAIR_BYTES)
            try:
                await super().stream_send(event)
                while isinstance(event, Body) and self._unsent_bytes(id) >= BUFFER_HIGH_WATER:
                    await wait.room.park()  # Hypercorn's own wait ends where the window is closed
            finally:
                del self._waits[id]
        if patience.cancelled_caught:
            lines: ClientLines = self.connection_state[LINES]
            lines.log(logger, logging.WARNING, "http.stalled", unsent_bytes=self._unsent_bytes(id))
            await self._end(id, ErrorCodes.CANCEL)

    async def _send_data(self, stream_id: int) -> None:
        await super()._send_data(stream_id)
        if stream_id not in self.stream_buffers and self._is_open(stream_id):  # its body is not wanted any more
            self._reset(stream_id, ErrorCodes.NO_ERROR)
            await self._flush()
        if (wait := self._waits.get(stream_id)) is not None:
            wait.room.unpark_all()
            if (unsent := self._unsent_bytes(stream_id)) <= wait.unsent_bytes:
                wait.unsent_bytes = unsent - FAIR_BYTES
                wait.scope.deadline = trio.current_time() + self._stall_timeout_sec

    async def _handle_events(self, events: Iterable[H2Event]) -> None:
        for event in events:
            if isinstance(event, DataReceived) and event.stream_id not in self.streams:
                # Its answer has ended. The connection's window is for the other streams.
                self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, RequestReceived):
                if is_well_formed(event):
                    await self._create_stream(event)  # also while the server stops, which the app says
                else:
                    self._refuse(event.stream_id)
                await self.send(Updated(idle=self.idle))
            elif isinstance(event, TrailersReceived):
                if not is_well_formed(event):
                    noted(400, self.streams.get(event.stream_id), self.connection_state)
                    await self._end(event.stream_id, ErrorCodes.PROTOCOL_ERROR)
            elif not isinstance(event, PriorityUpdated):  # RFC 9113 has no priorities any more: all streams are equal
                await super()._handle_events([event])
        await self._flush()

    async def _create_stream(self, request: RequestReceived) -> None:
        id = request.stream_id
        try:
            if any(name == b":path" for name, _ in request.headers):
                await super()._create_stream(request)
                return
        except UnicodeDecodeError:  # in the method, the path or a WebSocket's handshake, before anything has come of it
            if self.streams.pop(id, None) is not None:
                del self.stream_buffers[id]
                self.priority.remove_stream(id)
        self._refuse(id)

    def _refuse(self, stream_id: int) -> None:
        """Answer a request that is malformed, unless its client has taken it back in the same turn."""
        headers = [(b":status", b"400"), (b"content-length", b"0"), *noted(400, None, self.connection_state)]
        with suppress(ProtocolError):
            self.connection.send_headers(stream_id, headers + self.config.response_headers("h2"), end_stream=True)
        if self._is_open(stream_id):
            self._reset(stream_id, ErrorCodes.NO_ERROR)

    async def _end(self, stream_id: int, code: ErrorCodes) -> None:
        """Reset a stream, and cancel its request."""
        self._reset(stream_id, code)
        await self._flush()
        await super().stream_send(StreamClosed(stream_id))
        await self._window_updated(stream_id)  # lets the sending task see that the stream is gone

    def _unsent_bytes(self, stream_id: int) -> int:
        buffer = self.stream_buffers.get(stream_id)
        return 0 if buffer is None else len(buffer.buffer)

    def _is_open(self, stream_id: int) -> bool:
        stream = self.connection.streams.get(stream_id)
        return stream is not None and not stream.closed

    def _reset(self, stream_id: int, code: ErrorCodes) -> None:
        with suppress(ProtocolError):  # it is closed, or the connection is
            self.connection.reset_stream(stream_id, code)
