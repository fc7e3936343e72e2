"""Tools for models whose template knows nothing of them: told in the system message, results as the user's words."""

from __future__ import annotations

import json
from collections.abc import Sequence

import attrs

from uma.types import Message, Tool

_HOW = (
    "You can call these functions, each given as JSON:\n{tools}\n\n"
    'To call one, answer with only {{"name": <its name>, "arguments": <an object>}} as JSON, one such object a call.'
)


def told(messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[Message, ...]:
    """The conversation as a template without tools can render it, with the tools in its system message."""
    turns = [_plain(message) for message in messages]
    if not tools:
        return tuple(turns)
    how = _HOW.format(tools="\n".join(json.dumps(attrs.asdict(tool), ensure_ascii=False) for tool in tools))
    if turns[0].role == "system":
        return (attrs.evolve(turns[0], content=f"{turns[0].content}\n\n{how}"), *turns[1:])
    return (Message("system", how), *turns)


def _plain(message: Message) -> Message:
    if message.role == "tool":
        of = f" of {message.name}" if message.name else ""
        return Message("user", f"Result{of}: {message.content}")
    if not message.tool_calls:
        return message
    calls = (f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}' for call in message.tool_calls)
    return Message(message.role, "\n".join(filter(None, (message.content, *calls))))
