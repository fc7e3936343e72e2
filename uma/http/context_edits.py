"""Anthropic's `context_management`: old results of tools and old thinking are cleared from a conversation that is long.

Programs send the whole conversation with every request. So the edits are made anew each time, from its beginning, as
they would have been made whenever the model was asked: once results have been cleared, the next requests begin alike
until there is too much again, and are cached.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import attrs
import trio

from uma import json_text
from uma.constraints import Length, Range
from uma.http.reader import Reader
from uma.types import Message, Request, Source

CLEARED = "[This tool result was cleared, to save context.]"
"""What stands in the place of a cleared result."""
TRIGGER_TOKENS, MAX_TRIGGER_SHARE = 100_000, 0.75
"""Length of a prompt from which on results are cleared, where the body does not say, as Anthropic has it; and the
maximum of it as a share of the context: a conversation that does not fit is refused."""
LEAST_CLEARED_SHARE = 0.1
"""Minimum of the trigger that is cleared at once, however little the body asks for: each time the prompt is read anew
from there."""
COMPACT_TRIGGER_TOKENS = 150_000
"""Length of a prompt from which on the conversation is summarised, where the body does not say, as Anthropic has it."""
KEPT_USES = 3
"""Last uses of tools that stay where the body does not say, as Anthropic has it."""
_Count = Annotated[int, Range(0)]


@attrs.frozen(kw_only=True)
class _Tokens:
    type: Literal["input_tokens"]
    value: _Count


@attrs.frozen(kw_only=True)
class _Uses:
    type: Literal["tool_uses"]
    value: _Count


@attrs.frozen(kw_only=True)
class _Trigger:
    type: Literal["input_tokens", "tool_uses"]
    value: _Count

    def is_over(self, tokens: float, uses: int, most_tokens: int) -> bool:
        """Whether a prompt of so many tokens, with so many results that are not cleared, has too much."""
        return uses > self.value if self.type == "tool_uses" else tokens > min(self.value, most_tokens)

    def least_gain(self, most_tokens: int) -> float:
        """Minimum tokens that are worth an edit."""
        return 1 if self.type == "tool_uses" else LEAST_CLEARED_SHARE * min(self.value, most_tokens)


@attrs.frozen(kw_only=True)
class _ClearToolUses:
    type: Literal["clear_tool_uses_20250919"]
    trigger: _Trigger = _Trigger(type="input_tokens", value=TRIGGER_TOKENS)
    keep: _Uses = _Uses(type="tool_uses", value=KEPT_USES)
    clear_at_least: _Tokens | None = None
    exclude_tools: Annotated[tuple[str, ...], Length(0, 1_024, "names")] | None = None
    clear_tool_inputs: bool | Annotated[tuple[str, ...], Length(0, 1_024, "names")] | None = None


@attrs.frozen(kw_only=True)
class _KeptThinking:
    type: Literal["thinking_turns", "all"]
    value: Annotated[int, Range(1)] = 1


@attrs.frozen(kw_only=True)
class _ClearThinking:
    type: Literal["clear_thinking_20251015"]
    keep: _KeptThinking = _KeptThinking(type="thinking_turns")


@attrs.frozen(kw_only=True)
class _Compact:
    type: Literal["compact_20260112"]
    trigger: _Tokens = _Tokens(type="input_tokens", value=COMPACT_TRIGGER_TOKENS)


@attrs.frozen(kw_only=True)
class ContextManagement:
    """`context_management`."""

    edits: Annotated[tuple[dict[str, Any], ...], Length(0, 16, "edits")] = ()


_EDITS: dict[Any, type[_ClearToolUses | _ClearThinking | _Compact]] = {
    "clear_tool_uses_20250919": _ClearToolUses,
    "clear_thinking_20251015": _ClearThinking,
    "compact_20260112": _Compact,
}


@attrs.frozen
class ContextEdits:
    """The edits that a body asks for."""

    _edits: Sequence[_ClearToolUses | _ClearThinking]
    _most_tokens: int
    """Maximum trigger."""
    compact_tokens: int | None
    """Length of a prompt from which on the conversation is summarised; None: it is not."""

    @classmethod
    def of(cls, body: ContextManagement | None, reader: Reader) -> ContextEdits | None:
        """None where there are none. Those of other types are ignored by name. Raises `BadRequest`."""
        if body is None:
            return None
        path, edits, compact_tokens = "context_management.edits", list[_ClearToolUses | _ClearThinking](), None
        for at, given in enumerate(body.edits):
            edit = {**given, "keep": {"type": "all"}} if given.get("keep") == "all" else given
            kind = _EDITS.get(edit.get("type"))
            found = None if kind is None else reader.part(edit, kind, f"{path}[{at}]")
            if isinstance(found, _ClearToolUses | _ClearThinking):
                edits.append(found)
            elif found is None:
                reader.ignored.add(f"{path}[{at}]")
            else:
                compact_tokens = longest_whole(found.trigger.value, reader)
        return cls(edits, round(MAX_TRIGGER_SHARE * reader.info.limits.n_ctx), compact_tokens)

    async def made(self, source: Source, request: Request) -> tuple[Request, list[dict[str, Any]]]:
        """The request with the edits made, and what is told of each that changed something. Raises `UmaError`."""
        applied, size_tokens = list[dict[str, Any]](), -1
        for edit in self._edits:
            if isinstance(edit, _ClearThinking) and edit.keep.type == "all":
                continue
            if size_tokens < 0:
                size_tokens = await _count(source, request)
            if isinstance(edit, _ClearToolUses):
                make = partial(_without_results, request, edit, size_tokens, self._most_tokens)
                told = "cleared_tool_uses"
            else:
                make = partial(_without_thinking, request.messages or (), edit.keep.value)
                told = "cleared_thinking_turns"
            messages, cleared = await trio.to_thread.run_sync(make, abandon_on_cancel=True)
            if cleared:
                before, request = size_tokens, attrs.evolve(request, messages=messages)
                size_tokens = await _count(source, request)
                tokens = max(0, before - size_tokens)
                applied.append({"type": edit.type, told: cleared, "cleared_input_tokens": tokens})
        return request, applied


def longest_whole(threshold: int | None, reader: Reader) -> int:
    """Maximum tokens of a conversation that is not summarised yet, where the body names this threshold."""
    most = max(1, round(MAX_TRIGGER_SHARE * reader.info.limits.n_ctx))
    return most if threshold is None else max(1, min(threshold, most))


async def _count(source: Source, request: Request) -> int:
    return len((await source.tokenize(request)).token_ids)


def _without_results(
    request: Request, edit: _ClearToolUses, size_tokens: int, most_tokens: int
) -> tuple[list[Message], int]:
    """The messages without the results that are over the trigger, and how many these are. A part's tokens are estimated
    by its share of the prompt's characters.
    """
    messages, excluded = list(request.messages or ()), edit.exclude_tools or ()
    named = {call.id: call.name for message in messages for call in message.tool_calls}
    of_messages = sum(map(_chars, messages))
    rate = size_tokens / max(1, of_messages + sum(len(json_text.dumps(tool.parameters)) for tool in request.tools))
    tokens, uses, cleared = size_tokens - rate * of_messages, list[int](), set[int]()
    # Of uses that are too old, added up as they become so: a sum at each message takes seconds of thousands.
    gain = 0.0
    least = 0 if edit.clear_at_least is None else edit.clear_at_least.value
    for at, message in enumerate(messages):
        tokens += rate * _chars(message)
        if message.role == "tool" and named.get(message.tool_call_id or "") not in excluded:
            uses.append(at)
            if len(uses) > edit.keep.value:
                gain += rate * (_chars(messages[uses[-1 - edit.keep.value]]) - len(CLEARED))
        if message.role == "assistant" or not edit.trigger.is_over(tokens, len(uses), most_tokens):
            continue
        old = max(0, len(uses) - edit.keep.value)
        if old and gain >= max(least, edit.trigger.least_gain(most_tokens)):
            cleared.update(uses[:old])
            tokens, uses, gain = tokens - gain, uses[old:], 0.0
    inputs = set(named.values()) if edit.clear_tool_inputs is True else set(edit.clear_tool_inputs or ())
    emptied = {id for at in cleared if (id := messages[at].tool_call_id) is not None and named.get(id) in inputs}
    return [_cleared(message, emptied, is_result=at in cleared) for at, message in enumerate(messages)], len(cleared)


def _cleared(message: Message, emptied: Collection[str], *, is_result: bool) -> Message:
    """The message without its text where `is_result`, and without arguments in the calls of these ids."""
    if is_result:
        return attrs.evolve(message, content=CLEARED, media=())
    if not any(call.id in emptied for call in message.tool_calls):
        return message
    calls = [attrs.evolve(call, arguments="{}") if call.id in emptied else call for call in message.tool_calls]
    return attrs.evolve(message, tool_calls=calls)


def _chars(message: Message) -> int:
    return len(message.content) + len(message.reasoning or "") + sum(len(call.arguments) for call in message.tool_calls)


def _without_thinking(messages: Sequence[Message], kept_turns: int) -> tuple[list[Message], int]:
    """The messages without thinking in all but the last so many turns that have any, and how many turns lost theirs."""
    turn, turns = 0, list[int]()
    for message in messages:
        turn += message.role == "user"
        turns.append(turn)
    thinking = sorted({turn for turn, message in zip(turns, messages, strict=True) if message.reasoning})
    old = set(thinking[:-kept_turns])
    return [
        attrs.evolve(message, reasoning=None) if turn in old else message
        for turn, message in zip(turns, messages, strict=True)
    ], len(old)
