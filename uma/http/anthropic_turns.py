"""Conversations and tools in Anthropic's form: content blocks, to UMA's messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import attrs

from uma import json_bytes, json_text
from uma.chat.json_call import whole_members
from uma.constraints import Length, Range
from uma.errors import BadRequest
from uma.http.content import content_of, part_of, question_start, read_part, text_of
from uma.http.exchange import Exchange
from uma.http.ignored import Ignored
from uma.http.media import MediaReader
from uma.http.thinking import Wish
from uma.http.tools import (
    Effort,
    Name,
    Schema,
    check_calls,
    distinct,
    name_schemas,
    named_choice,
    tool_fields,
    with_names,
)
from uma.types import MAX_TOOLS, Capabilities, CutCall, Media, Message, Tool, ToolCall, joined


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


def offered(tools: Sequence[ToolBody], choice: ChoiceBody | None, able: Capabilities, http: Exchange) -> dict[str, Any]:
    """The fields of a `Request` for `tools` and `tool_choice`. Tools that Anthropic defines are named as ignored."""
    places = [index for index, tool in enumerate(tools) if tool.type in (None, "custom")]
    http.ignored.add_all(f"tools[{index}]" for index in range(len(tools)) if index not in places)
    every = [
        Tool(tools[at].name, tools[at].description or "", tools[at].input_schema, bool(tools[at].strict))
        for at in places
    ]
    kept = distinct(every)
    name_schemas(http.names, [places[at] for at in kept], "input_schema")
    given = [every[at] for at in kept]
    if choice is None:
        return tool_fields(given, "auto", able, is_parallel=True)
    if choice.type == "tool":
        if choice.name is None:
            raise BadRequest("tool_choice.name: is required")
        word = named_choice(choice.name)
    else:
        word = "required" if choice.type == "any" else choice.type
    return tool_fields(given, word, able, is_parallel=not choice.disable_parallel_tool_use)


def turns_of(
    bodies: Sequence[TurnBody], able: Capabilities, http: Exchange, *, is_behind_system: bool
) -> tuple[Message, ...]:
    """The messages, with a message of its own for each result of a tool. Unknown fields are ignored by name.

    `is_behind_system`: another message will come before them.
    """
    turns: list[Message] = []
    media = MediaReader(able)
    question = question_start(["tool" if _has_result(body.content) else body.role for body in bodies])
    for number, body in enumerate(bodies):
        turns += _turns(body, f"messages[{number}].content", able, http.ignored, media, is_question=number >= question)
    media.name(http.names, [Message("system", ""), *turns] if is_behind_system else turns)
    return with_names(turns)


def _has_result(content: Any) -> bool:
    return isinstance(content, list) and any(_kind(block) == "tool_result" for block in content)


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None


def _turns(
    body: TurnBody, path: str, able: Capabilities, ignored: Ignored, media: MediaReader, *, is_question: bool
) -> Iterator[Message]:
    if not isinstance(body.content, list):
        yield Message(body.role, text_of(body.content, path, ignored))
        return
    parts: list[str | Media] = []
    calls, thoughts, results = list[ToolCall](), list[str](), 0
    for index, block in enumerate(body.content):
        here = f"{path}[{index}]"
        kind = _kind(block)
        if kind == "tool_use":
            check_calls(able, here)
            use = read_part(block, _ToolUse, here, ignored)
            calls.append(ToolCall(use.id, use.name, json_text.dumps(use.input)))
        elif kind == "tool_result":
            check_calls(able, here)
            result = read_part(block, _ToolResult, here, ignored)
            mark = "Error: " if result.is_error else ""
            text, seen = content_of(result.content, f"{here}.content", ignored, media, is_question=False)
            results += 1
            shown = tuple(attrs.evolve(each, at=len(mark) + each.at) for each in seen)
            yield Message("tool", mark + text, (), result.tool_use_id, media=shown)
        elif isinstance(kind, str) and _OF_SERVER_TOOLS.fullmatch(kind):
            ignored.add(here)
        elif kind == "thinking":
            thoughts.append(text_of(block.get("thinking"), f"{here}.thinking", ignored))
        elif kind == "compaction":  # Anthropic's summary of the turns before it
            parts.append(text_of(block.get("content"), f"{here}.content", ignored))
        elif kind != "redacted_thinking":
            parts.append(part_of(block, here, ignored, media, is_question=is_question))
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
