"""A server on a Unix socket, with the very interface of an engine in this process.

One hello session carries any number of requests at once. One task reads the socket and hands each event to the
request it belongs to; nothing is ever sent twice and nothing reconnects by itself: what was running when the server
went away is lost, and says so.
"""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from itertools import count
from typing import Any, TypeVar

import attrs
import trio

from uma.client.parts import errors_moved, halves, joined_embeddings, joined_ranking
from uma.client.stream import Stream
from uma.config import default_socket
from uma.errors import ConnectionLost, Ended, FrameTooLarge, InternalError, Loading, UmaError, WrongValues, from_code
from uma.net.client import CLIENT, ORIGIN, OWNER, with_span
from uma.net.inline import MAX_FRAME_BYTES
from uma.net.link import Link, ReaderStalledError
from uma.net.peer import pid_of_peer
from uma.protocol import messages
from uma.protocol.messages import BareQuery, Query, QueryAnswer, Sender, ServerEvent, WholeQuery, carried
from uma.protocol.session import ClientSession
from uma.types import (
    Activity,
    DecisionRequest,
    Decisions,
    Embeddings,
    EmbedRequest,
    Event,
    EventStream,
    Explained,
    Health,
    ListedModel,
    LoadState,
    Ranking,
    Request,
    RerankRequest,
    ServerInfo,
    Tokenized,
)
from uma.wrong import Wrong

_log = logging.getLogger("uma.client")
LOST_RETRY_MS = 1000
"""Time after which a request is worth to be asked again that a model's process has ended with."""
E = TypeVar("E")


@attrs.define(eq=False)
class PendingQuery:
    """A query that waits for its one answer."""

    on_loading: Callable[[LoadState], None] = lambda _: None
    """Given how far the load of its model is, where it waits for that."""
    is_work: bool = False
    """Whether it is a client's request, and no look at the server."""
    answered: trio.Event = attrs.field(factory=trio.Event)
    answer: QueryAnswer | UmaError | None = None

    def resolve(self, answer: QueryAnswer | UmaError) -> None:
        """Hand over the answer, or why there is none. The first one counts: a plain session ends with its answer."""
        if not self.answered.is_set():
            self.answer = answer
            self.answered.set()


def run_command(path: str) -> str:
    """The command that starts a server on this socket."""
    return "uma run" if path == default_socket() else f"uma run --socket {shlex.quote(path)}"


@attrs.define(eq=False)
class Client:
    """A session with a server, with the methods of `types.Source`. `connect` makes it; use it in its Trio thread.

    Any number of requests can run at once. Methods raise the server's errors as the same classes, and `ConnectionLost`
    after the server is gone. Leaving a `generate` block cancels the request at the server, and drops events that are
    still on their way. If a caller reads its events slowly, up to `stream.BUFFER_EVENTS` are buffered without any
    effect on other requests. Beyond that its request ends with `Ended`, if the client has other requests. If it has
    none, the client stops reading until the caller has caught up; a server closes the session of a client that reads
    next to nothing for `tx_timeout_sec`.
    """

    _where: str
    _link: Link
    _session: ClientSession
    _is_shared: bool = False
    """Whether the server is a process of ours, for requests of several clients: it is told which is whose, and one
    whose id another has that runs gets an id of its own."""
    _greeted: trio.Event = attrs.field(factory=trio.Event, init=False)
    """The hello is answered, be it with how far the server's model is loaded: then another answer follows."""
    _load: LoadState | None = attrs.field(default=None, init=False)
    _streams: dict[str, Stream] = attrs.field(factory=dict, init=False)
    _questions: dict[str, PendingQuery] = attrs.field(factory=dict, init=False)
    _numbers: count[int] = attrs.field(factory=lambda: count(1), init=False)
    _failure: UmaError | None = attrs.field(default=None, init=False)
    _lost: trio.Event = attrs.field(factory=trio.Event, init=False)
    _overfull: Stream | None = attrs.field(default=None, init=False)
    lost_requests: int = attrs.field(default=0, init=False)
    """Requests that ran when the connection ended, and failed by that."""

    @property
    def info(self) -> ServerInfo:
        """The server's card."""
        assert self._session.info is not None  # `connect` hands out no client before
        return self._session.info

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended, so that nothing can be asked any more."""
        return self._lost.is_set()

    @property
    def is_reading(self) -> bool:
        """Whether it takes what the server sends, and does not wait for a reader of one of its streams."""
        return self._overfull is None

    @property
    def is_greeted(self) -> bool:
        """Whether `answer_to_hello` returns at once."""
        return self._greeted.is_set()

    @property
    def server_pid(self) -> int | None:
        """The process id of the server, as the kernel tells it; None where it cannot."""
        return pid_of_peer(self._link.sock)

    def generate(self, request: Request) -> AbstractAsyncContextManager[EventStream]:
        """See `Source.generate`. Entering raises `ValueError` where the id is one of this client's running requests."""

        async def start(stream: Stream) -> None:
            await self._begin(stream, request)

        return Stream(request.id, start, self._cancel, self._end_thinking)

    async def tokenize(self, request: Request, *, pieces: bool = False) -> Tokenized:
        """See `Source.tokenize`."""
        id = self._fresh_id()
        answer = await self._ask(id, messages.TokenizeQuery(attrs.evolve(request, id=id), pieces), is_work=True)
        assert isinstance(answer, messages.TokenizeEvent)
        return answer.tokenized

    async def embed(self, request: EmbedRequest) -> Embeddings:
        """See `Source.embed`. Texts that the server does not take in one frame are asked for in several requests.

        Raises `BadRequest` where the server is too old to know the question.
        """
        id = self._fresh_id()
        sent = attrs.evolve(request, id=id, metadata=with_span(request.metadata))
        try:
            answer = await self._ask_whole(id, messages.EmbedQuery(sent, "base64", self._sender()))
        except FrameTooLarge as error:
            first, second, middle = halves(request, error)
            begun = await self.embed(first)
            with errors_moved(middle):
                return joined_embeddings(begun, await self.embed(second))
        assert isinstance(answer, messages.EmbedEvent)
        return attrs.evolve(answer.result, id=request.id)

    async def rerank(self, request: RerankRequest) -> Ranking:
        """See `Source.rerank`, and `embed` for documents that are too long for one frame."""
        id = self._fresh_id()
        sent = attrs.evolve(request, id=id, metadata=with_span(request.metadata))
        try:
            answer = await self._ask_whole(id, messages.RerankQuery(sent, self._sender()))
        except FrameTooLarge as error:
            first, second, middle = halves(request, error)
            begun = await self.rerank(first)
            with errors_moved(middle):
                return joined_ranking(begun, await self.rerank(second), middle, request.top_n)
        assert isinstance(answer, messages.RerankEvent)
        ranking: Ranking = carried(answer)
        return attrs.evolve(ranking, id=request.id)

    async def decide(self, request: DecisionRequest) -> Decisions:
        """See `Source.decide`. Raises `BadRequest` where the server is too old to know the question, too."""
        id = request.id if request.id not in self._questions.keys() | self._streams.keys() else self._fresh_id()
        sent = attrs.evolve(request, id=id, metadata=with_span(request.metadata))  # `activity` tells of it by this id
        answer = await self._ask_whole(id, messages.DecideQuery(sent, self._sender()))
        assert isinstance(answer, messages.DecideEvent)
        decisions: Decisions = carried(answer)
        return attrs.evolve(decisions, id=request.id)

    async def _ask_whole(self, id: str, query: WholeQuery) -> QueryAnswer:
        """Ask, and cancel where the caller leaves before the answer."""
        try:
            return await self._ask(id, query, is_work=True)
        except trio.Cancelled:
            if self._failure is None:
                self._link.post(self._session.send(messages.Cancel(id)))
            raise

    async def health(self, *, probe: bool = True) -> Health:
        """See `Source.health`."""
        health: Health = carried(await self._answer(messages.HealthEvent, messages.HealthQuery(probe)))
        return health

    async def metrics(self) -> Mapping[str, Any]:
        """See `Source.metrics`; the server's own figures (`active_sessions` ...) are in it too."""
        return (await self._answer(messages.MetricsEvent, messages.MetricsQuery())).snapshot

    async def activity(self, id: str = "") -> Activity:
        """See `Source.activity`. A server of a version before 1.2 tells of all requests whatever `id` is."""
        activity: Activity = carried(await self._answer(messages.ActivityEvent, messages.ActivityQuery(id)))
        return activity

    async def explain(self, id: str = "") -> Explained:
        """See `Source.explain`. Raises `BadRequest` where the server is too old to know the question, too."""
        return (await self._answer(messages.ExplainEvent, messages.ExplainQuery(id, self._sender()))).request

    async def trace(self, seconds: float) -> str:
        """What the server's threads do within so many seconds, 60 at most: JSON in Chrome's trace event format.

        Raises `BadRequest` where the server belongs to another user, another trace is on, or the server is too old.
        """
        return (await self._answer(messages.TraceEvent, messages.TraceQuery(seconds))).trace

    async def end_request(self, number: int) -> bool:
        """End a request of any session by its `RunningRequest.number`, and tell its client so. Whether it still ran.

        Raises `BadRequest` where the server belongs to another user, or is too old to know the question.
        """
        return (await self._answer(messages.EndEvent, messages.EndQuery(number))).ended

    async def pause(self, seconds: float) -> None:
        """Have the server compute nothing for so long, or with 0 go on. What runs stands still, and what comes waits.

        Raises `BadRequest` where the server belongs to another user, or is too old to know the question.
        """
        await self._answer(messages.HealthEvent, messages.PauseQuery(seconds))

    async def models(self, *, reload: bool = False) -> Sequence[ListedModel]:
        """All models of a server that has several, the default one first; none of them is loaded by that. With `reload`
        it looks for new ones first.

        Raises `BadRequest` where the server has one alone, or is too old to know the question; so do the next three.
        """
        return (await self._answer(messages.ModelsEvent, messages.ModelsQuery(reload))).models

    async def load(
        self, model: str | None, keep_sec: float | None = None, on_loading: Callable[[LoadState], None] = lambda _: None
    ) -> ListedModel:
        """See `Models.load`; `on_loading` is given how far that is."""
        told_sec = -1.0 if keep_sec == math.inf else keep_sec
        return (await self._answer(messages.ModelsEvent, messages.LoadQuery(model, told_sec), on_loading)).models[0]

    async def unload(self, model: str | None) -> ListedModel:
        """See `Models.unload`. Raises `BadRequest` where the server belongs to another user, too."""
        return (await self._answer(messages.ModelsEvent, messages.UnloadQuery(model))).models[0]

    async def pin(
        self, model: str | None, *, is_pinned: bool = True, on_loading: Callable[[LoadState], None] = lambda _: None
    ) -> ListedModel:
        """See `Models.pin`. Raises `BadRequest` where the server belongs to another user, too."""
        return (await self._answer(messages.ModelsEvent, messages.PinQuery(model, is_pinned), on_loading)).models[0]

    async def _answer(
        self, event: type[E], query: BareQuery, on_loading: Callable[[LoadState], None] = lambda _: None
    ) -> E:
        """The answer to the query, which is given an id of its own: an event of this class."""
        id = self._fresh_id()
        answer = await self._ask(id, attrs.evolve(query, id=id), on_loading)
        assert isinstance(answer, event)
        return answer

    # What goes out.

    def say_hello(self, model: str | None = None, *, loads: bool = True) -> None:
        """Begin to open the session. `connect` calls it once."""
        self._link.post(self._session.hello(model=model, loads=loads))

    async def answer_to_hello(self) -> LoadState | None:
        """None once the session is open; before, each time that the server says so, how far its model's load is.
        Raises what the server refuses the session with. `connect` calls it until it is None."""
        await self._greeted.wait()
        if self._failure is not None:
            raise self._failure
        if self._session.info is None:
            self._greeted = trio.Event()
            return self._load
        return None

    async def _begin(self, stream: Stream, request: Request) -> None:
        await self._link.room()
        if self._is_shared and stream.id in self._streams:
            stream.shown_id, stream.id = stream.id, self._fresh_id()
            request = attrs.evolve(request, id=stream.id)
        while (known := self._streams.get(stream.id)) is not None:
            if not known.is_left:
                raise WrongValues(f"id: {stream.id!r} is running on this client already; each request needs its own")
            await known.ended()  # left, but the server holds the id until it has answered the cancel
        self._raise_if_lost()
        await trio.lowlevel.checkpoint_if_cancelled()
        sent = attrs.evolve(request, metadata=with_span(request.metadata))
        self._link.post(self._session.send(messages.Generate(sent, sender=self._sender())))
        self._streams[stream.id] = stream
        self._end_overfull()

    def _cancel(self, stream: Stream) -> None:
        self._link.post(self._session.send(messages.Cancel(stream.id)))

    def _end_thinking(self, stream: Stream) -> None:
        # An older server does not know it, and has no bound of thinking either.
        if "max_reasoning_tokens" in self.info.capabilities.sampling_params:
            self._link.post(self._session.send(messages.EndThinking(stream.id)))

    async def _ask(
        self, id: str, query: Query, on_loading: Callable[[LoadState], None] = lambda _: None, *, is_work: bool = False
    ) -> QueryAnswer:
        await self._link.room()
        self._raise_if_lost()
        self._link.post(self._session.send(query))
        question = self._questions[id] = PendingQuery(on_loading, is_work)
        self._end_overfull()
        try:
            await question.answered.wait()
        finally:
            self._questions.pop(id, None)
        if isinstance(question.answer, UmaError):
            raise question.answer
        assert question.answer is not None
        return question.answer

    def _sender(self) -> Sender | None:
        """The client that this task works for, in a session of several."""
        if not self._is_shared:
            return None
        owner = OWNER.get()
        return Sender(f"{hash(CLIENT.get()):x}", ORIGIN.get(), "" if owner is None else str(owner))

    def _fresh_id(self) -> str:
        return next(id for id in map("uma-query-{}".format, self._numbers) if id not in self._streams)

    def _raise_if_lost(self) -> None:
        if self._failure is not None:
            raise self._told(
                ConnectionLost(f"{self._where}: the session is over ({self._failure.message}); connect again")
            )

    def _told(self, failure: UmaError, *, is_begun: bool = False) -> UmaError:
        """What callers get where the session ends so: of a process of ours they know no more than that it is gone, and
        where no answer had begun that the same request works later.
        """
        if not self._is_shared or not isinstance(failure, ConnectionLost):
            return failure
        ended = f"the process of {self._where} has ended, and this request with it"
        if is_begun:
            return InternalError(f"{ended}; the next one loads it again")
        return Loading(f"{ended}, before its answer began; ask again, which loads it", retry_after_ms=LOST_RETRY_MS)

    # What comes in.

    async def read(self) -> None:
        """Take in the server's events until it is gone; then fail whatever still waits. `connect` runs it."""
        session = self._session
        try:
            while data := await self._link.receive():
                session.receive(data)
                while (payload := session.next_frame()) is not None:
                    if len(payload) <= MAX_FRAME_BYTES:
                        self._take(session.event(payload))
                    else:
                        read = partial(session.event, payload)
                        self._take(await trio.to_thread.run_sync(read, abandon_on_cancel=True))
                if self._overfull is not None:
                    self._end_overfull()
                    await self._overfull.room()
                    self._overfull = None
        except trio.ClosedResourceError:
            pass
        except UmaError as error:
            self._lose(
                ConnectionLost(f"{self._where}: what listens there does not speak UMA's protocol: {error.message}")
            )
        self._lose(
            ConnectionLost(
                f"{self._where}: the server went away, and what was running there with it; start it with "
                f"`{run_command(self._where)}`"
            )
        )

    def _end_overfull(self) -> None:
        """End the request whose caller has its buffer full, where others would wait for that caller."""
        if (full := self._overfull) is None or not full.is_full:
            return
        streams, questions = self._streams.values(), self._questions.values()
        if any(stream is not full for stream in streams) or any(question.is_work for question in questions):
            full.give_up(Ended("slow reader: too many tokens of this answer waited to be read; read it faster"))

    async def write(self) -> None:
        """Send what the methods have to say. `connect` runs it."""
        # A broken pipe is no news here: `read` sees the same end, after the server's last words.
        with suppress(OSError, ReaderStalledError):
            await self._link.write(lambda: False)

    def _take(self, event: ServerEvent) -> None:
        if type(event) is messages.TokenEvent:
            stream = self._streams.get(event.id)
            if stream is not None:
                self._give(stream, event.token)
        elif isinstance(event, messages.PromptEvent | messages.ReasoningEvent | messages.ToolCallEvent):
            stream = self._streams.get(event.id)
            if stream is not None:
                self._give(stream, carried(event))
        elif isinstance(event, messages.EosEvent):
            if (stream := self._streams.pop(event.id, None)) is not None:
                stream.put(carried(event))
        elif isinstance(event, messages.ErrorEvent):
            self._take_error(event)
        elif isinstance(event, messages.HelloEvent):
            self._greeted.set()
        elif isinstance(event, messages.LoadingEvent):
            if event.id in self._questions:
                self._questions[event.id].on_loading(event)
            elif event.id is None:
                self._load = event
                self._greeted.set()
        elif isinstance(event, QueryAnswer) and event.id in self._questions:
            self._questions[event.id].resolve(event)

    def _give(self, stream: Stream, event: Event) -> None:
        """Hand an event to its stream. A fault in the stream's tap ends that stream alone."""
        try:
            stream.put(event)
        except Exception as fault:  # noqa: BLE001  (whatever it is, it is this stream's alone)
            _log.error("a stream failed: a fault while an event was delivered", exc_info=fault)
            stream.give_up(InternalError(f"a fault ended this stream ({type(fault).__name__}: {fault})"))
        if stream.is_full:
            self._overfull = stream

    def _take_error(self, event: messages.ErrorEvent) -> None:
        error = from_code(
            event.code,
            event.message,
            event.retry_after_ms,
            wrong=[Wrong(wrong.field, wrong.why) for wrong in event.wrong],
            prompt_tokens=event.prompt_tokens,
            n_ctx=event.n_ctx,
        )
        if event.id is None:
            self._lose(error)
        elif (stream := self._streams.pop(event.id, None)) is not None:
            stream.fail(error)
        elif (question := self._questions.get(event.id)) is not None:
            question.resolve(error)

    def _lose(self, error: UmaError) -> None:
        """End the session: all that wait get the error, the first one that was given."""
        if self._failure is None:
            self._failure = error
            self.lost_requests = sum(not stream.is_left for stream in self._streams.values())
            self.lost_requests += sum(question.is_work for question in self._questions.values())
        for stream in self._streams.values():
            stream.fail(self._told(self._failure, is_begun=stream.is_begun))
        for question in self._questions.values():
            question.resolve(self._told(self._failure))
        self._streams.clear()
        self._greeted.set()
        self._lost.set()

    def close(self) -> None:
        """Hang up. `connect` calls it at its end."""
        self._link.close()

    async def lost(self) -> UmaError:
        """Wait until the session is over, ended by either side; the reason."""
        await self._lost.wait()
        assert self._failure is not None
        return self._failure
