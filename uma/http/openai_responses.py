"""OpenAI's Responses API, stateless: `POST /v1/responses`, plain and with its events in their documented order."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import attrs

from uma.constraints import Length, Range, Text
from uma.http import abilities, stored_responses
from uma.http.ask import Ask, ChatAsk, Generates, Said, Tokenizes
from uma.http.dialect import Body, Dialect, Writer, sse
from uma.http.exchange import Exchange
from uma.http.fields import Common
from uma.http.gateway import Gateway
from uma.http.ignored import Ignored
from uma.http.logprobs import PendingLogprobs, entries, spelling
from uma.http.openai import error, input_tokens
from uma.http.openai_input import INPUT, messages_of
from uma.http.openai_items import PREFIXES, ItemKind, OutputItem
from uma.http.openai_tools import Offered, offered
from uma.http.problem import Problem, Unsupported
from uma.http.reader import Reader
from uma.http.structured_outputs import StructuredFields, grammar_of
from uma.http.telemetry import TelemetryFields
from uma.http.thinking import ReasoningBody, Wish
from uma.http.tools import openai_choice
from uma.http.usage import answer_parts, finish_reason, of_truncation, timings
from uma.protocol.converter import field_name
from uma.types import (
    MAX_TOOLS,
    Capabilities,
    CutCall,
    Finished,
    ReasoningDelta,
    Temperature,
    Token,
    ToolCall,
    ToolCallDelta,
)


@attrs.frozen(kw_only=True)
class TextFormat:
    """Form of the answer: the field `text`."""

    format: Any = None
    verbosity: Any = None


LOGPROBS = "message.output_text.logprobs"
"""What `include` asks log probabilities by."""


@attrs.frozen(kw_only=True)
class ResponsesBody(Common, StructuredFields, TelemetryFields):
    """The fields that do something; the rest is named in `X-UMA-Ignored`."""

    input: Annotated[Any, INPUT]
    model: str | None = None
    instructions: Annotated[str, Text()] | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int, Range(1)] | None = None
    temperature: Temperature | None = None
    text: TextFormat | None = None
    tools: Annotated[tuple[Any, ...], Length(0, MAX_TOOLS, "tools")] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningBody | None = None
    top_logprobs: abilities.TopLogprobs = None
    include: Annotated[tuple[str, ...], Length(0, 64, "words")] | None = None
    previous_response_id: str | None = None
    prompt: Any = None
    conversation: Any = None
    background: bool | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None


def _read(fields: Mapping[str, Any], reader: Reader, stored: int = 0) -> ChatAsk:
    body = reader.generating(fields, ResponsesBody)
    _refuse(body)
    _note_ignored(body, reader.ignored)
    tools = offered(body.tools or (), reader)
    places, choice = openai_choice(body.tool_choice, tools.tools)
    tools.name_schemas(reader.names, places)
    asked, form = body.reasoning or ReasoningBody(), None if body.text is None else body.text.format
    wanted = abilities.response_format(form, "text.format", reader, is_flat=True)
    return ChatAsk(
        body=body,
        writer=partial(ResponsesWriter, body=body, tools=tools),
        messages=messages_of(body.input, body.instructions, reader, stored),
        tools=[tools.tools[at] for at in places],
        tool_choice=choice,
        is_parallel=body.parallel_tool_calls,
        wish=Wish(
            wanted=asked.wanted,
            field="reasoning",
            effort=asked.effort,
            effort_field="reasoning.effort",
            budget=asked.max_tokens,
            budget_field="reasoning.max_tokens",
        ),
        stream=body.stream,
        max_tokens=body.max_output_tokens,
        tokens_field="max_output_tokens",
        logprobs=_logprobs(body, reader.able),
        grammar=grammar_of(body, reader, ("text.format", wanted), choice),
        sampling={"temperature": body.temperature},
    )


def _refuse(body: ResponsesBody) -> None:
    if body.prompt is not None:
        raise Unsupported.at("prompt", "no prompts are stored here; send it as instructions and input")
    if body.conversation:
        raise Unsupported.at("conversation", "none are stored here; send previous_response_id, or all of it as input")
    if body.background:
        raise Unsupported.at("background", "unsupported; ask for a stream, or send a batch to /v1/batches")


def _note_ignored(body: ResponsesBody, ignored: Ignored) -> None:
    if body.text is not None and body.text.verbosity is not None:
        ignored.add("text.verbosity")
    if body.reasoning is not None:
        body.reasoning.note_ignored(ignored)
    ignored.add_all(f"include.{_word(each)}" for each in body.include or () if each != LOGPROBS)


def _word(given: str) -> str:
    return ".".join(map(field_name, given.split(".")))


def _logprobs(body: ResponsesBody, able: Capabilities) -> int | None:
    """How many likeliest tokens to tell with each: `include` asks for log probabilities, and so does a number."""
    top = abilities.logprobs(body.top_logprobs, "top_logprobs", able)
    return abilities.logprobs(0, "include", able) if top is None and LOGPROBS in (body.include or ()) else top


@attrs.define
class ResponsesWriter(Writer):
    """One response: thinking, a message and calls, each an item of its own."""

    body: ResponsesBody
    tools: Offered
    created: int = attrs.field(factory=lambda: int(time.time()), init=False)
    _number: int = attrs.field(default=-1, init=False)
    _items: list[OutputItem] = attrs.field(factory=list, init=False)
    """The items so far; the last one is open while text comes for it."""
    _is_open: bool = attrs.field(default=False, init=False)
    _pending: PendingLogprobs = attrs.field(factory=PendingLogprobs, init=False)

    def begin(self) -> bytes:
        response = self._response("in_progress", [], None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def token(self, index: int, token: Token) -> bytes:
        positions, more = self._pending.take(token), self.timed(index)
        return self._grown("message", token.text, logprobs=entries(positions), fields=more) if token.text else b""

    def progress(self, index: int, fields: Mapping[str, Any]) -> bytes:
        return self._event("response.in_progress", response=self._response("in_progress", [], None), **fields)

    def part(self, index: int, part: ReasoningDelta | ToolCallDelta) -> bytes:
        self._pending.aside()
        if isinstance(part, ReasoningDelta):
            return self._grown("reasoning", part.text)
        return self._grown(self._kind(part.name), part.arguments, ToolCall(part.call_id, part.name, ""))

    def finished(self, index: int, finished: Finished) -> bytes:
        empty = b"" if self._is_open else self._grown("message", "")
        closed = self._close(_status(finished))
        kind = "response.completed" if _status(finished) == "completed" else "response.incomplete"
        self.answer = response = self._whole(finished)
        times = {} if self.telemetry is None else {"timings": timings(finished)}
        return empty + closed + self._event(kind, response=response, **times)

    def failed(self, problem: Problem) -> bytes:
        body = self.dialect.error(problem, self.id)["error"]
        return self._event("error", code=body["code"], message=body["message"], param=body["param"])

    def whole(self, results: Sequence[Finished]) -> Body:
        result = results[0]
        if result.reasoning:
            self._add("reasoning").text = result.reasoning
        before = result.reasoning or ""
        for said in answer_parts(result):
            if isinstance(said, str):
                item = self._add("message")
                item.text, item.logprobs = said, entries(spelling(result.logprobs or (), said, before))
                before = said
            else:
                self._add(self._kind(said.name), said).text = said.arguments
        if not self._items:
            self._add("message")
        return self._whole(result)

    def _whole(self, result: Finished) -> Body:
        return {**self._response(_status(result), self._output(result), result), **self._notes(result)}

    def _output(self, result: Finished) -> list[dict[str, Any]]:
        """All items at the end: what cuts the answer off cuts the last one."""
        *whole, last = self._items
        return [*(item.body("completed") for item in whole), last.body(_status(result))]

    def _kind(self, name: str) -> ItemKind:
        """What a call of the tool that the model calls so is."""
        return "custom_tool_call" if self.tools.called(name).is_custom else "function_call"

    def _add(self, kind: ItemKind, call: ToolCall | CutCall | None = None) -> OutputItem:
        called = None if call is None else self.tools.called(call.name)
        item = OutputItem(kind, f"{PREFIXES[kind]}_{self.id}_{len(self._items)}", call, called)
        self._items.append(item)
        return item

    def _grown(
        self,
        kind: ItemKind,
        text: str,
        call: ToolCall | None = None,
        logprobs: Sequence[dict[str, Any]] = (),
        fields: Mapping[str, Any] | None = None,
    ) -> bytes:
        """The next piece of an item's text, with further `fields`. Where no such item is open, one is opened first."""
        last = self._items[-1] if self._is_open else None
        opened = b""
        if last is None or last.kind != kind or (call is not None and last.call_id != call.id):
            opened, last = self._close("completed"), self._add(kind, call)
            self._is_open = True
            opened += self._item_event("response.output_item.added", item=last.body("in_progress", is_begun=False))
            if last.part_kind:
                opened += self._part_event("response.content_part.added", part=last.part())
        last.text += text
        last.logprobs += logprobs
        if not text or kind == "custom_tool_call":  # its input is known at its end
            return opened
        more: dict[str, Any] = {"logprobs": logprobs} if kind == "message" else {}
        return opened + self._part_event(f"response.{last.event}.delta", delta=text, **more, **(fields or {}))

    def _close(self, status: str) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        item = self._items[-1]
        more: dict[str, Any] = {"logprobs": item.logprobs} if item.kind == "message" else {}
        name = {"name": item.called.name} if item.kind == "function_call" and item.called else {}
        done = (
            self._part_event(f"response.{item.event}.delta", delta=item.shown_text)
            if item.kind == "custom_tool_call"
            else b""
        )
        done += self._part_event(f"response.{item.event}.done", **{item.text_key: item.shown_text}, **more, **name)
        if item.part_kind:
            done += self._part_event("response.content_part.done", part=item.part())
        return done + self._item_event("response.output_item.done", item=item.body(status))

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return sse({"type": kind, "sequence_number": self._number, **fields}, kind)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, output_index=len(self._items) - 1, **fields)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        item = self._items[-1]
        place = {"content_index": 0} if item.part_kind else {}
        return self._item_event(kind, item_id=item.id, **place, **fields)

    def _response(self, status: str, output: Sequence[Mapping[str, Any]], result: Finished | None) -> dict[str, Any]:
        body, settings = self.body, self.requests[0].sampling.settled
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        form = None if body.text is None else body.text.format
        verbosity = None if body.text is None else body.text.verbosity
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": self.keep is not None,
            "temperature": settings.temperature,
            "text": {"format": form or {"type": "text"}} | ({"verbosity": verbosity} if verbosity else {}),
            "tool_choice": body.tool_choice or "auto",
            "tools": [_tool(each) for each in body.tools or ()],
            "top_logprobs": self.requests[0].sampling.logprobs or 0,
            "top_p": settings.top_p,
            "truncation": "disabled" if self.requests[0].truncation == "off" else "auto",
            "usage": None if result is None else _usage(result),
            "metadata": body.metadata or {},
        }

    def _notes(self, result: Finished) -> dict[str, Any]:
        """What a whole response tells besides OpenAI's fields, streamed or not."""
        return {"timings": timings(result), **self.warnings([result])}


def _tool(body: dict[str, Any]) -> dict[str, Any]:
    """A tool as OpenAI's answers repeat it."""
    is_function = body.get("type", "function") == "function"
    return {**_FUNCTION, **body} if is_function else body


_FUNCTION = {"type": "function", "description": None, "parameters": None, "strict": None}
"""Members that a function always has in an answer."""


def _status(result: Finished) -> str:
    return "completed" if finish_reason(result) != "length" else "incomplete"


def _usage(result: Finished) -> dict[str, Any]:
    usage = result.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        **of_truncation([result]),
    }


def _early_event(body: Body) -> bytes:
    """The event of an error before any other."""
    return sse({**body["error"], "type": "error", "sequence_number": 0}, "error")


RESPONSES = Dialect(error, event=_early_event)


@attrs.frozen(eq=False)
class _Responses(Generates):
    """`POST /v1/responses`. Where responses are stored, one is unless `store` is false."""

    async def __call__(
        self, gateway: Gateway, http: Exchange, keep: Callable[[Body], Awaitable[None]] | None = None
    ) -> None:
        fields = await http.fields()
        given, before = fields.get("input"), await stored_responses.before(gateway, http, fields)
        own: Any = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if before and isinstance(own, list):
            fields["input"], http.is_quick = [*before, *own], False
        if fields.get("store") is not False and stored_responses.days_kept(gateway):
            keep = partial(stored_responses.keep, gateway, http, before, own)
        elif fields.get("store"):
            http.ignored.add("store")
        await Generates(self.dialect, partial(_read, stored=len(before)))(gateway, http, keep)

    def begin(
        self, gateway: Gateway, http: Exchange, reader: Reader, fields: dict[str, Any]
    ) -> tuple[Ask | Said, Writer | None]:
        if fields.get("previous_response_id") is not None:
            return Said({}), None
        return super().begin(gateway, http, reader, fields)


responses = _Responses(RESPONSES, _read)

count_tokens = Tokenizes(_read, input_tokens, is_whole=True)
"""The prompt's tokens, as a response to it would use them."""
