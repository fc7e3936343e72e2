"""One end of a Unix stream socket, as both the client and the server hold it.

Many tasks have something to say on one socket, thousands of times a second. They append to the link's buffer and one
writing task sends all that has gathered in one system call; reads are as large as the kernel will give. The buffer is
bounded, and a task that finds it full waits: backpressure from a slow reader.
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
"""Maximum bytes of one read. A batch of 32 token events is about 3 KiB, so a read is nearly always everything there
is."""
FAIR_BYTES = 8192
"""What a peer must read within the time allowed, as long as there is more for it. Also the most that is sent at once,
since the system counts whole pieces as read."""


class Flusher:
    """Sends what a turn has posted on many links, in one task's turn for all of them.

    One task runs `run`. Links that have it wake their own writing tasks only for what the system does not take at once.
    """

    def __init__(self) -> None:
        self._posted: list[Link] = []
        self._work = Wakeup()

    def note(self, link: Link) -> None:
        """Have the link flushed soon."""
        self._posted.append(link)
        self._work.ring()

    async def run(self) -> None:
        """Flush what is posted, until cancelled."""
        while True:
            posted, self._posted = self._posted, []
            for link in posted:
                link.flush()
            if not self._posted:
                await self._work.wait()


@attrs.define(eq=False)
class LoopTurn:
    """A block in which what is posted on the links of a Trio thread gathers, and at whose end it is sent.

    For the task that gives all streams their tokens: no other has to be woken to send them. Not to be nested.
    """

    _is_open: bool = attrs.field(default=False, init=False)
    _posted: list[Link] = attrs.field(factory=list, init=False)

    def takes(self, link: Link) -> bool:
        """Whether the link is flushed at the end of the block; False outside of one."""
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
    """That of the Trio thread that calls."""
    try:
        return _TURN.get()
    except LookupError:
        _TURN.set(found := LoopTurn())
        return found


class ReaderStalledError(Exception):
    """The peer read nothing, or next to nothing, for as long as the link allows."""


@attrs.define(eq=False)
class Link:
    """A connected, non-blocking socket with a bounded buffer of what is yet to be sent. Belongs to one Trio thread.

    `post` never waits; await `room` after it where `is_full`. Exactly one task runs `write`, at most one `receive`s.
    """

    sock: socket.socket
    max_unsent_bytes: int
    stall_timeout_sec: float
    """How long the peer can take to read `FAIR_BYTES` while more than the system will hold waits for it."""
    _flusher: Flusher | None = None
    _turn: LoopTurn = attrs.field(factory=turn, init=False)
    unsent_bytes: int = attrs.field(default=0, init=False)
    _due: float | None = attrs.field(default=None, init=False)
    """When the peer must have read `FAIR_BYTES`; None while the system takes all there is."""
    _sent_bytes: int = attrs.field(default=0, init=False)
    """Since that was set, as `_drained_bytes`: by how much the system's own buffer has shrunk while we waited."""
    _drained_bytes: int = attrs.field(default=0, init=False)
    _pending: deque[bytes] = attrs.field(factory=deque, init=False)
    _is_dead: bool = attrs.field(default=False, init=False)
    _is_done: Callable[[], bool] = attrs.field(default=lambda: False, init=False)
    _work: Wakeup = attrs.field(factory=Wakeup, init=False)
    _room: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)

    @property
    def is_full(self) -> bool:
        """Whether the bound is reached: time to wait for `room`."""
        return self.unsent_bytes >= self.max_unsent_bytes

    def post(self, data: bytes) -> None:
        """Append to the unsent bytes, and wake the writing task. After `write` has ended this does nothing."""
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
        """Send what callers have gathered, as far as the system takes it now. The writing task does the rest."""
        if not self._work.is_awaited:
            return  # it is about it
        data = b"".join(self._pending)
        self._pending.clear()
        try:
            sent = self.sock.send(data[:FAIR_BYTES]) if data else 0
        except OSError:
            sent = 0  # the writing task will meet it again
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
        """Where the bound is reached, wait until half of it is sent or the link is broken. Else no checkpoint."""
        while self.is_full and not self._is_dead:
            await self._room.park()

    async def write(self, is_done: Callable[[], bool]) -> None:
        """Send what is posted. Each time all of it is sent, `is_done` says whether that was the end.

        Raises `OSError` where the peer is gone and `ReaderStalledError` where it reads less than `FAIR_BYTES` within
        `stall_timeout_sec`. Afterwards no task waits for room any more, and what is posted is dropped.
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
        """Wait until the system takes more, for as long as the peer reads at a fair pace.

        What could be sent is a poor measure of that: the system takes more only when most of what it holds was read,
        for which a slow reader can need minutes.
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
        """What the system holds for the peer, its own overhead included; 0 where it does not tell."""
        if sys.platform == "win32":
            return 0
        try:
            return int(struct.unpack("i", fcntl.ioctl(self.sock, termios.TIOCOUTQ, bytes(4)))[0])
        except OSError:
            return 0

    async def receive(self) -> bytes:
        """What has arrived, at most `RECEIVE_BYTES`; `b""` where the peer will send no more."""
        while True:
            await trio.lowlevel.wait_readable(self.sock.fileno())
            try:
                return self.sock.recv(RECEIVE_BYTES)
            except BlockingIOError:
                continue
            except ConnectionError:
                return b""

    @property
    def is_hung_up(self) -> bool:
        """Whether the peer is gone altogether, and has not merely said that it will send no more."""
        if sys.platform == "win32":
            return False  # an ordinary read finds it out
        poll = select.poll()
        poll.register(self.sock.fileno(), select.POLLIN)
        return any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))

    async def hung_up(self) -> None:
        """Wait until the peer is gone, or will send no more, also where it has sent what nobody has read yet.

        Without Linux's word for that this waits until it is cancelled.
        """
        if sys.platform != "linux":
            await trio.sleep_forever()
        # An epoll is readable itself once something has happened that it watches for.
        try:
            with select.epoll() as watch:
                watch.register(self.sock.fileno(), select.EPOLLRDHUP)
                await trio.lowlevel.wait_readable(watch.fileno())
        except (OSError, ValueError):  # no descriptor is left for it, or the socket is closed
            await trio.sleep_forever()

    def close(self) -> None:
        """Close the socket. Tasks that still wait on it get `trio.ClosedResourceError`."""
        if self.sock.fileno() >= 0:
            trio.lowlevel.notify_closing(self.sock.fileno())
        self.sock.close()
