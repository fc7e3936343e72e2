"""Messages of the protocol as frozen classes: what a client sends, and what a server answers.

The constraints stand in the fields' types (`uma.constraints`), so that converter, constructors and JSON Schemas cannot
disagree. On the wire a request's sampling parameters stand flat beside its `id`.
"""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import attrs

from uma.constraints import Length, Range
from uma.types import (
    MAX_PAUSE_SEC,
    MAX_TRACE_SEC,
    Activity,
    Capabilities,
    DecisionRequest,
    Decisions,
    Embeddings,
    EmbedRequest,
    Explained,
    Finished,
    Health,
    Limits,
    ListedModel,
    LoadState,
    Logprobs,
    ModelInfo,
    ModelName,
    Prompt,
    Ranking,
    ReasoningDelta,
    Request,
    RerankRequest,
    ServerInfo,
    Token,
    Tokenized,
    ToolCallDelta,
)

S = TypeVar("S", str, bytes)
T = TypeVar("T", str, bytes)
E = TypeVar("E")
Encoding = Literal["float", "base64"]
Id = Annotated[str, Length(1, 128)]

# Messages of a client.


@attrs.frozen
class Hello:
    """The first frame of a session that can carry many requests at once."""

    versions: Annotated[tuple[Annotated[str, Length(1, 32)], ...], Length(1, 64, "versions")]
    client: Annotated[str, Length(0, 128)] = ""
    """`name/version`, for the server's log."""
    strict: bool = False
    """Refuse unknown request fields, instead of naming them in `warnings`."""
    model: ModelName | None = None
    """Model for requests that name none, where the server has several; None: its default."""
    loads: bool = True
    """Load that model, if it never was, to answer with its card. False: answer at once; the card of a model that was
    never loaded is then empty."""
    warnings: tuple[str, ...] = ()


@attrs.frozen
class Sender:
    """Owner of a request, for programs that serve clients of their own. Only accepted from the user that the server
    runs as, and root.
    """

    client: Annotated[str, Length(0, 128)] = ""
    """Key of the program's client: its clients are scheduled in turns, as sessions are."""
    origin: Annotated[str, Length(0, 256)] = ""
    """Description of the client for people, as `activity` shows it."""
    owner: Annotated[str, Length(0, 128)] = ""
    """Owner of the request, for `explain`; empty: the server's own user."""


@attrs.frozen
class Generate:
    """Generation request (`type` absent or `generate`)."""

    request: Request
    keep_alive: bool = False
    """Keep a plain session open after this request's `eos`."""
    sender: Sender | None = None
    warnings: tuple[str, ...] = ()
    """Fields that were ignored or cut. The `eos` repeats them."""


@attrs.frozen
class Cancel:
    """End the running request of this id: `{"event": "cancel", "id": …}`."""

    id: Id


@attrs.frozen
class EndThinking:
    """Close the thinking of the running request of this id, so that it answers: `{"event": "answer", "id": …}`."""

    id: Id


@attrs.frozen(kw_only=True)
class QueryFields:
    """Common fields of queries that contain no request, and of their answers."""

    id: Id | None = None
    warnings: tuple[str, ...] = ()
    """Fields of the query that were ignored. The answer repeats them."""


@attrs.frozen
class MetricsQuery(QueryFields):
    """Query for a snapshot of the metrics: `{"type": "metrics"}`."""


@attrs.frozen
class ActivityQuery(QueryFields):
    """Query for the running requests: `{"type": "activity"}`."""

    request: Annotated[str, Length(0, 128)] = ""
    """Id of the requests to report; empty: all."""


@attrs.frozen
class ExplainQuery(QueryFields):
    """Query for where the time of a request went: `{"type": "explain", "request": …}`."""

    request: Annotated[str, Length(0, 128)] = ""
    """Id of the request; empty: this user's newest one."""
    sender: Sender | None = None


@attrs.frozen
class TraceQuery(QueryFields):
    """Query for a trace of the next seconds: `{"type": "trace", "seconds": …}`.

    For the user that the server runs as, and root.
    """

    seconds: Annotated[float, Range(gt=0, le=MAX_TRACE_SEC)] = 5.0


@attrs.frozen
class EndQuery(QueryFields):
    """Command to end a running request of any session: `{"type": "end", "number": …}`.

    For the user that the server runs as, and root.
    """

    number: Annotated[int, Range(1)]
    """The request's `number` in an `activity` event."""


@attrs.frozen
class PauseQuery(QueryFields):
    """Command to pause all computation: `{"type": "pause", "seconds": …}`. Answered by a `health` event.

    For the user that the server runs as, and root.
    """

    seconds: Annotated[float, Range(ge=0, le=MAX_PAUSE_SEC)] = MAX_PAUSE_SEC
    """Length of the pause; 0: resume."""


@attrs.frozen
class ModelsQuery(QueryFields):
    """Query for the list of models, of a server that has several: `{"type": "models"}`."""

    reload: bool = False
    """Search the folders for new models first."""


@attrs.frozen
class LoadQuery(QueryFields):
    """Command to load a model, of a server that has several: `{"type": "load", "model": …}`. Answered once it is
    loaded.
    """

    model: ModelName | None = None
    """None: the server's default."""
    keep_sec: float | None = None
    """Time for which the model stays loaded without requests; 0: it is unloaded at once, below 0: as if pinned, null:
    as it was set last. Values below 0 and above 86,400 are for users who can pin."""


@attrs.frozen
class UnloadQuery(QueryFields):
    """Command to unload a model once its requests have ended: `{"type": "unload", "model": …}`. Answered at once.

    For the user that the server runs as, and root.
    """

    model: ModelName | None = None
    """None: the server's default."""


@attrs.frozen
class PinQuery(QueryFields):
    """Command to load a model and keep it loaded, whatever needs its memory: `{"type": "pin", "model": …}`.

    For the user that the server runs as, and root.
    """

    model: ModelName | None = None
    """None: the server's default."""
    pinned: bool = True
    """False: unpin the model; it stays loaded until its memory is needed."""


@attrs.frozen
class HealthQuery(QueryFields):
    """Query whether generation works: `{"type": "health"}`."""

    probe: bool = True
    """Generate one token as a test; false: report the status alone."""


@attrs.frozen
class TokenizeQuery:
    """Query for token ids: `{"type": "tokenize", "id": …}` with one of `prompt`, `messages`, `token_ids`."""

    request: Request
    pieces: bool = False
    """Return the bytes of each token, too."""
    warnings: tuple[str, ...] = ()


@attrs.frozen
class EmbedQuery:
    """Query for embeddings: `{"type": "embed", "id": …}` with one of `texts` and `token_ids`."""

    request: EmbedRequest
    encoding: Encoding = "float"
    """Encoding of the embeddings: numbers, or the base64 of 32-bit floats, little-endian."""
    sender: Sender | None = None
    warnings: tuple[str, ...] = ()


@attrs.frozen
class RerankQuery:
    """Query for a ranking: `{"type": "rerank", "id": …, "query": …, "documents": […]}`."""

    request: RerankRequest
    sender: Sender | None = None
    warnings: tuple[str, ...] = ()


@attrs.frozen
class DecideQuery:
    """Query for decisions: `{"type": "decide", "id": …, "messages": […], "questions": […]}`."""

    request: DecisionRequest
    sender: Sender | None = None
    warnings: tuple[str, ...] = ()


WholeQuery = EmbedQuery | RerankQuery | DecideQuery
"""Queries that are computed and answered in one piece. A client can cancel them."""

ModelQuery = ModelsQuery | LoadQuery | UnloadQuery | PinQuery
"""Queries for a server that has several models."""
BareQuery = MetricsQuery | ActivityQuery | ExplainQuery | TraceQuery | EndQuery | PauseQuery | ModelQuery | HealthQuery
"""Queries that contain no request."""
PlainQuery = BareQuery | TokenizeQuery
"""Queries that a client cannot cancel."""
Query = PlainQuery | WholeQuery
"""All messages that ask for one answer: all but generations."""

ClientMessage = Hello | Generate | Cancel | EndThinking | Query

# Events of a server. An event that carries a class of `uma.types` extends it by fields that only the wire has.


def wire_event(event: type[E], what: Any, **more: Any) -> E:
    """The `event` that carries `what`, an object of the class that `event` extends, with `more` fields."""
    return event(**{field.name: getattr(what, field.name) for field in attrs.fields(type(what))} | more)


def carried(event: Any) -> Any:
    """The object of `uma.types` that such an event carries."""
    cls: Any = type(event).__base__
    return cls(**{field.name: getattr(event, field.name) for field in attrs.fields(cls)})


@attrs.frozen
class HelloEvent:
    """The answer to `Hello`: the version of this session, and the server's card."""

    version: str
    server: str
    model: ModelInfo
    capabilities: Capabilities
    limits: Limits
    warnings: tuple[str, ...] = ()
    chat_template: str = ""
    models: tuple[str, ...] = ()
    """Names of all models that requests can ask for; empty: only this one."""

    @classmethod
    def of(cls, info: ServerInfo, version: str, warnings: tuple[str, ...] = ()) -> HelloEvent:
        """The answer of the server that `info` describes."""
        card = (info.server, info.model, info.capabilities, info.limits)
        return cls(version, *card, warnings, info.chat_template, info.models)

    @property
    def info(self) -> ServerInfo:
        """The server's card, as `uma.types` has it."""
        return ServerInfo(self.server, self.model, self.capabilities, self.limits, self.chat_template, self.models)


@attrs.frozen
class PromptEvent(Prompt):
    """The prompt, before the first token, where `echo` or `prompt_logprobs` asked for it, or only its summary."""

    metadata: dict[str, Any] | None = None


@attrs.frozen
class TokenEvent:
    """One token. `text` is whole characters and can be empty."""

    id: str
    text: str
    token_id: int
    metadata: dict[str, Any] | None = None
    index: int = 0
    """Answer of several that it belongs to."""
    logprobs: Logprobs | None = None

    @classmethod
    def of(cls, token: Token, metadata: dict[str, Any] | None = None) -> TokenEvent:
        """The wire's form of `token`."""
        return cls(token.id, token.text, token.token_id, metadata, token.index, token.logprobs)

    @property
    def token(self) -> Token:
        """The event as `uma.types` has it."""
        return Token(self.id, self.text, self.token_id, self.index, self.logprobs)


@attrs.frozen
class ReasoningEvent(ReasoningDelta):
    """The next piece of the model's thinking, where `reasoning` asked for it."""

    metadata: dict[str, Any] | None = None


@attrs.frozen
class ToolCallEvent(ToolCallDelta):
    """The next piece of a tool call's arguments."""

    metadata: dict[str, Any] | None = None


@attrs.frozen
class EosEvent(Finished):
    """End of a request. `text` and `token_ids` are set where `stream` was false."""

    metadata: dict[str, Any] | None = None


@attrs.frozen
class WrongField:
    """Error of one field of a request."""

    field: str
    """Path of the field; empty where the error is about the whole request."""
    why: str


@attrs.frozen
class ErrorEvent:
    """An error. With an `id` it ends that request; without one it is about the session or a refused frame."""

    code: str
    message: str
    id: str | None = None
    retry_after_ms: int | None = None
    """Set where the same request can succeed later."""
    metadata: dict[str, Any] | None = None
    prompt_tokens: int | None = None
    """Minimum length of a prompt that does not fit the context of `n_ctx` tokens."""
    n_ctx: int | None = None
    wrong: tuple[WrongField, ...] = ()
    """Lines of `message` in order, if any of them is about a field."""


@attrs.frozen
class MetricsEvent(QueryFields):
    """A snapshot of the metrics. Flat on the wire: its fields stand beside `event`."""

    snapshot: Mapping[str, Any]


@attrs.frozen
class ActivityEvent(Activity):
    """The answer to `ActivityQuery`."""

    id: str | None = None
    warnings: tuple[str, ...] = ()


@attrs.frozen
class ExplainEvent(QueryFields):
    """The answer to `ExplainQuery`."""

    request: Explained


@attrs.frozen
class TraceEvent(QueryFields):
    """The answer to `TraceQuery`, at the end of the traced time."""

    trace: str
    """JSON in Chrome's trace event format, which Perfetto reads."""


@attrs.frozen
class EndEvent(QueryFields):
    """The answer to `EndQuery`."""

    ended: bool
    """False: no such request was running."""


@attrs.frozen
class ModelsEvent(QueryFields):
    """The answer to `ModelsQuery`; with a single model the answer to the other model queries."""

    models: tuple[ListedModel, ...]
    """Models, the default one first."""


@attrs.frozen
class HealthEvent(Health):
    """The answer to `HealthQuery` and `PauseQuery`."""

    id: str | None = None
    warnings: tuple[str, ...] = ()


@attrs.frozen
class LoadingEvent(LoadState):
    """A notice that messages of this session wait for the model to be loaded. Sent when they begin to wait, and about
    once a second. Followed by their answers, or by an error where the model cannot be loaded.
    """

    id: str | None = None
    """Request that waits for its model, where the server has several; None: the session."""


@attrs.frozen
class TokenizeEvent:
    """The answer to `TokenizeQuery`."""

    id: str
    token_ids: tuple[int, ...]
    warnings: tuple[str, ...] = ()
    text: str | None = None
    """Text of the ids, where the query had `messages` or `token_ids`."""
    added_tokens: int = 0
    pieces: tuple[str, ...] | None = None
    """Bytes of each token in base64, where the query asked for them."""

    @classmethod
    def of(cls, query: TokenizeQuery, found: Tokenized) -> TokenizeEvent:
        """The event that answers `query`."""
        pieces = None if found.pieces is None else _each_once(lambda piece: b64encode(piece).decode(), found.pieces)
        return cls(query.request.id, found.token_ids, query.warnings, found.text, found.added_tokens, pieces)

    @property
    def tokenized(self) -> Tokenized:
        """The event as `uma.types` has it."""
        pieces = None if self.pieces is None else _each_once(b64decode, self.pieces)
        return Tokenized(self.token_ids, self.text, self.added_tokens, pieces)


@attrs.frozen
class EmbedEvent:
    """The answer to `EmbedQuery`: an embedding for each text, in their order."""

    id: str
    embeddings: tuple[str | list[float] | None, ...]
    """Embeddings as base64 of 32-bit floats, little-endian, or as numbers; null: the text has no token."""
    prompt_tokens: tuple[int, ...]
    """Number of tokens of each text."""
    warnings: tuple[str, ...] = ()
    metadata: dict[str, Any] | None = None
    reason: Literal["stop", "cancelled"] = "stop"
    """`cancelled`: the client cancelled the query, and there is no result."""

    @property
    def result(self) -> Embeddings:
        """The event as `uma.types` has it. Raises `ValueError` for anything but base64 of 32-bit floats."""
        return Embeddings(self.id, tuple(map(_vector, self.embeddings)), self.prompt_tokens, self.warnings)


def _each_once(convert: Callable[[S], T], pieces: Sequence[S]) -> tuple[T, ...]:
    """`convert` of each piece, called once for equal ones: 100,000 tokens have few different ones."""
    known = {piece: convert(piece) for piece in set(pieces)}
    return tuple(map(known.__getitem__, pieces))


def _vector(written: str | list[float] | None) -> array[float] | None:
    if written is None:
        return None
    vector = array("f")
    if isinstance(written, str):
        vector.frombytes(b64decode(written, validate=True))
    else:
        vector.extend(written)
    return vector


@attrs.frozen
class RerankEvent(Ranking):
    """The answer to `RerankQuery`."""

    warnings: tuple[str, ...] = ()
    metadata: dict[str, Any] | None = None
    reason: Literal["stop", "cancelled"] = "stop"
    """`cancelled`: the client cancelled the query, and there is no result."""


@attrs.frozen
class DecideEvent(Decisions):
    """The answer to `DecideQuery`."""

    warnings: tuple[str, ...] = ()
    metadata: dict[str, Any] | None = None
    reason: Literal["stop", "cancelled"] = "stop"
    """`cancelled`: the client cancelled the query, and there is no result."""


@attrs.frozen
class UnknownEvent:
    """An event with a name of a newer server. Must be ignored."""

    event: str
    id: str | None = None


QueryAnswer = (
    MetricsEvent
    | ActivityEvent
    | ExplainEvent
    | TraceEvent
    | EndEvent
    | ModelsEvent
    | HealthEvent
    | TokenizeEvent
    | EmbedEvent
    | RerankEvent
    | DecideEvent
)

ServerEvent = (
    HelloEvent
    | PromptEvent
    | TokenEvent
    | ReasoningEvent
    | ToolCallEvent
    | EosEvent
    | ErrorEvent
    | LoadingEvent
    | QueryAnswer
    | UnknownEvent
)
