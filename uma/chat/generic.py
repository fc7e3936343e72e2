"""Tools for models whose template does not support them: they are described in the system message.

Such a template does not show earlier calls either: they and their results become plain text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import attrs

from uma import json_text
from uma.chat.derive import written
from uma.chat.families import Family
from uma.chat.forms import NamedForm, ObjectForm
from uma.types import Message, Tool

_LIST = "You can call these functions, each given as JSON:\n{tools}\n\n"
_HOW = 'To call one, answer with only {"name": <its name>, "arguments": <an object>} as JSON, one such object a call.'
_HOW_IN_FORM = "To call one, write exactly this, with its name and its arguments as a JSON object:\n{form}"


def with_tools(messages: Sequence[Message], tools: Sequence[Tool], family: Family) -> tuple[Message, ...]:
    """The conversation with the tools in its system message, and how to call them in this family's form."""
    turns = list(messages)
    if not tools:
        return tuple(turns)
    listed = "\n".join(json_text.dumps(attrs.asdict(tool)) for tool in tools)
    how = _LIST.format(tools=listed) + _how(family)
    if turns[0].role == "system":
        return (attrs.evolve(turns[0], content=f"{turns[0].content}\n\n{how}"), *turns[1:])
    return (Message("system", how), *turns)


def with_calls(messages: Sequence[Message], family: Family) -> tuple[Message, ...]:
    """The conversation with its calls in the messages' texts, in this family's form."""
    return tuple(_with_calls(message, family) for message in messages)


def _with_calls(message: Message, family: Family) -> Message:
    if not message.tool_calls:
        return message
    calls = [(call.name, json_text.loads(call.arguments)) for call in message.tool_calls]
    return attrs.evolve(message, content=message.content + written(family, calls), tool_calls=())


def _how(family: Family) -> str:
    form = family.form
    if family.is_bare or not isinstance(form, ObjectForm | NamedForm):
        return _HOW
    call = f"{form.before}<name>{form.after}{{...}}{form.end}"
    return _HOW_IN_FORM.format(form=f"{family.open}{family.lead}{call}{family.trail}{family.close}")


def plain(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The conversation with calls and their results as plain text."""
    return tuple(_plain(message) for message in messages)


def _plain(message: Message) -> Message:
    if message.role == "tool":
        of = f" of {message.name}" if message.name else ""
        before = f"Result{of}: "
        media = tuple(attrs.evolve(media_file, at=len(before) + media_file.at) for media_file in message.media)
        return Message("user", before + message.content, media=media)
    if not message.tool_calls:
        return message
    calls = (f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}' for call in message.tool_calls)
    return Message(message.role, "\n".join(filter(None, (message.content, *calls))), media=message.media)
