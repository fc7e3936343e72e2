"""The interface of a dialect: the form of its errors, and of one body's answer, streamed or whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import attrs
import orjson

from uma import json_bytes
from uma.http.problem import Problem
from uma.http.telemetry import PromptState, Telemetry
from uma.http.usage import warnings
from uma.types import Finished, Prompt, ReasoningDelta, Request, Token, ToolCallDelta

Body = Mapping[str, Any]

EVENT_STREAM = b"text/event-stream; charset=utf-8"
NDJSON = b"application/x-ndjson"
JSON = b"application/json"


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
class Dialect:
    """What all answers of an API have in common: errors, and what a stream has beside its events."""

    error: Callable[[Problem, str], Body]
    """Makes the body of an error; the other argument is the request's id."""
    media_type: bytes = EVENT_STREAM
    """Content type of a stream."""
    alive: Callable[[str], bytes] = comment
    """Makes a sign of life that clients skip, of a text about the progress."""
    event: Callable[[Body], bytes] = sse
    """Makes the event of an error's body."""
    is_streamed: Callable[[Mapping[str, Any]], bool] = lambda fields: fields.get("stream") is True
    """Whether a body asks for a stream."""

    def failed(self, problem: Problem, request_id: str) -> bytes:
        """An error after a stream has begun. Nothing follows it."""
        return self.event(self.error(problem, request_id))


@attrs.define
class Writer(ABC):
    """Writes what is generated for one body.

    All methods but `whole` return bytes for the stream, empty where there is nothing to tell. `index` is that of the
    request in `requests`. They neither wait nor raise, and are called in the order of events.
    """

    dialect: Dialect
    id: str
    """Id of the HTTP request."""
    model: str
    """Name of the model as answers have it."""
    requests: Sequence[Request]
    """What the engine is asked for; one for each prompt."""
    telemetry: Telemetry | None
    """Members about the stream's speed, where the body asks for them."""
    is_unbounded: bool
    """Whether the body asks for as many tokens as there may be, so that fewer than some number are no change."""
    keep: Callable[[Body], Awaitable[None]] | None = attrs.field(default=None, init=False)
    """Stores the whole answer, before its end is told."""
    answer: Body = attrs.field(factory=dict, init=False)
    """The whole answer that a stream ends with, where it does with one."""
    notes: list[str] = attrs.field(factory=list, init=False)
    """Further warnings."""
    edits: Sequence[Body] | None = attrs.field(default=None, init=False)
    """How the conversation was edited; None where the body asks for no edits."""
    shown_prompt: str | None = attrs.field(default=None, init=False)
    """The rendered prompt, where the body asks to see it."""
    prompt_state: PromptState | None = attrs.field(default=None, init=False)
    """How far a prompt was when it was last looked at; None: not known yet."""

    @property
    def counts_first(self) -> bool:
        """Whether the stream opens with the tokens of its one prompt, and how many of them come from the cache: nothing
        is sent before a slot has it.
        """
        return False

    @property
    def is_streamed(self) -> bool:
        """Whether the answer is a stream."""
        return self.requests[0].stream

    def warnings(self, results: Sequence[Finished]) -> dict[str, Any]:
        """What had to be changed of the request, each said once; nothing where there is none."""
        return warnings(results, is_unbounded=self.is_unbounded, before=self.notes)

    def timed(self, index: int) -> dict[str, Any]:
        """Further members of a request's next token, where the body asks for them."""
        return {} if self.telemetry is None else self.telemetry.token(index)

    def begin(self) -> bytes:
        """What a stream opens with."""
        return b""

    def progress(self, index: int, fields: Mapping[str, Any]) -> bytes:
        """How far a prompt is, with these members; only where there is `telemetry`."""
        return b""

    def prompt(self, index: int, prompt: Prompt) -> bytes:
        """The prompt, where it was asked for."""
        return b""

    @abstractmethod
    def token(self, index: int, token: Token) -> bytes:
        """A token."""

    def part(self, index: int, part: ReasoningDelta | ToolCallDelta) -> bytes:
        """A piece of thinking or of a tool call, where the request asked for these."""
        return b""

    @abstractmethod
    def finished(self, index: int, finished: Finished) -> bytes:
        """The end of one request."""

    def end(self, results: Sequence[Finished]) -> bytes:
        """The end of the stream, after all requests have ended."""
        return b""

    def failed(self, problem: Problem) -> bytes:
        """An error after the stream has begun. Nothing follows it."""
        return self.dialect.failed(problem, self.id)

    def heartbeat(self, progress: str) -> bytes:
        """A sign of life that clients skip."""
        return self.dialect.alive(progress)

    @abstractmethod
    def whole(self, results: Sequence[Finished]) -> Body | list[Body] | str:
        """The answer of a request without a stream; plain text where it is a string."""
