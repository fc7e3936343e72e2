"""Anthropic's Messages API: `POST /v1/messages`, plain and streamed, and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import attrs
import orjson

from uma.constraints import Length, Range, show
from uma.errors import BadRequest
from uma.http import abilities
from uma.http.anthropic_turns import (
    ChoiceBody,
    ThinkingBody,
    ToolBodies,
    TurnBody,
    offered,
    thinking_wish,
    tool_use,
    turns_of,
)
from uma.http.ask import ChatAsk, Generates, Tokenizes
from uma.http.content import text_of
from uma.http.context_edits import ContextManagement, edits_of
from uma.http.dialect import Body, Dialect, Writer, comment, sse
from uma.http.fields import MAX_MESSAGES, Common
from uma.http.ignored import Ignored
from uma.http.problem import Problem
from uma.http.reader import Reader
from uma.http.structured_outputs import StructuredFields, grammar_of
from uma.http.tools import Effort
from uma.http.usage import answer_parts, of_truncation
from uma.types import Finished, Grammar, Message, ReasoningDelta, Token, ToolCallDelta

_TYPES = {
    "unauthorized": "authentication_error",
    "forbidden": "permission_error",
    "not_found": "not_found_error",
    "model_not_found": "not_found_error",
    "too_large": "request_too_large",
    "rate": "rate_limit_error",
    "overloaded": "rate_limit_error",
    "busy": "overloaded_error",
    "crowded": "overloaded_error",
    "loading": "overloaded_error",
    "stopping": "overloaded_error",
    "fault": "api_error",
}


OVERFLOW = "prompt is too long: "
"""Programs know an overflow by Anthropic's words for it, and shorten the conversation by the numbers behind them."""


def _error(problem: Problem, request_id: str) -> Body:
    """`{"type": "error", "error": {"type", "message"}, "request_id"}`."""
    kind = _TYPES.get(problem.kind, "invalid_request_error")
    message = _too_long(problem) if problem.kind == "context_length" else problem.message
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def _too_long(problem: Problem) -> str:
    """`prompt is too long: N tokens > M maximum`, and what the engine says. An answer has at least one token."""
    if problem.prompt_tokens is None or problem.n_ctx is None:
        return OVERFLOW + problem.message
    return f"{OVERFLOW}{problem.prompt_tokens} tokens > {problem.n_ctx - 1} maximum; {problem.message}"


ANTHROPIC = Dialect(_error, event=lambda body: sse(body, "error"))


@attrs.frozen(kw_only=True)
class OutputBody:
    """A request's `output_config`: how hard to think, and the form of the answer."""

    effort: Effort | None = None
    format: Any = None


@attrs.frozen(kw_only=True)
class AnthropicConversation(Common):
    """Fields that `/v1/messages` and `/v1/messages/count_tokens` share: the conversation, and its tools."""

    messages: Annotated[tuple[TurnBody, ...], Length(1, MAX_MESSAGES, "messages")]
    model: str | None = None
    system: Any = None
    tools: ToolBodies | None = None
    tool_choice: ChoiceBody | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputBody | None = None
    context_management: ContextManagement | None = None


@attrs.frozen(kw_only=True)
class MessagesBody(AnthropicConversation, StructuredFields):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Range(1)]
    stream: bool | None = None
    temperature: Annotated[float, Range(0, 1)] | None = None
    output_format: Any = None
    stop_sequences: Annotated[tuple[Annotated[str, Length(1, 1024)], ...], Length(0, 16, "strings")] | None = None


def _read(fields: Mapping[str, Any], reader: Reader) -> ChatAsk:
    body = reader.generating(fields, MessagesBody)
    conversation = _conversation(body, reader)
    return ChatAsk(
        writer=MessageWriter,
        stream=body.stream,
        max_tokens=body.max_tokens,
        grammar=grammar_of(body, reader, _grammar(body, reader), conversation["tool_choice"]),
        sampling={
            "temperature": body.temperature,
            "stop": reader.first(("stop_sequences", body.stop_sequences or None), ("stop", body.stop or None)),
        },
        **conversation,
    )


def _grammar(body: MessagesBody, reader: Reader) -> tuple[str, Grammar | None]:
    """`output_config.format`, `output_format` in the beta: `{"type": "json_schema", "schema": …}`; with its name."""
    config = body.output_config or OutputBody()
    field, form = reader.named_first(("output_config.format", config.format), ("output_format", body.output_format))
    if form is None:
        return field, None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise BadRequest.at(field, f"expected an object of type json_schema, not {show(form)}")
    place = f"{field}.schema"
    if form.get("schema") is None:
        raise BadRequest.at(place, "is required (an object)")
    return field, abilities.json_schema(form["schema"], place, reader, field)


def _read_conversation(fields: Mapping[str, Any], reader: Reader) -> ChatAsk:
    return ChatAsk(writer=MessageWriter, **_conversation(reader.body(fields, AnthropicConversation), reader))


def _conversation(body: AnthropicConversation, reader: Reader) -> dict[str, Any]:
    """The fields of a `ChatAsk` that its prompt is made from."""
    effort = None if body.output_config is None else body.output_config.effort
    system = text_of(_without_billing(body.system, reader.ignored), "system", reader)
    return {
        "body": body,
        "messages": [*([Message("system", system)] if system else []), *turns_of(body.messages, reader)],
        "wish": thinking_wish(body.thinking, effort),
        "edits": edits_of(body.context_management, reader),
        **offered(body.tools or (), body.tool_choice, reader),
    }


BILLING = "x-anthropic-billing-header"
"""Beginning of a block of `system` by which Claude Code tells Anthropic what to charge. It changes with each session,
and nothing behind it could come from the cache; to a model it says nothing."""


def _without_billing(system: Any, ignored: Ignored) -> Any:
    """`system` without such blocks, which are added to `ignored`."""
    if not isinstance(system, list):
        return system
    kept = [part for part in system if not _is_billing(part)]
    ignored.add_all(f"system[{index}]" for index, part in enumerate(system) if _is_billing(part))
    return kept


def _is_billing(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(text := part.get("text"), str) and text.startswith(BILLING)


@attrs.define
class MessageWriter(Writer):
    """Writes an answer as Anthropic's message: whole, or as a stream of content blocks."""

    _block: int = attrs.field(default=-1, init=False)
    """The number of the content block that is open, or was last."""
    _open: str = attrs.field(default="", init=False)
    """What the open block has: the type of its deltas, and for a call its id; empty where none is open."""
    _opening: bytes = attrs.field(default=b"", init=False)
    """A delta of the open block up to its text."""

    @property
    def counts_first(self) -> bool:
        return True

    def begin(self) -> bytes:
        assert self.prompt_state is not None  # it `counts_first`
        message: dict[str, Any] = {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _input(self.prompt_state.total, self.prompt_state.cached) | {"output_tokens": 0},
        }
        return sse({"type": "message_start", "message": message}, "message_start")

    def token(self, index: int, token: Token) -> bytes:
        if not token.text:
            return b""
        return self._entered("text", "text", _TEXT) + self._opening + orjson.dumps(token.text) + b"}}\n\n"

    def part(self, index: int, part: ReasoningDelta | ToolCallDelta) -> bytes:
        """Thinking and each call have a block of their own."""
        if isinstance(part, ReasoningDelta):
            entered = self._entered("thinking", "thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return entered + self._opening + orjson.dumps(part.text) + b"}}\n\n"
        block = {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}
        entered = self._entered(part.call_id, "partial_json", block)
        return entered + self._opening + orjson.dumps(part.arguments) + b"}}\n\n" if part.arguments else entered

    def _entered(self, what: str, key: str, block: dict[str, Any]) -> bytes:
        """Leave the block that is open, and open this one, unless it is open already."""
        if what == self._open:
            return b""
        left, self._open, self._block = self._left(), what, self._block + 1
        kind = _DELTAS[key]
        self._opening = (
            f'event: content_block_delta\ndata: {{"type":"content_block_delta","index":{self._block},'
            f'"delta":{{"type":"{kind}","{key}":'
        ).encode()
        start = {"type": "content_block_start", "index": self._block, "content_block": block}
        return left + sse(start, "content_block_start")

    def _left(self) -> bytes:
        if not self._open:
            return b""
        return sse({"type": "content_block_stop", "index": self._block}, "content_block_stop")

    def finished(self, index: int, finished: Finished) -> bytes:
        delta = {"stop_reason": _stop_reason(finished), "stop_sequence": finished.stop_string}
        opened = b"" if self._open else self._entered("text", "text", _TEXT)
        last = {"type": "message_delta", "delta": delta, "usage": _usage(finished), **self._notes([finished])}
        end = {"type": "message_stop"}
        return opened + self._left() + sse(last, "message_delta") + sse(end, "message_stop")

    def heartbeat(self, progress: str) -> bytes:
        """Anthropic's own streams have events for that, behind the one that opens the message."""
        if self.prompt_state is None:
            return comment(progress)
        return b": " + progress.encode() + b"\n" + sse({"type": "ping"}, "ping")

    def whole(self, results: Sequence[Finished]) -> Body:
        result = results[0]
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": _content(result),
            "stop_reason": _stop_reason(result),
            "stop_sequence": result.stop_string,
            "usage": _usage(result),
            **self._notes(results),
        }

    def _notes(self, results: Sequence[Finished]) -> dict[str, Any]:
        """What an answer tells besides, whole or at a stream's end."""
        edits = {} if self.edits is None else {"context_management": {"applied_edits": self.edits}}
        return {**edits, **self.warnings(results)}


_TEXT: dict[str, Any] = {"type": "text", "text": ""}
_DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "partial_json": "input_json_delta"}
"""Types of a stream's deltas, by the member that has their text."""


def _content(result: Finished) -> list[dict[str, Any]]:
    """The blocks of a whole answer: one of text where there is nothing else, as in a stream."""
    blocks: list[dict[str, Any]] = []
    if result.reasoning:
        blocks.append({"type": "thinking", "thinking": result.reasoning, "signature": ""})
    blocks += [{**_TEXT, "text": said} if isinstance(said, str) else tool_use(said) for said in answer_parts(result)]
    return blocks or [_TEXT]


def _stop_reason(result: Finished) -> str:
    if result.stop_string is not None:
        return "stop_sequence"
    if result.reason == "length":
        return "max_tokens"
    return "tool_use" if result.tool_calls else "end_turn"


def _input(tokens: int, cached: int) -> dict[str, Any]:
    """Anthropic counts tokens that came from the cache apart from the others."""
    return {
        "input_tokens": tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


def _usage(result: Finished) -> dict[str, Any]:
    usage = result.usage
    return _input(usage.prompt_tokens, usage.cached_tokens) | {
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        **of_truncation([result]),
    }


messages = Generates(ANTHROPIC, _read)
count_tokens = Tokenizes(_read_conversation, lambda found: {"input_tokens": len(found.token_ids)})
"""The prompt's tokens, as a message with it would use them."""
