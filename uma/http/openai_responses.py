"""OpenAI's Responses API, stateless: `POST /v1/responses`, plain and with its events in their documented order."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import attrs

from uma.constraints import Range, show
from uma.errors import BadRequest
from uma.http import abilities
from uma.http.dialect import Body, SseJob, sse
from uma.http.exchange import Exchange
from uma.http.fields import Common, read, sampling, urgency
from uma.http.gateway import Gateway
from uma.http.openai import DEFAULTS, ERRORS, text_of
from uma.http.problem import Problem, Unsupported
from uma.http.usage import timings, warnings
from uma.protocol.converter import structure
from uma.types import Finished, Message, Request, Temperature, Token


@attrs.frozen(kw_only=True)
class TextFormat:
    """`text`."""

    format: Any = None
    verbosity: Any = None


@attrs.frozen(kw_only=True)
class ResponsesBody(Common):
    """The fields that do something; the rest is named in `X-UMA-Ignored`."""

    input: Any
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int, Range(1)] | None = None
    temperature: Temperature | None = None
    text: TextFormat | None = None
    tools: Any = None
    tool_choice: Any = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    metadata: dict[str, Any] | None = None


@attrs.frozen(kw_only=True)
class _Item:
    role: str
    content: Any = None
    type: str = "message"


async def responses(gateway: Gateway, http: Exchange) -> None:
    """`POST /v1/responses`."""
    body = read(await http.fields(), ResponsesBody, http)
    model = gateway.names.check(body.model)
    _refuse(body)
    form = None if body.text is None else body.text.format
    params = sampling(
        gateway,
        body,
        DEFAULTS,
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        grammar=abilities.response_format(form, "text.format", gateway.source.info.capabilities),
    )
    how = urgency(body, http)
    request = Request(
        http.id, messages=_messages(body), sampling=params, stream=bool(body.stream), priority=how.priority, slo=how.slo
    )
    await gateway.generate(http, ResponsesJob([request], bool(body.stream), f"resp_{http.id}", model, body))


def _refuse(body: ResponsesBody) -> None:
    abilities.tools(body.tools)
    abilities.tools(body.tool_choice, "tool_choice")
    for name in ("previous_response_id", "conversation", "background"):
        if getattr(body, name):
            raise Unsupported(f"{name}: responses are not stored here; send the whole conversation as input")


def _messages(body: ResponsesBody) -> tuple[Message, ...]:
    system = [Message("system", body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return (*system, Message("user", body.input))
    if not isinstance(body.input, list) or not body.input:
        raise BadRequest(f"input: expected a string or a list of messages, not {show(body.input)}")
    return (*system, *(_message(item, f"input[{index}]") for index, item in enumerate(body.input)))


def _message(item: Any, path: str) -> Message:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind in ("function_call", "function_call_output"):
        abilities.tools(kind, path)
    if kind != "message":
        raise BadRequest(f"{path}: expected a message, not {show(item)}")
    try:
        found = structure(item, _Item)
    except BadRequest as error:
        raise BadRequest(f"{path}.{error.message}") from None
    role = "system" if found.role == "developer" else found.role
    return Message(role, text_of(found.content, f"{path}.content"))


@attrs.define
class ResponsesJob(SseJob):
    """One response with one message in it."""

    id: str
    model: str
    body: ResponsesBody
    created: int = attrs.field(factory=lambda: int(time.time()), init=False)
    _number: int = attrs.field(default=-1, init=False)
    _texts: list[str] = attrs.field(factory=list, init=False)

    @property
    def _item_id(self) -> str:
        return f"msg_{self.requests[0].id}"

    def begin(self) -> bytes:
        """See `Job`."""
        response = self._response("in_progress", [], None)
        item = self._item("in_progress", None)
        return b"".join(
            [
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
                self._event("response.output_item.added", output_index=0, item=item),
                self._part_event("response.content_part.added", part=_part("")),
            ]
        )

    def token(self, index: int, token: Token) -> bytes:
        """See `Job`."""
        if not token.text:
            return b""
        self._texts.append(token.text)
        return self._part_event("response.output_text.delta", delta=token.text, logprobs=[])

    def finished(self, index: int, finished: Finished) -> bytes:
        """See `Job`."""
        text = "".join(self._texts)
        item = self._item(_status(finished), text)
        kind = "response.completed" if _status(finished) == "completed" else "response.incomplete"
        return b"".join(
            [
                self._part_event("response.output_text.done", text=text, logprobs=[]),
                self._part_event("response.content_part.done", part=_part(text)),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(kind, response=self._response(_status(finished), [item], finished)),
            ]
        )

    def end(self, results: Sequence[Finished]) -> bytes:
        """See `Job`."""
        return b""

    def failed(self, problem: Problem) -> bytes:
        """See `Job`."""
        body = ERRORS.error(problem, self.id)["error"]
        return self._event("error", code=body["code"], message=body["message"], param=body["param"])

    def whole(self, results: Sequence[Finished]) -> Body:
        """See `Job`."""
        result = results[0]
        status = _status(result)
        return {
            **self._response(status, [self._item(status, result.text or "")], result),
            "timings": timings(result),
            **warnings(results),
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return sse({"type": kind, "sequence_number": self._number, **fields}, kind)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **fields)

    def _item(self, status: str, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [_part(text)]
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _response(self, status: str, output: list[Mapping[str, Any]], result: Finished | None) -> dict[str, Any]:
        body = self.body
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        form = None if body.text is None else body.text.format
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": DEFAULTS.temperature if body.temperature is None else body.temperature,
            "text": {"format": form or {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if result is None else _usage(result),
            "metadata": body.metadata or {},
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(result: Finished) -> str:
    return "incomplete" if result.reason == "length" else "completed"


def _usage(result: Finished) -> dict[str, Any]:
    usage = result.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
