"""One HTTP request and its answer: the body read within its bounds, the answer written, a vanished client noticed."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeVar
from urllib.parse import parse_qs

import attrs
import orjson
import trio
from starlette.types import Message, Receive, Scope, Send

from uma import json_bytes
from uma.constraints import show
from uma.contracts.versions import CONTRACT_VERSIONS, PROTOCOL_HEADER, SERVER_HEADER
from uma.errors import BadRequest, InvalidJson, UmaError
from uma.http.body_budget import BodyBudget
from uma.http.dialect import JSON, Dialect, dumps
from uma.http.ignored import Ignored, header_value
from uma.http.multipart import form_fields
from uma.http.problem import BodyEncoded, BodyTimeout, BodyTooLarge, Problem, RateLimited
from uma.net.arrivals import arrivals
from uma.net.client import CLIENT, ORIGIN, with_user
from uma.net.inline import is_quick
from uma.net.quota import ClientAccount
from uma.net.throttle import ClientLines, Throttle
from uma.protocol.json_size import check_size
from uma.types import EventStream, Finished, LoadState
from uma.version import __version__
from uma.wrong import Wrong

logger = logging.getLogger("uma.http")

Header = tuple[bytes, bytes]

T = TypeVar("T")

ACCOUNT = "uma.account"
"""The scope's entry that holds the account of a request of this process itself, which comes without a key."""

ID = "uma.id"
"""The scope's entry that holds the request's id."""

POST = "uma.post"
"""The entry of the scope's `state` by which a connection takes a part of a body at once: `Callable[[bytes], bool]`."""

LINES = "uma.lines"
"""The entry of the scope's `state` that bounds what the connection has logged: `ClientLines`."""

MIN_BYTES_PER_SEC = 16_384
"""Rate at which a body must come, on average: one that trickles would keep its place for as long as it likes, and a
fixed time would keep a slow uplink from ever sending a large one."""
MAX_LEFT_BYTES = 65_536
"""Maximum length of a body that is read only to be dropped behind an error."""
LEFT_SEC = 1.0
"""Maximum wait for such a body."""

_VERSIONS = (
    (PROTOCOL_HEADER.lower().encode(), CONTRACT_VERSIONS[-1].encode()),
    (SERVER_HEADER.lower().encode(), f"uma/{__version__}".encode()),
)


def new_id() -> str:
    """An id for a request, in its answer's headers and in the log."""
    return secrets.token_hex(12)


def lines_of(scope: Scope) -> ClientLines:
    """Throttle of what is logged of a request: its connection's, or its own where another server than UMA's calls the
    app.
    """
    lines: ClientLines | None = scope.get("state", {}).get(LINES)
    return ClientLines(Throttle()) if lines is None else lines


def id_of(scope: Scope) -> str:
    """The id of the request that has this scope; the first call gives it one."""
    return str(scope.setdefault(ID, new_id()))


def headers_of(id: str) -> list[Header]:
    """Headers of every answer, whatever it is: the request's id, and this server's versions."""
    return [(b"x-request-id", id.encode()), (b"request-id", id.encode()), *_VERSIONS]


class ClientGoneError(Exception):
    """Nothing more is to be answered: the client hung up before its request was complete, or wanted no body (HEAD)."""


@attrs.define(eq=False)
class Exchange:
    """One request on its way through the app. Belongs to the task that runs the application."""

    scope: Scope
    receive: Receive
    _send: Send
    id: str
    """Id of this server's making: in the answer's header, in the log and in the engine's `Request`."""
    max_body_bytes: int
    timeout_sec: float
    parsing: trio.CapacityLimiter
    """Limiter of threads that read large bodies, shared by all exchanges."""
    bodies: BodyBudget
    """Budget of the bodies of all exchanges."""
    extra_headers: list[Header] = attrs.field(factory=list)
    """Headers that the answer has, whatever it is."""
    ignored: Ignored = attrs.field(factory=Ignored)
    """Fields of the body that are not known or not done: `X-UMA-Ignored` names them."""
    names: dict[str, str] = attrs.field(factory=dict, init=False)
    """The body's names for fields that the engine calls otherwise; errors use them."""
    account: ClientAccount | None = None
    """The account of the key that came with it; None where no keys are asked for."""
    owner: Hashable = None
    """Whose the request is, and who can end it: the account, or without keys the machine that it came from."""
    has_priority: bool = attrs.field(default=False, init=False)
    """Whether the request asks for a lane itself."""
    has_computed: bool = attrs.field(default=False, init=False)
    """Whether the engine has computed for it."""
    model: str | None = attrs.field(default=None, init=False)
    """Name of the one of several models that answers it."""
    load_ms: float = attrs.field(default=0.0, init=False)
    """How long it has waited for that model's load; 0: it was loaded."""
    status: int = attrs.field(default=0, init=False)
    """Status of the answer; 0 while it has not begun."""
    tokens: Counter[str] = attrs.field(factory=Counter, init=False)
    """Tokens of its requests that have ended, as the log names them: `prompt`, `completion`."""
    tokens_per_second: float = attrs.field(default=0.0, init=False)
    """Speed of the last of them."""
    takes_form: bool = attrs.field(default=False, init=False)
    """Whether its body is a form with a file, and not JSON."""
    failure: UmaError | None = attrs.field(default=None, init=False)
    """What its answer ended with, or is; None: no error."""
    streamed: Dialect | None = attrs.field(default=None, init=False)
    """Dialect of a stream that has begun before its model was loaded."""
    _streams: list[EventStream] = attrs.field(factory=list, init=False)
    """What generates its answer just now."""
    _ends_thinking: bool = attrs.field(default=False, init=False)
    _post: Callable[[bytes], bool] | None = attrs.field(init=False)
    has_body: bool = attrs.field(default=False, init=False)
    """Whether the body has come to its end."""
    _fields: dict[str, Any] | None = attrs.field(default=None, init=False)
    """The body's object, where it was asked for before `built`."""
    is_quick: bool = attrs.field(default=True, init=False)
    """Whether the body is read on Trio's thread: it is small, as is what it goes on from."""
    held_bytes: int = attrs.field(default=0, init=False)
    """What this exchange's body has of the budget."""
    _holder: Hashable = attrs.field(default=None, init=False)
    """The client that it is counted on."""

    @_post.default
    def _post_of_connection(self) -> Callable[[bytes], bool] | None:
        post: Callable[[bytes], bool] | None = self.scope.get("state", {}).get(POST)
        return post

    @property
    def lines(self) -> ClientLines:
        """Throttle of what is logged of it."""
        return lines_of(self.scope)

    def header(self, name: bytes) -> str | None:
        """The request's header; the first of several."""
        return next((value.decode("latin-1") for key, value in self.scope["headers"] if key == name), None)

    @property
    def whose(self) -> dict[str, Any]:
        """Which of several models answers it and the key's name, as the log has them."""
        return {"model": self.model, "key": self.account.name if self.account else None}

    @property
    def is_json(self) -> bool:
        """Whether the body is said to be JSON."""
        return (self.header(b"content-type") or "").partition(";")[0].strip().lower() == "application/json"

    @property
    def query(self) -> dict[str, str]:
        """The first value of each parameter."""
        return {name: each[0] for name, each in parse_qs(self.scope["query_string"].decode("latin-1")).items()}

    @property
    def path(self) -> str:
        """The path asked for."""
        return str(self.scope["path"])

    @property
    def is_started(self) -> bool:
        """Whether the answer's status has gone out."""
        return self.status != 0

    async def body(self) -> bytes:
        """The whole body. Raises `BodyTooLarge` or `BodiesFull` before reading it where its length says so,
        `BodyEncoded` where it is compressed, `BodyTimeout` where it does not come, `BodiesFull` where there is no more
        memory for what comes, and `ClientGoneError` where the client hangs up.
        """
        length = self.header(b"content-length")
        if length is not None and length.isdigit() and int(length) > self.max_body_bytes:
            raise self._too_large()
        self._check_encoding()
        self._holder = CLIENT.get()
        self.bodies.check(self._holder, int(length) if length is not None and length.isdigit() else 0)
        body, expected = bytearray(), arrivals()
        began = trio.current_time()
        with expected.receiving(self):
            while not self.has_body:
                piece = await self.piece(began, len(body))
                if len(body) + len(piece) > self.max_body_bytes:
                    raise self._too_large()
                self.hold(len(piece))
                body += piece
                if not self.has_body:
                    expected.came_in_part(self)
        return bytes(body)

    async def piece(self, began: float, received_bytes: int) -> bytes:
        """The next piece of a body that `began` to come then; `has_body` says whether it was the last. Raises
        `BodyTimeout` where it does not come, or slowly, and `ClientGoneError`.
        """
        slowest = began + self.timeout_sec + received_bytes / MIN_BYTES_PER_SEC
        with trio.move_on_at(min(trio.current_time() + self.timeout_sec, slowest)) as patience:
            message = await self.receive()
        if patience.cancelled_caught:
            raise BodyTimeout(
                f"timeout: the body stalled for {self.timeout_sec:g} s (http_timeout_sec), or came slower than "
                f"{MIN_BYTES_PER_SEC:,} bytes a second"
            )
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        self.has_body = not message.get("more_body", False)
        data: bytes = message.get("body", b"")
        return data

    def hold(self, more_bytes: int) -> None:
        """Count so many more bytes as this exchange's body's. Raises `BodiesFull`."""
        self.bodies.take(self._holder, more_bytes)
        self.held_bytes += more_bytes

    def release_body(self) -> None:
        """Give the budget back what this exchange's body has of it."""
        held, self.held_bytes = self.held_bytes, 0
        self.bodies.give_back(self._holder, held)

    def _check_encoding(self) -> None:
        given = b",".join(value for key, value in self.scope["headers"] if key == b"content-encoding").decode("latin-1")
        if any(each.strip().lower() not in ("", "identity") for each in given.split(",")):
            raise BodyEncoded(f"Content-Encoding: {given[:200]!r} is unsupported; send the body uncompressed")

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body is over {self.max_body_bytes:,} bytes (max_frame_bytes)")

    async def built(self, build: Callable[[dict[str, Any]], T], *, keeps: bool = False) -> T:
        """What `build` makes of the body's JSON object, or of its form's fields; in another thread where it is large.
        `keeps`: `fields` was called before, and the body can be built from again.

        Raises `RateLimited` where the key has as many bodies on their way as it is given requests, `InvalidJson` or
        `BadRequest` where the body is no object, `BadRequest` where it holds more than `check_size` allows,
        `ClientGoneError` where the client hangs up before its turn, and whatever `body` and `build` raise.
        """
        if self._fields is not None:
            make = partial(build, self._fields)
            self._fields = self._fields if keeps else None
            return make() if self.is_quick else await self.in_thread(make)
        with self.sending():
            data = await self.body()
            self.is_quick = is_quick(data)
            if self.is_quick:
                fields = self._object(data)
                self._note_user(fields)
                return build(fields)

            def read() -> tuple[dict[str, Any], T]:
                if not self.takes_form:
                    check_size(data)
                fields = self._object(data)
                return fields, build(fields)

            with arrivals().reading(len(data)):
                fields, made = await self.in_thread(read)
            self._note_user(fields)
            return made

    async def in_thread(self, read: Callable[[], T]) -> T:
        """What `read` gives in one of the few threads for what is large, such as bodies. It is not begun for a client
        that has given up: with retries behind time-outs that would be most of the work.
        """
        return await self.unless_gone(
            partial(trio.to_thread.run_sync, read, limiter=self.parsing, abandon_on_cancel=True)
        )

    def _note_user(self, fields: dict[str, Any]) -> None:
        """Have the origin of what this task asks for name the body's `user`."""
        user = fields.get("user") or fields.get("safety_identifier")
        if isinstance(user, str):
            ORIGIN.set(with_user(ORIGIN.get(), user))

    def _object(self, data: bytes) -> dict[str, Any]:
        return form_fields(self.header(b"content-type"), data) if self.takes_form else _object(data)

    async def fields(self) -> dict[str, Any]:
        """The body's JSON object, which `built` can still be called for. Raises as that."""
        self._fields = await self.built(lambda fields: fields)
        return self._fields

    @contextmanager
    def sending(self) -> Iterator[None]:
        """A block in which the key has another body on its way. Raises `RateLimited` where that is one too many."""
        if self.account is None:
            yield
            return
        if (excess := self.account.sending_objection()) is not None:
            raise RateLimited(excess.message, retry_after_ms=excess.retry_after_ms)
        with self.account.sending_now():
            yield

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """A block that is left where the client hangs up or sends no more. Its `UmaError` comes out alone."""
        failure: UmaError | None = None

        async def leave() -> None:
            while (await self.receive())["type"] != "http.disconnect":
                pass
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave)
            try:
                yield
            except UmaError as error:
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def unless_gone(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What `ask` gives. Raises its `UmaError`, and `ClientGoneError` where the client hangs up: that cancels it."""
        async with self.connected():
            return await ask()
        raise ClientGoneError

    async def send(self, message: Message) -> None:
        """ASGI's `send`, which gives the answer this exchange's own headers."""
        if message["type"] == "http.response.start":
            self.release_body()
            message = {**message, "headers": [*message.get("headers", ()), *self.extra_headers, *self._named()]}
        await self._send(message)
        self.status = message.get("status", self.status)

    def _named(self) -> list[Header]:
        shown = header_value(", ".join(self.ignored))
        return [(b"x-uma-ignored", shown)] if shown else []

    async def start(self, status: int, media_type: bytes, headers: Iterable[Header] = ()) -> None:
        """Send the status and the headers of an answer that is written in parts, which may never end: an answer to HEAD
        ends here, and raises `ClientGoneError`.
        """
        await self._start(status, media_type, headers)
        if self.scope["method"] == "HEAD":
            await self.write(b"", is_last=True)
            raise ClientGoneError

    async def _start(self, status: int, media_type: bytes, headers: Iterable[Header]) -> None:
        every = [(b"content-type", media_type), *headers]
        await self.send({"type": "http.response.start", "status": status, "headers": every})

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        """Send a part of the body. Waits while the client is behind in reading."""
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})

    def post(self, data: bytes) -> bool:
        """Send a part of the body in this very turn, where the connection can; False: only `write` can.

        For one token of each of many streams `write` costs more than all that makes the token's event.
        """
        return self._post is not None and self.is_started and self._post(data)

    async def answer(
        self, data: bytes, *, status: int = 200, media_type: bytes = JSON, headers: Iterable[Header] = ()
    ) -> None:
        """Send a whole answer."""
        await self._start(status, media_type, [(b"content-length", str(len(data)).encode()), *headers])
        await self.write(data, is_last=True)

    async def answer_json(self, body: Any, *, status: int = 200, headers: Iterable[Header] = ()) -> None:
        """Send a whole answer as JSON."""
        await self.answer(dumps(body), status=status, headers=headers)

    def ignore(self, places: Iterable[str]) -> None:
        """Name parts of the request that have no effect, by the engine's names, in the answer's header."""
        self.ignored.add_all(Wrong(place, "").renamed(self.names).field for place in places)

    @contextmanager
    def generating(self, stream: EventStream) -> Iterator[None]:
        """A block in which `stream` generates for the answer, so that `end_thinking` reaches it."""
        self.ignore(stream.ignored)
        self._streams.append(stream)
        if self._ends_thinking:
            stream.end_thinking()
        try:
            yield
        finally:
            self._streams.remove(stream)

    def note(self, event: Finished) -> None:
        """Count a request that has ended."""
        self.tokens.update(prompt=event.usage.prompt_tokens, completion=event.usage.completion_tokens)
        self.tokens_per_second = event.metrics.tokens_per_second

    def end_thinking(self) -> None:
        """Have the model begin its answer, also to those of several prompts that still wait."""
        self._ends_thinking = True
        for stream in self._streams:
            stream.end_thinking()

    def failed(self, error: UmaError) -> Problem:
        """The problem that `error` is, which ends the answer: with the body's own names, and in the log."""
        self.failure, problem = error, Problem.of(error, self.names)
        if self.account is not None and problem.status == 429 and ACCOUNT not in self.scope:  # a batch asks again
            self.account.refused += 1
        level = logging.INFO if problem.kind == "loading" else logging.WARNING  # a client that polls asks many times
        asked = {"path": self.path[:100], "status": problem.status}  # what is longer is no path of ours
        told = {**asked, "code": error.code, "message": error.message, **self.whose}
        self.lines.log(logger, level, "http.failed", request=self.id, **told)
        return problem

    def tell_load(self, load: LoadState) -> None:
        """Have the answer's headers tell how far a model is."""
        told = (b"x-uma-load", header_value(load.words)), (b"x-uma-loading-percent", b"%d" % load.percent)
        self.extra_headers.extend(told)

    async def fail(self, dialect: Dialect, problem: Problem) -> None:
        """Send an error in the dialect's form. The connection stays usable, or, where a body is left unread, the answer
        says that it ends.
        """
        headers = problem.headers
        if problem.kind in ("too_large", "timeout", "busy") or not await self._leave_no_body():
            headers.append((b"connection", b"close"))
        if problem.kind == "unauthorized":
            headers.append((b"www-authenticate", b"Bearer"))
        if problem.kind == "encoded":
            headers.append((b"accept-encoding", b"identity"))
        await self.answer_json(dialect.error(problem, self.id), status=problem.status, headers=headers)

    async def _leave_no_body(self) -> bool:
        """Take what is left of the body, so that the next request on this connection is found behind it; False where
        that is much or does not come soon.
        """
        length = self.header(b"content-length") or "0"
        is_long = not length.isdigit() or int(length) > MAX_LEFT_BYTES
        if self.has_body:
            return True
        if self.header(b"transfer-encoding") is None and (length == "0" or is_long):
            return not is_long
        left = MAX_LEFT_BYTES
        with trio.move_on_after(LEFT_SEC):
            while not self.has_body and left >= 0:
                message = await self.receive()
                if message["type"] == "http.disconnect":
                    break
                left -= len(message.get("body", b""))
                self.has_body = not message.get("more_body", False)
        return self.has_body


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json_bytes.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidJson(f"the body {json_bytes.fault(error)}") from None
    if not isinstance(value, dict):
        raise BadRequest(f"the body must be a JSON object, not {show(value)}")
    return value
