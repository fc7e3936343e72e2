"""A connection that speaks framed JSON: `ServerSession` says what each frame means, this does it."""

from __future__ import annotations

import logging
import math
import socket
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from time import perf_counter
from typing import Any

import attrs
import trio

from uma.engine import Engine
from uma.engine.intake.overload import full_queue_retry_ms
from uma.errors import BadRequest, Overloaded, UmaError, VersionMismatch
from uma.models.names import adapter_in
from uma.net.arrivals import arrivals
from uma.net.client import QUEUED, asker
from uma.net.inline import MAX_POSITIONS, is_quick
from uma.net.metering import metered, metered_whole
from uma.protocol.codec import MAX_INLINE_FIGURES, encode_event, written_embeddings
from uma.protocol.messages import (
    ActivityQuery,
    Cancel,
    DecideQuery,
    EmbedQuery,
    EndQuery,
    EndThinking,
    ExplainQuery,
    Generate,
    HealthEvent,
    HealthQuery,
    Hello,
    LoadingEvent,
    LoadQuery,
    MetricsQuery,
    ModelQuery,
    ModelsQuery,
    PauseQuery,
    PinQuery,
    PlainQuery,
    RerankQuery,
    Sender,
    TokenizeQuery,
    TraceQuery,
    UnloadQuery,
    WholeQuery,
    wire_event,
)
from uma.protocol.session import Incoming, Parsed, Refused, ServerSession
from uma.protocol.versions import negotiate
from uma.server.connection import TELL_SEC, A, Connection, ConnectionHost, SessionWork
from uma.server.logs import log
from uma.types import (
    MAX_KEEP_SEC,
    EventStream,
    Finished,
    ListedModel,
    LoadState,
    Request,
    ServerInfo,
    Source,
    Token,
    Usage,
)

logger = logging.getLogger("uma.server")


MAX_QUERIES = 16
"""Maximum queries of one session that are being answered; beyond it the session's input waits, as for
`MAX_STARTING`."""
SLICE_SEC = 0.001
"""Time with frames that nothing comes of, such as cancels without effect, after which other sessions have a turn."""
MAX_WAITING = 64
"""Maximum frames of one session that wait for the model; beyond it the session's input waits."""
MAX_WAITING_BYTES = 8 * 2**20
"""Bytes of such frames together after which the session's input waits, too."""
MAX_STARTING = 64
"""Maximum requests of one session that are being tokenized; beyond it the session's input waits. Once they are
tokenized the engine's own queue bounds them."""


class JsonConnection(Connection):
    """One session of the protocol. Its `ServerSession` belongs to all its tasks, which share one thread."""

    def __init__(self, name: str, sock: socket.socket, server: ConnectionHost) -> None:
        super().__init__(name, sock, server)
        self._session = ServerSession(max_frame_bytes=server.config.frame_bytes(takes_media=True))
        self._starting = 0
        self._asking = 0
        self._has_turn = trio.lowlevel.ParkingLot()
        self._slice_began = 0.0
        self._waiting: deque[bytes] = deque()
        """Frames that wait for the model."""
        self._waiting_bytes = 0
        self._waits = False
        """Frames wait for the model or for those before them that did."""
        self._knows_loading = True
        self._model: str | None = None
        """The model of requests that name none, where the server has several; None: its default."""

        if server.is_ready:
            self.be_ready(server.engine.info)

    def be_ready(self, info: ServerInfo) -> None:
        n_vocab = None if info.models else info.model.vocab_size  # each of several checks its own
        self._session.bound(n_vocab=n_vocab, max_frame_bytes=info.limits.max_frame_bytes)

    @property
    def is_mid_frame(self) -> bool:
        return self._session.is_mid_frame

    @property
    def is_idle(self) -> bool:
        return self._session.is_idle and not self._waits

    def is_over(self) -> bool:
        return self._session.flushed()

    def fail(self, error: UmaError) -> None:
        self.link.post(self._session.fail(error))

    def drain(self) -> None:
        self.link.post(self._session.drain())

    async def take(self, data: bytes) -> bool:
        self._session.receive(data)
        had_frame = False
        self._slice_began = perf_counter()
        while (payload := self._session.next_payload()) is not None:
            had_frame = True
            if isinstance(payload, Refused):
                self._act(payload)
            elif self._waits or not self.server.is_ready:
                await self._put_off(payload)
            else:
                await self._take_in(payload)
        return had_frame

    async def _take_in(self, payload: bytes) -> None:
        message = self._session.admit(await self._parse(payload))
        if isinstance(message, Hello):
            await self._greet(message)
        elif message is not None:
            self._act(message)
        elif perf_counter() - self._slice_began < SLICE_SEC:
            return
        # Trio starts new tasks in no particular order; this way requests reach the engine as they were sent.
        await trio.lowlevel.checkpoint()
        while self._starting >= MAX_STARTING or self._asking >= MAX_QUERIES:
            await self._has_turn.park()
        if self.link.is_full:
            await self.link.room()
        self._slice_began = perf_counter()

    async def _put_off(self, payload: bytes) -> None:
        """Have a frame wait for the model. A question for the server's health is answered at once.

        What it says is read once it can be checked against the model, and in the version that the hello before it
        agrees on.
        """
        message = self._session.parse(payload) if is_quick(payload) else None
        if isinstance(message, HealthQuery) and not self.server.is_ready:
            await self._tell_health(payload, message)
            return
        if not self._waits:
            self._waits = True
            self._knows_loading = not isinstance(message, Hello) or _agrees_on_1_1(message)
            self._tasks.start_soon(self._take_in_later)
        self._waiting.append(payload)
        self._waiting_bytes += len(payload)
        while len(self._waiting) >= MAX_WAITING or self._waiting_bytes >= MAX_WAITING_BYTES:
            await self._has_turn.park()

    async def _tell_health(self, payload: bytes, query: HealthQuery) -> None:
        if self._waits:  # it is no part of the session that begins with what waits
            health = await self.server.health(probe=False)
            await self.say(encode_event(wire_event(HealthEvent, health, id=query.id, warnings=query.warnings)))
            await trio.lowlevel.checkpoint()
        else:
            await self._take_in(payload)

    async def _take_in_later(self) -> None:
        await self.loaded(self._tell_loading)
        self._slice_began = perf_counter()
        while self._waiting:
            payload = self._waiting.popleft()
            self._waiting_bytes -= len(payload)
            self._has_turn.unpark_all()
            await self._take_in(payload)
        self._waits = False
        self._update_clock(had_frame=False)
        self.link.post(b"")

    def _tell_loading(self, load: LoadState, id: str | None = None) -> None:
        if self._knows_loading and not self.link.unsent_bytes and not self._session.is_closing:
            self.link.post(encode_event(LoadingEvent(load.percent, load.waits_for, id), self._session.version))

    async def _parse(self, payload: bytes) -> Parsed:
        """What a frame says; a large one is read in another thread, while the session's next ones wait."""
        if is_quick(payload):
            return self._session.parse(payload)
        with arrivals().reading(len(payload)):
            return await trio.to_thread.run_sync(
                self._session.parse, payload, limiter=self.server.parsing, abandon_on_cancel=True
            )

    def _act(self, message: Incoming) -> None:
        match message:
            case Hello():
                pass  # greeted before
            case Generate():
                self._start(message)
            case Cancel():
                # Only requests that run come out of the session, so a cancel for any other never gets here.
                if (work := self.work.get(message.id)) is not None:
                    work.cancel()
            case EndThinking():
                if (work := self.work.get(message.id)) is not None:
                    work.end_thinking()
            case Refused():
                self.server.note_refused(message.event.code)
                self.log_failure(message.event.id, message.event)
                self.link.post(message.data)
            case EmbedQuery() | RerankQuery() | DecideQuery():
                self._start_whole(message)
            case _:
                self._start_query(message)

    async def _greet(self, hello: Hello) -> None:
        self._knows_loading = _agrees_on_1_1(hello)
        try:
            with self._telling_of_load(hello.model) if hello.loads else nullcontext():
                info = await self.card(hello.model, loads=hello.loads)
        except UmaError as error:
            self.fail(error)
            return
        is_kept = self.models or (hello.model and adapter_in(hello.model, self.adapters))
        self._model = hello.model if is_kept else None
        self.link.post(self._session.welcome(info))
        log(logger, logging.DEBUG, "session.hello", session=self.name, client=hello.client)

    def _of_session(self, request: A) -> A:
        """The request, with the session's model where it names none."""
        return request if self._model is None or request.model else attrs.evolve(request, model=self._model)

    @contextmanager
    def _telling_of_load(self, model: str | None, id: str | None = None) -> Iterator[None]:
        """A block in which the client is told how far a model is that has to be loaded, and which request waits."""
        telling = trio.CancelScope()

        async def tell() -> None:
            with telling:
                while self.models and (load := self.models.load_of(model)) is not None:
                    self._tell_loading(load, id)
                    await trio.sleep(TELL_SEC)

        if self.models and self.models.load_of(model) is not None:
            self._tasks.start_soon(tell)
        try:
            yield
        finally:
            telling.cancel()

    @asynccontextmanager
    async def _loaded(self, model: str | None, id: str) -> AsyncIterator[Source]:
        """A block with what answers a request: where the server has several models that one, which stays loaded."""
        if self.models is None:
            yield self.engine
            return
        async with AsyncExitStack() as stack:
            with self._telling_of_load(model, id):
                source = await stack.enter_async_context(self.models.using(model, id=id))
            yield source

    def _start(self, message: Generate) -> None:
        id = message.request.id
        try:
            self._check_queue()
            request = self.enter(self._of_session(message.request))
        except UmaError as error:
            self.server.note_refused(error.code)
            self._tell_failure(id, error)
            return
        self._starting += self.models is None
        log(logger, logging.DEBUG, "request.received", session=self.name, request=id)
        self._tasks.start_soon(self._generate, request, self.begin(id), message.sender)

    def _start_query(self, query: PlainQuery) -> None:
        try:
            self._check_queue()
        except Overloaded as error:
            self.server.note_refused(error.code)
            self.log_failure(_id_of(query), error)
            self.link.post(self._session.fail_query(query, error))
            return
        self._asking += 1
        key = object()
        self._tasks.start_soon(self._answer, query, key, self.begin(key))

    def _start_whole(self, query: WholeQuery) -> None:
        id = query.request.id
        try:
            self._check_queue()
            self.server.unread.check()
            request: Any = query.request
            query = attrs.evolve(query, request=self.enter_whole(self._of_session(request)))
        except UmaError as error:
            self.server.note_refused(error.code)
            self._tell_failure(id, error)
            return
        work = self.begin(id)
        work.is_whole = True
        log(logger, logging.DEBUG, "request.received", session=self.name, request=id)
        self._tasks.start_soon(self._answer_whole, query, work)

    async def _answer_whole(self, query: WholeQuery, work: SessionWork) -> None:
        """Embed, rank or decide. The engine bounds what waits for it."""
        self.speak_for(query.sender)
        QUEUED.set((query.request.priority, (1,)))
        try:
            with work.scope:
                async with self._loaded(query.request.model, query.request.id) as source:
                    data = await self._compute(query, source)
                self.link.post(data)
                if self.link.is_full:
                    with self.server.unread.holding(len(data)):
                        await self.link.room()
            if work.is_cancelled and work.scope.cancelled_caught:
                self.link.post(self._session.cancelled(query))
            work.raise_if_aborted()
        except Exception as fault:  # noqa: BLE001  (whatever it is, it is this request's alone)
            self._tell_failure(query.request.id, self.as_uma_error(fault, query.request.id))
        finally:
            self.leave()
        self.done(query.request.id, work)

    async def _compute(self, query: WholeQuery, source: Source) -> bytes:
        asks: dict[type, Any] = {EmbedQuery: source.embed, RerankQuery: source.rerank, DecideQuery: source.decide}
        with metered_whole(query.request, self.account) as meter:
            found: Any = await asks[type(query)](query.request)
            meter.usage = Usage(found.read_tokens, 0, 0)
        if not isinstance(query, EmbedQuery) or found.n_figures <= MAX_INLINE_FIGURES:
            return self._session.answer(query, found)
        written = await trio.to_thread.run_sync(
            written_embeddings, found, query.encoding, limiter=self.server.parsing, abandon_on_cancel=True
        )
        return self._session.answer_embed(query, found, written)

    async def _generate(self, request: Request, work: SessionWork, sender: Sender | None) -> None:
        self.speak_for(sender)
        QUEUED.set((request.priority, (request.sampling.drawn_answers,)))
        id, entered = request.id, self._entered(request)
        del request  # its files are large, and once it is admitted nobody needs them
        try:
            with work.scope:
                async with (
                    entered as (stream, model),
                    metered(stream, self.account) as meter,
                ):
                    work.attach(stream)
                    meter.usage = await self._relay(stream, model)
            work.raise_if_aborted()
        except Exception as fault:  # noqa: BLE001  (whatever it is, it is this request's alone)
            self._tell_failure(id, self.as_uma_error(fault, id))
        except trio.Cancelled:
            self.log_often(logging.INFO, "request.dropped", request=id)
            raise
        finally:
            self.leave()
        self.done(id, work)

    @asynccontextmanager
    async def _entered(self, request: Request) -> AsyncIterator[tuple[EventStream, str | None]]:
        """`generate` of the request's model with the files that it names, and of several models its name. Counts those
        that are still being admitted: not those that wait for their model.
        """
        async with self._loaded(request.model, request.id) as source, AsyncExitStack() as stack:
            self._starting += self.models is not None
            try:
                async with self.server.files.read(request, self._user) as whole:
                    del request
                    stream = await stack.enter_async_context(source.generate(whole))
                    del whole
            finally:
                self._starting -= 1
                self._has_turn.unpark_all()
            yield stream, None if self.models is None else source.info.model.name

    def _check_queue(self) -> None:
        most = self.server.max_session_requests
        if len(self.work) >= most:
            service_ms, at_once = self.engine.snapshot()["service_ms_ewma"], self.engine.info.limits.max_sequences
            raise Overloaded(
                f"this session has {most:,} requests running and waiting; wait for one to end",
                retry_after_ms=full_queue_retry_ms(len(self.work), most, service_ms, at_once),
            )

    async def _relay(self, stream: EventStream, model: str | None) -> Usage | None:
        # Tokens pass through the tap, in the turn that brings them; the task sees those for which there was no room.
        stream.tap = self._pass_on
        link = self.link
        async for event in stream:
            written = None
            if type(event) is Finished and event.n_positions > MAX_POSITIONS:
                written = await trio.to_thread.run_sync(
                    self._session.eos, event, limiter=self.server.parsing, abandon_on_cancel=True
                )
            link.post(self._session.relay(event, written))
            if type(event) is Finished:
                self.log_finished(event, model)
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

    async def _answer(self, query: PlainQuery, key: object, work: SessionWork) -> None:
        try:
            with work.scope:
                self.link.post(self._session.answer(query, await self._ask(query)))
            work.raise_if_aborted()
        except Exception as fault:  # noqa: BLE001  (whatever it is, it is this query's alone)
            error = self.as_uma_error(fault, _id_of(query))
            self.link.post(self._session.fail_query(query, error))
            self.log_failure(_id_of(query), error)
        finally:
            self._asking -= 1
            self._has_turn.unpark_all()
        self.done(key, work)

    async def _ask(self, query: PlainQuery) -> Any:
        if isinstance(query, MetricsQuery):
            return await self.server.metrics()
        if isinstance(query, ActivityQuery):
            return await self.engine.activity(query.request)
        if isinstance(query, ExplainQuery):
            self.speak_for(query.sender)
            return await self.engine.explain(query.request)
        if isinstance(query, TraceQuery):
            return await self._trace(query)
        if isinstance(query, EndQuery):
            return await self._end(query)
        if isinstance(query, PauseQuery):
            self._check_owner("pause the server")
            await self.server.pause(query.seconds, self.name)
            return await self.server.health(probe=False)
        if isinstance(query, HealthQuery):
            return await self.server.health(probe=query.probe)
        if isinstance(query, ModelQuery):
            return await self._ask_models(query)
        request = self.check_model(self._of_session(query.request))
        async with (
            self._loaded(request.model, request.id) as source,
            self.server.files.read(request, self._user) as whole,
        ):
            return await source.tokenize(whole, pieces=query.pieces)

    async def _trace(self, query: TraceQuery) -> str:
        self._check_owner("trace the server")
        if self.models is not None:
            return await self.models.trace(query.seconds)
        if not isinstance(self.engine, Engine):
            raise BadRequest.at("type", "there is no trace of this server")
        trace = (await self.engine.record(query.seconds)).written()
        written = await trio.to_thread.run_sync(b"".join, trace, limiter=self.server.parsing, abandon_on_cancel=True)
        return written.decode()

    async def _ask_models(self, query: ModelQuery) -> list[ListedModel]:
        if (models := self.models) is None:
            raise BadRequest.at("type", "this server has one model; one of several is started by `uma run --models`")
        if isinstance(query, ModelsQuery):
            if query.reload:
                await models.look_again()
            usable = self.account.usable(models)
            every = (*models.listed(), *models.gone())
            return [listed for listed in every if usable is None or listed.name in usable]
        model = self.own_model(query.model or self._model)
        if not isinstance(query, LoadQuery) or (query.keep_sec or 0) < 0:
            self._check_owner("unload and pin its models")
        elif (query.keep_sec or 0) > MAX_KEEP_SEC:
            self._check_owner(f"keep a model for longer than {MAX_KEEP_SEC:,.0f} s (keep_sec)")
        if isinstance(query, UnloadQuery):
            return [await models.unload(model)]
        if isinstance(query, PinQuery) and not query.pinned:
            return [await models.pin(model, is_pinned=False)]
        with self._telling_of_load(model, query.id):
            if isinstance(query, PinQuery):
                return [await models.pin(model)]
            is_endless = query.keep_sec is not None and query.keep_sec < 0
            return [await models.load(model, math.inf if is_endless else query.keep_sec)]

    def _check_owner(self, what: str) -> None:
        if not self.is_owner:
            raise BadRequest.at("type", f"only the user that the server runs as can {what}")

    async def _end(self, query: EndQuery) -> bool:
        self._check_owner("end the requests of others")
        is_ended = await self.engine.end_request(query.number)
        if not self.server.is_child:
            session, by, number = self.name, asker(), query.number
            log(logger, logging.INFO, "request.ended", session=session, by=by, number=number, was_running=is_ended)
        return is_ended

    def _tell_failure(self, id: str, error: UmaError) -> None:
        self.link.post(self._session.fail(error, id))
        self.log_failure(id, error)


def _agrees_on_1_1(hello: Hello) -> bool:
    """Whether the session that this opens has the events of version 1.1."""
    try:
        return negotiate(hello.versions) != "1.0"
    except VersionMismatch:
        return False


def _id_of(query: PlainQuery) -> str | None:
    return query.request.id if isinstance(query, TokenizeQuery) else query.id
