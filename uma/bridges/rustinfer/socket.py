"""A ROUTER socket under Trio, which also reports peers that have disconnected.

ZeroMQ has one descriptor for all events of a socket, and is edge-triggered: any call on the socket can consume an
event. So after each send the receiving task is woken if there is something to read.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import trio
import zmq
from zmq.utils.monitor import parse_monitor_message

from uma.errors import ConfigError

HEARTBEAT_MS = 1_000
HEARTBEAT_TIMEOUT_MS = 5_000
"""Maximum silence of a peer, heartbeats included, before it counts as gone."""
RETRY_SEC = 0.005
"""Interval of attempts to send to a peer whose buffer is full: ZeroMQ does not report when one peer's buffer has
space."""
LATE_RETRY_SEC = 0.1
"""Interval of attempts to send to a peer that has stalled."""
LINGER_MS = 500
QUEUED_MESSAGES = 256
"""Maximum messages for one peer that ZeroMQ queues until the peer reads them. A full queue accepts messages again once
half of it is read."""
STALL_TIMEOUT_SEC = 30.0
"""Maximum time that a peer takes to read that half. Heartbeats do not detect this, as none is sent behind a full
queue."""


@attrs.frozen
class Envelope:
    """Return address of a message: the peer's identity, and the frames before the message (REQ's empty frame)."""

    frames: tuple[bytes, ...]
    connection: int
    """Descriptor of the peer's connection, by which ZeroMQ reports its end."""

    @property
    def peer(self) -> bytes:
        """The peer's identity."""
        return self.frames[0]


class PeerGoneError(Exception):
    """The recipient of a message is no longer connected."""


class PeerStalledError(Exception):
    """The recipient of a message is connected, but has not read for too long."""


class RouterSocket:
    """A bound ROUTER socket. Belongs to one Trio thread; one task receives, any task sends."""

    def __init__(
        self,
        endpoint: str,
        max_message_bytes: int,
        heartbeat_ms: int = HEARTBEAT_MS,
        heartbeat_timeout_ms: int = HEARTBEAT_TIMEOUT_MS,
        stall_timeout_sec: float = STALL_TIMEOUT_SEC,
    ) -> None:
        self._stall_timeout_sec = stall_timeout_sec
        self._sent_sec: dict[int, float] = {}
        """Time at which each connection last accepted a message."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, LINGER_MS),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),
            (zmq.SNDHWM, QUEUED_MESSAGES),
            (zmq.MAXMSGSIZE, max_message_bytes),
            (zmq.HEARTBEAT_IVL, heartbeat_ms),
            (zmq.HEARTBEAT_TIMEOUT, heartbeat_timeout_ms),
            (zmq.HEARTBEAT_TTL, heartbeat_timeout_ms),
        ):
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPTED)
        self._nap = trio.CancelScope()
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"--bind: {endpoint}: {error.strerror}") from error
        self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def close(self) -> None:
        """Disconnect all peers, once they have read what was sent, or after `LINGER_MS`."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()

    async def receive(self) -> tuple[Envelope, bytes]:
        """The next message. Cancelling the wait loses none."""
        while True:
            await trio.lowlevel.checkpoint_if_cancelled()
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                await self._wait()
                continue
            connection = int(frames[-1].get(zmq.SRCFD))
            *envelope, message = (frame.bytes for frame in frames)
            if envelope:
                return Envelope(tuple(envelope), connection), message

    async def _wait(self) -> None:
        """Wait until a message can have come."""
        with trio.CancelScope() as self._nap:
            await trio.lowlevel.wait_readable(self._socket.fileno())

    async def send(self, to: Envelope, message: bytes) -> None:
        """Send to a peer, and wait while its queue is full. Raises `PeerGoneError`, and `PeerStalledError` where the
        queue stays full.
        """
        began = trio.current_time()
        while not self.try_send(to, message):
            if trio.current_time() > max(began, self._sent_sec.get(to.connection, 0.0)) + self._stall_timeout_sec:
                raise PeerStalledError
            await trio.sleep(RETRY_SEC)  # nothing tells when a peer has read

    async def send_late(self, to: Envelope, message: bytes) -> None:
        """Send to a peer that has stalled, once it reads again. Raises `PeerGoneError`."""
        while not self.try_send(to, message):  # noqa: ASYNC110  (nothing tells when a peer has read)
            await trio.sleep(LATE_RETRY_SEC)

    def try_send(self, to: Envelope, message: bytes) -> bool:
        """Send to a peer; False where its queue is full. Raises `PeerGoneError`."""
        try:
            self._socket.send_multipart([*to.frames, message], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise PeerGoneError from None
        finally:
            if _is_readable(self._socket):
                self._nap.cancel()
        self._sent_sec[to.connection] = trio.current_time()
        return True

    def ended_connections(self) -> Iterator[int]:
        """Descriptors of connections that have ended since the last call. Never waits."""
        while _is_readable(self._monitor):
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._sent_sec.pop(int(event["value"]), None)
                yield int(event["value"])

    async def something_ended(self) -> None:
        """Wait until `ended_connections` can have new entries."""
        await trio.lowlevel.wait_readable(self._monitor.fileno())


def _is_readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
