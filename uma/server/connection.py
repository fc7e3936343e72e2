"""One connection: a nursery with a reading task, a writing task, and a task for each request.

The tasks share the connection's link and nothing else. Hanging up ends the nursery, and with it every request that
ran there; a cancel ends one request's scope; a full link holds up just this connection's requests.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import attrs
import trio

from uma import posix
from uma.config import RuntimeConfig
from uma.errors import BadRequest, IdleTimeout, Overloaded, UmaError, UnknownModel, VersionMismatch
from uma.models.names import check_alone, meant
from uma.net import quota
from uma.net.arrivals import arrivals
from uma.net.client import CLIENT, ORIGIN, OWNER, USER, asker, origin
from uma.net.faults import as_uma_error
from uma.net.link import Link, ReaderStalledError
from uma.net.peer import pid_of_peer, program_of, uid_of_peer
from uma.net.quota import Excess
from uma.net.throttle import ClientLines, Throttle
from uma.net.unread import Unread
from uma.protocol.messages import ErrorEvent, Sender
from uma.server.clock import IdleClock
from uma.server.logs import lines_lost_total, log
from uma.server.own_files import OwnFiles
from uma.server.users import Users
from uma.types import (
    DecisionRequest,
    EmbedRequest,
    EventStream,
    Finished,
    Health,
    LoadProgress,
    LoadState,
    Models,
    Request,
    RerankRequest,
    ServerInfo,
    Source,
)

logger = logging.getLogger("uma.server")

W = TypeVar("W", EmbedRequest, RerankRequest, DecisionRequest)
A = TypeVar("A", Request, EmbedRequest, RerankRequest, DecisionRequest)

LINGER_SEC = 0.5
"""After the last event the peer can still be sending. Reading on for a moment spares it a broken pipe before it has
read why."""
HANG_UP_CHECK_SEC = 0.5
"""After a client has closed its sending half its socket is readable for ever, so a hang-up has to be looked for."""

MAX_PARSING = 2
"""Maximum threads that parse large frames: they share one interpreter lock, so more would only wait for each other."""
MAX_SESSION_REQUESTS = 256
"""Maximum requests of one session, running and waiting: a quarter of what waits by default, the rest is for others."""
TELL_SEC = 1.0
"""Between two words to a session that waits for the model. Clients give up after some ten seconds of silence."""


class ServedEngine(Source, Protocol):
    """What a server serves: an engine, or several models."""

    def begin_drain(self) -> None:
        """Take no more requests; those that run come to their end."""

    async def end_request(self, number: int) -> bool:
        """End the request of this `RunningRequest.number`; whether there was one."""

    async def pause(self, seconds: float) -> None:
        """Compute nothing for so long from now on; 0: go on."""

    def yield_memory(self) -> None:
        """Drop half of the prefixes that are kept in host memory, for other programs."""

    def snapshot(self) -> Mapping[str, Any]:
        """Snapshot of `metrics`, at once."""


class ConnectionHost:
    """What the connections of one server share: its engine once there is one, its bounds and its figures."""

    def __init__(self, engine: ServedEngine | LoadProgress, config: RuntimeConfig) -> None:
        self._progress = engine if isinstance(engine, LoadProgress) else None
        self._engine = None if isinstance(engine, LoadProgress) else engine
        self.config = config
        self.is_child = False
        """Whether it has one model of several, and its only session is the supervisor's."""
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
        self._loaded = trio.Event()
        if self._engine is not None:
            self._loaded.set()
        self._turns: dict[trio.Event, None] = {}
        """Turns of sessions that wait for the model, in the order in which they began to."""
        self._began_sec = time.monotonic()
        self._tasks: trio.Nursery | None = None
        """Nursery of what outlives the session that asked for it; there while the server runs."""
        self._pause = trio.CancelScope(deadline=-math.inf)
        """The last pause, which ends at its deadline."""

    @property
    def engine(self) -> ServedEngine:
        """The engine. There is none before `be_ready`."""
        assert self._engine is not None
        return self._engine

    @property
    def is_ready(self) -> bool:
        """Whether the model is loaded. Until then nothing but `health` can be answered."""
        return self._loaded.is_set()

    @property
    def load(self) -> LoadState:
        """How far the model's load is."""
        return LoadState(100 if self._progress is None else self._progress.percent)

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

    async def health(self, *, probe: bool) -> Health:
        """The engine's health; before there is one, how far its model is loaded."""
        if self._progress is not None:
            return Health("loading", 0.0, 0, self._progress.percent)
        return await self.engine.health(probe=probe)

    async def metrics(self) -> Mapping[str, Any]:
        """The engine's snapshot with the server's own figures. Never waits for compute.

        What was refused here is counted with what the engine refused: a client knows no difference. A process of one
        model among several is no server to clients, so it has no figures of one.
        """
        snapshot = await self.engine.metrics()
        snapshot = {
            **snapshot,
            "requests_total": snapshot["requests_total"] + self.requests_refused_total,
            "requests_rejected": snapshot["requests_rejected"] + self.requests_refused_total,
            "requests_overloaded": snapshot["requests_overloaded"] + self.requests_queue_full_total,
        }
        own = {"uptime_sec": round(time.monotonic() - self._began_sec, 3), **self.figures()}
        return snapshot if self.is_child else {**snapshot, **own}

    def figures(self) -> dict[str, Any]:
        """What sessions and users the server has and had, and what its log has lost."""
        return {
            "active_sessions": len(self._connections),
            "sessions_total": self.sessions_total,
            "sessions_refused_total": self.sessions_refused_total,
            "log_lines_lost_total": lines_lost_total(),
            **quota.figures("user", self.users.accounts()),
        }

    async def pause(self, seconds: float, session: str) -> None:
        """Have the engine compute nothing for so long; 0: go on. Logs both, and the end of a pause that just ends."""
        await self.engine.pause(seconds)
        if self.is_child or self._tasks is None:  # of several models the supervisor tells, once
            return
        now, before = trio.current_time(), self._pause
        self._pause = trio.CancelScope(deadline=now + seconds)
        before.cancel()
        if seconds:
            log(logger, logging.INFO, "server.paused", session=session, by=asker(), seconds=seconds)
            self._tasks.start_soon(self._tell_end_of, self._pause)
        elif before.deadline > now:
            log(logger, logging.INFO, "server.resumed", session=session, by=asker())

    async def _tell_end_of(self, pause: trio.CancelScope) -> None:
        with pause:
            await trio.sleep_forever()
        if pause is self._pause:
            log(logger, logging.INFO, "server.resumed", by="time")

    def note_refused(self, code: str) -> None:
        """Count a request that a session refused with the error `code`. A hello is none."""
        if code != VersionMismatch.code:
            self.requests_refused_total += 1
            self.requests_queue_full_total += code == Overloaded.code


@attrs.define(eq=False)
class SessionWork:
    """One thing a connection does for its client, and how to end it."""

    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    stream: EventStream | None = None
    """The engine's stream, once the work has one."""
    is_whole: bool = False
    """Whether it is answered in one piece, without a stream; a cancel ends it at once."""
    is_cancelled: bool = False
    ends_thinking: bool = False
    verdict: UmaError | None = None
    """Why it was ended, where that was not the client's wish."""

    def cancel(self) -> None:
        """The client's wish: what runs ends at the next token, with an `eos` that says so."""
        self.is_cancelled = True
        if self.stream is not None:
            self.stream.cancel()
        elif self.is_whole:
            self.scope.cancel()

    def end_thinking(self) -> None:
        """The client's wish: its thinking ends at the next token."""
        self.ends_thinking = True
        if self.stream is not None:
            self.stream.end_thinking()

    def attach(self, stream: EventStream) -> EventStream:
        """Let `cancel` and `end_thinking` reach the engine, also where they came before there was a stream."""
        self.stream = stream
        if self.ends_thinking:
            stream.end_thinking()
        if self.is_cancelled:
            stream.cancel()
        return stream

    def abort(self, error: UmaError) -> None:
        """The server's wish: it ends now, with `error`."""
        self.verdict = error
        self.scope.cancel()

    def raise_if_aborted(self) -> None:
        """After `scope`: raise the verdict, unless the work came to its own end before that could reach it."""
        if self.verdict is not None and self.scope.cancelled_caught:
            raise self.verdict


class Connection(ABC):
    """What JSON and newline sessions have in common. Belongs to the server's Trio thread."""

    def __init__(self, name: str, sock: socket.socket, server: ConnectionHost) -> None:
        self.name = name
        self.server = server
        self.link = Link(sock, server.config.max_tx_bytes, server.config.tx_timeout_sec)
        self.clock = IdleClock(server.config.idle_timeout_sec)
        self._user = uid = uid_of_peer(sock)
        self.is_owner = uid is not None and uid in (0, posix.user_id())
        """Whether the server is this user's."""
        self._owner = None if self.is_owner else ("user", uid)
        self.account = server.users.account(uid)
        """What the user at the other end can use now."""
        is_bounded = self.account.is_bounded
        self._client = ("user", uid) if is_bounded else name
        pid = pid_of_peer(sock)
        self._origin = origin("socket", self.account.name if is_bounded else None, program_of(pid), pid)
        self.work: dict[object, SessionWork] = {}
        self._log_lines = ClientLines(server.failures)
        self._saw_eof = False
        self._tasks: trio.Nursery

    @property
    def engine(self) -> ServedEngine:
        """The server's engine, once it has one."""
        return self.server.engine

    # What a kind of session is: bytes in, and its own way to say things.

    @abstractmethod
    async def take(self, data: bytes) -> bool:
        """Act on bytes from the client. Whether a whole frame or line ended in them."""

    def be_ready(self, info: ServerInfo) -> None:  # noqa: B027  (not every kind of session has bounds of its own)
        """The model is loaded: what the session's requests can ask for is known."""

    @abstractmethod
    def fail(self, error: UmaError) -> None:
        """End the session with an error that speaks of it as a whole."""

    @abstractmethod
    def drain(self) -> None:
        """Take no more requests, and end once nothing runs."""

    @property
    @abstractmethod
    def is_mid_frame(self) -> bool:
        """Whether a part of a frame or line has come."""

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether nothing runs or waits."""

    @abstractmethod
    def is_over(self) -> bool:
        """Called when all is written: whether the session ends with it."""

    # What they share.

    async def run(self, refusal: UmaError | None = None) -> None:
        """Serve until either side ends it; with a `refusal`, only to say so. Never raises for the peer's doings."""
        CLIENT.set(self._client)
        ORIGIN.set(self._origin)
        OWNER.set(self._owner)
        USER.set(self._user)
        try:
            async with trio.open_nursery() as self._tasks:
                if refusal is not None:
                    self.fail(refusal)
                self._tasks.start_soon(self._write)
                await self._read()
        finally:
            self.link.close()

    def speak_for(self, sender: Sender | None) -> None:
        """Have this task work for the client that a session of the server's own user names."""
        if sender is not None and self.is_owner:
            CLIENT.set((self.name, sender.client))
            ORIGIN.set(sender.origin)
            OWNER.set(sender.owner or None)

    def abort(self, error: UmaError) -> None:
        """End everything that runs here with `error`; the session ends once the error is sent."""
        for work in self.work.values():
            work.abort(error)

    async def _read(self) -> None:
        expected = arrivals()
        with self.clock.scope, expected.receiving(self):
            self._update_clock(had_frame=False)
            while data := await self.link.receive():
                with self.clock.standing():
                    had_frame = await self.take(data)
                if had_frame:
                    expected.came_whole(self)
                self._update_clock(had_frame=had_frame)
                if self.is_mid_frame:
                    expected.came_in_part(self)
            self._note_eof()
        if self._saw_eof:
            await self._await_hang_up()
            return
        limit = self.server.config.idle_timeout_sec
        what = "half a frame came" if self.is_mid_frame else "nothing came and nothing ran"
        self.fail(
            IdleTimeout(f"{what} for {limit:g} s (idle_timeout_sec); connect again when there is something to do")
        )
        half_frame = self.is_mid_frame
        self.server.failures.log(logger, logging.INFO, "session.idle", session=self.name, half_frame=half_frame)
        while await self.link.receive():
            pass
        self._note_eof()
        await self._await_hang_up()

    def _note_eof(self) -> None:
        # A client can close its sending half and still read. What runs goes on, and its end is the session's.
        self._saw_eof = True
        self.link.post(b"")

    async def _await_hang_up(self) -> None:
        """After the end of input: end everything once the client is gone altogether."""
        while not self.link.is_hung_up:  # noqa: ASYNC110  (the kernel has no event for it that Trio could wait for)
            await trio.sleep(HANG_UP_CHECK_SEC)
        self._tasks.cancel_scope.cancel()

    async def _write(self) -> None:
        try:
            await self.link.write(self._is_done)
        except ReaderStalledError:
            unsent = self.link.unsent_bytes
            self.server.failures.log(logger, logging.WARNING, "session.stalled", session=self.name, unsent_bytes=unsent)
        except OSError:
            pass  # hung up: the reading task sees it too
        else:
            await self._linger()
        self._tasks.cancel_scope.cancel()

    def _is_done(self) -> bool:
        return self.is_over() or (self._saw_eof and self.is_idle)

    async def _linger(self) -> None:
        try:
            self.link.sock.shutdown(socket.SHUT_WR)
        except OSError:
            return
        if not self._saw_eof:
            await trio.sleep(LINGER_SEC)

    async def loaded(self, tell: Callable[[LoadState], None]) -> None:
        """Wait until the model is loaded. `tell` is given how far that is, at once and every `TELL_SEC`."""
        with self.server.queued() as turn:
            while not turn.is_set():
                tell(self.server.load)
                with trio.move_on_after(TELL_SEC):
                    await turn.wait()
                if self.link.is_hung_up:  # also where the session reads no more, and so does not see it
                    self._tasks.cancel_scope.cancel()

    async def say(self, data: bytes) -> None:
        """Post, and wait where the client is behind in reading."""
        self.link.post(data)
        if self.link.is_full:
            await self.link.room()

    def begin(self, key: object) -> SessionWork:
        """Enter a piece of work; `done` takes it out again."""
        self.work[key] = work = SessionWork()
        return work

    def done(self, key: object, work: SessionWork) -> None:
        """A piece of work is over. Its id can be in use again by now: then that one stays."""
        if self.work.get(key) is work:
            del self.work[key]
        self._update_clock(had_frame=False)

    @property
    def models(self) -> Models | None:
        """All models of the server, where it has several."""
        return self.engine if isinstance(self.engine, Models) else None

    async def card(self, model: str | None, *, loads: bool = True) -> ServerInfo:
        """What the server is, of several models with this one, and with limits as they are for this user. `loads`: see
        `Models.card`.
        """
        model = self.own_model(model if self.models else None)
        info = self.engine.info if self.models is None else await self.models.card(model, loads=loads)
        usable = None if self.models is None else self.account.usable(self.models)
        models = info.models if usable is None else tuple(offered for offered in info.models if offered in usable)
        return attrs.evolve(info, limits=self.account.limits(info.limits), models=models)

    @property
    def adapters(self) -> tuple[str, ...]:
        """LoRA adapters of the server's one model."""
        return () if self.models else self.engine.info.capabilities.adapters

    def own_model(self, asked: str | None) -> str | None:
        """The model that a request which asks for this one gets. Raises `UnknownModel` where there is none of that
        name, or its user must not use it.
        """
        if self.models is None:
            model = self.engine.info.model
            of = {model: (model.name, model.title)}
            if asked is not None:
                check_alone(asked, model.name, [model.title], self.adapters)
            bound = self.account.bounds.models
            if bound is not None and not any(meant(name, of) for name in bound):
                raise UnknownModel(self.account.other_model(model.name).message)
            return asked
        found = self.account.model(asked, self.models)
        if isinstance(found, Excess):
            raise UnknownModel(found.message)
        return found

    def check_model(self, request: A) -> A:
        """The request, with the model that it gets. Raises as `own_model`."""
        model = self.own_model(request.model)
        return request if model == request.model else attrs.evolve(request, model=model)

    def enter(self, request: Request) -> Request:
        """The request as its user's bounds have it, counted as running until `leave`.

        Raises `Overloaded` where it can be let in later, and `BadRequest` for a field that its user must not use so.
        """
        request = self._checked(request)
        # On the wire a priority of 0 is that of a request that says nothing.
        default = self.engine.info.limits.default_max_tokens
        fitted = self.account.fit(request, has_priority=request.priority > 0, default_max_tokens=default)
        if isinstance(fitted, Excess):
            raise BadRequest(fitted.message)
        self.account.begin(1)
        return fitted

    def enter_whole(self, request: W) -> W:
        """Enter a request that is answered in one piece."""
        request = self._checked(request)
        lane = self.account.lane(request.priority, has_priority=request.priority > 0)
        if isinstance(lane, Excess):
            raise BadRequest(lane.message)
        self.account.begin(1)
        return attrs.evolve(request, priority=lane)

    def _checked(self, request: A) -> A:
        """The request with the model that it gets, if its user may have one more now."""
        self.server.users.look()
        request = self.check_model(request)
        if (excess := self.account.objection(1, trio.current_time())) is not None:
            raise Overloaded(excess.message, retry_after_ms=excess.retry_after_ms)
        return request

    def leave(self) -> None:
        """A request that was let in has ended."""
        self.account.end(1)

    def log_finished(self, event: Finished, model: str | None = None) -> None:
        """Note the end of a request that came to one; `model` is the one of several that it had. What a model's own
        process has computed the server in front of it tells, once.
        """
        log(
            logger,
            logging.DEBUG if self.server.is_child else logging.INFO,
            "request.finished",
            session=self.name,
            request=event.id,
            model=model,
            reason=event.reason,
            prompt=event.usage.prompt_tokens,
            cached=event.usage.cached_tokens,
            completion=event.usage.completion_tokens,
            ttft_ms=event.metrics.ttft_ms,
            tokens_per_second=event.metrics.tokens_per_second,
        )

    def as_uma_error(self, fault: Exception, id: str | None) -> UmaError:
        """What the client is told of what ended one of its requests."""
        return as_uma_error(fault, logger, "request.crashed", session=self.name, request=id)

    def log_failure(self, id: str | None, error: UmaError | ErrorEvent) -> None:
        """Note what a request, or a frame that was none, was refused or ended with."""
        level = logging.DEBUG if self.server.is_child else logging.WARNING
        self.log_often(level, "request.failed", request=id, code=error.code, message=error.message)
        self.account.refused += error.code == Overloaded.code

    def log_often(self, level: int, event: str, **fields: Any) -> None:
        """Log what the client can bring about as often as it likes, within this session's bound and the server's."""
        self._log_lines.log(logger, level, event, session=self.name, **fields)

    def _update_clock(self, *, had_frame: bool) -> None:
        self.clock.update(is_idle=self.is_idle, is_mid_frame=self.is_mid_frame, had_frame=had_frame)
