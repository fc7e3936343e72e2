"""Rewrites conversations into forms that strict templates accept.

A template can refuse what others accept: consecutive messages of one role, a system message that is not the first, any
system message, ids of calls in another form than its own. Each step here removes one such objection without losing
text, and leaves a conversation without it unchanged. So a growing conversation keeps its beginning, and with it its
cached prefix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from itertools import takewhile
from typing import Any

import attrs

from uma.types import Message, Tool

_BETWEEN = "\n\n"
"""Text between two merged messages."""
_ID_CHARS = 9
"""Length of the ids that Mistral's templates accept, which are letters and digits."""
_STRICT_ID = re.compile(rf"[a-zA-Z0-9]{{{_ID_CHARS}}}", re.ASCII)


def forms_of(messages: Sequence[Message]) -> Iterator[tuple[Message, ...]]:
    """The conversation as it is, then in stricter forms, those with the fewest changes first. None comes twice."""
    seen: set[tuple[Message, ...]] = set()
    for form in _stricter(tuple(messages)):
        for with_strict_id in (form, _with_strict_ids(form)):
            if with_strict_id not in seen:
                seen.add(with_strict_id)
                yield with_strict_id


def _stricter(messages: tuple[Message, ...]) -> Iterator[tuple[Message, ...]]:
    yield messages
    for step in _STEPS:
        yield step(messages)
    for step in _STEPS:
        messages = step(messages)
        yield messages


def without_system(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The conversation with the leading system message as the first lines of the user's message behind it."""
    if not messages or messages[0].role != "system":
        return tuple(messages)
    system, *rest = messages
    if rest and rest[0].role == "user":
        return (attrs.evolve(rest[0], content=f"{system.content}\n{rest[0].content}"), *rest[1:])
    return (attrs.evolve(system, role="user"), *rest)


def one_system(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The conversation with one system message, at the beginning; later ones become the user's."""
    first = list(takewhile(lambda turn: turn.role == "system", messages))
    rest = (
        attrs.evolve(message, role="user") if message.role == "system" else message
        for message in messages[len(first) :]
    )
    if len(first) > 1:
        first = [attrs.evolve(first[0], content=_BETWEEN.join(text.content for text in first))]
    return (*first, *rest)


def _alternating(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The conversation with consecutive messages of the user, or of the assistant, merged."""
    return _merged(messages, lambda last, turn: last.role == turn.role in ("user", "assistant"))


def _after_results(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The conversation with each user's message right behind a tool's result appended to the result."""
    return _merged(messages, lambda last, turn: (last.role, turn.role) == ("tool", "user"))


def _one_call_each(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The conversation with one call in each message, and the call's result behind it."""
    results = {turn.tool_call_id: turn for turn in messages if turn.role == "tool"}
    single: list[Message] = []
    taken: set[str] = set()
    for turn in messages:
        if len(turn.tool_calls) < 2:
            if turn.tool_call_id not in taken:
                single.append(turn)
            continue
        for at, call in enumerate(turn.tool_calls):
            message = attrs.evolve(turn, tool_calls=(call,))
            single.append(message if at == 0 else attrs.evolve(message, content="", reasoning=None))
            if call.id in results:
                single.append(results[call.id])
                taken.add(call.id)
    return tuple(single)


_STEPS = (one_system, _alternating, _after_results, without_system, _one_call_each)


def _merged(messages: Sequence[Message], belong_together: Callable[[Message, Message], bool]) -> tuple[Message, ...]:
    merged: list[Message] = []
    for turn in messages:
        if merged and belong_together(merged[-1], turn):
            merged[-1] = _joined(merged[-1], turn)
        else:
            merged.append(turn)
    return tuple(merged)


def _joined(first: Message, second: Message) -> Message:
    return attrs.evolve(
        first,
        content=_BETWEEN.join(filter(None, (first.content, second.content))),
        reasoning=_BETWEEN.join(filter(None, (first.reasoning, second.reasoning))) or None,
        tool_calls=(*first.tool_calls, *second.tool_calls),
    )


def _with_strict_ids(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The conversation with ids of calls as nine letters and digits; an id always gets the same one."""
    return tuple(
        attrs.evolve(
            turn,
            tool_calls=tuple(attrs.evolve(call, id=_strict(call.id)) for call in turn.tool_calls),
            tool_call_id=None if turn.tool_call_id is None else _strict(turn.tool_call_id),
        )
        if turn.tool_calls or turn.tool_call_id is not None
        else turn
        for turn in messages
    )


def described(tool: Tool) -> Tool:
    """The tool with a description of each parameter, if only an empty one, and of the members of each object."""
    return attrs.evolve(tool, parameters={"type": "object", "properties": {}, **_described(tool.parameters or {})})


def _described(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    if isinstance(given := schema.get("properties"), dict):
        made["properties"] = {
            name: {"description": "", **_described(inner)} if isinstance(inner, dict) else inner
            for name, inner in given.items()
        }
    return {"additionalProperties": {}, **made} if made.get("type") == "object" else made


def _strict(id: str) -> str:
    return id if _STRICT_ID.fullmatch(id) else sha256(id.encode()).hexdigest()[:_ID_CHARS]
