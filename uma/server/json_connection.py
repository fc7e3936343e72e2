"""A connection that speaks framed JSON: `ServerSession` says what each frame means, this does it."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import trio

from uma.engine.delivery.stream import RequestStream
from uma.errors import Overloaded, UmaError
from uma.protocol.messages import ActivityQuery, Cancel, Generate, HealthQuery, Hello, MetricsQuery, TokenizeQuery
from uma.protocol.session import Incoming, QueryResult, Refused, ServerSession
from uma.server.connection import Connection, Work
from uma.server.logs import log
from uma.types import Finished, Request, Token

if TYPE_CHECKING:
    from uma.server.server import Server

logger = logging.getLogger("uma.server")

LEAST_RETRY_MS = 50

Query = MetricsQuery | ActivityQuery | HealthQuery | TokenizeQuery

MAX_STARTING = 64
"""Requests of one session that are being tokenized; beyond it the session's input waits. Once they are tokenized the
engine's own queue bounds them."""


class JsonConnection(Connection):
    """One session of the protocol. Its `ServerSession` belongs to all its tasks, which share one thread."""

    def __init__(self, name: str, sock: socket.socket, server: Server) -> None:
        super().__init__(name, sock, server)
        info = server.engine.info
        self._session = ServerSession(
            max_frame_bytes=server.config.max_frame_bytes,
            max_tokens=info.limits.max_tokens,
            n_vocab=info.model.vocab_size,
        )
        self._starting = 0
        self._started = trio.lowlevel.ParkingLot()

    @property
    def is_mid_frame(self) -> bool:
        return self._session.is_mid_frame

    @property
    def is_idle(self) -> bool:
        return self._session.is_idle

    def is_over(self) -> bool:
        return self._session.flushed()

    def fail(self, error: UmaError) -> None:
        self.link.post(self._session.fail(error))

    def drain(self) -> None:
        self.link.post(self._session.drain())

    async def take(self, data: bytes) -> bool:
        self._session.receive(data)
        had_frame = False
        while (message := self._session.next_message()) is not None:
            had_frame = True
            self._act(message)
            # Trio starts new tasks in no particular order; this way requests reach the engine as they were sent.
            await trio.lowlevel.checkpoint()
            while self._starting >= MAX_STARTING:
                await self._started.park()
            if self.link.is_full:
                await self.link.room()
        return had_frame

    def _act(self, message: Incoming) -> None:
        match message:
            case Generate():
                self._start(message)
            case Cancel():
                # Only requests that run come out of the session, so a cancel for any other never gets here.
                if (work := self.work.get(message.id)) is not None:
                    work.cancel()
            case Hello():
                self.link.post(self._session.welcome(self.engine.info))
                log(logger, logging.DEBUG, "session.hello", session=self.name, client=message.client)
            case Refused():
                self.server.note_refused(message.event.code)
                self.log_failure(message.event.id, message.event)
                self.link.post(message.data)
            case _:
                key = object()
                self._tasks.start_soon(self._answer, message, key, self.begin(key))

    def _start(self, message: Generate) -> None:
        id = message.request.id
        try:
            self._check_crowd()
        except Overloaded as error:
            self.server.note_refused(error.code)
            self._tell_failure(id, error)
            return
        self._starting += 1
        log(logger, logging.DEBUG, "request.received", session=self.name, request=id)
        self._tasks.start_soon(self._generate, message, self.begin(id))

    async def _generate(self, message: Generate, work: Work) -> None:
        request = message.request
        try:
            with work.scope:
                async with self._entered(request) as stream:
                    work.attach(stream)
                    await self._relay(stream)
            work.raise_if_aborted()
        except UmaError as error:
            self._tell_failure(request.id, error)
        except trio.Cancelled:
            log(logger, logging.INFO, "request.dropped", session=self.name, request=request.id)
            raise
        self.done(request.id, work)

    @asynccontextmanager
    async def _entered(self, request: Request) -> AsyncIterator[RequestStream]:
        """`generate`, with an account of who is still on the way in."""
        async with AsyncExitStack() as stack:
            try:
                stream = await stack.enter_async_context(self.engine.generate(request))
            finally:
                self._starting -= 1
                self._started.unpark_all()
            yield stream

    def _check_crowd(self) -> None:
        most = self.server.config.max_session_queue
        if len(self.work) >= most:
            service_ms = self.engine.snapshot()["service_ms_ewma"]
            raise Overloaded(
                f"this session has {most:,} requests running and waiting (max_session_queue); wait for one to end",
                retry_after_ms=max(LEAST_RETRY_MS, round(service_ms / most)),
            )

    async def _relay(self, stream: RequestStream) -> None:
        # Tokens pass through the tap, in the turn that brings them; the task sees those for which there was no room.
        stream.tap = self._pass_on
        link = self.link
        async for event in stream:
            link.post(self._session.relay(event))
            if type(event) is Finished:
                self.log_finished(event)
                return  # without a checkpoint: nothing may end a request twice
            if link.is_full:
                await link.room()

    def _pass_on(self, token: Token) -> bool:
        link = self.link
        if link.is_full:
            return False
        link.post(self._session.relay(token))
        return True

    async def _answer(self, query: Query, key: object, work: Work) -> None:
        try:
            with work.scope:
                self.link.post(self._session.answer(query, await self._ask(query)))
            work.raise_if_aborted()
        except UmaError as error:
            self.link.post(self._fail_query(query, error))
            self.log_failure(_id_of(query), error)
        self.done(key, work)

    async def _ask(self, query: Query) -> QueryResult:
        if isinstance(query, MetricsQuery):
            return await self.server.metrics()
        if isinstance(query, ActivityQuery):
            return await self.engine.activity()
        if isinstance(query, HealthQuery):
            return await self.engine.health(probe=query.probe)
        return await self.engine.tokenize(query.request)

    def _fail_query(self, query: Query, error: UmaError) -> bytes:
        if isinstance(query, TokenizeQuery):
            return self._session.fail(error, query.request.id)
        return self._session.fail_query(query, error)

    def _tell_failure(self, id: str, error: UmaError) -> None:
        self.link.post(self._session.fail(error, id))
        self.log_failure(id, error)


def _id_of(query: Query) -> str | None:
    return query.request.id if isinstance(query, TokenizeQuery) else query.id
