"""What `LLM`'s methods were given, checked: `TypeError` at the call for what is of another kind."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from io import BytesIO
from itertools import repeat
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeVar

import attrs

from uma import json_text
from uma.config import LOG, SERVER_ONLY, RuntimeConfig, nearest, settings
from uma.constraints import show
from uma.errors import BadRequest, ConfigError
from uma.types import GRAMMAR_FIELDS, Media, Message, ReasoningMode, SamplingParams, Tool, ToolCall, joined

T = TypeVar("T")
Conversation = Sequence[Message | Mapping[str, Any]]
Sampling = SamplingParams | Mapping[str, Any]
"""Sampling parameters, or a dict of their fields."""
Choice = str | Mapping[str, Any]
"""A `Request`'s `tool_choice`, or OpenAI's dict of a function by name."""


SAMPLING_NAMES = (*(field.name for field in attrs.fields(SamplingParams)), *GRAMMAR_FIELDS)
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that every chat has. Templates have others of their own, so only what is nearly one of these is refused."""
NO_KEYWORDS = SERVER_ONLY | LOG
"""Settings that an `LLM` has no use for: it serves no other program, and logs as Python's `logging` is set up."""


def config_of(model: str, given: dict[str, Any]) -> RuntimeConfig:
    """The configuration of these keywords.

    Raises `ConfigError` for an unknown one, with the nearest known, and for one that only a server has a use for.
    """
    known = settings()
    wrong = [f"{name}: no such setting{nearest(name, known)}" for name in given if name not in known]
    wrong += [f"{name}: a setting of a server (`uma run`), which LLM is not" for name in given if name in NO_KEYWORDS]
    if wrong:
        raise ConfigError("\n".join(wrong))
    given = {name: fspath(value) if isinstance(value, PathLike) else value for name, value in given.items()}
    return RuntimeConfig(model=model, **given)


def params_for(number: int, given: Sampling | Sequence[Sampling] | None) -> Iterable[SamplingParams]:
    """Sampling parameters for each prompt. Raises `TypeError`, or `ValueError` where their number is not `number`."""
    if given is None or isinstance(given, SamplingParams | Mapping):
        return repeat(sampling_of(given, "sampling_params"), number)
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise TypeError(
            f"sampling_params: expected SamplingParams, a dict of its fields, or a list, not {shown(given)}"
        )
    if len(given) != number:
        raise ValueError(f"sampling_params: {len(given)} came for {number} prompts; give one for all, or one for each")
    return [sampling_of(params, f"sampling_params[{index}]") for index, params in enumerate(given)]


def sampling_of(given: Sampling | None, where: str) -> SamplingParams:
    """`SamplingParams` as given, or of a dict of its fields. Raises `TypeError` that begins with `where`."""
    if given is None or isinstance(given, SamplingParams):
        return given or SamplingParams()
    if not isinstance(given, Mapping):
        raise TypeError(f"{where}: expected SamplingParams or a dict of its fields, not {shown(given)}")
    for name in given:
        if name not in SAMPLING_NAMES:
            raise TypeError(f"{where}: {shown(name)} is no field of SamplingParams{nearest(str(name), SAMPLING_NAMES)}")
    return SamplingParams(**given)


def check_keywords(unknown: Mapping[str, Any], method: str) -> None:
    """Raise `TypeError` for keywords that a method has not; of those of `SamplingParams` it says where they belong."""
    for name in unknown:
        near = name if name in SAMPLING_NAMES else next(iter(get_close_matches(name, SAMPLING_NAMES, n=1)), None)
        hint = f"; give sampling_params=SamplingParams({near}=…), or a dict" if near else ""
        raise TypeError(f"LLM.{method}() got an unexpected keyword argument {name!r}{hint}")


def state_of(given: str | Conversation | Mapping[str, Any]) -> tuple[Message, ...]:
    """The state of decisions as messages: a conversation as it is, a text or anything else as one of the user's."""
    if isinstance(given, str):
        return (Message("user", given),)
    turns = given if isinstance(given, Sequence) else ()
    if turns and all(isinstance(turn, Message) or (isinstance(turn, Mapping) and "role" in turn) for turn in turns):
        messages: tuple[Message, ...] = prompt_fields(turns)["messages"]
        return messages
    return (Message("user", json_text.dumps(given, separators=(",", ":"))),)


def texts_of(given: str | Iterable[str], name: str, *, hint: str = "") -> list[str]:
    """The texts, each of them a string (`TypeError`, which says `hint` where one is a message or a conversation)."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, bytes | Mapping) or not isinstance(given, Iterable):
        raise TypeError(f"{name}: expected a string or a list of strings, not {shown(given)}")
    found = list(given)
    for index, text in enumerate(found):
        if not isinstance(text, str):
            hinted = hint if isinstance(text, Message | Mapping) else ""
            raise TypeError(f"{name}[{index}]: expected a string, not {shown(text)}{hinted}")
    return found


def conversations_of(given: str | Conversation | Sequence[str | Conversation]) -> list[tuple[Any, ...]]:
    """The conversations, each a tuple of messages or dicts (`TypeError`) whose roles are not misspelt (`BadRequest`).
    A string is one message of the user's. What else is in a dict is looked at later.
    """
    expected = "expected a string, or a list of messages, each a Message or a dict of role and content"
    if isinstance(given, bytes | Mapping | Message) or not isinstance(given, Iterable):
        raise TypeError(f"conversations: {expected}, not {shown(given)}")
    every: Any = [given] if isinstance(given, str) else list(given)
    if every and isinstance(every[0], Message | Mapping):
        every = [every]
    found = []
    for index, conversation in enumerate(every):
        if isinstance(conversation, bytes | Mapping | Message) or not isinstance(conversation, Iterable):
            raise TypeError(f"conversations[{index}]: {expected}, not {shown(conversation)}")
        messages = (Message("user", conversation),) if isinstance(conversation, str) else tuple(conversation)
        for place, message in enumerate(messages):
            if not isinstance(message, Message | Mapping):
                raise TypeError(f"conversations[{index}][{place}]: {expected}, not {shown(message)}")
            if why := _misspelt(message):
                raise BadRequest.at(f"conversations[{index}][{place}].role", why)
        found.append(messages)
    return found


def shown(value: Any) -> str:
    """A value as a `TypeError` quotes it: in Python's words."""
    return repr(value) if value is None or isinstance(value, bool) else show(value)


def row_fields(row: Any, index: int, for_chat: Mapping[str, Any]) -> dict[str, Any]:
    """A request's fields for one row of many; `for_chat` are those of conversations.

    Raises `TypeError` for what is neither a prompt nor a conversation. What is in its dicts is looked at later.
    """
    if isinstance(row, str):
        return {"prompt": row}
    if isinstance(row, bytes | Mapping | Message) or not isinstance(row, Iterable):
        raise TypeError(f"rows[{index}]: expected a string, or a list of messages, not {shown(row)}")
    return {"messages": row, **for_chat}


def prompt_fields(prompt: str | Conversation) -> dict[str, Any]:
    """A request's field for one prompt or one conversation. `TypeError` for neither, `BadRequest` for a wrong one."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, bytes | Mapping | Message) or not isinstance(prompt, Iterable):
        raise TypeError(f"prompt: expected a string, or a list of messages, not {shown(prompt)}")
    ((*messages,),) = conversations_of([tuple(prompt)])
    return {"messages": make_request(lambda: tuple(map(message_of, messages)))}


def make_request(make: Callable[..., T], **fields: Any) -> T:
    """What `make` makes, its `ValueError` as `BadRequest`: what the engine would call it."""
    try:
        return make(**fields)
    except ValueError as error:
        raise BadRequest.of(error) from None


def message_of(given: Message | Mapping[str, Any]) -> Message:
    """A turn of a conversation, of a dict in OpenAI's form too. Raises `ValueError` for what is none: one bad
    conversation must not cost the others.
    """
    if why := _misspelt(given):
        raise ValueError(f"messages: role: {why}")
    if isinstance(given, Message):
        return given
    if not isinstance(given, Mapping) or not {"role", "content"} <= given.keys() <= _MESSAGE_FIELDS:
        expected = "expected a Message, or a dict of role and content, and perhaps tool_calls, tool_call_id, name"
        raise ValueError(f"messages: {expected}, not {shown(given)}")
    calls = given.get("tool_calls") or ()
    if not isinstance(calls, list | tuple):
        raise ValueError(f"messages: tool_calls: expected a list of calls, not {shown(calls)}")  # noqa: TRY004
    content = "" if calls and given["content"] is None else given["content"]
    media: tuple[Media, ...] = ()
    if isinstance(content, list | tuple):
        content, media = _parts_of(content)
    return Message(**{"media": media, **given, "content": content, "tool_calls": tuple(map(_call_of, calls))})


def _misspelt(given: Message | Mapping[str, Any]) -> str:
    """Why the role of a message is none; empty where it is one, or a template can have it."""
    role = given.role if isinstance(given, Message) else given.get("role") if isinstance(given, Mapping) else None
    if isinstance(role, str) and role not in ROLES and (near := nearest(role, ROLES)):
        return f"{role!r} is no role{near}"
    return ""


def _parts_of(parts: Sequence[Any]) -> tuple[str, tuple[Media, ...]]:
    """A content of several parts: of type `text` with a text, `image` with a path, bytes or a picture of Pillow's, or
    `audio` with a path or bytes; and OpenAI's `image_url`, where that has the file itself.
    """
    found: list[str | Media] = []
    for index, part in enumerate(parts):
        if isinstance(part, Mapping) and part.get("type") == "image_url":
            found.append(_of_url(part.get("image_url"), f"messages: content[{index}].image_url"))
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        value = part.get(kind) if isinstance(part, Mapping) and kind in ("text", "image", "audio") else None
        if kind == "text" and isinstance(value, str):
            found.append(value)
        elif kind in ("image", "audio") and isinstance(value, bytes | bytearray):
            found.append(_media(bytes(value)))
        elif kind in ("image", "audio") and isinstance(value, str | PathLike):
            found.append(_media(_file(value, f"messages: content[{index}].{kind}")))
        elif kind == "image" and callable(getattr(value, "convert", None)) and callable(getattr(value, "save", None)):
            found.append(_media(_png(value, f"messages: content[{index}].{kind}")))
        else:
            expected = (
                "expected a part of type text with text, image with a path, bytes or a PIL.Image, "
                "or audio with a path or bytes"
            )
            raise ValueError(f"messages: content[{index}]: {expected}, not {shown(part)}")
    return joined(found)


def _of_url(given: Any, where: str) -> Media:
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str) or not url.startswith("data:") or ";base64," not in url:
        what = "expected a data URL in base64; nothing is fetched here, so give a path or bytes as type image"
        raise ValueError(f"{where}: {what}, not {shown(url)}")
    return Media(url.partition(";base64,")[2])


def _png(image: Any, where: str) -> bytes:
    """The file of a picture of Pillow's, which is not imported here."""
    file = BytesIO()
    try:
        image.convert("RGB").save(file, "PNG", compress_level=1)
    except (OSError, TypeError) as error:  # a file that is read only now, and is broken; another library's object
        raise ValueError(f"{where}: {error}") from None
    return file.getvalue()


def _media(data: bytes) -> Media:
    return Media(base64.b64encode(data).decode())


def _file(path: str | PathLike[str], where: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except (OSError, ValueError) as error:
        raise ValueError(f"{where}: {getattr(error, 'strerror', None) or error}: {fspath(path)}") from None


_MESSAGE_FIELDS = {field.name for field in attrs.fields(Message)}


def _call_of(given: Any) -> ToolCall:
    if isinstance(given, ToolCall):
        return given
    inner = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(inner, Mapping) or not {"name", "arguments"} <= inner.keys() or "id" not in given:
        raise ValueError(
            f"messages: tool_calls: expected a ToolCall, or a dict of an id and a function's name and arguments, "
            f"not {shown(given)}"
        )
    return ToolCall(given["id"], inner["name"], inner["arguments"])


def tool_fields(
    tools: Iterable[Tool | Mapping[str, Any]], choice: Choice, reasoning: ReasoningMode | None, *, is_parallel: bool
) -> dict[str, Any]:
    """The fields of a `Request` for tools and thinking. Raises `TypeError`."""
    if isinstance(choice, Mapping):  # as OpenAI has a function by name
        inner = choice.get("function", choice)
        choice = inner.get("name") if choice.get("type") == "function" and isinstance(inner, Mapping) else None  # type: ignore[assignment]
    if not isinstance(choice, str):
        what = "expected auto, none, required, a tool's name, or OpenAI's dict of a function by name"
        raise TypeError(f"tool_choice: {what}")
    return {
        "tools": tuple(tool_of(tool, f"tools[{index}]") for index, tool in enumerate(tools)),
        "tool_choice": choice,
        "parallel_tool_calls": is_parallel,
        "reasoning": reasoning,
    }


def tool_of(given: Tool | Mapping[str, Any], where: str) -> Tool:
    """A tool as given, or of a dict in OpenAI's form. Raises `TypeError` that begins with `where`."""
    if isinstance(given, Tool):
        return given
    inner = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(inner, Mapping) or "name" not in inner:
        raise TypeError(f"{where}: expected a Tool, or a dict with a function's name, not {shown(given)}")
    return Tool(inner["name"], inner.get("description") or "", inner.get("parameters"), bool(inner.get("strict")))
