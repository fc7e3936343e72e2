"""The input of OpenAI's Responses API: messages, calls and what they brought, as items, to UMA's messages."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import attrs

from uma import json_text
from uma.constraints import Text, show
from uma.errors import BadRequest
from uma.http.content import content_of, question_start, text_of
from uma.http.fields import MAX_MESSAGES
from uma.http.openai_tools import checked_name, custom_arguments
from uma.http.reader import Reader
from uma.http.tools import Name, check_calls, past_call
from uma.types import Message, ToolCall

INPUT = "a string or a list of messages"


@attrs.frozen(kw_only=True)
class _Stored:
    """What an item has that was output before; it changes nothing."""

    type: Any = None
    id: Any = None
    status: Any = None


@attrs.frozen(kw_only=True)
class _Item(_Stored):
    role: Literal["user", "assistant", "system", "developer"]
    content: Any = None


@attrs.frozen(kw_only=True)
class _Call(_Stored):
    call_id: Name
    name: Name
    arguments: Annotated[str, Text()] = "{}"
    namespace: Name | None = None


@attrs.frozen(kw_only=True)
class _CustomCall(_Stored):
    call_id: Name
    name: Name
    input: Annotated[str, Text()]
    namespace: Name | None = None


@attrs.frozen(kw_only=True)
class _ShellCall(_Stored):
    call_id: Name
    action: dict[str, Any]


@attrs.frozen(kw_only=True)
class _Output(_Stored):
    call_id: Name
    output: Any = None
    name: Any = None


@attrs.frozen(kw_only=True)
class _Reasoning(_Stored):
    summary: tuple[dict[str, Any], ...] = ()
    content: tuple[dict[str, Any], ...] | None = None
    encrypted_content: Any = None


def _thought(item: _Reasoning, path: str, reader: Reader) -> str:
    """The text of an item of thinking: all of it where the item has that, else its summary."""
    name, parts = ("content", item.content) if item.content else ("summary", item.summary)
    return "\n".join(text_of(part.get("text"), f"{path}.{name}[{at}].text", reader) for at, part in enumerate(parts))


def messages_of(given: Any, instructions: str | None, reader: Reader, stored: int = 0) -> list[Message]:
    """The conversation that `input` and `instructions` are. What cannot be read is ignored. The first `stored` items
    are no part of the body, but come with `previous_response_id`.

    Raises `BadRequest` for what is none.
    """
    system = [Message("system", instructions)] if instructions else []
    if isinstance(given, str):
        return [*system, Message("user", text_of(given, "input", reader))]
    if not isinstance(given, list) or not given:
        raise BadRequest.at("input", f"expected {INPUT}, not {show(given)}")
    if len(given) > MAX_MESSAGES:
        raise BadRequest.at("input", f"{len(given):,} messages are more than {MAX_MESSAGES:,}")
    turns = list(system)
    question = question_start([_speaker(item) for item in given])
    for index, item in enumerate(given):
        path = f"input[{index - stored}]" if index >= stored else f"previous_response_id.input[{index}]"
        _add(turns, item, path, reader, is_question=index >= question)
    turns = [each for each in turns if not _is_thought(each)]  # an answer that was cut off in its thinking is none
    if not turns:
        raise BadRequest.at("input", "has no message")
    return turns


def _is_thought(turn: Message) -> bool:
    """Whether it is thinking, without an answer or a call so far."""
    return bool(turn.reasoning) and not (turn.content or turn.tool_calls)


def _speaker(item: Any) -> str:
    """Speaker, as in `question_start`: a call and thinking are the assistant's, what a call brought is the tool's."""
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    if kind == "message":
        return str(item.get("role")) if isinstance(item, dict) else ""
    return "tool" if str(kind).endswith("_output") else "assistant"


def _add(turns: list[Message], item: Any, path: str, reader: Reader, *, is_question: bool) -> None:
    """Put an input item behind the conversation so far; a call belongs to the assistant's turn before it."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "reasoning":
        if thought := _thought(reader.part(item, _Reasoning, path), path, reader):
            turns.append(Message("assistant", "", reasoning=thought))
    elif kind in ("function_call", "custom_tool_call", "local_shell_call"):
        check_calls(reader.able, path)
        last = turns.pop() if turns and turns[-1].role == "assistant" else Message("assistant", "")
        turns.append(attrs.evolve(last, tool_calls=(*last.tool_calls, _past_call(item, kind, path, reader))))
    elif kind in ("function_call_output", "custom_tool_call_output", "local_shell_call_output"):
        check_calls(reader.able, path)
        result = reader.part(item, _Output, path)
        text, seen = content_of(result.output, f"{path}.output", reader, is_question=False)
        turns.append(Message("tool", text, (), result.call_id, media=seen))
    elif kind == "message":
        message = reader.part(item, _Item, path)
        role = "system" if message.role == "developer" else message.role
        text, seen = content_of(message.content, f"{path}.content", reader, is_question=is_question)
        if role == "assistant" and turns and _is_thought(turns[-1]):
            turns[-1] = attrs.evolve(turns[-1], content=text, media=seen)
        else:
            turns.append(Message(role, text, media=seen))
    elif isinstance(kind, str) and _OF_HOSTED_TOOLS.fullmatch(kind):
        reader.ignored.add(path)
    else:
        raise BadRequest.at(path, f"expected a message, a call or its output, not {show(item)}")


_OF_HOSTED_TOOLS = re.compile(r"\w+_call|\w+_call_output|tool_search_output|mcp_\w+|compaction|program(_output)?")
"""Types of items about tools that run at OpenAI's: a conversation that began there has them."""


def _past_call(item: Any, kind: str, path: str, reader: Reader) -> ToolCall:
    """A call of an earlier answer, by the name that the model calls the tool."""
    if kind == "local_shell_call":
        shell = reader.part(item, _ShellCall, path)
        return ToolCall(shell.call_id, "local_shell", json_text.dumps(shell.action))
    if kind == "custom_tool_call":
        custom = reader.part(item, _CustomCall, path)
        name = checked_name(custom.name, custom.namespace, path)
        return ToolCall(custom.call_id, name, custom_arguments(custom.input))
    found = reader.part(item, _Call, path)
    name = checked_name(found.name, found.namespace, path)
    return past_call(found.call_id, name, found.arguments, path, reader.ignored)
