"""HTTP/2 on one connection, by h2: a client that errs or stalls loses its own request, and what else runs goes on.

What h2 takes for an error of the whole connection ends all its streams.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

import trio
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)
from h2.exceptions import InvalidBodyLengthError, ProtocolError
from h2.settings import SettingCodes, Settings
from h2.utilities import HeaderValidationFlags, validate_headers

from uma.http.call import Call, Host, identified
from uma.http.exchange import Header
from uma.http.http1 import MAX_HEAD_BYTES
from uma.net.link import FAIR_BYTES

logger = logging.getLogger("uma.http")

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What a client's HTTP/2 begins with (RFC 9113, 3.4)."""
MAX_STREAMS = 100
"""Requests that a connection can have at once."""
MAX_UNSENT_BYTES = 32_768
"""What is kept of an answer for a reader that opens no window. Two frames."""


class _Connection(H2Connection):
    """h2's connection, which does not end for a malformed request. (RFC 9113, 8.1.1: that is an error of its stream.)

    It does not look at heads, which its owner does with `is_well_formed`.
    """

    def __init__(self) -> None:
        super().__init__(H2Configuration(client_side=False, header_encoding=None, validate_inbound_headers=False))
        bounds = {SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS, SettingCodes.MAX_HEADER_LIST_SIZE: MAX_HEAD_BYTES}
        self.local_settings = Settings(client=False, initial_values=bounds)

    def _receive_frame(self, frame: Any) -> list[Event]:
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


class Http2:
    """What is said on a connection."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.h2 = _Connection()
        self._calls: dict[int, _Call] = {}
        self.h2.initiate_connection()
        self.flush()

    @property
    def is_behind(self) -> bool:
        """Whether nothing more is to be read: the client does not take what answers it."""
        return self.host.is_full

    async def room(self) -> None:
        """Wait while `is_behind`."""
        await self.host.room()

    def feed(self, data: bytes) -> None:
        """Take what has come."""
        try:
            events = self.h2.receive_data(data)
        except ProtocolError:
            self.flush()
            self.host.close()
            return
        for event in events:
            self._handle(event)
        self.flush()

    def leave(self) -> None:
        """The client is gone, or has closed its sending half."""
        for call in self._calls.values():
            call.leave()

    def drain(self) -> None:
        """The server stops: end with the answers that run."""
        if not self._calls:
            with suppress(ProtocolError):
                self.h2.close_connection()
            self.flush()
            self.host.close()

    def flush(self) -> None:
        """Post what h2 has to say."""
        if data := self.h2.data_to_send():
            self.host.post(data)

    def _handle(self, event: Event) -> None:
        call = self._calls.get(getattr(event, "stream_id", None) or 0)
        if isinstance(event, RequestReceived):
            self._begin(event)
        elif isinstance(event, DataReceived):
            if call is None:  # its answer has ended; the connection's window is for the other streams
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            else:
                call.add(event.data)
                call.unacknowledged_bytes += event.flow_controlled_length - len(event.data)
        elif isinstance(event, StreamEnded) and call is not None:
            call.end_body()
        elif isinstance(event, StreamReset) and call is not None:
            self._drop(call)
        elif isinstance(event, TrailersReceived) and not is_well_formed(event):
            identified(self.host.lines, 400, None if call is None else call.scope)
            self.reset(event.stream_id, ErrorCodes.PROTOCOL_ERROR)
        elif isinstance(event, WindowUpdated) and call is not None:
            call.send_more()
        elif isinstance(event, WindowUpdated | RemoteSettingsChanged):
            self._send_more()
        elif isinstance(event, ConnectionTerminated):
            self.host.close()

    def _begin(self, head: RequestReceived) -> None:
        fields = dict(reversed(head.headers))
        method, target = fields.get(b":method", b""), fields.get(b":path", b"")
        if b":protocol" in fields and method == b"CONNECT":  # a WebSocket (RFC 8441), which is not offered
            self._refuse(head.stream_id, 403)
        elif not is_well_formed(head) or not target or not (method + target).isascii():
            self._refuse(head.stream_id, 400)
        else:
            host = fields.get(b":authority", fields.get(b"host", b""))
            plain = [(name, value) for name, value in head.headers if not name.startswith(b":") and name != b"host"]
            call = _Call(self, head.stream_id, method.decode().upper(), target, [(b"host", host), *plain])
            self._calls[head.stream_id] = call
            self.host.start(call)

    def _refuse(self, stream_id: int, status: int) -> None:
        """Answer a request that is malformed, unless its client has taken it back in the same turn."""
        headers = [(b":status", b"%d" % status), (b"content-length", b"0"), *identified(self.host.lines, status)]
        with suppress(ProtocolError):
            self.h2.send_headers(stream_id, headers, end_stream=True)
        self._ignore_body(stream_id)
        if not self._calls:
            self.host.rest()

    def _ignore_body(self, stream_id: int) -> None:
        """The answer is whole. What has not come of the body is not wanted any more."""
        stream = self.h2.streams.get(stream_id)
        if stream is not None and not stream.closed:
            self._reset(stream_id, ErrorCodes.NO_ERROR)

    def reset(self, stream_id: int, code: ErrorCodes) -> None:
        """End a stream, and its request."""
        self._reset(stream_id, code)
        self.flush()
        if (call := self._calls.get(stream_id)) is not None:
            self._drop(call)

    def _reset(self, stream_id: int, code: ErrorCodes) -> None:
        with suppress(ProtocolError):  # it is closed, or the connection is
            self.h2.reset_stream(stream_id, code)

    def was_answered(self, call: _Call) -> None:
        """The answer is whole, and sent as far as its stream is concerned."""
        with suppress(ProtocolError):
            self.h2.end_stream(call.stream_id)
        self._ignore_body(call.stream_id)
        self.flush()
        self._drop(call)

    def _drop(self, call: _Call) -> None:
        del self._calls[call.stream_id]
        call.leave()
        self.acknowledge(call, call.unread_bytes)
        if self._calls:
            return
        if self.host.is_draining:
            self.drain()
        else:
            self.host.rest()

    def acknowledge(self, call: _Call, count: int) -> None:
        """So many bytes of the body, and what came around them, need no room any more."""
        count, call.unacknowledged_bytes = count + call.unacknowledged_bytes, 0
        with suppress(ProtocolError):
            self.h2.acknowledge_received_data(count, call.stream_id)
        self.flush()

    def _send_more(self) -> None:
        """Share a window that has opened: a frame of each answer in turn."""
        behind = list(self._calls.values())
        while behind := [call for call in behind if call.send_frame()]:
            pass
        self.flush()


class _Call(Call):
    """A request over HTTP/2."""

    def __init__(self, http: Http2, stream_id: int, method: str, target: bytes, headers: list[Header]) -> None:
        super().__init__(http.host, method, target, headers, "2")
        self.stream_id = stream_id
        self.unacknowledged_bytes = 0
        """Of frames around the body's bytes: their padding."""
        self._http = http
        self._unsent = bytearray()
        self._is_last = False
        self._patience = trio.CancelScope()
        self._unsent_goal_bytes = 0
        """How little must be left before the reader is given more time."""
        self._room = trio.lowlevel.ParkingLot()

    def leave(self) -> None:
        """See `Call`."""
        super().leave()
        self._room.unpark_all()

    def _is_asked_for(self) -> None:
        pass

    def _was_taken(self, count: int) -> None:
        if not self._is_gone:
            self._http.acknowledge(self, count)

    def _begin(self, status: int, headers: list[Header]) -> None:
        fields = [(b":status", b"%d" % status), *((name, value) for name, value in headers if name != b"connection")]
        with suppress(ProtocolError):
            self._http.h2.send_headers(self.stream_id, fields)
        self._http.flush()

    async def _write(self, data: bytes, *, is_last: bool) -> None:
        """Waits while more than two frames are unsent, at the end until all is sent."""
        await self._http.host.room()
        if self.is_over:
            return
        self._unsent += data
        self._is_last = is_last
        self.send_more()
        if not self._is_behind:
            return
        self._wait_for(len(self._unsent) - FAIR_BYTES)
        with self._patience:
            while self._is_behind:
                await self._room.park()
        if self._patience.cancelled_caught:
            self._http.host.lines.log(logger, logging.WARNING, "http.stalled", unsent_bytes=len(self._unsent))
            self._http.reset(self.stream_id, ErrorCodes.CANCEL)
        self._patience = trio.CancelScope()

    @property
    def _is_behind(self) -> bool:
        return not self.is_over and (self._is_last or len(self._unsent) >= MAX_UNSENT_BYTES)

    def _wait_for(self, goal_bytes: int) -> None:
        self._unsent_goal_bytes = goal_bytes
        self._patience.deadline = trio.current_time() + self._http.host.stall_timeout_sec

    def send_more(self) -> None:
        """Send what the window allows."""
        while self.send_frame():
            pass
        self._http.flush()

    def send_frame(self) -> bool:
        """Send one frame. Whether there is more that could be sent."""
        if self.is_over:
            return False
        try:
            window = self._http.h2.local_flow_control_window(self.stream_id)
            count = max(0, min(len(self._unsent), window, self._http.h2.max_outbound_frame_size))
            if count:
                self._http.h2.send_data(self.stream_id, bytes(self._unsent[:count]))
                del self._unsent[:count]
        except ProtocolError:  # the stream is closed, or the connection is
            return False
        if not self._unsent and self._is_last:
            self._http.was_answered(self)
        elif count and len(self._unsent) <= self._unsent_goal_bytes:
            self._wait_for(len(self._unsent) - FAIR_BYTES)
        self._room.unpark_all()
        return bool(count and self._unsent)

    def _post(self, data: bytes) -> bool:
        if self._unsent or self._http.host.is_full:
            return False
        self._unsent += data
        self.send_more()
        return True

    def abandon(self) -> None:
        """See `Call`. The client sees its stream reset."""
        self._http.reset(self.stream_id, ErrorCodes.INTERNAL_ERROR)
