"""One end of a stream socket, for client and server.

Many tasks write on one socket, thousands of times a second. They append to the link's buffer, and one writing task
sends all that has accumulated by one system call. Reads take as much as the kernel gives. The buffer is bounded, and a
task that finds it full waits: backpressure from a slow reader.
"""

from __future__ import annotations

import select
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import attrs
import trio

with suppress(ImportError):  # Windows
    import fcntl
    import termios

from uma.net.wakeup import Wakeup

RECEIVE_BYTES = 65536
"""Maximum bytes of one read. A batch of 32 token events is about 3 KiB, so one read usually takes all there is."""
BULK_BYTES = 262_144
"""Maximum bytes of a read after one that was full, as of a large body. Each read lets other threads have the
interpreter, which takes up to a switch interval to get back. Always so long, a read of few bytes takes 20 µs more."""
FAIR_BYTES = 8192
"""Bytes that a peer must read within `stall_timeout_sec` while more waits for it. Also the maximum of one send, because
the kernel counts only whole buffers as read."""


class Flusher:
    """Sends the pending data of many links in one task, instead of waking a writing task for each link.

    One task runs `run`. A link with a flusher wakes its own writing task only for data that the kernel does not take at
    once.
    """

    def __init__(self) -> None:
        self._posted: list[Link] = []
        self._work = Wakeup()

    def note(self, link: Link) -> None:
        """Have `run` flush the link."""
        self._posted.append(link)
        self._work.ring()

    async def run(self) -> None:
        """Flush the noted links, until cancelled."""
        while True:
            posted, self._posted = self._posted, []
            for link in posted:
                link.flush()
            if not self._posted:
                await self._work.wait()


@attrs.define(eq=False)
class LoopTurn:
    """A block that collects the links of a Trio thread that data is posted on, and flushes them at its end.

    The task that delivers all streams' tokens uses it, so that sending them wakes no other task. Blocks must not be
    nested.
    """

    _is_open: bool = attrs.field(default=False, init=False)
    _posted: list[Link] = attrs.field(factory=list, init=False)

    def takes(self, link: Link) -> bool:
        """Whether the link will be flushed at the end of the block; False outside of a block."""
        if self._is_open:
            self._posted.append(link)
        return self._is_open

    def __enter__(self) -> None:
        self._is_open = True

    def __exit__(self, *_: object) -> None:
        self._is_open = False
        posted, self._posted = self._posted, []
        for link in posted:
            link.flush()


_TURN: trio.lowlevel.RunVar[LoopTurn] = trio.lowlevel.RunVar("TURN")


def turn() -> LoopTurn:
    """The `LoopTurn` of the calling Trio thread."""
    try:
        return _TURN.get()
    except LookupError:
        _TURN.set(found := LoopTurn())
        return found


class ReaderStalledError(Exception):
    """The peer read less than `FAIR_BYTES` within `stall_timeout_sec`."""


@attrs.define(eq=False)
class Link:
    """A connected, non-blocking socket with a bounded buffer of unsent bytes. Belongs to one Trio thread.

    `post` never waits; after it, await `room` where the link `is_full`. Exactly one task runs `write`, at most one
    `receive`s.
    """

    sock: socket.socket
    max_unsent_bytes: int
    stall_timeout_sec: float
    """Maximum time that the peer takes to read `FAIR_BYTES` while the kernel's buffer is full."""
    _flusher: Flusher | None = None
    _turn: LoopTurn = attrs.field(factory=turn, init=False)
    unsent_bytes: int = attrs.field(default=0, init=False)
    _due: float | None = attrs.field(default=None, init=False)
    """Deadline by which the peer must have read `FAIR_BYTES`; None while the kernel takes all data at once."""
    _sent_bytes: int = attrs.field(default=0, init=False)
    """Bytes sent since `_due` was set. `_drained_bytes` is by how much the kernel's buffer has shrunk since then."""
    _drained_bytes: int = attrs.field(default=0, init=False)
    _pending: deque[bytes] = attrs.field(factory=deque, init=False)
    _next_bytes: int = attrs.field(default=RECEIVE_BYTES, init=False)
    """Maximum bytes of the next read."""
    _is_dead: bool = attrs.field(default=False, init=False)
    _is_done: Callable[[], bool] = attrs.field(default=lambda: False, init=False)
    _work: Wakeup = attrs.field(factory=Wakeup, init=False)
    _room: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)

    @property
    def is_full(self) -> bool:
        """Whether the buffer has reached its bound: await `room` before posting more."""
        return self.unsent_bytes >= self.max_unsent_bytes

    def post(self, data: bytes) -> None:
        """Append to the unsent bytes, and have them sent soon. Does nothing once `write` has ended."""
        if self._is_dead:
            return
        if not self._pending and not self._turn.takes(self):
            if self._flusher is None:
                self._work.ring()
            else:
                self._flusher.note(self)
        self._pending.append(data)
        self.unsent_bytes += len(data)

    def flush(self) -> None:
        """Send what was posted, as far as the kernel takes it now. The writing task sends the rest."""
        if not self._work.is_awaited:
            return  # the writing task is sending
        data = b"".join(self._pending)
        self._pending.clear()
        try:
            sent = self.sock.send(data[:FAIR_BYTES]) if data else 0
        except OSError:
            sent = 0  # the writing task gets the same error, and raises it
        if sent < len(data):
            self._pending.append(data[sent:])
        self._note_sent(sent)
        if self._pending or self._is_done():
            self._work.ring()

    def _note_sent(self, sent: int) -> None:
        self.unsent_bytes -= sent
        self._sent_bytes += sent
        if self._room and self.unsent_bytes <= self.max_unsent_bytes // 2:
            self._room.unpark_all()

    async def room(self) -> None:
        """Where the bound is reached, wait until half of the buffer is sent or the link is broken. Otherwise return
        without a checkpoint.
        """
        while self.is_full and not self._is_dead:
            await self._room.park()

    async def write(self, is_done: Callable[[], bool]) -> None:
        """Send what is posted. Each time that all of it is sent, `is_done` says whether the link ends.

        Raises `OSError` where the peer is gone, and `ReaderStalledError` where it reads less than `FAIR_BYTES` within
        `stall_timeout_sec`. Afterwards no task waits for room any more, and posted data is dropped.
        """
        self._is_done = is_done
        try:
            while True:
                if self._pending:
                    await self._send_pending()
                if self._pending:
                    continue
                if is_done():
                    return
                await self._work.wait()
        finally:
            self._is_dead = True
            self._pending.clear()
            self._room.unpark_all()

    async def _send_pending(self) -> None:
        data = self._pending.popleft() if len(self._pending) == 1 else b"".join(self._pending)
        self._pending.clear()
        unsent = memoryview(data)
        while unsent:
            try:
                sent = self.sock.send(unsent[:FAIR_BYTES])
            except BlockingIOError:
                await self._wait_writable()
                continue
            unsent = unsent[sent:]
            self._note_sent(sent)
        if not self._pending:
            self._due = None

    async def _wait_writable(self) -> None:
        """Wait until the kernel takes more data, as long as the peer reads `FAIR_BYTES` within each
        `stall_timeout_sec`.

        Not measured by sent bytes alone: the kernel accepts data again only when most of its buffer was read, which can
        take a slow reader minutes.
        """
        due = self._restart_stall_timer() if self._due is None else self._due
        held = self._held_bytes()
        while True:
            with trio.move_on_at(due) as patience:
                await trio.lowlevel.wait_writable(self.sock.fileno())
            before, held = held, self._held_bytes()
            self._drained_bytes += before - held
            if max(self._sent_bytes, self._drained_bytes) >= FAIR_BYTES:
                due = self._restart_stall_timer()
            elif patience.cancelled_caught:
                raise ReaderStalledError
            if not patience.cancelled_caught:
                return

    def _restart_stall_timer(self) -> float:
        self._sent_bytes = self._drained_bytes = 0
        self._due = trio.current_time() + self.stall_timeout_sec
        return self._due

    def _held_bytes(self) -> int:
        """Bytes in the kernel's send buffer, its own overhead included; 0 where the system does not tell."""
        if sys.platform == "win32":
            return 0
        try:
            return int(struct.unpack("i", fcntl.ioctl(self.sock, termios.TIOCOUTQ, bytes(4)))[0])
        except OSError:
            return 0

    async def receive(self) -> bytes:
        """The data that has arrived, at most `BULK_BYTES`; `b""` where the peer will send no more."""
        while True:
            await trio.lowlevel.wait_readable(self.sock.fileno())
            try:
                data = self.sock.recv(self._next_bytes)
            except BlockingIOError:
                continue
            except ConnectionError:
                return b""
            self._next_bytes = RECEIVE_BYTES if len(data) < RECEIVE_BYTES else BULK_BYTES
            return data

    @property
    def is_hung_up(self) -> bool:
        """Whether the peer has closed the connection in both directions, and not only its sending side."""
        if sys.platform == "win32":
            return False  # the next read tells
        poll = select.poll()
        poll.register(self.sock.fileno(), select.POLLIN)
        return any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))

    async def hung_up(self) -> None:
        """Wait until the peer has closed the connection or its sending side, even while received data is unread.

        Linux only (EPOLLRDHUP); on other systems this waits until it is cancelled.
        """
        if sys.platform != "linux":
            await trio.sleep_forever()
        # An epoll descriptor becomes readable itself once an event that it watches has occurred.
        try:
            with select.epoll() as watch:
                watch.register(self.sock.fileno(), select.EPOLLRDHUP)
                await trio.lowlevel.wait_readable(watch.fileno())
        except (OSError, ValueError):  # no descriptor is left for it, or the socket is closed
            await trio.sleep_forever()

    def close(self) -> None:
        """Close the socket. Tasks that wait on it get `trio.ClosedResourceError`."""
        if self.sock.fileno() >= 0:
            trio.lowlevel.notify_closing(self.sock.fileno())
        self.sock.close()
