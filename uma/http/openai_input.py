"""The input of OpenAI's Responses API: messages, calls and what they brought, as items, to UMA's messages."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import attrs

from uma import json_text
from uma.constraints import Text, show
from uma.errors import BadRequest
from uma.http.content import content_of, question_start, read_part, text_of
from uma.http.exchange import Exchange
from uma.http.fields import MAX_MESSAGES
from uma.http.ignored import Ignored
from uma.http.media import MediaReader
from uma.http.openai_tools import checked_name, custom_arguments
from uma.http.tools import Name, check_calls, past_call, with_names
from uma.types import Capabilities, Message, ToolCall

INPUT = "a string or a list of messages"


@attrs.frozen(kw_only=True)
class _Item:
    role: Literal["user", "assistant", "system", "developer"]
    content: Any = None
    type: str = "message"
    id: Any = None
    """Id of an item that was output; the next field is one of its as well."""
    status: Any = None


@attrs.frozen(kw_only=True)
class _Call:
    call_id: Name
    name: Name
    arguments: Annotated[str, Text()] = "{}"
    namespace: Name | None = None
    type: str = "function_call"
    id: Any = None
    status: Any = None


@attrs.frozen(kw_only=True)
class _CustomCall:
    call_id: Name
    name: Name
    input: Annotated[str, Text()]
    namespace: Name | None = None
    type: str = "custom_tool_call"
    id: Any = None
    status: Any = None


@attrs.frozen(kw_only=True)
class _ShellCall:
    call_id: Name
    action: dict[str, Any]
    type: str = "local_shell_call"
    id: Any = None
    status: Any = None


@attrs.frozen(kw_only=True)
class _Output:
    call_id: Name
    output: Any = None
    type: str = "function_call_output"
    name: Any = None
    id: Any = None
    status: Any = None


@attrs.frozen(kw_only=True)
class _Reasoning:
    summary: tuple[dict[str, Any], ...] = ()
    content: tuple[dict[str, Any], ...] | None = None
    type: str = "reasoning"
    encrypted_content: Any = None
    id: Any = None
    status: Any = None


def _thought(item: _Reasoning, path: str, ignored: Ignored) -> str:
    """The text of an item of thinking: all of it where the item has that, else its summary."""
    name, parts = ("content", item.content) if item.content else ("summary", item.summary)
    return "\n".join(text_of(part.get("text"), f"{path}.{name}[{at}].text", ignored) for at, part in enumerate(parts))


def messages_of(given: Any, instructions: str | None, able: Capabilities, http: Exchange) -> tuple[Message, ...]:
    """The conversation that `input` and `instructions` are. Adds what cannot be read to what is ignored.

    Raises `BadRequest` for what is none.
    """
    ignored, media = http.ignored, MediaReader(able)
    system = [Message("system", instructions)] if instructions else []
    if isinstance(given, str):
        return (*system, Message("user", text_of(given, "input", ignored)))
    if not isinstance(given, list) or not given:
        raise BadRequest(f"input: expected {INPUT}, not {show(given)}")
    if len(given) > MAX_MESSAGES:
        raise BadRequest(f"input: {len(given):,} messages are more than {MAX_MESSAGES:,}")
    turns = list(system)
    question = question_start([_speaker(item) for item in given])
    for index, item in enumerate(given):
        _add(turns, item, f"input[{index}]", able, ignored, media, is_question=index >= question)
    turns = [each for each in turns if not _is_thought(each)]  # an answer that was cut off in its thinking is none
    if not turns:
        raise BadRequest("input: has no message")
    media.name(http.names, turns)
    return with_names(turns)


def _is_thought(turn: Message) -> bool:
    """Whether it is thinking, without an answer or a call so far."""
    return bool(turn.reasoning) and not (turn.content or turn.tool_calls)


def _speaker(item: Any) -> str:
    """Speaker, as in `question_start`: a call and thinking are the assistant's, what a call brought is the tool's."""
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    if kind == "message":
        return str(item.get("role")) if isinstance(item, dict) else ""
    return "tool" if str(kind).endswith("_output") else "assistant"


def _add(
    turns: list[Message],
    item: Any,
    path: str,
    able: Capabilities,
    ignored: Ignored,
    media: MediaReader,
    *,
    is_question: bool,
) -> None:
    """Put an input item behind the conversation so far; a call belongs to the assistant's turn before it."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "reasoning":
        if thought := _thought(read_part(item, _Reasoning, path, ignored), path, ignored):
            turns.append(Message("assistant", "", reasoning=thought))
    elif kind in ("function_call", "custom_tool_call", "local_shell_call"):
        check_calls(able, path)
        last = turns.pop() if turns and turns[-1].role == "assistant" else Message("assistant", "")
        turns.append(attrs.evolve(last, tool_calls=(*last.tool_calls, _past_call(item, kind, path, ignored))))
    elif kind in ("function_call_output", "custom_tool_call_output", "local_shell_call_output"):
        check_calls(able, path)
        result = read_part(item, _Output, path, ignored)
        text, seen = content_of(result.output, f"{path}.output", ignored, media, is_question=False)
        turns.append(Message("tool", text, (), result.call_id, media=seen))
    elif kind == "message":
        message = read_part(item, _Item, path, ignored)
        role = "system" if message.role == "developer" else message.role
        text, seen = content_of(message.content, f"{path}.content", ignored, media, is_question=is_question)
        if role == "assistant" and turns and _is_thought(turns[-1]):
            turns[-1] = attrs.evolve(turns[-1], content=text, media=seen)
        else:
            turns.append(Message(role, text, media=seen))
    elif isinstance(kind, str) and _OF_HOSTED_TOOLS.fullmatch(kind):
        ignored.add(path)
    else:
        raise BadRequest(f"{path}: expected a message, a call or its output, not {show(item)}")


_OF_HOSTED_TOOLS = re.compile(r"\w+_call|\w+_call_output|tool_search_output|mcp_\w+|compaction|program(_output)?")
"""Types of items about tools that run at OpenAI's: a conversation that began there has them."""


def _past_call(item: Any, kind: str, path: str, ignored: Ignored) -> ToolCall:
    """A call of an earlier answer, by the name that the model calls the tool."""
    if kind == "local_shell_call":
        shell = read_part(item, _ShellCall, path, ignored)
        return ToolCall(shell.call_id, "local_shell", json_text.dumps(shell.action))
    if kind == "custom_tool_call":
        custom = read_part(item, _CustomCall, path, ignored)
        return ToolCall(
            custom.call_id, checked_name(custom.name, custom.namespace, path), custom_arguments(custom.input)
        )
    found = read_part(item, _Call, path, ignored)
    return past_call(
        found.call_id, checked_name(found.name, found.namespace, path), found.arguments, f"{path}.arguments", ignored
    )
