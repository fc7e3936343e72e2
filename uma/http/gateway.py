"""What every endpoint has at hand: the source, the settings, the model's names."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import attrs
import trio
from starlette.types import ASGIApp

from uma.chat.whole_call import NOTE
from uma.config import RuntimeConfig
from uma.errors import CUT_OFF, Ended, ShuttingDown, UmaError
from uma.http.batch_queue import BatchQueue
from uma.http.body_budget import BodyBudget
from uma.http.dialect import JSON, Body, Writer, dumps
from uma.http.exchange import Exchange
from uma.http.generation import gather, stream
from uma.http.ignored import Ignored, header_value
from uma.http.keys import KeyFile
from uma.http.models import ModelNames
from uma.http.problem import Forbidden, RateLimited
from uma.http.reader import Reader
from uma.jobs.store import JobFolder
from uma.models.names import with_each
from uma.net.inline import MAX_POSITIONS
from uma.net.metering import metered_whole
from uma.net.quota import ClientAccount, Excess
from uma.net.throttle import Throttle
from uma.net.unread import Unread
from uma.types import (
    SAMPLER_FIELDS,
    Activity,
    DecisionRequest,
    EmbedRequest,
    Finished,
    LoadProgress,
    Models,
    Request,
    RerankRequest,
    RunningRequest,
    ServerInfo,
    Source,
    Usage,
)

MAX_OWNERS = 1_000
"""Requests whose owner is known after their end: as many as an engine can explain."""

W = TypeVar("W", EmbedRequest, RerankRequest, DecisionRequest)
R = TypeVar("R")

ENDED = "the request was ended with DELETE /v1/requests/{id}, or on the page"
PART = re.compile(r"-\d+$")
"""What the id of one prompt of several has behind the request's."""
MAX_PARSING = 2
"""Threads that read large bodies: they share one interpreter lock, so more would only wait for each other."""


class Answering(Protocol):
    """Answer that is being generated, as others end it."""

    @property
    def owner(self) -> Hashable:
        """See `Exchange.owner`."""

    @property
    def exchange(self) -> Exchange | None:
        """What it is an answer to; None where it outlives that."""

    def end_thinking(self) -> None:
        """See `types.EventStream.end_thinking`."""

    def stop(self) -> None:
        """End it, and tell its client that it was ended."""


class SocketStream(Protocol):
    """Stream of a request that came over the Unix socket, as HTTP ends it."""

    def end_thinking(self) -> None:
        """See `types.EventStream.end_thinking`."""

    def fail(self, error: UmaError) -> None:
        """End it, and tell its client this."""


@runtime_checkable
class HasUsers(Protocol):
    """A source whose requests over the Unix socket HTTP can list and end, for the user they are of."""

    def streams_of(self, user: int) -> Mapping[str, SocketStream]:
        """See `Engine.streams_of`."""


@attrs.define(eq=False)
class Work(Answering):
    """Answer that is being written: its exchange, its scope, and why it was ended from outside, if it was."""

    exchange: Exchange
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    verdict: UmaError | None = None

    @property
    def owner(self) -> Hashable:
        return self.exchange.owner

    def end_thinking(self) -> None:
        self.exchange.end_thinking()

    def stop(self) -> None:
        self.end(Ended(ENDED))

    def end(self, verdict: UmaError) -> None:
        """End it with this error. The first one holds."""
        self.verdict = self.verdict or verdict
        self.scope.cancel()

    def error(self) -> UmaError:
        """What ended it."""
        assert self.verdict is not None
        return self.verdict


@attrs.define(eq=False)
class Gateway:
    """What all endpoints of one server share: its source, names, bounds, and the answers that run. One Trio thread."""

    config: RuntimeConfig
    progress: LoadProgress | None
    """While the source's model is being loaded: how far that is."""
    _source: Source | None = attrs.field(default=None, init=False)
    _names: ModelNames | None = attrs.field(default=None, init=False)
    models: Models | None = attrs.field(default=None, init=False)
    """The source, where it is several models."""
    _card: ServerInfo | None = attrs.field(default=None, init=False)
    """See `to_model`."""
    _of_one: RuntimeConfig | None = attrs.field(default=None, init=False)
    """The settings for one of them, whose own card has its sampling figures."""
    began_sec: float = attrs.field(factory=time.monotonic, init=False)
    connections_total: int = 0
    """Connections accepted since the start, refused ones not included."""
    connections_refused_total: int = 0
    answers: Counter[int] = attrs.field(factory=Counter)
    """Requests by the status of their answer; 0: the client went away before there was one."""
    parsing: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(MAX_PARSING), init=False)
    """Limiter of threads that read large bodies."""
    lines: Throttle = attrs.field(factory=Throttle, init=False)
    """Throttle of log lines that clients can bring about at no cost of their own."""
    bodies: BodyBudget = attrs.field(init=False)
    """What the bodies of all requests take."""
    readiness: trio.Event = attrs.field(factory=trio.Event, init=False)
    """Set once there is a source."""
    keys: KeyFile | None = attrs.field(default=None, init=False)
    """None: no key is asked for."""
    of_socket: Callable[[], Mapping[str, Any]] = attrs.field(default=dict, init=False)
    """Figures of the sessions on the socket that is served beside."""
    app: ASGIApp = attrs.field(init=False)
    """The application over this gateway, once it is built: for requests of the server itself."""
    jobs: JobFolder | None = attrs.field(init=False)
    """Files and batches; None: this server keeps none."""
    batches: BatchQueue = attrs.field(factory=BatchQueue, init=False)
    tasks: trio.Nursery | None = attrs.field(default=None, init=False)
    """Nursery of what outlives the connection that asked for it; there while the service runs."""
    unread: Unread = attrs.field(factory=Unread, init=False)
    """Embeddings that wait to be read."""
    writers: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(1), init=False)
    """Threads that write large answers."""
    at_abort: list[Callable[[], None]] = attrs.field(factory=list, init=False)
    """Called by `abort`: ends what runs in `tasks`."""
    answering: dict[str, Answering] = attrs.field(factory=dict, init=False)
    """What runs just now, by the id in its answer's `X-Request-Id`; the page's answers by their request's own."""
    _owners: dict[str, Hashable] = attrs.field(factory=dict, init=False)
    """Whose the last requests were, by the same ids, the newest last."""
    _running: dict[str, Work] = attrs.field(factory=dict, init=False)
    """What `abort` ends, by the ids of exchanges."""

    @jobs.default
    def _jobs(self) -> JobFolder | None:
        return JobFolder(Path(self.config.http_jobs)) if self.config.http_jobs else None

    @bodies.default
    def _budget(self) -> BodyBudget:
        return BodyBudget.of(self.config.frame_bytes(takes_media=True))

    @classmethod
    def of(cls, source: Source | LoadProgress, config: RuntimeConfig) -> Gateway:
        """A gateway to `source`, or to one that is still being loaded: then `be_ready` follows."""
        if isinstance(source, LoadProgress):
            return cls(config, source)
        gateway = cls(config, None)
        gateway.be_ready(source)
        return gateway

    def be_ready(self, source: Source) -> None:
        """Take requests for `source` from now on."""
        self._source, self._names, self.progress = source, ModelNames.of(source, self.config), None
        self.models = source if isinstance(source, Models) else None
        no_sampling: dict[str, Any] = dict.fromkeys(SAMPLER_FIELDS)
        self._of_one = attrs.evolve(self.config, **no_sampling) if self.models else None
        self.readiness.set()

    def to_model(self, source: Source, names: ModelNames, card: ServerInfo | None = None) -> Gateway:
        """A copy of the gateway, to one of several models; or with a `card` to judge a body by that, before its model
        is loaded. Then no ignored field is noted.
        """
        gateway = copy(self)
        gateway._source, gateway._names, gateway.models, gateway._card = source, names, None, card
        gateway.config = self._of_one or self.config
        return gateway

    @property
    def source(self) -> Source:
        """What answers. There is none while `progress` is there."""
        assert self._source is not None
        return self._source

    @property
    def info(self) -> ServerInfo:
        """What the source tells of itself and its model."""
        return self._card or self.source.info

    @property
    def names(self) -> ModelNames:
        """Names of the source's model."""
        assert self._names is not None
        return self._names

    @property
    def model_names(self) -> list[str]:
        """What lists of models show: the name, the configured aliases, and the name with each adapter."""
        adapted = with_each(self.names.name, self.names.adapters)
        return list(dict.fromkeys([self.names.name, *self.config.aliases, *adapted]))

    def reader(self, http: Exchange) -> Reader:
        """A reader of the body of `http`."""
        ignored = Ignored() if self._card else http.ignored
        return Reader(http.id, self.info, ignored, http.names, partial(self.names.check, http=http), http.load_ms)

    async def generate(self, http: Exchange, writer: Writer) -> None:
        """Answer with what is generated for `writer`; see `uma/http/generation.py`. Raises `ShuttingDown` where `abort`
        ended it before the answer had begun, and `Ended` where its client did.
        """
        writer.requests = self.admitted(http, writer.requests)
        results: list[Finished] = []
        with self._ended_from_outside(http, len(writer.requests)) as work:
            if writer.is_streamed:
                await stream(self.source, http, writer)
            else:
                results = await gather(self.source, http, writer.requests)
        if results:  # written to its end, whatever happens meanwhile: its length has been told
            written = partial(_written, writer, results)
            if sum(result.n_positions for result in results) <= MAX_POSITIONS:
                body, data = written()
            else:
                body, data = await trio.to_thread.run_sync(written, limiter=self.writers, abandon_on_cancel=True)
            if noted := [line for result in results for line in result.warnings if line.endswith(NOTE)]:
                http.extra_headers.append((b"x-uma-note", header_value("; ".join(noted))))
            if writer.keep is not None and isinstance(body, Mapping):
                await writer.keep(body)
            media_type = b"text/plain; charset=utf-8" if isinstance(body, str) else JSON
            await http.answer(data, media_type=media_type)
        elif work.scope.cancelled_caught:
            error = work.error()
            if not http.is_started:
                raise error
            await http.write(writer.failed(http.failed(error)), is_last=True)

    async def compute(
        self,
        http: Exchange,
        request: W,
        ask: Callable[[W], Awaitable[R]],
        tokens_of: Callable[[R], int] = attrgetter("read_tokens"),
    ) -> R:
        """What the source answers to a request that is answered in one piece, charged to the account of the key.

        A client that goes away cancels it, which raises `ClientGoneError`. Raises `ShuttingDown` where `abort` ended
        it, `Ended` where its client did, and `RateLimited` or `Forbidden` where it is over the key's bounds.
        """
        self.unread.check()
        request = self.admitted_whole(http, request)
        with self._ended_from_outside(http, 1) as work, metered_whole(request, http.account) as meter:
            found = await http.unless_gone(partial(ask, request))
            meter.usage = Usage(tokens_of(found), 0, 0)
            return found
        raise work.error()

    async def finish(self, http: Exchange, request: Request) -> Finished:
        """The end of one generation. Otherwise as `compute`."""
        requests = self.admitted(http, [request])
        with self._ended_from_outside(http, 1) as work:
            (finished,) = await gather(self.source, http, requests)
            return finished
        raise work.error()

    @contextmanager
    def ended_by_abort(self, http: Exchange) -> Iterator[Work]:
        """A block that `abort` ends; of two, one in the other, the inner one alone."""
        work, outer = Work(http), self._running.get(http.id)
        self._running[http.id] = work
        with work.scope:
            try:
                yield work
            finally:
                del self._running[http.id]
                if outer is not None:
                    self._running[http.id] = outer

    @contextmanager
    def waiting(self, http: Exchange) -> Iterator[None]:
        """A block in which a request waits for its model, where its client sees it and can end it."""
        self.answering[http.id] = self._running[http.id]
        try:
            yield
        finally:
            del self.answering[http.id]

    @contextmanager
    def _ended_from_outside(self, http: Exchange, requests: int) -> Iterator[Work]:
        """A block in which so many requests run, and that `abort` or the client itself can end."""
        with self.ended_by_abort(http) as work, running(http.account, requests):
            self.began(http.id, work)
            http.has_computed = True
            try:
                yield work
            finally:
                del self.answering[http.id]

    def admitted(self, http: Exchange, requests: Sequence[Request]) -> Sequence[Request]:
        """The requests as the key's bounds have them. Raises `RateLimited` where they are over one and waiting helps,
        else `Forbidden`.
        """
        if http.account is not None:
            _check_rate(http.account, len(requests))
        return self.fitted(http, requests)

    def fitted(self, http: Exchange, requests: Sequence[Request]) -> Sequence[Request]:
        """The rest of `admitted`: what the key's bounds say of each request."""
        if http.account is None:
            return requests
        fitted, default = [], self.info.limits.default_max_tokens
        for request in requests:
            fit = http.account.fit(request, has_priority=http.has_priority, default_max_tokens=default)
            if isinstance(fit, Excess):
                raise Forbidden(fit.message)
            fitted.append(fit)
        return fitted

    def admitted_whole(self, http: Exchange, request: W) -> W:
        """`admitted` for a request that generates nothing."""
        if http.account is None:
            return request
        _check_rate(http.account, 1)
        lane = http.account.lane(request.priority, has_priority=http.has_priority)
        if isinstance(lane, Excess):
            raise Forbidden(lane.message)
        return attrs.evolve(request, priority=lane)

    def began(self, id: str, answering: Answering) -> None:
        """Note that it runs from now on: `answering` has it until the caller takes it out."""
        self.answering[id] = answering
        self._owners[id] = answering.owner
        if len(self._owners) > MAX_OWNERS:
            del self._owners[next(iter(self._owners))]

    def is_of(self, id: str, owner: Hashable) -> bool:
        """Whether a request that runs, or is one of the last, is this owner's."""
        running = self.answering.get(id)
        return id in self._owners and owner == self._owners[id] if running is None else owner == running.owner

    def shown(self, activity: Activity, http: Exchange) -> Activity:
        """An activity as the key of `http` can see it: of what others ask neither id nor origin, unless it manages
        models. Without keys it is all there.
        """
        if http.account is None or http.account.manages_models:
            return activity
        every, aliases = (*activity.running, *activity.waiting), dict[str, str]()
        for each in every:
            is_own = self.is_of(each.id, http.owner) or self.is_of(PART.sub("", each.id), http.owner)
            # What waits for a load has no number yet.
            aliases.setdefault(each.id, each.id if is_own else f"other-{each.number or f'load-{len(aliases)}'}")

        def shown(request: RunningRequest) -> RunningRequest:
            id, behind = aliases[request.id], aliases.get(request.behind, "")
            return attrs.evolve(request, id=id, behind=behind, origin=request.origin if id == request.id else "")

        return attrs.evolve(
            activity, running=tuple(map(shown, activity.running)), waiting=tuple(map(shown, activity.waiting))
        )

    def requests_of(self, owner: Hashable) -> list[str]:
        """The ids in `answering` that are this owner's."""
        return [id for id, each in self.answering.items() if each.owner == owner]

    def on_socket(self, user: int | None) -> Mapping[str, SocketStream]:
        """This user's requests that came over the socket, by their ids; none where another process has the socket."""
        source = self.source
        return source.streams_of(user) if user is not None and isinstance(source, HasUsers) else {}

    def abort(self) -> None:
        """End everything that generates, or waits before its answer, and tell its clients that the server stops."""
        for id, work in self._running.items():
            if id in self.answering or not work.exchange.is_started or work.exchange.streamed is not None:
                work.end(ShuttingDown(CUT_OFF))
        for end in self.at_abort:
            end()

    def count(self, http: Exchange) -> None:
        """Count a request that was answered, or whose client went away."""
        self.answers[http.status] += 1


def _written(writer: Writer, results: Sequence[Finished]) -> tuple[Body | list[Body] | str, bytes]:
    """A whole answer, and what is sent of it. Any thread."""
    body = writer.whole(results)
    return body, body.encode() if isinstance(body, str) else dumps(body)


def running(account: ClientAccount | None, requests: int) -> AbstractContextManager[None]:
    """A block in which so many requests of `account` run."""
    return nullcontext() if account is None else account.running_now(requests)


def _check_rate(account: ClientAccount, requests: int) -> None:
    if (excess := account.objection(requests, trio.current_time())) is not None:
        if excess.retry_after_ms is None:
            raise Forbidden(excess.message)
        raise RateLimited(excess.message, retry_after_ms=excess.retry_after_ms)
