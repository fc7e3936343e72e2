"""A connection that speaks framed JSON: `ServerSession` says what each frame means, this does it."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from time import perf_counter

import attrs
import trio

from uma.engine.policy.overload import full_queue_retry_ms
from uma.errors import Overloaded, UmaError
from uma.net.arrivals import arrivals
from uma.net.inline import is_quick
from uma.net.metering import metered, metered_whole
from uma.protocol.codec import MAX_INLINE_FIGURES, written_embeddings
from uma.protocol.messages import (
    ActivityQuery,
    Cancel,
    EmbedQuery,
    EndThinking,
    Generate,
    HealthQuery,
    Hello,
    MetricsQuery,
    RerankQuery,
    TokenizeQuery,
)
from uma.protocol.session import Incoming, Parsed, QueryResult, Refused, ServerSession
from uma.server.connection import Connection, Host, Work
from uma.server.logs import log
from uma.types import EventStream, Finished, Request, ServerInfo, Token, Usage

logger = logging.getLogger("uma.server")

Whole = EmbedQuery | RerankQuery

Query = MetricsQuery | ActivityQuery | HealthQuery | TokenizeQuery

MAX_QUERIES = 16
"""Maximum queries of one session that are being answered; beyond it the session's input waits, as for
`MAX_STARTING`."""
SLICE_SEC = 0.001
"""Time with frames that nothing comes of, such as cancels without effect, after which other sessions have a turn."""
MAX_STARTING = 64
"""Maximum requests of one session that are being tokenized; beyond it the session's input waits. Once they are
tokenized the engine's own queue bounds them."""


class JsonConnection(Connection):
    """One session of the protocol. Its `ServerSession` belongs to all its tasks, which share one thread."""

    def __init__(self, name: str, sock: socket.socket, server: Host) -> None:
        super().__init__(name, sock, server)
        self._session = ServerSession(max_frame_bytes=server.config.max_frame_bytes, not_ready=server.refusal)
        if server.refusal() is None:
            self.be_ready(server.engine.info)
        self._starting = 0
        self._asking = 0
        self._has_turn = trio.lowlevel.ParkingLot()

    def be_ready(self, info: ServerInfo) -> None:
        self._session.bound(n_vocab=info.model.vocab_size)

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
        began = perf_counter()
        while (payload := self._session.next_payload()) is not None:
            had_frame = True
            message = payload if isinstance(payload, Refused) else self._session.admit(await self._parse(payload))
            if message is not None:
                self._act(message)
            elif perf_counter() - began < SLICE_SEC:
                continue
            # Trio starts new tasks in no particular order; this way requests reach the engine as they were sent.
            await trio.lowlevel.checkpoint()
            while self._starting >= MAX_STARTING or self._asking >= MAX_QUERIES:
                await self._has_turn.park()
            if self.link.is_full:
                await self.link.room()
            began = perf_counter()
        return had_frame

    async def _parse(self, payload: bytes) -> Parsed:
        """What a frame says; a large one is read in another thread, while the session's next ones wait."""
        if is_quick(payload):
            return self._session.parse(payload)
        with arrivals().reading(len(payload)):
            return await trio.to_thread.run_sync(self._session.parse, payload, limiter=self.server.parsing)

    def _act(self, message: Incoming) -> None:
        match message:
            case Generate():
                self._start(message)
            case Cancel():
                # Only requests that run come out of the session, so a cancel for any other never gets here.
                if (work := self.work.get(message.id)) is not None:
                    work.cancel()
            case EndThinking():
                if (work := self.work.get(message.id)) is not None:
                    work.end_thinking()
            case Hello():
                self.link.post(self._session.welcome(self.info))
                log(logger, logging.DEBUG, "session.hello", session=self.name, client=message.client)
            case Refused():
                self.server.note_refused(message.event.code)
                self.log_failure(message.event.id, message.event)
                self.link.post(message.data)
            case EmbedQuery() | RerankQuery():
                self._start_whole(message)
            case _:
                self._start_query(message)

    def _start(self, message: Generate) -> None:
        id = message.request.id
        try:
            self._check_crowd()
            request = self.enter(message.request)
        except UmaError as error:
            self.server.note_refused(error.code)
            self._tell_failure(id, error)
            return
        self._starting += 1
        log(logger, logging.DEBUG, "request.received", session=self.name, request=id)
        self._tasks.start_soon(self._generate, request, self.begin(id))

    def _start_query(self, query: Query) -> None:
        try:
            self._check_crowd()
        except Overloaded as error:
            self.server.note_refused(error.code)
            self.log_failure(_id_of(query), error)
            self.link.post(self._session.fail_query(query, error))
            return
        self._asking += 1
        key = object()
        self._tasks.start_soon(self._answer, query, key, self.begin(key))

    def _start_whole(self, query: Whole) -> None:
        id = query.request.id
        try:
            self._check_crowd()
            self.server.unread.check()
            if isinstance(query, EmbedQuery):
                query = attrs.evolve(query, request=self.enter_whole(query.request))
            else:
                query = attrs.evolve(query, request=self.enter_whole(query.request))
        except UmaError as error:
            self.server.note_refused(error.code)
            self._tell_failure(id, error)
            return
        work = self.begin(id)
        work.is_whole = True
        log(logger, logging.DEBUG, "request.received", session=self.name, request=id)
        self._tasks.start_soon(self._answer_whole, query, work)

    async def _answer_whole(self, query: Whole, work: Work) -> None:
        """Embed or rank. The engine bounds what waits for it."""
        try:
            with work.scope:
                data = await self._compute(query)
                self.link.post(data)
                if self.link.is_full:
                    with self.server.unread.holding(len(data)):
                        await self.link.room()
            if work.is_cancelled and work.scope.cancelled_caught:
                self.link.post(self._session.cancelled(query))
            work.raise_if_aborted()
        except UmaError as error:
            self._tell_failure(query.request.id, error)
        finally:
            self.leave()
        self.done(query.request.id, work)

    async def _compute(self, query: Whole) -> bytes:
        if isinstance(query, RerankQuery):
            with metered_whole(query.request, self.account) as meter:
                ranking = await self.engine.rerank(query.request)
                meter.usage = Usage(ranking.prompt_tokens, 0, 0)
            return self._session.answer(query, ranking)
        with metered_whole(query.request, self.account) as meter:
            found = await self.engine.embed(query.request)
            meter.usage = Usage(sum(found.prompt_tokens), 0, 0)
        if found.n_figures <= MAX_INLINE_FIGURES:
            return self._session.answer(query, found)
        written = await trio.to_thread.run_sync(written_embeddings, found, query.encoding, limiter=self.server.parsing)
        return self._session.answer_embed(query, found, written)

    async def _generate(self, request: Request, work: Work) -> None:
        try:
            with work.scope:
                async with self._entered(request) as stream, metered(stream, self.account) as meter:
                    work.attach(stream)
                    meter.usage = await self._relay(stream)
            work.raise_if_aborted()
        except UmaError as error:
            self._tell_failure(request.id, error)
        except trio.Cancelled:
            self.log_often(logging.INFO, "request.dropped", request=request.id)
            raise
        finally:
            self.leave()
        self.done(request.id, work)

    @asynccontextmanager
    async def _entered(self, request: Request) -> AsyncIterator[EventStream]:
        """`generate`, counting the requests that are still being admitted."""
        async with AsyncExitStack() as stack:
            try:
                stream = await stack.enter_async_context(self.engine.generate(request))
            finally:
                self._starting -= 1
                self._has_turn.unpark_all()
            yield stream

    def _check_crowd(self) -> None:
        most = self.server.config.max_session_queue
        if len(self.work) >= most:
            service_ms, at_once = self.engine.snapshot()["service_ms_ewma"], self.engine.info.limits.max_sequences
            raise Overloaded(
                f"this session has {most:,} requests running and waiting (max_session_queue); wait for one to end",
                retry_after_ms=full_queue_retry_ms(len(self.work), most, service_ms, at_once),
            )

    async def _relay(self, stream: EventStream) -> Usage | None:
        # Tokens pass through the tap, in the turn that brings them; the task sees those for which there was no room.
        stream.tap = self._pass_on
        link = self.link
        async for event in stream:
            link.post(self._session.relay(event))
            if type(event) is Finished:
                self.log_finished(event)
                return event.usage  # without a checkpoint: a request must not end twice
            if link.is_full:
                await link.room()
        return None

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
            self.link.post(self._session.fail_query(query, error))
            self.log_failure(_id_of(query), error)
        finally:
            self._asking -= 1
            self._has_turn.unpark_all()
        self.done(key, work)

    async def _ask(self, query: Query) -> QueryResult:
        if isinstance(query, MetricsQuery):
            return await self.server.metrics()
        if isinstance(query, ActivityQuery):
            return await self.engine.activity()
        if isinstance(query, HealthQuery):
            return await self.server.health(probe=query.probe)
        return await self.engine.tokenize(query.request)

    def _tell_failure(self, id: str, error: UmaError) -> None:
        self.link.post(self._session.fail(error, id))
        self.log_failure(id, error)


def _id_of(query: Query) -> str | None:
    return query.request.id if isinstance(query, TokenizeQuery) else query.id
