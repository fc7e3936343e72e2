"""What `LLM`'s methods were given, checked: `WrongKind` at the call for what is of another kind."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from inspect import getdoc, isfunction, ismethod, signature
from io import BytesIO
from itertools import repeat
from numbers import Integral
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeVar

import attrs
import numpy as np

from uma import json_text
from uma.config import LOG, SERVER_ONLY, RuntimeConfig
from uma.constraints import show
from uma.errors import BadRequest, UmaError, WrongKind, WrongValues
from uma.schema_of import parameters_of
from uma.types import (
    GRAMMAR_FIELDS,
    DecisionQuestion,
    DecisionRequest,
    Media,
    Message,
    ReasoningMode,
    RerankRequest,
    SamplingParams,
    Tool,
    ToolCall,
    joined,
)
from uma.wrong import OTHERS, Wrong, below, nearest

T = TypeVar("T")
Prompt = str | Sequence[int]
"""A text that is continued, or its token ids."""
Conversation = Sequence[Message | Mapping[str, Any]]
Sampling = SamplingParams | Mapping[str, Any]
"""Sampling parameters, or a dict of their fields."""
GivenTool = Tool | Mapping[str, Any] | Callable[..., Any]
"""A tool: a Python function, a `Tool`, or a dict as OpenAI has it."""
Choice = str | Mapping[str, Any] | Callable[..., Any]
"""A `Request`'s `tool_choice`, one of the functions in `tools`, or OpenAI's dict of a function by name."""


PROMPT = "expected a string or a list of token ids"
BYTES = bytes | bytearray | memoryview
"""Sequences of integers that are neither token ids nor a list of anything."""
SAMPLING_NAMES = (*(field.name for field in attrs.fields(SamplingParams)), *GRAMMAR_FIELDS)
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that every chat has. Templates have others of their own, so only what is nearly one of these is refused."""
CALL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls", "reasoning")
"""Fields of a request that are given once for all conversations, beside sampling parameters."""
NO_KEYWORDS = SERVER_ONLY | LOG
"""Settings that an `LLM` has no use for: it serves no other program, and logs as Python's `logging` is set up."""
EMBED_FIELDS = ("dimensions", "normalize", "fail_on_empty")
DECISION_FIELDS = tuple(field.name for field in attrs.fields(DecisionRequest)[3:])
"""Fields of a `DecisionRequest` but its id, state and questions."""
KEYWORDS = tuple(field.name for field in attrs.fields(RuntimeConfig) if field.name not in NO_KEYWORDS)
"""Settings of an `LLM`."""


HINTS = {
    **dict.fromkeys(NO_KEYWORDS, "it is a setting of a server (`uma run`), which LLM is not"),
    "base_url": "socket is a server's Unix socket; a server's URL is for a client of OpenAI's API, such as `openai`",
    "verbose": "what UMA logs is Python's `logging` to show",
    "stream": "llm.stream gives an answer piece by piece",
    "timeout": "each call has it: llm.generate(…, timeout=30)",
    "use_tqdm": "llm.generate and llm.chat have progress=False",
    "gpu_memory_utilization": "n_gpu_layers and n_ctx say what is taken of a GPU's memory",
    "tensor_parallel_size": "a model is divided among all GPUs",
}
"""What to do in the place of a keyword that is not here, where another keyword does not say it."""


def config_of(model: str, given: Mapping[str, Any]) -> RuntimeConfig:
    """The configuration of these keywords. Raises `ConfigError` for a wrong value."""
    given = {name: fspath(value) if isinstance(value, PathLike) else value for name, value in given.items()}
    return RuntimeConfig(model=model, **given)


def params_for(number: int, given: Sampling | Sequence[Sampling] | None) -> Iterable[SamplingParams]:
    """Sampling parameters for each prompt. Raises `WrongKind`, or `WrongValues` where their number is not `number`."""
    if given is None or isinstance(given, SamplingParams | Mapping):
        return repeat(sampling_of(given, "sampling_params"), number)
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise WrongKind(
            f"sampling_params: expected SamplingParams, a dict of its fields, or a list, not {shown(given)}"
        )
    if len(given) != number:
        raise WrongValues(f"sampling_params: {len(given)} came for {number} prompts; give one for all, or one for each")
    return [sampling_of(params, f"sampling_params[{index}]") for index, params in enumerate(given)]


def sampling_of(given: Sampling | None, where: str) -> SamplingParams:
    """`SamplingParams` as given, or of a dict of its fields. Raises `WrongKind` that begins with `where`."""
    if given is None or isinstance(given, SamplingParams):
        return given or SamplingParams()
    if not isinstance(given, Mapping):
        raise WrongKind(f"{where}: expected SamplingParams or a dict of its fields, not {shown(given)}")
    for name in given:
        if name not in SAMPLING_NAMES:
            raise WrongKind(f"{where}: {shown(name)} is no field of SamplingParams{nearest(str(name), SAMPLING_NAMES)}")
    return SamplingParams(**given)


def check_keywords(unknown: Iterable[str], method: Callable[..., Any], known: Sequence[str] = ()) -> None:
    """Raise `WrongKind` for keywords that a method has not, with the nearest that it has (these are `known`, too); of
    those of `SamplingParams` it says where they belong.
    """
    own = (*signature(method).parameters, *known)
    every = (*own, *SAMPLING_NAMES) if "sampling_params" in own else own
    for name in unknown:
        own_name = OTHERS.get(name)
        near = [own_name] if own_name in every else [] if name in HINTS else get_close_matches(name, every, n=1)
        hint = f"; {HINTS[name]}" if name in HINTS and not near else nearest(name, near)
        if near and near[0] in SAMPLING_NAMES and near[0] not in own:
            hint = f"; give sampling_params=SamplingParams({near[0]}=…), or a dict"
        raise WrongKind(f"LLM.{method.__name__}() got an unexpected keyword argument {name!r}{hint}")


def is_fault_of_call(error: UmaError, *, own_sampling: bool) -> bool:
    """Whether an error of one prompt of many is about what was given for all: tools, or with `own_sampling` of each
    prompt nothing else, and otherwise sampling parameters, too.
    """
    shared = CALL_FIELDS if own_sampling else (*CALL_FIELDS, *SAMPLING_NAMES)
    lines = error.lines if isinstance(error, BadRequest) else ()
    return any(isinstance(line, Wrong) and re.split(r"[.\[]", line.field)[0] in shared for line in lines)


def state_of(given: str | Conversation | Mapping[str, Any]) -> tuple[Message, ...]:
    """The state of decisions as messages: a conversation as it is, a text or anything else as one of the user's."""
    if isinstance(given, str):
        return (Message("user", given),)
    turns = given if isinstance(given, Sequence) else ()
    if turns and all(isinstance(turn, Message) or (isinstance(turn, Mapping) and "role" in turn) for turn in turns):
        messages: tuple[Message, ...] = prompt_fields(turns)["messages"]
        return messages
    try:
        return (Message("user", json_text.dumps(given, separators=(",", ":"))),)
    except TypeError as error:
        raise WrongKind(f"state: expected a text, a conversation, or what JSON has, not {shown(given)}") from error


def questions_of(given: str | DecisionQuestion | Iterable[str | DecisionQuestion]) -> list[DecisionQuestion]:
    """Questions as given; a string asks for yes or no. Raises `WrongKind` for what is none."""
    expected = "expected a string, which asks for yes or no, or a DecisionQuestion"
    every = listed(given, "questions", f"{expected}, or a list of these", str | DecisionQuestion)
    for index, question in enumerate(every):
        if not isinstance(question, str | DecisionQuestion):
            hint = 'DecisionQuestion.choice("Which?", ["a", "b"]) makes one'
            raise WrongKind(f"questions[{index}]: {expected}, not {shown(question)}; {hint}")
    return [DecisionQuestion.predicate(text) if isinstance(text, str) else text for text in every]


def texts_of(given: str | Iterable[str], name: str) -> list[str]:
    """The texts, each of them a string (`WrongKind`)."""
    found = listed(given, name, "expected a string or a list of strings", str)
    for index, text in enumerate(found):
        if not isinstance(text, str):
            raise WrongKind(f"{name}[{index}]: expected a string, not {shown(text)}")
    return found


def conversations_of(
    given: str | Conversation | Sequence[str | Conversation], *, is_one: bool = False
) -> tuple[list[tuple[Any, ...]], bool]:
    """The conversations, each a tuple of messages or dicts (`WrongKind`), and whether it is one alone, not in a list
    (an empty list has none, unless it `is_one`). A string is one message of the user's. What is in a dict is looked at
    later.
    """
    expected = "expected a string, or a list of messages, each a Message or a dict of role and content"
    every, is_alone = listed(given, "conversations", expected, str), isinstance(given, str)
    if isinstance(every[0], Message | Mapping) if every else is_one:
        every, is_alone = [every], True
    found = []
    for index, conversation in enumerate(every):
        where = "messages" if is_alone else f"conversations[{index}]"
        is_text = isinstance(conversation, str)
        messages = (Message("user", conversation),) if is_text else tuple(listed(conversation, where, expected))
        for place, message in enumerate(messages):
            if not isinstance(message, Message | Mapping):
                raise WrongKind(f"{where}[{place}]: {expected}, not {shown(message)}")
        found.append(messages)
    return found, is_alone


def rerank_request(query: str, documents: Iterable[str], top_n: int | None) -> RerankRequest:
    """The request for a ranking. Raises `WrongKind` and `BadRequest`."""
    texts = texts_of(documents, "documents")
    return RerankRequest(id="rerank", query=query, documents=texts, top_n=top_n)


def listed(given: Any, where: str, expected: str, one: Any = ()) -> list[Any]:
    """The items of a list; of a single one, which is of these classes, it alone. Raises `WrongKind` for neither."""
    if isinstance(given, one):
        return [given]
    if isinstance(given, str | BYTES | Mapping | Message) or not isinstance(given, Iterable):
        raise WrongKind(f"{where}: {expected}, not {shown(given)}")
    return list(given)


def shown(value: Any) -> str:
    """A value as a `WrongKind` quotes it: in Python's words."""
    return repr(value) if value is None or isinstance(value, bool) else show(value)


def row_fields(row: Any, index: int, for_chat: Mapping[str, Any]) -> dict[str, Any]:
    """A request's fields for one row of many; `for_chat` are those of conversations.

    Raises `WrongKind` for what is neither a prompt nor a conversation. What is in its dicts is looked at later.
    """
    if (fields := given_prompt(row)) is not None:
        return fields
    return {"messages": listed(row, f"rows[{index}]", f"{PROMPT}, or a list of messages"), **for_chat}


def given_prompt(given: Any) -> dict[str, Any] | None:
    """A request's field for one prompt, a text or a list of token ids; None for what is neither."""
    if isinstance(given, str):
        return {"prompt": given}
    is_list = isinstance(given, Sequence | np.ndarray) and not isinstance(given, BYTES)
    if not is_list or not len(given) or not _is_integer(given[0]):
        return None
    return {"token_ids": tuple(int(id) if _is_integer(id) else id for id in given)}


def _is_integer(value: Any) -> bool:
    """Whether a value can be a token's id: numpy's integers too, and no boolean."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def prompts_of(given: Any) -> tuple[list[tuple[Any, dict[str, Any]]], bool]:
    """The prompts, each with its field (`WrongKind`), and whether it is one alone, not in a list."""
    is_alone, found = given_prompt(given) is not None, []
    for index, prompt in enumerate([given] if is_alone else listed(given, "prompts", f"{PROMPT}, or a list of these")):
        if (fields := given_prompt(prompt)) is None:
            hint = "; llm.chat takes conversations" if isinstance(prompt, Message | Mapping) else ""
            raise WrongKind(f"prompts[{index}]: {PROMPT}, not {shown(prompt)}{hint}")
        found.append((next(iter(fields.values())), fields))
    return found, is_alone


def prompt_fields(prompt: Prompt | Conversation) -> dict[str, Any]:
    """A request's field for one prompt or one conversation. `WrongKind` for neither, `BadRequest` for a wrong one."""
    if (fields := given_prompt(prompt)) is not None:
        return fields
    messages = listed(prompt, "prompt", f"{PROMPT}, or a list of messages")
    return {"messages": messages_of(messages)}


def messages_of(given: Iterable[Message | Mapping[str, Any]]) -> tuple[Message, ...]:
    """A conversation, of dicts in OpenAI's form too. Raises `WrongValues` for what is none, with the message's index:
    one bad conversation must not cost the others.
    """
    found = []
    for index, message in enumerate(given):
        try:
            found.append(_message_of(message))
        except WrongValues as error:
            raise WrongValues(*below(f"messages[{index}]", error.lines)) from None
    return tuple(found)


def _message_of(given: Message | Mapping[str, Any]) -> Message:
    role = given.role if isinstance(given, Message) else given.get("role") if isinstance(given, Mapping) else None
    if isinstance(role, str) and role not in ROLES and (near := nearest(role, ROLES)):
        raise WrongValues(Wrong("role", f"{role!r} is no role{near}"))
    if isinstance(given, Message):
        return given
    if not isinstance(given, Mapping):
        raise WrongValues(Wrong("", f"expected a Message, or a dict of role and content, not {shown(given)}"))
    for name in given:
        if name not in _MESSAGE_FIELDS:
            raise WrongValues(Wrong(_key(name), f"no field of a message{nearest(str(name), _MESSAGE_FIELDS)}"))
    calls = given.get("tool_calls") or ()
    if not isinstance(calls, list | tuple):
        raise WrongValues(Wrong("tool_calls", f"expected a list of calls, not {shown(calls)}"))
    for name in ("role", "content"):
        if name not in given and not (calls and name == "content"):
            raise WrongValues(Wrong(name, "this message has none; give it role and content"))
    content = "" if calls and given.get("content") is None else given["content"]
    media: tuple[Media, ...] = ()
    if isinstance(content, list | tuple):
        content, media = _parts_of(content)
    return Message(**{"media": media, **given, "content": content, "tool_calls": tuple(map(_call_of, calls))})


def _key(name: Any) -> str:
    """A key of a dict as the path of an error has it: one that is no word is quoted."""
    return name if isinstance(name, str) and name.isprintable() and len(name) <= MAX_KEY_CHARS else f"[{shown(name)}]"


def _parts_of(parts: Sequence[Any]) -> tuple[str, tuple[Media, ...]]:
    """A content of several parts: of type `text` with a text, `image` with a path, bytes or a picture of Pillow's, or
    `audio` with a path or bytes; and OpenAI's `image_url`, where that has the file itself.
    """
    found: list[str | Media] = []
    for index, part in enumerate(parts):
        if isinstance(part, Mapping) and part.get("type") == "image_url":
            found.append(_of_url(part.get("image_url"), f"content[{index}].image_url"))
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        value = part.get(kind) if isinstance(part, Mapping) and kind in ("text", "image", "audio") else None
        if kind == "text" and isinstance(value, str):
            found.append(value)
        elif kind in ("image", "audio") and isinstance(value, bytes | bytearray):
            found.append(_media(bytes(value)))
        elif kind in ("image", "audio") and isinstance(value, str | PathLike):
            found.append(_media(_file(value, f"content[{index}].{kind}")))
        elif kind == "image" and callable(getattr(value, "convert", None)) and callable(getattr(value, "save", None)):
            found.append(_media(_png(value, f"content[{index}].{kind}")))
        else:
            expected = (
                "expected a part of type text with text, image with a path, bytes or a PIL.Image, "
                "or audio with a path or bytes"
            )
            raise WrongValues(Wrong(f"content[{index}]", f"{expected}, not {shown(part)}"))
    return joined(found)


def _of_url(given: Any, where: str) -> Media:
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str) or not url.startswith("data:") or ";base64," not in url:
        what = "expected a data URL in base64; nothing is fetched here, so give a path or bytes as type image"
        raise WrongValues(Wrong(where, f"{what}, not {shown(url)}"))
    return Media(url.partition(";base64,")[2])


def _png(image: Any, where: str) -> bytes:
    """The file of a picture of Pillow's, which is not imported here."""
    file = BytesIO()
    try:
        image.convert("RGB").save(file, "PNG", compress_level=1)
    except (OSError, TypeError) as error:  # a file that is read only now, and is broken; another library's object
        raise WrongValues(Wrong(where, str(error))) from None
    return file.getvalue()


def _media(data: bytes) -> Media:
    return Media(base64.b64encode(data).decode())


def _file(path: str | PathLike[str], where: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except (OSError, ValueError) as error:
        raise WrongValues(Wrong(where, f"{getattr(error, 'strerror', None) or error}: {fspath(path)}")) from None


_MESSAGE_FIELDS = {field.name for field in attrs.fields(Message)}
_TOOL_FIELDS = ("type", "function", *(field.name for field in attrs.fields(Tool)))
MAX_KEY_CHARS = 60
"""Maximum length of a key that an error names as it is."""


def _call_of(given: Any) -> ToolCall:
    if isinstance(given, ToolCall):
        return given
    inner = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(inner, Mapping) or not {"name", "arguments"} <= inner.keys() or "id" not in given:
        what = "expected a ToolCall, or a dict of an id and a function's name and arguments"
        raise WrongValues(Wrong("tool_calls", f"{what}, not {shown(given)}"))
    return ToolCall(given["id"], inner["name"], inner["arguments"])


def tool_fields(
    tools: Iterable[GivenTool], choice: Choice, reasoning: ReasoningMode | None, *, is_parallel: bool
) -> dict[str, Any]:
    """The fields of a `Request` for tools and thinking. Raises `WrongKind`."""
    if isinstance(choice, Mapping):  # as OpenAI has a function by name
        inner = choice.get("function", choice)
        choice = inner.get("name") if choice.get("type") == "function" and isinstance(inner, Mapping) else None  # type: ignore[assignment]
    choice = getattr(choice, "__name__", choice)  # a function, as `tools` has it
    if not isinstance(choice, str):
        what = "expected auto, none, required, a tool's name, or OpenAI's dict of a function by name"
        raise WrongKind(f"tool_choice: {what}")
    every = listed(tools, "tools", "expected a list of functions, of Tools, or of dicts as OpenAI has them")
    return {
        "tools": tuple(tool_of(tool, f"tools[{index}]") for index, tool in enumerate(every)),
        "tool_choice": choice,
        "parallel_tool_calls": is_parallel,
        "reasoning": reasoning,
    }


def tool_of(given: GivenTool, where: str) -> Tool:
    """A tool as given, of a Python function, or of a dict in OpenAI's form. Raises `WrongKind`, and `BadRequest` for
    what is wrong in a dict, both about `where`.
    """
    if isinstance(given, Tool):
        return given
    if isfunction(given) or ismethod(given):
        if given.__name__ == "<lambda>":
            raise WrongKind(f"{where}: a lambda has no name to call it by; write the function with def, or give a Tool")
        return Tool(given.__name__, getdoc(given) or "", parameters_of(given))
    inner = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(inner, Mapping):
        raise WrongKind(f"{where}: expected a function, a Tool, or a dict with a function's name, not {shown(given)}")
    if "name" not in inner:
        near = next(filter(None, (nearest(str(name), ("name", "function")) for name in inner)), "")
        raise BadRequest.at(where, f"expected a Tool, or a dict with a function's name, not {shown(given)}{near}")
    for name in (name for name in inner if name not in _TOOL_FIELDS):
        raise BadRequest.at(f"{where}.{_key(name)}", f"no field of a tool{nearest(str(name), _TOOL_FIELDS)}")
    try:
        return Tool(inner["name"], inner.get("description") or "", inner.get("parameters"), bool(inner.get("strict")))
    except WrongValues as error:
        raise BadRequest(*below(where, error.lines)) from None
