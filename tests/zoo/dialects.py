"""One question in OpenAI's, Anthropic's and Ollama's words, and their answers, whole or streamed, as one thing."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Literal

import attrs
from conversations import CITY_AND_DAYS, openai, openai_tool
from http_server import Answered

from uma.types import Message, Tool

DialectName = Literal["openai", "anthropic", "ollama", "responses"]
PATHS: dict[DialectName, str] = {
    "openai": "/v1/chat/completions",
    "anthropic": "/v1/messages",
    "ollama": "/api/chat",
    "responses": "/v1/responses",
}


@attrs.frozen(kw_only=True)
class Cell:
    """A question, whatever the dialect."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    choice: str | None = None
    """`tool_choice`: a word of OpenAI's, or a tool's name."""
    is_parallel: bool = False
    has_schema: bool = False
    """Whether the answer is to be JSON of `CITY_AND_DAYS`."""
    stop: tuple[str, ...] = ()
    thinks: bool | None = False
    """Whether thinking is asked for; None for a question that does not say."""
    max_tokens: int = 4

    @property
    def has_calls(self) -> bool:
        """Whether there were calls before, or can be one now."""
        return bool(self.tools and self.choice != "none") or any(each.tool_calls for each in self.messages)

    def fits(self, dialect: DialectName) -> bool:
        """Whether the dialect has words for all of it."""
        if dialect == "responses":
            return not self.stop
        return dialect != "ollama" or self.choice in (None, "auto")


@attrs.frozen(kw_only=True)
class Said:
    """What an answer says."""

    text: str
    calls: tuple[tuple[str, str], ...]
    """Names and arguments, as JSON."""
    is_cut: bool
    """Whether it ended at its maximum of tokens."""


def body_of(dialect: DialectName, cell: Cell, *, stream: bool) -> dict[str, Any]:
    """The request's body."""
    made = {"openai": _openai, "anthropic": _anthropic, "ollama": _ollama, "responses": _responses}[dialect](cell)
    return made | {"model": "zoo", "stream": stream}


def said(dialect: DialectName, answered: Answered, *, stream: bool) -> Said:
    """The answer, which must be one."""
    if not stream:
        whole = {"openai": _openai_said, "anthropic": _anthropic_said, "ollama": _ollama_said}
        return (whole | {"responses": _response_said})[dialect](answered.json)
    if dialect == "ollama":
        return _ollama_streamed([json.loads(line) for line in answered.body.splitlines() if line.strip()])
    streamed = {"openai": _openai_streamed, "anthropic": _anthropic_streamed, "responses": _response_streamed}
    return streamed[dialect](list(_events(answered.body)))


def _openai(cell: Cell) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [openai(each) for each in cell.messages], "seed": 1}
    body |= {"max_tokens": cell.max_tokens}
    if cell.tools:
        body |= {"tools": [openai_tool(each) for each in cell.tools], "parallel_tool_calls": cell.is_parallel}
        is_name = cell.choice not in (None, "auto", "none", "required")
        body["tool_choice"] = {"type": "function", "function": {"name": cell.choice}} if is_name else cell.choice
    if cell.has_schema:
        schema = {"name": "place", "schema": CITY_AND_DAYS, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if cell.stop:
        body["stop"] = list(cell.stop)
    if cell.thinks is not None:
        body["chat_template_kwargs"] = {"enable_thinking": cell.thinks}
    return body


def _responses(cell: Cell) -> dict[str, Any]:
    body = _openai(cell)
    body |= {"input": [item for each in body.pop("messages") for item in _items(each)]}
    body |= {"max_output_tokens": body.pop("max_tokens")}
    if cell.tools:
        body["tools"] = [{"type": "function", **each["function"]} for each in body["tools"]]
        if isinstance(body["tool_choice"], dict):
            body["tool_choice"] = {"type": "function", "name": cell.choice}
    if cell.has_schema:
        schema = body.pop("response_format")["json_schema"]
        body["text"] = {"format": {"type": "json_schema", **schema}}
    if body.pop("chat_template_kwargs", None):
        body["reasoning"] = {"effort": "medium" if cell.thinks else "none"}
    return body


def _items(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A message of chat completions as items of a response's input."""
    if message["role"] == "tool":
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
        return
    if thought := message.get("reasoning_content"):
        yield {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thought}]}
    if message.get("content"):
        yield {"role": message["role"], "content": message["content"]}
    for call in message.get("tool_calls") or ():
        yield {"type": "function_call", "call_id": call["id"], **call["function"]}


def _anthropic(cell: Cell) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    for each in cell.messages:
        blocks = list(_blocks(each))
        role = "user" if each.role == "tool" else each.role
        if each.role == "tool" and turns and turns[-1]["content"][-1]["type"] == "tool_result":
            turns[-1]["content"] += blocks
        elif each.role != "system":
            turns.append({"role": role, "content": blocks})
    body: dict[str, Any] = {"messages": turns, "max_tokens": cell.max_tokens}
    if systems := [each.content for each in cell.messages if each.role == "system"]:
        body["system"] = systems[0]
    if cell.tools:
        body["tools"] = [
            {"name": each.name, "description": each.description, "input_schema": each.parameters} for each in cell.tools
        ]
        word = {"required": "any", "auto": "auto", "none": "none"}.get(cell.choice or "auto", "tool")
        body["tool_choice"] = {"type": word} | ({"name": cell.choice} if word == "tool" else {})
        if word != "none":
            body["tool_choice"]["disable_parallel_tool_use"] = not cell.is_parallel
    if cell.has_schema:
        body["output_config"] = {"format": {"type": "json_schema", "schema": CITY_AND_DAYS}}
    if cell.stop:
        body["stop_sequences"] = list(cell.stop)
    if cell.thinks is not None:
        body["thinking"] = {"type": "enabled", "budget_tokens": 1_024} if cell.thinks else {"type": "disabled"}
    return body


def _blocks(message: Message) -> Iterator[dict[str, Any]]:
    if message.role == "tool":
        yield {"type": "tool_result", "tool_use_id": message.tool_call_id, "content": message.content}
        return
    if message.reasoning:
        yield {"type": "thinking", "thinking": message.reasoning, "signature": ""}
    if message.content:
        yield {"type": "text", "text": message.content}
    for call in message.tool_calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}


def _ollama(cell: Cell) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [_ollama_message(each) for each in cell.messages]}
    body["options"] = {"num_predict": cell.max_tokens, "seed": 1} | ({"stop": list(cell.stop)} if cell.stop else {})
    if cell.tools:
        body["tools"] = [openai_tool(each) for each in cell.tools]
    if cell.has_schema:
        body["format"] = CITY_AND_DAYS
    if cell.thinks is not None:
        body["think"] = cell.thinks
    return body


def _ollama_message(message: Message) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.role == "tool":
        made["tool_name"] = message.name
    if message.reasoning:
        made["thinking"] = message.reasoning
    if message.tool_calls:
        made["tool_calls"] = [
            {"function": {"name": call.name, "arguments": json.loads(call.arguments)}} for call in message.tool_calls
        ]
    return made


def _openai_said(body: dict[str, Any]) -> Said:
    (choice,) = body["choices"]
    message = choice["message"]
    calls = [(each["function"]["name"], each["function"]["arguments"]) for each in message.get("tool_calls") or ()]
    return Said(text=message["content"] or "", calls=tuple(calls), is_cut=choice["finish_reason"] == "length")


def _openai_streamed(events: list[dict[str, Any]]) -> Said:
    text, names, arguments, reasons = "", dict[int, str](), defaultdict[int, str](str), list[str]()
    for event in events:
        for choice in event.get("choices", ()):
            text += choice["delta"].get("content") or ""
            reasons += filter(None, [choice.get("finish_reason")])
            for call in choice["delta"].get("tool_calls") or ():
                names.setdefault(call["index"], call["function"].get("name", ""))
                arguments[call["index"]] += call["function"].get("arguments") or ""
    (reason,) = reasons
    return Said(text=text, calls=tuple((names[at], arguments[at]) for at in names), is_cut=reason == "length")


def _response_said(body: dict[str, Any]) -> Said:
    calls = [(each["name"], each["arguments"]) for each in body["output"] if each["type"] == "function_call"]
    messages = [each for each in body["output"] if each["type"] == "message"]
    text = "".join(part["text"] for each in messages for part in each["content"])
    return Said(text=text, calls=tuple(calls), is_cut=body["status"] == "incomplete")


def _response_streamed(events: list[dict[str, Any]]) -> Said:
    """What the pieces amount to is what the whole response at the end has."""
    text, arguments = "", defaultdict[int, str](str)
    for event in events:
        text += event["delta"] if event["type"] == "response.output_text.delta" else ""
        if event["type"] == "response.function_call_arguments.delta":
            arguments[event["output_index"]] += event["delta"]
    whole = _response_said(events[-1]["response"])
    assert text == whole.text
    # (A call that is cut off before its arguments has no piece.)
    assert list(arguments.values()) == [call for _, call in whole.calls if call]
    return whole


def _anthropic_said(body: dict[str, Any]) -> Said:
    calls = [(each["name"], json.dumps(each["input"])) for each in body["content"] if each["type"] == "tool_use"]
    text = "".join(each["text"] for each in body["content"] if each["type"] == "text")
    return Said(text=text, calls=tuple(calls), is_cut=body["stop_reason"] == "max_tokens")


def _anthropic_streamed(events: list[dict[str, Any]]) -> Said:
    text, names, arguments, reason = "", dict[int, str](), defaultdict[int, str](str), None
    for event in events:
        delta = event.get("delta", {})
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            names[event["index"]] = event["content_block"]["name"]
        text += delta.get("text", "")
        arguments[event.get("index", -1)] += delta.get("partial_json", "")
        reason = delta.get("stop_reason", reason)
    assert events[-1]["type"] == "message_stop"
    calls = tuple((names[at], arguments[at] or "{}") for at in names)
    return Said(text=text, calls=calls, is_cut=reason == "max_tokens")


def _ollama_said(body: dict[str, Any]) -> Said:
    return _ollama_streamed([body])


def _ollama_streamed(lines: list[dict[str, Any]]) -> Said:
    calls = [
        (call["function"]["name"], json.dumps(call["function"]["arguments"]))
        for line in lines
        for call in line["message"].get("tool_calls") or ()
    ]
    text = "".join(line["message"]["content"] for line in lines)
    assert lines[-1]["done"]
    return Said(text=text, calls=tuple(calls), is_cut=lines[-1]["done_reason"] == "length")


def _events(body: bytes) -> Iterator[dict[str, Any]]:
    for line in body.decode().splitlines():
        if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
            yield json.loads(data)
