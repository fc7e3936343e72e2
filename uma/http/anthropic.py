"""Anthropic's Messages API: `POST /v1/messages`, plain and streamed, and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
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
from uma.http.content import text_of
from uma.http.dialect import BaseJob, Body, comment, sse
from uma.http.exchange import Exchange
from uma.http.fields import (
    DRAWN,
    MAX_MESSAGES,
    Common,
    allowed_tokens,
    first,
    named_first,
    of_output,
    read,
    read_generating,
    sampling,
    urgency,
)
from uma.http.gateway import Gateway
from uma.http.generation import small_work
from uma.http.ignored import Ignored
from uma.http.problem import Problem
from uma.http.structured_outputs import StructuredFields, grammar_of
from uma.http.thinking import max_reasoning_tokens, thinking
from uma.http.tools import Effort
from uma.http.usage import answer_parts, warnings
from uma.types import Finished, Grammar, Message, ReasoningDelta, Request, Token, ToolCallDelta

_TYPES = {
    "unauthorized": "authentication_error",
    "forbidden": "permission_error",
    "not_found": "not_found_error",
    "model_not_found": "not_found_error",
    "too_large": "request_too_large",
    "rate": "rate_limit_error",
    "overloaded": "rate_limit_error",
    "busy": "overloaded_error",
    "loading": "overloaded_error",
    "stopping": "overloaded_error",
    "fault": "api_error",
}


OVERFLOW = "prompt is too long: "
"""Programs know an overflow by Anthropic's words for it, and shorten the conversation by the numbers behind them."""
_NUMBERS = re.compile(r"([\d,]+) tokens.* context of ([\d,]+) tokens")
"""The prompt's tokens and the context's, in the engine's words."""


class AnthropicErrors:
    """`{"type": "error", "error": {"type", "message"}, "request_id"}`."""

    def error(self, problem: Problem, request_id: str) -> Body:
        """See `Dialect`."""
        kind = _TYPES.get(problem.kind, "invalid_request_error")
        message = _too_long(problem.message) if problem.kind == "context_length" else problem.message
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def _too_long(message: str) -> str:
    """`prompt is too long: N tokens > M maximum`, and what the engine says. An answer has at least one token."""
    if (found := _NUMBERS.search(message)) is None:
        return OVERFLOW + message
    tokens, context = (int(each.replace(",", "")) for each in found.groups())
    return f"{OVERFLOW}{tokens} tokens > {context - 1} maximum; {message}"


ERRORS = AnthropicErrors()


@attrs.frozen(kw_only=True)
class OutputBody:
    """`output_config`."""

    effort: Effort | None = None
    format: Any = None


@attrs.frozen(kw_only=True)
class Conversation(Common):
    """What both endpoints take."""

    messages: Annotated[tuple[TurnBody, ...], Length(1, MAX_MESSAGES, "messages")]
    model: str | None = None
    system: Any = None
    tools: ToolBodies | None = None
    tool_choice: ChoiceBody | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputBody | None = None


@attrs.frozen(kw_only=True)
class MessagesBody(Conversation, StructuredFields):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Range(1)]
    stream: bool | None = None
    temperature: Annotated[float, Range(0, 1)] | None = None
    output_format: Any = None
    stop_sequences: Annotated[tuple[Annotated[str, Length(1, 1024)], ...], Length(0, 16, "strings")] | None = None


async def messages(gateway: Gateway, http: Exchange) -> None:
    """`POST /v1/messages`."""
    await gateway.generate(http, await http.built(partial(_job, gateway, http)))


def _job(gateway: Gateway, http: Exchange, fields: dict[str, Any]) -> MessagesJob:
    body = read_generating(fields, MessagesBody, http)
    model = gateway.names.check(body.model, http)
    prompt = _prompt(gateway, body, http)
    params = sampling(
        gateway,
        body,
        DRAWN,
        **of_output(gateway, body),
        max_tokens=allowed_tokens(gateway, body.max_tokens, "max_tokens"),
        temperature=body.temperature,
        max_reasoning_tokens=max_reasoning_tokens(
            thinking_wish(body.thinking, None), body.max_reasoning_tokens, gateway.source.info.capabilities
        ),
        stop=first(http, ("stop_sequences", body.stop_sequences or None), ("stop", body.stop or None)),
        grammar=grammar_of(
            body,
            gateway.source.info.capabilities,
            http,
            _grammar(body, gateway, http),
            prompt.get("tool_choice", "auto"),
        ),
    )
    how = urgency(body, http)
    request = Request(http.id, sampling=params, stream=bool(body.stream), **how, **prompt)
    return MessagesJob([request], bool(body.stream), f"msg_{http.id}", model)


def _grammar(body: MessagesBody, gateway: Gateway, http: Exchange) -> tuple[str, Grammar | None]:
    """`output_config.format`, `output_format` in the beta: `{"type": "json_schema", "schema": …}`; with its name."""
    config = body.output_config or OutputBody()
    field, form = named_first(http, ("output_config.format", config.format), ("output_format", body.output_format))
    if form is None:
        return field, None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise BadRequest(f"{field}: expected an object of type json_schema, not {show(form)}")
    place = f"{field}.schema"
    if form.get("schema") is None:
        raise BadRequest(f"{place}: is required (an object)")
    return field, abilities.json_schema(form["schema"], place, gateway.source.info.capabilities, http.names, field)


async def count_tokens(gateway: Gateway, http: Exchange) -> None:
    """`POST /v1/messages/count_tokens`: the prompt's tokens, as a request with it would use them."""

    def request(fields: dict[str, Any]) -> Request:
        body = read(fields, Conversation, http)
        gateway.names.check(body.model, http)
        return Request(http.id, **_prompt(gateway, body, http))

    found = await small_work(http, partial(gateway.source.tokenize, await http.built(request)))
    await http.answer_json({"input_tokens": len(found.token_ids)})


def _prompt(gateway: Gateway, body: Conversation, http: Exchange) -> dict[str, Any]:
    """The fields of a `Request` that its prompt is made from."""
    able = gateway.source.info.capabilities
    effort = None if body.output_config is None else body.output_config.effort
    system = text_of(_without_billing(body.system, http.ignored), "system", http.ignored)
    turns = turns_of(body.messages, able, http, is_behind_system=bool(system))
    return {
        "messages": (*([Message("system", system)] if system else []), *turns),
        **thinking(thinking_wish(body.thinking, effort), able, http.ignored),
        **offered(body.tools or (), body.tool_choice, able, http),
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
class MessagesJob(BaseJob):
    """One message."""

    id: str
    model: str
    prompt_tokens: int | None = attrs.field(default=None, init=False)
    """See `CountingJob`."""
    _block: int = attrs.field(default=-1, init=False)
    """The number of the content block that is open, or was last."""
    _open: str = attrs.field(default="", init=False)
    """What the open block has: the type of its deltas, and for a call its id; empty where none is open."""
    _opening: bytes = attrs.field(default=b"", init=False)
    """A delta of the open block up to its text."""

    def begin(self) -> bytes:
        """See `Job`. The number of cached tokens comes at the end."""
        message: dict[str, Any] = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": self.prompt_tokens, "output_tokens": 0},
        }
        return sse({"type": "message_start", "message": message}, "message_start")

    def token(self, index: int, token: Token) -> bytes:
        """See `Job`."""
        if not token.text:
            return b""
        return self._entered("text", "text", _TEXT) + self._opening + orjson.dumps(token.text) + b"}}\n\n"

    def part(self, index: int, part: ReasoningDelta | ToolCallDelta) -> bytes:
        """See `Job`. Thinking and each call have a block of their own."""
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
        kind = {"text": "text_delta", "thinking": "thinking_delta", "partial_json": "input_json_delta"}[key]
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
        """See `Job`."""
        delta = {"stop_reason": _stop_reason(finished), "stop_sequence": finished.stop_string}
        opened = b"" if self._open else self._entered("text", "text", _TEXT)
        last = {"type": "message_delta", "delta": delta, "usage": _usage(finished), **warnings([finished])}
        end = {"type": "message_stop"}
        return opened + self._left() + sse(last, "message_delta") + sse(end, "message_stop")

    def failed(self, problem: Problem) -> bytes:
        """See `Job`."""
        return sse(ERRORS.error(problem, self.requests[0].id), "error")

    def heartbeat(self, progress: str) -> bytes:
        """See `Job`. Anthropic's own streams have events for that, behind the one that opens the message."""
        if self.prompt_tokens is None:
            return comment(progress)
        return b": " + progress.encode() + b"\n" + sse({"type": "ping"}, "ping")

    def whole(self, results: Sequence[Finished]) -> Body:
        """See `Job`."""
        result = results[0]
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": _content(result),
            "stop_reason": _stop_reason(result),
            "stop_sequence": result.stop_string,
            "usage": _usage(result),
            **warnings(results),
        }


_TEXT: dict[str, Any] = {"type": "text", "text": ""}


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


def _usage(result: Finished) -> dict[str, Any]:
    """Anthropic counts tokens that came from the cache apart from the others."""
    usage = result.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }
