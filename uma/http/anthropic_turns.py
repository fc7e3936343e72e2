"""Conversations and tools in Anthropic's form: content blocks, to UMA's messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import attrs

from uma.constraints import Length, Range
from uma.errors import BadRequest
from uma.http.openai import text_of
from uma.http.problem import Unsupported
from uma.http.tools import Name, Schema, check_calls, tool_fields, with_names
from uma.protocol.converter import structure
from uma.types import Capabilities, Message, Tool, ToolCall


@attrs.frozen(kw_only=True)
class ToolBody:
    """An entry of `tools`. Those that run at Anthropic's have a `type` of their own."""

    name: Name
    description: str | None = None
    input_schema: Schema | None = None
    type: str | None = None


ToolBodies = Annotated[tuple[ToolBody, ...], Length(0, 128, "tools")]


@attrs.frozen(kw_only=True)
class ChoiceBody:
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


@attrs.frozen(kw_only=True)
class TurnBody:
    """A message; its content is a string or a list of blocks."""

    role: Literal["user", "assistant", "system"]
    content: Any = None


@attrs.frozen(kw_only=True)
class _ToolUse:
    id: Name
    name: Name
    input: dict[str, Any]


@attrs.frozen(kw_only=True)
class _ToolResult:
    tool_use_id: Name
    content: Any = None
    is_error: bool | None = None


def offered(tools: Sequence[ToolBody], choice: ChoiceBody | None, able: Capabilities) -> dict[str, Any]:
    """The fields of a `Request` for `tools` and `tool_choice`."""
    for index, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            raise Unsupported(f"tools[{index}]: {tool.type} runs at Anthropic's; give a tool with an input_schema")
    given = [Tool(tool.name, tool.description or "", tool.input_schema) for tool in tools]
    if choice is None:
        return tool_fields(given, "auto", able, is_parallel=True)
    if choice.type == "tool" and choice.name is None:
        raise BadRequest("tool_choice.name: is required")
    words = {"any": "required", "tool": choice.name or ""}
    return tool_fields(
        given, words.get(choice.type, choice.type), able, is_parallel=not choice.disable_parallel_tool_use
    )


def turns_of(bodies: Sequence[TurnBody], able: Capabilities) -> tuple[Message, ...]:
    """The messages, with a message of its own for each result of a tool."""
    turns = [turn for number, body in enumerate(bodies) for turn in _turns(body, f"messages[{number}].content", able)]
    return with_names(turns)


def _turns(body: TurnBody, path: str, able: Capabilities) -> Iterator[Message]:
    if not isinstance(body.content, list):
        yield Message(body.role, text_of(body.content, path))
        return
    texts, calls, results = [], [], 0
    for index, block in enumerate(body.content):
        here = f"{path}[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            check_calls(able, here)
            use = _read(block, _ToolUse, here)
            calls.append(ToolCall(use.id, use.name, json.dumps(use.input, ensure_ascii=False)))
        elif kind == "tool_result":
            check_calls(able, here)
            result = _read(block, _ToolResult, here)
            text = text_of(result.content, f"{here}.content")
            results += 1
            yield Message("tool", f"Error: {text}" if result.is_error else text, (), result.tool_use_id)
        elif kind not in ("thinking", "redacted_thinking"):  # templates leave old thinking out as well
            texts.append(text_of([block], here))
    if texts or calls or not results:
        yield Message(body.role, "\n".join(texts), tuple(calls))


def _read(block: Any, cls: Any, path: str) -> Any:
    try:
        return structure(block, cls)
    except BadRequest as error:
        raise BadRequest(f"{path}.{error.message}") from None


def tool_use(call: ToolCall) -> dict[str, Any]:
    """A whole call as a content block."""
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}


@attrs.frozen(kw_only=True)
class ThinkingBody:
    """`thinking`."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Range(1)] | None = None


def thinking_wanted(thinking: ThinkingBody | None, ignored: list[str]) -> bool:
    """Whether `thinking` asks for some. Adds its budget to `ignored`: thinking has no bound but `max_tokens`."""
    if thinking is None:
        return False
    if thinking.budget_tokens is not None:
        ignored.append("thinking.budget_tokens")
    return thinking.type != "disabled"
