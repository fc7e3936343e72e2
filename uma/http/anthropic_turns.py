"""Conversations and tools in Anthropic's form: content blocks, to UMA's messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import attrs

from uma import json_bytes, json_text
from uma.chat.partial_json import whole_members
from uma.constraints import Length, Range
from uma.errors import BadRequest
from uma.http.content import content_of, part_of, question_start, text_of
from uma.http.reader import Reader
from uma.http.thinking import Wish
from uma.http.tools import Effort, Name, Schema, check_calls, distinct, name_schemas, named_choice
from uma.types import MAX_TOOLS, CutCall, Media, Message, Tool, ToolCall, joined


@attrs.frozen(kw_only=True)
class ToolBody:
    """An entry of `tools`. Those that Anthropic defines, and most of which run there, have a `type` of their own."""

    name: Name
    description: str | None = None
    input_schema: Schema | None = None
    strict: bool | None = None
    type: str | None = None


ToolBodies = Annotated[tuple[ToolBody, ...], Length(0, MAX_TOOLS, "tools")]


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
    type: str = "tool_use"


@attrs.frozen(kw_only=True)
class _ToolResult:
    tool_use_id: Name
    type: str = "tool_result"
    content: Any = None
    is_error: bool | None = None


_OF_SERVER_TOOLS = re.compile(r"server_tool_use|mcp_tool_use|\w+_tool_result|container_upload")
"""Types of blocks about tools that run at Anthropic's: a conversation that began there has them."""


def offered(tools: Sequence[ToolBody], choice: ChoiceBody | None, reader: Reader) -> dict[str, Any]:
    """The fields of a `ChatAsk` for `tools` and `tool_choice`. Tools that Anthropic defines are named as ignored."""
    places = [index for index, tool in enumerate(tools) if tool.type in (None, "custom")]
    reader.ignored.add_all(f"tools[{index}]" for index in range(len(tools)) if index not in places)
    every = [
        Tool(tools[at].name, tools[at].description or "", tools[at].input_schema, bool(tools[at].strict))
        for at in places
    ]
    kept = distinct(every)
    name_schemas(reader.names, [places[at] for at in kept], "input_schema")
    word: str = "auto" if choice is None else "required" if choice.type == "any" else choice.type
    if choice is not None and choice.type == "tool":
        if choice.name is None:
            raise BadRequest.at("tool_choice.name", "is required")
        word = named_choice(choice.name)
    is_parallel = choice is None or not choice.disable_parallel_tool_use
    return {"tools": [every[at] for at in kept], "tool_choice": word, "is_parallel": is_parallel}


def turns_of(bodies: Sequence[TurnBody], reader: Reader) -> list[Message]:
    """The messages, with a message of its own for each result of a tool. Unknown fields are ignored by name."""
    turns: list[Message] = []
    question = question_start(["tool" if _has_result(body.content) else body.role for body in bodies])
    for number, body in enumerate(bodies):
        turns += _turns(body, f"messages[{number}].content", reader, is_question=number >= question)
    return turns


def _has_result(content: Any) -> bool:
    return isinstance(content, list) and any(_kind(block) == "tool_result" for block in content)


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None


def _turns(body: TurnBody, path: str, reader: Reader, *, is_question: bool) -> Iterator[Message]:
    if not isinstance(body.content, list):
        yield Message(body.role, text_of(body.content, path, reader))
        return
    parts: list[str | Media] = []
    calls, thoughts, results = list[ToolCall](), list[str](), 0
    for index, block in enumerate(body.content):
        here = f"{path}[{index}]"
        kind = _kind(block)
        if kind == "tool_use":
            check_calls(reader.able, here)
            use = reader.part(block, _ToolUse, here)
            calls.append(ToolCall(use.id, use.name, json_text.dumps(use.input)))
        elif kind == "tool_result":
            check_calls(reader.able, here)
            result = reader.part(block, _ToolResult, here)
            mark = "Error: " if result.is_error else ""
            text, seen = content_of(result.content, f"{here}.content", reader, is_question=False)
            results += 1
            shown = tuple(attrs.evolve(each, at=len(mark) + each.at) for each in seen)
            yield Message("tool", mark + text, (), result.tool_use_id, media=shown)
        elif isinstance(kind, str) and _OF_SERVER_TOOLS.fullmatch(kind):
            reader.ignored.add(here)
        elif kind == "thinking":
            thoughts.append(text_of(block.get("thinking"), f"{here}.thinking", reader))
        elif kind == "compaction":
            parts.append(text_of(block.get("content"), f"{here}.content", reader))
        elif kind != "redacted_thinking":
            parts.append(part_of(block, here, reader, is_question=is_question))
    if parts or calls or not results:
        text, seen = joined(parts)
        yield Message(body.role, text, tuple(calls), reasoning="\n".join(thoughts) or None, media=seen)


def tool_use(call: ToolCall | CutCall) -> dict[str, Any]:
    """A call as a content block. One that is cut off has those of its arguments that are whole."""
    given = call.arguments if isinstance(call, ToolCall) else whole_members(call.arguments)
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": json_bytes.verbatim(given)}


@attrs.frozen(kw_only=True)
class ThinkingBody:
    """`thinking`."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Range(1)] | None = None


def thinking_wish(thinking: ThinkingBody | None, effort: Effort | None) -> Wish:
    """What `thinking` and `output_config` ask for; without `thinking` there is to be none."""
    return Wish(
        wanted=thinking is not None and thinking.type != "disabled",
        field="thinking",
        effort=effort,
        effort_field="output_config.effort",
        budget=None if thinking is None else thinking.budget_tokens,
        budget_field="thinking.budget_tokens",
    )
