"""The protocol's messages as frozen classes: what a client can say, and what a server answers.

Their fields' types carry the rules (`uma.constraints`), so that the converter, the constructors and the JSON Schemas
cannot disagree. On the wire a request's sampling parameters stand flat beside its `id`.
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

# What a client can say.


@attrs.frozen
class Hello:
    """The first frame of a session that can carry many requests at once."""

    versions: Annotated[tuple[Annotated[str, Length(1, 32)], ...], Length(1, 64, "versions")]
    client: Annotated[str, Length(0, 128)] = ""
    """`name/version`, for the server's log."""
    strict: bool = False
    """Unknown request fields are refused instead of named in `warnings`."""
    model: ModelName | None = None
    """The model of requests that name none, where the server has several; None: its default."""
    loads: bool = True
    """Have that model loaded where it never was, for its card. False: the answer comes at once; what it says of a model
    that is not known yet is empty."""
    warnings: tuple[str, ...] = ()


@attrs.frozen
class Sender:
    """Whose a request is, where a program asks for clients of its own. Heeded of the user that the server runs as, and
    root.
    """

    client: Annotated[str, Length(0, 128)] = ""
    """Tells the program's clients apart: they take turns as sessions do."""
    origin: Annotated[str, Length(0, 256)] = ""
    """The client in words for people, as `activity` tells it."""
    owner: Annotated[str, Length(0, 128)] = ""
    """Whose the request is, for `explain`; empty: the server's own user's."""


@attrs.frozen
class Generate:
    """A generation asked for (`type` absent or `generate`)."""

    request: Request
    keep_alive: bool = False
    """A plain session stays open after this request's `eos`."""
    sender: Sender | None = None
    warnings: tuple[str, ...] = ()
    """What was ignored or cut. The `eos` repeats it."""


@attrs.frozen
class Cancel:
    """End the running request of this id: `{"event": "cancel", "id": …}`."""

    id: Id


@attrs.frozen
class EndThinking:
    """Close the thinking of the running request of this id, so that it answers: `{"event": "answer", "id": …}`."""

    id: Id


@attrs.frozen(kw_only=True)
class Marked:
    """What each question that has no request in it has, and its answer."""

    id: Id | None = None
    warnings: tuple[str, ...] = ()
    """What was ignored of the question. The answer repeats it."""


@attrs.frozen
class MetricsQuery(Marked):
    """A snapshot asked for: `{"type": "metrics"}`."""


@attrs.frozen
class ActivityQuery(Marked):
    """What runs just now asked for: `{"type": "activity"}`."""

    request: Annotated[str, Length(0, 128)] = ""
    """Id of the requests to tell of; empty: all."""


@attrs.frozen
class ExplainQuery(Marked):
    """An account asked for of where the time of a request went: `{"type": "explain", "request": …}`."""

    request: Annotated[str, Length(0, 128)] = ""
    """Id of the request; empty: the newest one of this user."""
    sender: Sender | None = None


@attrs.frozen
class TraceQuery(Marked):
    """A trace of the next seconds asked for: `{"type": "trace", "seconds": …}`.

    For the user that the server runs as, and root.
    """

    seconds: Annotated[float, Range(gt=0, le=MAX_TRACE_SEC)] = 5.0


@attrs.frozen
class EndQuery(Marked):
    """The end asked for of a running request, whichever session it is of: `{"type": "end", "number": …}`.

    For the user that the server runs as, and root.
    """

    number: Annotated[int, Range(1)]
    """The request's `number` in an `activity` event."""


@attrs.frozen
class PauseQuery(Marked):
    """A pause asked for, in which nothing is computed: `{"type": "pause", "seconds": …}`. Answered by a `health` event.

    For the user that the server runs as, and root.
    """

    seconds: Annotated[float, Range(ge=0, le=MAX_PAUSE_SEC)] = MAX_PAUSE_SEC
    """0: go on."""


@attrs.frozen
class ModelsQuery(Marked):
    """List asked for of all models of a server that has several: `{"type": "models"}`."""

    reload: bool = False
    """Look for new ones first."""


@attrs.frozen
class LoadQuery(Marked):
    """A model to be loaded, of a server that has several: `{"type": "load", "model": …}`. Answered once it is."""

    model: ModelName | None = None
    """None: the server's default."""
    keep_sec: float | None = None
    """How long it stays without a request from then on; 0: it leaves at once, below 0: as if pinned, null: as it was
    said last. Below 0 and above 86,400 are for those who can pin."""


@attrs.frozen
class UnloadQuery(Marked):
    """A model to leave once its requests have ended: `{"type": "unload", "model": …}`. Answered at once.

    For the user that the server runs as, and root.
    """

    model: ModelName | None = None
    """None: the server's default."""


@attrs.frozen
class PinQuery(Marked):
    """A model to be loaded and to stay, whatever needs its memory: `{"type": "pin", "model": …}`.

    For the user that the server runs as, and root.
    """

    model: ModelName | None = None
    """None: the server's default."""
    pinned: bool = True
    """False: take that back; the model stays until it has to leave."""


@attrs.frozen
class HealthQuery(Marked):
    """Health asked for, which says whether generation works: `{"type": "health"}`."""

    probe: bool = True
    """Really generate one token; false: the status alone."""


@attrs.frozen
class TokenizeQuery:
    """Token ids asked for: `{"type": "tokenize", "id": …}` with one of `prompt`, `messages`, `token_ids`."""

    request: Request
    pieces: bool = False
    """Tell what each token stands for, too."""
    warnings: tuple[str, ...] = ()


@attrs.frozen
class EmbedQuery:
    """Embeddings asked for: `{"type": "embed", "id": …}` with one of `texts` and `token_ids`."""

    request: EmbedRequest
    encoding: Encoding = "float"
    """How the figures come back: as numbers, or as the base64 of 32-bit floats, little-endian."""
    sender: Sender | None = None
    warnings: tuple[str, ...] = ()


@attrs.frozen
class RerankQuery:
    """A ranking asked for: `{"type": "rerank", "id": …, "query": …, "documents": […]}`."""

    request: RerankRequest
    sender: Sender | None = None
    warnings: tuple[str, ...] = ()


@attrs.frozen
class DecideQuery:
    """Decisions asked for: `{"type": "decide", "id": …, "messages": […], "questions": […]}`."""

    request: DecisionRequest
    sender: Sender | None = None
    warnings: tuple[str, ...] = ()


WholeQuery = EmbedQuery | RerankQuery | DecideQuery
"""What is computed and answered in one piece. A client can cancel it."""

ModelQuery = ModelsQuery | LoadQuery | UnloadQuery | PinQuery
"""What is asked of a server that has several models."""
MarkedQuery = (
    MetricsQuery | ActivityQuery | ExplainQuery | TraceQuery | EndQuery | PauseQuery | ModelQuery | HealthQuery
)
"""What has no request in it."""
PlainQuery = MarkedQuery | TokenizeQuery
"""Questions that no client can cancel."""
Query = PlainQuery | WholeQuery
"""What a client asks besides a generation. Each has one answer."""

ClientMessage = Hello | Generate | Cancel | EndThinking | Query

# What a server answers. An event that carries a class of `uma.types` extends it by what only the wire has.


def told_as(event: type[E], what: Any, **more: Any) -> E:
    """The wire's form of an object whose class `event` extends, with `more` fields."""
    return event(**{field.name: getattr(what, field.name) for field in attrs.fields(type(what))} | more)


def carried(event: Any) -> Any:
    """The object that such an event carries, as `uma.types` has it."""
    cls: Any = type(event).__base__
    return cls(**{field.name: getattr(event, field.name) for field in attrs.fields(cls)})


@attrs.frozen
class HelloEvent:
    """The answer to `Hello`: the version spoken from here on, and the server's card."""

    version: str
    server: str
    model: ModelInfo
    capabilities: Capabilities
    limits: Limits
    warnings: tuple[str, ...] = ()
    chat_template: str = ""
    models: tuple[str, ...] = ()
    """Names of all models that requests can ask for; none: this one alone."""

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
    """The prompt, before the first token, where `echo` or `prompt_logprobs` asked for it, or its summary alone."""

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
    """A request's end. `text` and `token_ids` are there where `stream` was false."""

    metadata: dict[str, Any] | None = None


@attrs.frozen
class WrongField:
    """What is wrong with one field of a request."""

    field: str
    """Path of the field; empty where it is the request as a whole."""
    why: str


@attrs.frozen
class ErrorEvent:
    """What went wrong. With an `id` it ends that request; without, it speaks of the session or of a refused frame."""

    code: str
    message: str
    id: str | None = None
    retry_after_ms: int | None = None
    """There where trying the same again later can help."""
    metadata: dict[str, Any] | None = None
    prompt_tokens: int | None = None
    """Minimum length of a prompt that does not fit the context; `n_ctx` is the context's."""
    n_ctx: int | None = None
    wrong: tuple[WrongField, ...] = ()
    """Lines of `message`, in their order, where some are about fields."""


@attrs.frozen
class MetricsEvent(Marked):
    """A snapshot. Flat on the wire: its fields stand beside `event`."""

    snapshot: Mapping[str, Any]


@attrs.frozen
class ActivityEvent(Activity):
    """The answer to `ActivityQuery`."""

    id: str | None = None
    warnings: tuple[str, ...] = ()


@attrs.frozen
class ExplainEvent(Marked):
    """The answer to `ExplainQuery`."""

    request: Explained


@attrs.frozen
class TraceEvent(Marked):
    """The answer to `TraceQuery`, once its time is over."""

    trace: str
    """JSON in the trace event format of Chrome, as Perfetto takes it."""


@attrs.frozen
class EndEvent(Marked):
    """The answer to `EndQuery`."""

    ended: bool
    """False: no such request ran any more."""


@attrs.frozen
class ModelsEvent(Marked):
    """The answer to `ModelsQuery`, and with the one model to what is asked of one."""

    models: tuple[ListedModel, ...]
    """The default one first."""


@attrs.frozen
class HealthEvent(Health):
    """The answer to `HealthQuery` and `PauseQuery`."""

    id: str | None = None
    warnings: tuple[str, ...] = ()


@attrs.frozen
class LoadingEvent(LoadState):
    """What came in this session waits until the model is loaded; sent when it begins to wait and about once a second.
    It is followed by the answers, or by an error where the model cannot be loaded.
    """

    id: str | None = None
    """The request that waits for its model, where the server has several; None: the session."""


@attrs.frozen
class TokenizeEvent:
    """The answer to `TokenizeQuery`."""

    id: str
    token_ids: tuple[int, ...]
    warnings: tuple[str, ...] = ()
    text: str | None = None
    """What the ids stand for, where `messages` or `token_ids` were asked about."""
    added_tokens: int = 0
    pieces: tuple[str, ...] | None = None
    """Each token's bytes in base64, where they were asked for."""

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
    """Each as the base64 of 32-bit floats, little-endian, or as numbers; null: the text has no token."""
    prompt_tokens: tuple[int, ...]
    """Tokens of each text."""
    warnings: tuple[str, ...] = ()
    metadata: dict[str, Any] | None = None
    reason: Literal["stop", "cancelled"] = "stop"
    """`cancelled`: at the client's wish, without a result."""

    @property
    def result(self) -> Embeddings:
        """The event as `uma.types` has it. Raises `ValueError` for what is no base64 of 32-bit floats."""
        return Embeddings(self.id, tuple(map(_vector, self.embeddings)), self.prompt_tokens, self.warnings)


def _each_once(convert: Callable[[S], T], pieces: Sequence[S]) -> tuple[T, ...]:
    """`convert` of each piece, called once for equal ones: of 100,000 tokens few are different."""
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
    """`cancelled`: at the client's wish, without a result."""


@attrs.frozen
class DecideEvent(Decisions):
    """The answer to `DecideQuery`."""

    warnings: tuple[str, ...] = ()
    metadata: dict[str, Any] | None = None
    reason: Literal["stop", "cancelled"] = "stop"
    """`cancelled`: at the client's wish, without a result."""


@attrs.frozen
class UnknownEvent:
    """An event of a name that this side does not know: a newer server's. To be ignored."""

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
