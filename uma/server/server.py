"""The server: its sessions, their admission, and the shutdown sequence.

Ending is a sequence with a bound at each step: no new sessions; what runs can finish; what still runs is told
`E_RUNTIME_SHUTDOWN`; a session that does not read that is closed.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import trio

from uma.config import RuntimeConfig
from uma.errors import Overloaded, ShuttingDown, TooManySessions, UmaError, VersionMismatch
from uma.net.accept import accept_forever
from uma.net.throttle import Throttle
from uma.net.unread import Unread
from uma.server import socketfile
from uma.server.connection import Connection, ServedEngine
from uma.server.json_connection import JsonConnection
from uma.server.logs import log
from uma.server.newline import NewlineConnection
from uma.server.own_files import OwnFiles
from uma.server.users import Users
from uma.types import Health, LoadProgress

logger = logging.getLogger("uma.server")

FAREWELL_SEC = 1.0
"""Maximum time for the last words of a stopping server to be read."""
MAX_PARSING = 2
"""Maximum threads that parse large frames: they share one interpreter lock, so more would only wait for each other."""


MAX_SESSION_REQUESTS = 256
"""Maximum requests of one session, running and waiting: a quarter of what waits by default, the rest is for others."""


class Server:
    """Serves one engine on one socket. All methods belong to the Trio thread that runs `serve`.

    With a `LoadProgress` in the engine's place it listens while the model is being loaded: `health` says how far that
    is, everything else waits in its session until `be_ready` or `give_up`.
    """

    def __init__(self, engine: ServedEngine | LoadProgress, config: RuntimeConfig) -> None:
        self._progress = engine if isinstance(engine, LoadProgress) else None
        self._engine = None if isinstance(engine, LoadProgress) else engine
        self.config = config
        self.is_child = False
        self.max_session_requests = MAX_SESSION_REQUESTS
        self.sessions_total = 0
        """Sessions accepted since the start, refused ones not included."""
        self.sessions_refused_total = 0
        self.requests_refused_total = 0
        """Requests that never reached the engine: no message, a busy session, a running id, too many of a session."""
        self.requests_queue_full_total = 0
        """Requests of them that were refused for overload."""
        self.parsing = trio.CapacityLimiter(MAX_PARSING)
        """Limiter of threads that parse large frames. A session has one at a time, so sessions take turns."""
        self.files = OwnFiles()
        self.users = Users.load(config.socket_users)
        self.unread = Unread()
        """Embeddings and rankings that wait to be read."""
        self.failures = Throttle()
        """Throttle of log lines that clients can bring about at no cost of their own."""
        self._connections: set[Connection] = set()
        self._refused: set[Connection] = set()
        self._gone = trio.lowlevel.ParkingLot()
        self._loaded = trio.Event()
        if self._engine is not None:
            self._loaded.set()
        self._turns: dict[trio.Event, None] = {}
        """Turns of sessions that wait for the model, in the order in which they began to."""
        self._farewell: UmaError | None = None
        """Why no session is accepted any more."""
        self._accepting = trio.CancelScope()
        self._numbers = count(1)
        self._began_sec = time.monotonic()

    @property
    def engine(self) -> ServedEngine:
        """The engine. There is none before `be_ready`."""
        assert self._engine is not None
        return self._engine

    def be_ready(self, engine: ServedEngine) -> None:
        """The model is loaded: take requests from now on."""
        self._engine, self._progress = engine, None
        for connection in self._connections:
            connection.be_ready(engine.info)
        self._loaded.set()

    def farewell_of(self, error: UmaError) -> UmaError:
        """What sessions are told of a load that has failed."""
        return ShuttingDown(f"the server ends: {error.message}")

    async def give_up(self, why: UmaError) -> None:
        """The model will not be loaded: tell every session, which takes `FAREWELL_SEC` at most. Cancel `serve` then."""
        self._farewell = why
        for connection in self._connections:
            connection.fail(why)
        with trio.move_on_after(FAREWELL_SEC):
            await self._all_gone()

    @property
    def is_ready(self) -> bool:
        """Whether the model is loaded. Until then nothing but `health` can be answered."""
        return self._loaded.is_set()

    @property
    def loading_percent(self) -> int:
        """How much of the model is loaded."""
        return 100 if self._progress is None else self._progress.percent

    @contextmanager
    def queued(self) -> Iterator[trio.Event]:
        """A place among the sessions that wait for the model. The event is set once it is loaded and those that began
        to wait before have had their turn.
        """
        turn = trio.Event()
        self._turns[turn] = None
        if self.is_ready:
            turn.set()
        try:
            yield turn
        finally:
            del self._turns[turn]

    async def _give_turns(self) -> None:
        """Let those in that waited for the model, one after another: it is they who would overload the engine."""
        await self._loaded.wait()
        for turn in list(self._turns):
            turn.set()
            await trio.lowlevel.checkpoint()

    async def health(self, *, probe: bool) -> Health:
        """The engine's health; before there is one, how far its model is loaded."""
        if self._progress is not None:
            return Health("loading", 0.0, 0, self._progress.percent)
        return await self.engine.health(probe=probe)

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until `begin_drain`, then return when everything has ended. Cancelling ends everything at once.

        `started` is called once clients can connect. Raises `ConfigError` where the socket cannot be had.
        """
        file = socketfile.listen(Path(self.config.socket), self.config.socket_mode)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._give_turns)
                task_status.started()
                with self._accepting:
                    await accept_forever(file.sock, lambda sock: self._admit(sock, nursery), self._note_shortage)
                # New connections are refused by the system from here on; those in the backlog get an error.
                file.remove()
                self._refuse_waiting(file.sock, nursery)
                await self._drain()
                nursery.cancel_scope.cancel()
        finally:
            file.remove()
            file.close()
            if self._engine is not None or self._accepting.cancel_called:  # a start that failed has said why
                suppressed = self.failures.suppressed or None
                log(logger, logging.INFO, "server.stopped", sessions_total=self.sessions_total, suppressed=suppressed)

    def begin_drain(self) -> None:
        """Take no more sessions and requests, and let `serve` come to its end."""
        self._accepting.cancel()

    async def metrics(self) -> Mapping[str, Any]:
        """The engine's snapshot with the server's own figures. Never waits for compute.

        What was refused here is counted with what the engine refused: a client knows no difference.
        """
        snapshot = await self.engine.metrics()
        return {
            **snapshot,
            "requests_total": snapshot["requests_total"] + self.requests_refused_total,
            "requests_rejected": snapshot["requests_rejected"] + self.requests_refused_total,
            "requests_overloaded": snapshot["requests_overloaded"] + self.requests_queue_full_total,
            "uptime_sec": round(time.monotonic() - self._began_sec, 3),
            "active_sessions": len(self._connections),
            "sessions_total": self.sessions_total,
            "sessions_refused_total": self.sessions_refused_total,
        }

    def note_refused(self, code: str) -> None:
        """Count a request that a session refused with the error `code`. A hello is none."""
        if code != VersionMismatch.code:
            self.requests_refused_total += 1
            self.requests_queue_full_total += code == Overloaded.code

    def _note_shortage(self, error: OSError) -> None:
        self.failures.log(logger, logging.ERROR, "server.cannot_accept", reason=error.strerror)

    def _admit(self, sock: socket.socket, nursery: trio.Nursery, refusal: UmaError | None = None) -> None:
        limit = self.config.max_sessions
        refusal = refusal or self._farewell
        if refusal is None and len(self._connections) >= limit:
            refusal = TooManySessions(f"{limit} sessions are open, and no more are allowed (max_sessions)")
        hosted = self._refused if refusal else self._connections
        if len(hosted) >= limit:
            sock.close()  # a flood: even a refusal costs a file descriptor
            return
        connection = self._connection(sock)
        hosted.add(connection)
        self._note_opened(connection, refusal)
        nursery.start_soon(self._host, connection, hosted, refusal)

    async def _host(self, connection: Connection, hosted: set[Connection], refusal: UmaError | None) -> None:
        try:
            await connection.run(refusal)
        except Exception as fault:  # noqa: BLE001  (whatever it is, it is this session's alone)
            log(logger, logging.ERROR, "session.crashed", session=connection.name, fault=fault)
        finally:
            hosted.discard(connection)
            self._gone.unpark_all()
            log(logger, logging.DEBUG, "session.closed", session=connection.name)

    def _connection(self, sock: socket.socket) -> Connection:
        sock.setblocking(False)
        kind = JsonConnection if self.config.protocol == "json" else NewlineConnection
        return kind(f"s{next(self._numbers)}", sock, self)

    def _note_opened(self, connection: Connection, refusal: UmaError | None) -> None:
        if refusal is None:
            self.sessions_total += 1
            log(logger, logging.DEBUG, "session.opened", session=connection.name)
        else:
            self.sessions_refused_total += 1
            fields = {"session": connection.name, "code": refusal.code}
            self.failures.log(logger, logging.WARNING, "session.refused", **fields)

    def _refuse_waiting(self, listener: socket.socket, nursery: trio.Nursery) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            self._admit(sock, nursery, ShuttingDown("the server is stopping; start it again with `uma run`"))

    async def _drain(self) -> None:
        log(logger, logging.INFO, "server.draining", sessions=len(self._connections))
        self.engine.begin_drain()
        for connection in self._connections:
            connection.drain()
        with trio.move_on_after(self.config.drain_timeout_sec):
            await self._all_gone()
        for connection in self._connections:
            connection.abort(ShuttingDown("the server is stopping, and this took longer than drain_timeout_sec"))
        with trio.move_on_after(FAREWELL_SEC):
            await self._all_gone()

    async def _all_gone(self) -> None:
        while self._connections or self._refused:
            await self._gone.park()


class SilentServer(Server):
    """A server that listens nowhere: others reach its engine by what serves beside it."""

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """See `Server.serve`."""
        async with trio.open_nursery() as nursery:
            self._begin(nursery)
            task_status.started()
            with self._accepting:
                await trio.sleep_forever()
            await self._drain()
            nursery.cancel_scope.cancel()

    def _begin(self, nursery: trio.Nursery) -> None:
        nursery.start_soon(self._give_turns)
