"""The interface of a dialect: the form of its errors, and of one generation's stream and whole answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import orjson

from uma import json_bytes
from uma.http.problem import Problem
from uma.http.telemetry import Telemetry
from uma.types import Finished, Prompt, ReasoningDelta, Request, Token, ToolCallDelta

Body = Mapping[str, Any]

EVENT_STREAM = b"text/event-stream; charset=utf-8"
NDJSON = b"application/x-ndjson"
JSON = b"application/json"


class Job(Protocol):
    """One HTTP request that generates: its `Request`s, and how their events are written.

    The methods return bytes for the stream, empty where there is nothing to say. `index` is that of the request in
    `requests`. They neither wait nor raise, and are called in the order of events.
    """

    requests: Sequence[Request]
    """What the engine is asked; one for each prompt."""

    @property
    def stream(self) -> bool:
        """Whether the answer is a stream."""

    @property
    def media_type(self) -> bytes:
        """The stream's content type."""

    @property
    def telemetry(self) -> Telemetry | None:
        """Members about the stream's speed, where the body asks for them."""

    def begin(self) -> bytes:
        """What a stream opens with."""

    def progress(self, index: int, fields: Mapping[str, Any]) -> bytes:
        """How far a prompt is, with these members; only where there is `telemetry`."""

    def prompt(self, index: int, prompt: Prompt) -> bytes:
        """The prompt, where it was asked for."""

    def token(self, index: int, token: Token) -> bytes:
        """A token."""

    def part(self, index: int, part: ReasoningDelta | ToolCallDelta) -> bytes:
        """A piece of thinking or of a tool call, where the request asked for these."""

    def finished(self, index: int, finished: Finished) -> bytes:
        """The end of one request."""

    def end(self, results: Sequence[Finished]) -> bytes:
        """The end of the stream, after all requests have ended."""

    def failed(self, problem: Problem) -> bytes:
        """An error after the stream has begun. Nothing follows it."""

    def heartbeat(self, progress: str) -> bytes:
        """A sign of life that clients skip."""

    def whole(self, results: Sequence[Finished]) -> Body | list[Body]:
        """The answer of a request without a stream."""


@runtime_checkable
class CountingJob(Protocol):
    """A job whose stream opens with the tokens of its one prompt: nothing is sent before they are known."""

    prompt_tokens: int | None
    """None: not known yet."""


class Dialect(Protocol):
    """The form of a dialect's errors."""

    def error(self, problem: Problem, request_id: str) -> Body:
        """The body of an error."""


def dumps(body: Any) -> bytes:
    """JSON as every answer has it."""
    return json_bytes.dumps(body, orjson.OPT_NON_STR_KEYS)


def sse(body: Any, event: str | None = None) -> bytes:
    """One server-sent event."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + dumps(body) + b"\n\n"


def comment(text: str) -> bytes:
    """A server-sent comment, which clients skip."""
    return b": " + text.encode() + b"\n\n"


@attrs.frozen
class StreamForm:
    """How the stream of an endpoint is told of what comes before its answer."""

    media_type: bytes = EVENT_STREAM
    alive: Callable[[str], bytes] = comment
    """A sign of life that clients skip."""
    failed: Callable[[Body], bytes] = sse
    """An error, given its body."""
    is_asked: Callable[[Mapping[str, Any]], bool] = lambda fields: fields.get("stream") is True
    """Whether a body asks for a stream."""


@attrs.define
class BaseJob:
    """What most jobs have in common. Their streams are server-sent events, unless they say otherwise."""

    requests: Sequence[Request]
    stream: bool
    telemetry: Telemetry | None = attrs.field(default=None, init=False)

    def progress(self, index: int, fields: Mapping[str, Any]) -> bytes:
        """See `Job`. Few dialects have it."""
        return b""

    def timed(self, index: int) -> dict[str, Any]:
        """Further members of a request's next token, where the body asks for them."""
        return {} if self.telemetry is None else self.telemetry.token(index)

    @property
    def media_type(self) -> bytes:
        """See `Job`."""
        return EVENT_STREAM

    def begin(self) -> bytes:
        """See `Job`."""
        return b""

    def prompt(self, index: int, prompt: Prompt) -> bytes:
        """See `Job`. Few dialects repeat a prompt."""
        return b""

    def part(self, index: int, part: ReasoningDelta | ToolCallDelta) -> bytes:
        """See `Job`. Endpoints of plain text ask for neither."""
        return b""

    def end(self, results: Sequence[Finished]) -> bytes:
        """See `Job`."""
        return b""

    def heartbeat(self, progress: str) -> bytes:
        """See `Job`."""
        return comment(progress)
