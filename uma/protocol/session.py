"""One session of the protocol, from its first frame to its end: valid messages in each state, running requests, and
closing. No I/O: bytes go in, messages come out; events go in, bytes come out.

Theory of operation
===================

A server drives a `ServerSession` so::

    session = ServerSession(max_frame_bytes=…, n_vocab=…)

    # the reading task
    while data := await stream.receive_some(65536):
        session.receive(data)
        while (message := session.next_message()) is not None:
            match message:
                case Refused():  write(message.data)                   # told already; `.event` is for the log
                case Hello():    write(session.welcome(engine.info))
                case Generate(): start a task for message.request      # and then, in that task:
                                     async for event in stream: write(session.relay(event))
                                     except UmaError as error: write(session.fail(error, request.id))
                case Cancel():   cancel the task of message.id         # it ends in relay(Finished(…, "cancelled", …))
                case _: result = …     # of a query, as `uma.types` has it
                        write(session.answer(message, result)) or session.fail_query(message, error)

    # the writing task, each time all that was queued has been written
    if session.flushed():
        close the socket and cancel what runs

`next_message` combines `next_payload`, `parse` and `admit`. A server that must not block while a large frame is parsed
calls these three itself: `parse` can run in any thread, because it changes no state.

All methods that return bytes return whole frames, which must be written in the order of the calls. Once the session is
closing they return `b""`, so a late task needs no check of its own. After a fatal `Refused`, `next_message` always
gives None. A timeout, a limit or a shutdown ends the session by `session.fail(error)` without an id. `session.drain()`
lets running requests end first.

A client drives a `ClientSession`: `write(session.hello())`, `write(session.send(Generate(request)))`,
`session.receive(data)`, `session.next_event()`.

`states` has the states, and the effect of each error on the session.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs
import orjson

from uma.errors import (
    STOPPING,
    BadRequest,
    Busy,
    FrameTooLarge,
    PromptTooLarge,
    ShuttingDown,
    UmaError,
)
from uma.json_bytes import BLOCK_BYTES
from uma.protocol.codec import (
    encode_embeddings,
    encode_event,
    encode_message,
    encode_token,
    fragment,
    id_and_metadata_of,
    message_of,
    parse_event,
    read_object,
    written_embeddings,
)
from uma.protocol.frames import DEFAULT_MAX_FRAME_BYTES, HEADER_BYTES, FrameDecoder
from uma.protocol.json_size import check_size
from uma.protocol.messages import (
    Cancel,
    ClientMessage,
    DecideQuery,
    EmbedQuery,
    EndThinking,
    EosEvent,
    ErrorEvent,
    Generate,
    HealthEvent,
    HealthQuery,
    Hello,
    HelloEvent,
    MetricsQuery,
    ModelQuery,
    ModelsEvent,
    PauseQuery,
    PromptEvent,
    Query,
    QueryAnswer,
    ReasoningEvent,
    RerankQuery,
    ServerEvent,
    TokenizeEvent,
    TokenizeQuery,
    ToolCallEvent,
    WholeQuery,
    WrongField,
    wire_event,
)
from uma.protocol.states import (
    AFTER_ERROR,
    PHASES,
    After,
    LocalProtocolError,
    Phase,
    PhaseStep,
    RequestExchange,
)
from uma.protocol.versions import SUPPORTED, negotiate
from uma.protocol.wire import EVENTS, name_of
from uma.types import (
    Embeddings,
    Event,
    Finished,
    Prompt,
    ReasoningDelta,
    ServerInfo,
    Token,
    ToolCallDelta,
    Usage,
)
from uma.wrong import Wrong


@attrs.frozen
class Refused:
    """A frame that was refused. `data` is the error event as a frame, to be written."""

    event: ErrorEvent
    data: bytes
    is_fatal: bool
    """The session closes once `data` is written."""


Incoming = ClientMessage | Refused


@attrs.frozen
class Unparsed:
    """A payload that is not a valid message: the error, and the id and metadata that the error event carries."""

    error: UmaError
    id: str | None = None
    metadata: dict[str, Any] | None = None


Parsed = ClientMessage | Unparsed


class ServerSession:
    """Server side of one session. Belongs to one thread; reading, writing and request tasks share it.

    `max_frame_bytes` bounds the frames of the client, `n_vocab` its token ids; None: unbounded.
    """

    def __init__(
        self,
        *,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
        n_vocab: int | None = None,
    ) -> None:
        self.phase = Phase.START
        self.version: str | None = None
        """Version agreed on in hello; None in a plain session."""
        self.client = ""
        """Name that the client gave itself in hello."""
        self._frames = FrameDecoder(max_frame_bytes)
        self._n_vocab = n_vocab
        self._strict = False
        self._hello_warnings: tuple[str, ...] = ()
        self._is_draining = False
        self._running: dict[str | int, RequestExchange] = {}
        """Running requests by id; queries without an id by the identity of their message."""

    def bound(self, *, n_vocab: int | None, max_frame_bytes: int) -> None:
        """Set the bounds that are known only once the model is loaded."""
        self._n_vocab, self._frames.max_frame_bytes = n_vocab, max_frame_bytes

    # Incoming bytes and messages.

    def receive(self, data: bytes) -> None:
        """Take bytes from the peer. Never raises; errors come out of `next_message`."""
        if not self.is_closing:
            self._frames.feed(data)

    def next_message(self) -> Incoming | None:
        """The next message to act on, or None until more bytes are received (or always, once closing).

        Never raises: a bad frame comes out as `Refused`. A cancel for a request that does not run, or was already
        cancelled, is dropped, so each `Cancel` that comes out has a running generation. The same holds for
        `EndThinking`.
        """
        while (payload := self.next_payload()) is not None:
            message = payload if isinstance(payload, Refused) else self.admit(self.parse(payload))
            if message is not None:
                return message
        return None

    def next_payload(self) -> bytes | Refused | None:
        """The next whole frame's payload, for `parse` and then `admit`; None until more bytes are received."""
        if self.is_closing:
            return None
        try:
            return self._frames.next_frame()
        except UmaError as error:
            return self._refuse(error, None, None)

    def parse(self, payload: bytes) -> Parsed:
        """Parse a payload. Never raises. Any thread, once the payload before it was admitted."""
        try:
            if len(payload) > BLOCK_BYTES:  # a shorter one cannot exceed the bounds
                check_size(payload)
            fields = read_object(payload)
        except UmaError as error:
            return Unparsed(error)
        try:
            return message_of(
                fields,
                strict=self._strict,
                n_vocab=self._n_vocab,
                version=self.version,
            )
        except UmaError as error:
            return Unparsed(error, *id_and_metadata_of(fields))

    def admit(self, parsed: Parsed) -> Incoming | None:
        """Act on the result of `parse`, in the order of the payloads. Never raises.

        None where there is nothing to act on: a cancel without effect, or a session that is closing by now.
        """
        if self.is_closing:
            return None
        if isinstance(parsed, Unparsed):
            return self._refuse(parsed.error, parsed.id, parsed.metadata)
        try:
            return parsed if self._admit(parsed) else None
        except UmaError as error:
            return self._refuse(error, *_id_and_metadata(parsed))

    def _admit(self, message: ClientMessage) -> bool:
        """Whether there is something to act on. Raises the error that refuses the message."""
        if isinstance(message, Cancel | EndThinking):
            return self._take_command(message)
        if isinstance(message, Hello):
            self._take_hello(message)
        else:
            self._take_request(message)
        return True

    def _take_command(self, command: Cancel | EndThinking) -> bool:
        exchange, cancels = self._running.get(command.id), isinstance(command, Cancel)
        if exchange is None or not (exchange.can_cancel if cancels else exchange.can_think):
            return False
        exchange.can_think, exchange.can_cancel = False, exchange.can_cancel and not cancels
        return True

    def _take_hello(self, hello: Hello) -> None:
        if (self.phase, "hello") not in PHASES:
            raise BadRequest.at("type", "a hello must be the first frame of its session, and this is a later one")
        if self._is_draining:
            raise ShuttingDown(STOPPING)
        self.version = negotiate(hello.versions)
        self._move("hello")
        self.client = hello.client
        self._strict = hello.strict
        self._hello_warnings = hello.warnings

    def _take_request(self, message: Generate | Query) -> None:
        # A monitor must be able to see the server drain.
        if self._is_draining and not isinstance(message, HealthQuery | MetricsQuery):
            raise ShuttingDown(STOPPING)
        if self.phase is Phase.PLAIN and self._running:
            raise Busy(
                "a request is running already, and a plain session has one at a time; "
                "wait for its eos, or open the session with hello to run many"
            )
        key = _key(message)
        if key in self._running:
            raise BadRequest.at(
                "id", f"{key!r} is the id of a request that is running in this session; give each its own"
            )
        self._move("request")
        self._running[key] = _exchange(message)

    def _refuse(self, error: UmaError, id: str | None, metadata: dict[str, Any] | None) -> Refused:
        if id in self._running:
            id = None  # the client takes an error with a running request's id for that request's end
        event = _error_event(error, id, metadata)
        data = encode_event(event)
        is_fatal = self._closes_after(error)
        if is_fatal:
            self._close()
        return Refused(event, data, is_fatal)

    # Outgoing frames.

    def welcome(self, info: ServerInfo) -> bytes:
        """The answer to the client's `Hello`."""
        if self.is_closing:
            return b""
        if self.version is None:
            raise LocalProtocolError("no hello has come, so there is none to answer")
        return encode_event(HelloEvent.of(info, self.version, self._hello_warnings), self.version)

    def relay(self, event: Event, written: bytes | None = None) -> bytes:
        """An engine's event as a frame: with the request's metadata, and in the `eos` with its warnings. An `eos` can
        be encoded already (`written`, by `eos`).

        Raises `LocalProtocolError` where no request of that id runs.
        """
        if self.is_closing:
            return b""
        exchange = self._running.get(event.id)
        if exchange is None:
            raise _not_running(event.id)
        if type(event) is Token:
            return encode_token(event, exchange.fragment)
        if (told := _WIRE_EVENTS.get(type(event))) is not None:
            return encode_event(wire_event(told, event, metadata=exchange.metadata))
        assert isinstance(event, Finished)
        data = written or self.eos(event)
        self._end(event.id, keep_alive=exchange.keep_alive)
        return data

    def eos(self, event: Finished) -> bytes:
        """The last frame of a request, to be passed to `relay`. Any thread: with log probabilities it is long."""
        if (exchange := self._running.get(event.id)) is None:
            raise _not_running(event.id)
        warnings = (*exchange.warnings, *event.warnings)
        return encode_event(wire_event(EosEvent, event, metadata=exchange.metadata, warnings=warnings), self.version)

    def answer_embed(self, query: EmbedQuery, embeddings: Embeddings, written: orjson.Fragment) -> bytes:
        """See `answer`. `written` comes from `written_embeddings`, in another thread where there are many numbers."""
        if self.is_closing:
            return b""
        data = encode_embeddings(embeddings, written, query.warnings, query.request.metadata)
        self._end(_key(query))
        return data

    def cancelled(self, query: WholeQuery) -> bytes:
        """Answer without a result to a query that the client cancelled."""
        if self.is_closing:
            return b""
        id, metadata = query.request.id, query.request.metadata
        nothing = {EmbedQuery: ((), ()), RerankQuery: ((), 0), DecideQuery: ((), Usage(0, 0, 0))}[type(query)]
        data = encode_event(EVENTS[name_of(type(query))](id, *nothing, query.warnings, metadata, "cancelled"))
        self._end(_key(query))
        return data

    def answer(self, query: Query, result: Any) -> bytes:
        """Answer to a query as a frame; `result` is its object of `uma.types`. Ends the query, and therefore a plain
        session.
        """
        if self.is_closing:
            return b""
        if isinstance(query, EmbedQuery):
            return self.answer_embed(query, result, written_embeddings(result, query.encoding))
        data = encode_event(_answer_to(query, result), self.version)
        self._end(_key(query))
        return data

    def fail(self, error: UmaError, id: str | None = None) -> bytes:
        """An error as a frame. With an `id` it ends that request; without one it ends the session.

        `AFTER_ERROR` and the other running requests decide whether a request's error also closes the session. Raises
        `LocalProtocolError` where no request of that id runs.
        """
        if self.is_closing:
            return b""
        if id is None:
            self._close()
            return encode_event(_error_event(error, None))
        return self._fail(error, id, id)

    def fail_query(self, query: Query, error: UmaError) -> bytes:
        """An error instead of a query's answer; the query can be without an id."""
        if self.is_closing:
            return b""
        key = _key(query)
        return self._fail(error, key, key if isinstance(key, str) else None)

    def drain(self) -> bytes:
        """Refuse each new request with `E_RUNTIME_SHUTDOWN`, but answer health and metrics queries.

        Closes once nothing runs, which can be now.
        """
        self._is_draining = True
        return b"" if self._running else self.fail(ShuttingDown(STOPPING))

    def flushed(self) -> bool:
        """Note that all returned frames were written. True: close the socket now."""
        if self.phase is Phase.CLOSING:
            self._move("flushed")
        return self.phase is Phase.CLOSED

    def _end(self, key: str | int, *, keep_alive: bool = False) -> None:
        self._taken_out(key)
        is_over = self.phase is Phase.PLAIN and not keep_alive
        if is_over or (self._is_draining and not self._running):
            self._close()

    def _fail(self, error: UmaError, key: str | int, id: str | None) -> bytes:
        data = encode_event(_error_event(error, id, self._taken_out(key).metadata))
        if self._closes_after(error) or (self._is_draining and not self._running):
            self._close()
        return data

    def _taken_out(self, key: str | int) -> RequestExchange:
        """Remove the request of a key, which is free from now on, and return it."""
        if (exchange := self._running.pop(key, None)) is None:
            raise _not_running(key)
        return exchange

    def _closes_after(self, error: UmaError) -> bool:
        """Whether `error` closes the session, given what else runs."""
        after = AFTER_ERROR.get(error.code, After.CLOSED_IF_PLAIN)
        if isinstance(error, ShuttingDown) and self._running:
            self._is_draining = True  # accepted requests end first
            return False
        if after is After.CLOSED_IF_PLAIN:
            return self.phase is not Phase.HELLO and not self._running
        return after is After.CLOSED

    def _move(self, step: PhaseStep) -> None:
        self.phase = PHASES[self.phase, step]

    def _close(self) -> None:
        self._move("close")
        self._running.clear()

    # State for the caller.

    @property
    def running(self) -> Mapping[str | int, RequestExchange]:
        """Running requests by id (queries without an id by a number)."""
        return MappingProxyType(self._running)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, so that the idle timeout counts."""
        return not self._running

    @property
    def is_mid_frame(self) -> bool:
        """Whether a frame is incomplete, so that the idle timeout counts, whatever runs."""
        return not self.is_closing and self._frames.is_mid_frame

    @property
    def is_closing(self) -> bool:
        """Whether the session reads no more, and returns no further frames."""
        return self.phase is Phase.CLOSING or self.phase is Phase.CLOSED


class ClientSession:
    """Client side of one hello session. Belongs to one thread.

    `max_frame_bytes` bounds the frames of the server: an `eos` can contain a whole output and the metadata.
    """

    def __init__(self, *, client: str = "", max_frame_bytes: int = 64 * DEFAULT_MAX_FRAME_BYTES) -> None:
        self.info: ServerInfo | None = None
        """The server's card; None before the hello event."""
        self.version: str | None = None
        """Version agreed on; None before the hello event."""
        self._client = client
        self._frames = FrameDecoder(max_frame_bytes)
        self._running: set[str | None] = set()

    def hello(self, *, strict: bool = False, model: str | None = None, loads: bool = True) -> bytes:
        """The session's first frame. `model` is the model of requests that name none; `loads`: see `Hello`."""
        return encode_message(Hello(SUPPORTED, self._client, strict, model, loads))

    def send(self, message: Generate | Cancel | EndThinking | Query) -> bytes:
        """A message as a frame.

        Raises `FrameTooLarge` for a length at which the server would close the session, and `BadRequest` for an id that
        is in use, or values that JSON cannot express. The session is then unchanged.
        """
        id = message.request.id if isinstance(message, _Requesting) else message.id
        if id in self._running and not isinstance(message, Cancel | EndThinking):
            raise BadRequest.at(
                "id", f"{id!r} is the id of a request that is running in this session; give each its own"
            )
        data = encode_message(message)
        limit = self.info.limits.max_frame_bytes if self.info else DEFAULT_MAX_FRAME_BYTES
        if len(data) - HEADER_BYTES > limit:
            raise FrameTooLarge(
                f"the request takes {len(data) - HEADER_BYTES:,} bytes; the server takes {limit:,} (max_frame_bytes)"
            )
        if id is not None and not isinstance(message, Cancel | EndThinking):
            self._running.add(id)
        return data

    def receive(self, data: bytes) -> None:
        """Take bytes from the server. Never raises."""
        self._frames.feed(data)

    def next_event(self) -> ServerEvent | None:
        """The next event, or None until more bytes are received.

        Raises `InvalidJson`, `BadRequest` or `FrameTooLarge` for an invalid event, after which the session is unusable.
        """
        payload = self.next_frame()
        return None if payload is None else self.event(payload)

    def next_frame(self) -> bytes | None:
        """Payload of the next event; see `next_event`. Raises `FrameTooLarge`."""
        return self._frames.next_frame()

    def event(self, payload: bytes) -> ServerEvent:
        """The event of a payload, which must be the next. Any thread: with log probabilities it takes long. Raises as
        `next_event` does.
        """
        event = parse_event(payload)
        if isinstance(event, HelloEvent):
            self.info, self.version = event.info, event.version
        elif isinstance(event, _LastEvent):
            self._running.discard(event.id)
        return event


_Requesting = Generate | TokenizeQuery | EmbedQuery | RerankQuery | DecideQuery
"""Messages whose id is the id of the request in them."""
_LastEvent = EosEvent | ErrorEvent | QueryAnswer
"""Events that end the request or query of their id."""
_WIRE_EVENTS: Mapping[type, type[ServerEvent]] = MappingProxyType(
    {Prompt: PromptEvent, ReasoningDelta: ReasoningEvent, ToolCallDelta: ToolCallEvent}
)
"""Wire event for each event of a generation."""


def _id_and_metadata(message: ClientMessage) -> tuple[str | None, dict[str, Any] | None]:
    """Id and metadata that an error about `message` carries."""
    if isinstance(message, Hello):
        return None, None
    if isinstance(message, _Requesting):
        return message.request.id, message.request.metadata
    return message.id, None


def _key(message: Generate | Query) -> str | int:
    if isinstance(message, _Requesting):
        return message.request.id
    return id(message) if message.id is None else message.id


def _exchange(message: Generate | Query) -> RequestExchange:
    if isinstance(message, WholeQuery):
        return RequestExchange(metadata=message.request.metadata, warnings=message.warnings, can_cancel=True)
    if not isinstance(message, Generate):
        return RequestExchange(warnings=message.warnings)
    metadata = message.request.metadata
    return RequestExchange(
        metadata=metadata,
        fragment=None if metadata is None else fragment(metadata),
        warnings=message.warnings,
        keep_alive=message.keep_alive,
        can_cancel=True,
        can_think=True,
    )


def _answer_to(query: Query, result: Any) -> ServerEvent:
    if isinstance(query, TokenizeQuery):
        return TokenizeEvent.of(query, result)
    if isinstance(query, ModelQuery):
        shown = tuple(attrs.evolve(model, info=None) for model in result)  # a card includes the whole chat template
        return ModelsEvent(shown, id=query.id, warnings=query.warnings)
    cls = HealthEvent if isinstance(query, PauseQuery) else EVENTS[name_of(type(query))]
    own = {"metadata": query.request.metadata} if isinstance(query, WholeQuery) else {"id": query.id}
    marks: dict[str, Any] = {"warnings": query.warnings, **own}
    event: ServerEvent = wire_event(cls, result, **marks) if issubclass(cls, type(result)) else cls(result, **marks)
    return event


def _error_event(error: UmaError, id: str | None, metadata: dict[str, Any] | None = None) -> ErrorEvent:
    event = ErrorEvent(error.code, error.message, id, error.retry_after_ms, metadata)
    if any(isinstance(line, Wrong) for line in error.lines):
        lines = [line if isinstance(line, Wrong) else Wrong("", line) for line in error.lines]
        event = attrs.evolve(event, wrong=tuple(WrongField(line.field, line.why) for line in lines))
    if isinstance(error, PromptTooLarge):
        return attrs.evolve(event, prompt_tokens=error.prompt_tokens, n_ctx=error.n_ctx)
    return event


def _not_running(key: str | int) -> LocalProtocolError:
    return LocalProtocolError(f"no request {key!r} runs in this session: its last event has gone out, or it never came")
