"""Anthropic's `context_management`: old results of tools are cleared from a conversation that is long.

Programs send the whole conversation with every request. So the edits are made anew each time, from its beginning, as
they would have been made whenever the model was asked: once results have been cleared, the next requests begin alike
until there is too much again, and are cached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import attrs
import trio

from uma import json_text
from uma.constraints import Length, Range
from uma.http.dialect import Body
from uma.http.reader import Reader
from uma.types import Message, Request, Source

CLEARED = "[This tool result was cleared, to save context.]"
"""What stands in the place of a cleared result."""
TRIGGER_TOKENS, MAX_TRIGGER_SHARE = 100_000, 0.75
"""Length of a prompt from which on results are cleared, where the body does not say, as Anthropic has it; and the
maximum of it as a share of the context: a conversation that does not fit is refused."""
MIN_CLEARED_SHARE = 0.1
"""Minimum of the trigger that is cleared at once, however little the body asks for: each time the prompt is read anew
from there."""
KEPT_USES = 3
"""Last uses of tools that stay where the body does not say, as Anthropic has it."""


@attrs.frozen(kw_only=True)
class _Amount:
    type: Literal["input_tokens", "tool_uses"]
    value: Annotated[int, Range(0)]


@attrs.frozen(kw_only=True)
class _Tokens(_Amount):
    type: Literal["input_tokens"]


@attrs.frozen(kw_only=True)
class _Uses(_Amount):
    type: Literal["tool_uses"]


@attrs.frozen(kw_only=True)
class ClearToolUses:
    """An edit of type `clear_tool_uses_20250919`."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: _Amount = _Amount(type="input_tokens", value=TRIGGER_TOKENS)
    keep: _Uses = _Uses(type="tool_uses", value=KEPT_USES)
    clear_at_least: _Tokens = _Tokens(type="input_tokens", value=0)
    exclude_tools: Annotated[tuple[str, ...], Length(0, 1_024, "names")] = ()


@attrs.frozen(kw_only=True)
class ContextManagement:
    """`context_management`."""

    edits: Annotated[tuple[dict[str, Any], ...], Length(0, 16, "edits")] = ()


def edits_of(body: ContextManagement | None, reader: Reader) -> list[ClearToolUses] | None:
    """The edits that a body asks for; None where it does not. Those of other types are ignored by name. Raises
    `BadRequest`.
    """
    if body is None:
        return None
    edits = list[ClearToolUses]()
    for at, edit in enumerate(body.edits):
        path = f"context_management.edits[{at}]"
        if edit.get("type") == "clear_tool_uses_20250919":
            given = {name: value for name, value in edit.items() if value is not None}
            edits.append(reader.part(given, ClearToolUses, path))
        else:
            reader.ignored.add(path)
    return edits


async def edited(source: Source, request: Request, edits: Sequence[ClearToolUses]) -> tuple[Request, list[Body]]:
    """The request with the edits made, and what is told of each that changed something. Raises `UmaError`."""
    applied = list[Body]()
    for edit in edits:
        before = len((await source.tokenize(request)).token_ids)
        make = partial(_cleared, request, edit, before, MAX_TRIGGER_SHARE * source.info.limits.n_ctx)
        messages, cleared = await trio.to_thread.run_sync(make, abandon_on_cancel=True)
        if cleared:
            request = attrs.evolve(request, messages=messages)
            tokens = max(0, before - len((await source.tokenize(request)).token_ids))
            applied.append({"type": edit.type, "cleared_tool_uses": cleared, "cleared_input_tokens": tokens})
    return request, applied


def _cleared(request: Request, edit: ClearToolUses, size_tokens: int, most_tokens: float) -> tuple[list[Message], int]:
    """The messages without the results that are over the trigger, and how many these are. A part's tokens are estimated
    by its share of the prompt's characters.
    """
    messages = list(request.messages or ())
    named = {call.id: call.name for message in messages for call in message.tool_calls}
    of_messages = sum(map(_chars, messages))
    rate = size_tokens / max(1, of_messages + sum(len(json_text.dumps(tool.parameters)) for tool in request.tools))
    by_uses, most = edit.trigger.type == "tool_uses", min(edit.trigger.value, most_tokens)
    least = max(edit.clear_at_least.value, 1 if by_uses else MIN_CLEARED_SHARE * most)
    tokens, cleared, recent, old = size_tokens - rate * of_messages, 0, deque[int](), list[int]()
    gain = 0.0  # by clearing the old ones, added up as they become so: a sum at each message takes seconds of thousands
    for at, message in enumerate(messages):
        tokens += rate * _chars(message)
        if message.role == "tool" and named.get(message.tool_call_id or "") not in edit.exclude_tools:
            recent.append(at)
            if len(recent) > edit.keep.value:
                old.append(recent.popleft())
                gain += rate * (_chars(messages[old[-1]]) - len(CLEARED))
        is_over = len(old) + len(recent) > edit.trigger.value if by_uses else tokens > most
        if message.role != "assistant" and is_over and gain >= least:
            for place in old:
                messages[place] = attrs.evolve(messages[place], content=CLEARED, media=())
            tokens, cleared, gain, old = tokens - gain, cleared + len(old), 0.0, []
    return messages, cleared


def _chars(message: Message) -> int:
    return len(message.content) + len(message.reasoning or "") + sum(len(call.arguments) for call in message.tool_calls)
