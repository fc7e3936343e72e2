"""The server: its sessions, their admission, and the shutdown sequence.

Ending is a sequence with a bound at each step: no new sessions; what runs can finish; what still runs is told
`E_RUNTIME_SHUTDOWN`; a session that does not read that is closed.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path

import trio

from uma.config import RuntimeConfig
from uma.errors import CUT_OFF, STOPPING, ShuttingDown, TooManySessions, UmaError
from uma.net.accept import accept_forever
from uma.server import socketfile
from uma.server.connection import Connection, ConnectionHost, ServedEngine
from uma.server.json_connection import JsonConnection
from uma.server.logs import log
from uma.server.newline import NewlineConnection
from uma.types import LoadProgress

logger = logging.getLogger("uma.server")

COUNT_SEC = 0.5
"""Maximum time in which a stopping server counts what runs."""
FAREWELL_SEC = 1.0
"""Maximum time for the last words of a stopping server to be read."""


class Server(ConnectionHost):
    """Serves one engine on one socket. All methods belong to the Trio thread that runs `serve`.

    With a `LoadProgress` in the engine's place it listens while the model is being loaded: `health` says how far that
    is, everything else waits in its session until `be_ready` or `give_up`.
    """

    def __init__(self, engine: ServedEngine | LoadProgress, config: RuntimeConfig) -> None:
        super().__init__(engine, config)
        self._refused: set[Connection] = set()
        self._gone = trio.lowlevel.ParkingLot()
        self.serving = 0
        """Services of its process that have not ended, itself among them."""
        self._farewell: UmaError | None = None
        """Why no session is accepted any more."""
        self._accepting = trio.CancelScope()
        self._draining = trio.CancelScope()
        self._numbers = count(1)

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

    async def _give_turns(self) -> None:
        """Let those in that waited for the model, one after another: it is they who would overload the engine."""
        await self._loaded.wait()
        for turn in list(self._turns):
            turn.set()
            await trio.lowlevel.checkpoint()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until `begin_drain`, then return when everything has ended. Cancelling ends everything at once.

        `started` is called once clients can connect. Raises `ConfigError` where the socket cannot be had.
        """
        file = socketfile.listen(Path(self.config.socket), self.config.socket_mode)
        try:
            async with trio.open_nursery() as nursery:
                admit = partial(self._admit, nursery)
                self._tasks = nursery
                nursery.start_soon(self._give_turns)
                task_status.started()
                with self._accepting:
                    await accept_forever(file.sock, admit, self._note_shortage)
                # Until the end a new session is told that the server stops: `uma ps` sees it so.
                self._farewell = ShuttingDown(STOPPING)
                nursery.start_soon(accept_forever, file.sock, admit, self._note_shortage)
                await self._drain(file)
                nursery.cancel_scope.cancel()
        finally:
            file.remove()
            file.close()

    def tell_stopped(self) -> None:
        """Log that all has ended, models included; a start that failed has said why."""
        if self._engine is not None or self._accepting.cancel_called:
            suppressed = self.failures.suppressed or None
            log(logger, logging.INFO, "server.stopped", sessions_total=self.sessions_total, suppressed=suppressed)

    def begin_drain(self) -> None:
        """Take no more sessions and requests, and let `serve` come to its end. Called again: now."""
        if self._accepting.cancel_called:
            self._draining.cancel()
        self._accepting.cancel()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """A service of its process serves in the block: a drain waits for it, and meanwhile the socket says so."""
        self.serving += 1
        try:
            yield
        finally:
            self.serving -= 1
            self._gone.unpark_all()

    def _note_shortage(self, error: OSError) -> None:
        self.failures.log(logger, logging.ERROR, "server.cannot_accept", reason=error.strerror)

    def _admit(self, nursery: trio.Nursery, sock: socket.socket) -> None:
        limit, refusal = self.config.max_sessions, self._farewell
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

    async def _drain(self, file: socketfile.SocketFile | None = None) -> None:
        """Let what runs finish within `drain_timeout_sec`, and end the rest. The socket's `file` goes before the last
        sessions do.
        """
        self.engine.begin_drain()
        for connection in self._connections:
            connection.drain()
        self._draining.deadline = trio.current_time() + self.config.drain_timeout_sec
        await self._log_drain()
        await trio.lowlevel.checkpoint()  # sessions that wait in the backlog are told too
        with self._draining:
            while self._connections or self.serving > 1:
                await self._gone.park()
        if file is not None:
            file.remove()
        for connection in self._connections:
            connection.abort(ShuttingDown(CUT_OFF))
        with trio.move_on_after(FAREWELL_SEC):
            await self._all_gone()

    async def _log_drain(self) -> None:
        """Log how many requests may still finish, in which time: of a model's own process the server in front tells."""
        if self.is_child:
            return
        requests = None
        with trio.move_on_after(COUNT_SEC), suppress(UmaError):
            now = await self.engine.activity()
            waiting = now.waiting_interactive + now.waiting_normal + now.waiting_background
            requests = len(now.running) + waiting
        sessions, seconds = len(self._connections), self.config.drain_timeout_sec
        log(logger, logging.INFO, "server.draining", sessions=sessions, requests=requests, seconds=seconds)

    async def _all_gone(self) -> None:
        while self._connections or self._refused:
            await self._gone.park()


class SilentServer(Server):
    """A server that listens nowhere: others reach its engine by what serves beside it."""

    def tell_stopped(self) -> None:
        """See `Server`: what serves beside it, or its parent, tells that."""

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            self._begin(nursery)
            task_status.started()
            with self._accepting:
                await trio.sleep_forever()
            await self._drain()
            nursery.cancel_scope.cancel()

    def _begin(self, nursery: trio.Nursery) -> None:
        nursery.start_soon(self._give_turns)
