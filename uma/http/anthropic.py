"""Anthropic's Messages API: `POST /v1/messages`, plain and streamed, and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import attrs
import orjson

from uma.constraints import Length, Range
from uma.http import abilities
from uma.http.dialect import Body, SseJob, sse
from uma.http.exchange import Exchange
from uma.http.fields import Common, read, sampling, urgency
from uma.http.gateway import Gateway
from uma.http.openai import text_of
from uma.http.problem import Problem, Unsupported
from uma.http.usage import warnings
from uma.types import Finished, Message, Request, SamplerSettings, Token

DEFAULTS = SamplerSettings(temperature=1.0)
"""As Anthropic's documents have them."""

_TYPES = {
    "unauthorized": "authentication_error",
    "forbidden": "permission_error",
    "not_found": "not_found_error",
    "model_not_found": "not_found_error",
    "too_large": "request_too_large",
    "rate": "rate_limit_error",
    "overloaded": "rate_limit_error",
    "stopping": "overloaded_error",
    "fault": "api_error",
}


class AnthropicErrors:
    """`{"type": "error", "error": {"type", "message"}, "request_id"}`."""

    def error(self, problem: Problem, request_id: str) -> Body:
        """See `Dialect`."""
        kind = _TYPES.get(problem.kind, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": problem.message}, "request_id": request_id}


ERRORS = AnthropicErrors()


@attrs.frozen(kw_only=True)
class TurnBody:
    """A message; its content is a string or a list of blocks."""

    role: Literal["user", "assistant", "system"]
    content: Any = None


@attrs.frozen(kw_only=True)
class Conversation(Common):
    """What both endpoints take."""

    messages: Annotated[tuple[TurnBody, ...], Length(1, None, "messages")]
    model: str | None = None
    system: Any = None
    tools: Any = None
    tool_choice: Any = None
    thinking: Any = None


@attrs.frozen(kw_only=True)
class MessagesBody(Conversation):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Range(1)]
    stream: bool | None = None
    temperature: Annotated[float, Range(0, 1)] | None = None
    stop_sequences: Annotated[tuple[Annotated[str, Length(1, 1024)], ...], Length(0, 16, "strings")] | None = None


async def messages(gateway: Gateway, http: Exchange) -> None:
    """`POST /v1/messages`."""
    body = read(await http.fields(), MessagesBody, http)
    model = gateway.names.check(body.model)
    turns = _turns(body)
    params = sampling(
        gateway,
        body,
        DEFAULTS,
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        stop=body.stop_sequences or body.stop,
    )
    how = urgency(body, http)
    request = Request(
        http.id, messages=turns, sampling=params, stream=bool(body.stream), priority=how.priority, slo=how.slo
    )
    await gateway.generate(http, MessagesJob([request], bool(body.stream), f"msg_{http.id}", model))


async def count_tokens(gateway: Gateway, http: Exchange) -> None:
    """`POST /v1/messages/count_tokens`: the prompt's tokens, as a request with it would use them."""
    body = read(await http.fields(), Conversation, http)
    gateway.names.check(body.model)
    found = await gateway.source.tokenize(Request(http.id, messages=_turns(body)))
    await http.answer_json({"input_tokens": len(found.token_ids)})


def _turns(body: Conversation) -> tuple[Message, ...]:
    abilities.tools(body.tools)
    abilities.tools(body.tool_choice, "tool_choice")
    abilities.thinking(body.thinking, "thinking")
    if body.messages[-1].role == "assistant":
        last = f"messages[{len(body.messages) - 1}]"
        raise Unsupported(f"{last}: this server cannot continue an assistant's message; end with a user's")
    system = text_of(body.system, "system")
    turns = [
        Message(each.role, _content(each.content, f"messages[{n}].content")) for n, each in enumerate(body.messages)
    ]
    return (*([Message("system", system)] if system else []), *turns)


def _content(content: Any, path: str) -> str:
    if isinstance(content, list):
        for index, block in enumerate(content):
            kind = block.get("type") if isinstance(block, dict) else None
            if kind in ("tool_use", "tool_result"):
                abilities.tools(kind, f"{path}[{index}]")
    return text_of(content, path)


@attrs.define
class MessagesJob(SseJob):
    """One message."""

    id: str
    model: str

    def begin(self) -> bytes:
        """See `Job`. How many tokens the prompt has is told at the end, with the rest of the usage."""
        message: dict[str, Any] = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        start = {"type": "message_start", "message": message}
        return sse(start, "message_start") + sse(block, "content_block_start")

    def token(self, index: int, token: Token) -> bytes:
        """See `Job`."""
        return _OPENING + orjson.dumps(token.text) + b"}}\n\n" if token.text else b""

    def finished(self, index: int, finished: Finished) -> bytes:
        """See `Job`."""
        delta = {"stop_reason": _stop_reason(finished), "stop_sequence": finished.stop_string}
        stop = {"type": "content_block_stop", "index": 0}
        last = {"type": "message_delta", "delta": delta, "usage": _usage(finished), **warnings([finished])}
        end = {"type": "message_stop"}
        return sse(stop, "content_block_stop") + sse(last, "message_delta") + sse(end, "message_stop")

    def end(self, results: Sequence[Finished]) -> bytes:
        """See `Job`."""
        return b""

    def failed(self, problem: Problem) -> bytes:
        """See `Job`."""
        return sse(ERRORS.error(problem, self.id), "error")

    def heartbeat(self, progress: str) -> bytes:
        """See `Job`. Anthropic's own streams have events for that."""
        return b": " + progress.encode() + b"\n" + sse({"type": "ping"}, "ping")

    def whole(self, results: Sequence[Finished]) -> Body:
        """See `Job`."""
        result = results[0]
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [{"type": "text", "text": result.text or ""}],
            "stop_reason": _stop_reason(result),
            "stop_sequence": result.stop_string,
            "usage": _usage(result),
            **warnings(results),
        }


_OPENING = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":'
)


def _stop_reason(result: Finished) -> str:
    if result.stop_string is not None:
        return "stop_sequence"
    return "max_tokens" if result.reason == "length" else "end_turn"


def _usage(result: Finished) -> dict[str, Any]:
    """Anthropic counts tokens that came from the cache apart from the others."""
    usage = result.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
