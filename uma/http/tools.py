"""Tools, their calls and results: from the dialects' words to UMA's.

OpenAI's and Ollama's bodies describe a tool in the same way; a dialect with another form makes `Function`s of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import attrs

from uma import json_text
from uma.chat.partial_json import whole_members
from uma.constraints import Json, Length, Text, show
from uma.errors import BadRequest
from uma.http.ignored import Ignored
from uma.http.problem import Unsupported
from uma.types import MAX_TOOLS, Capabilities, Message, Tool, ToolCall
from uma.types.fields import MAX_MEMBERS

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much a model is asked to think. `none`: not at all. A template gets the nearest value that it knows."""
MAX_NAME = 128
"""Maximum characters of a tool's name."""
Name = Annotated[str, Length(1, MAX_NAME), Text()]
Schema = Annotated[dict[str, Any], Json(le=65_536, members=MAX_MEMBERS)]


@attrs.frozen(kw_only=True)
class Function:
    """A tool's description."""

    name: Name
    description: Annotated[str, Text()] | None = None
    parameters: Schema | None = None
    strict: bool | None = None
    """A schema that no grammar can keep to in full is refused; else what stands in the way is named and left out, where
    the model chooses."""

    @property
    def tool(self) -> Tool:
        """Tool in UMA's words."""
        return Tool(self.name, self.description or "", self.parameters, bool(self.strict))


@attrs.frozen(kw_only=True)
class FunctionTool:
    """An entry of `tools`: `{"type": "function", "function": {…}}`."""

    function: Function
    type: Literal["function"] = "function"


Tools = Annotated[tuple[FunctionTool, ...], Length(0, MAX_TOOLS, "tools")]


@attrs.frozen(kw_only=True)
class CalledFunction:
    """Name and arguments of the function that a message's call names."""

    name: Name
    arguments: Annotated[str, Text()] = "{}"


@attrs.frozen(kw_only=True)
class Call:
    """An entry of a message's `tool_calls`."""

    id: Name
    function: CalledFunction
    type: Literal["function"] = "function"


Calls = Annotated[tuple[Call, ...], Length(0, 128, "calls")]


def past_call(id: str, name: str, arguments: str, path: str, ignored: Ignored) -> ToolCall:
    """A call of an earlier answer, whose function the body has at `path`.

    Where they are no JSON object, as those of a call that was cut off, the members that are whole are kept: templates
    take no others. The field is named among the ignored ones then.
    """
    given = arguments.strip() or "{}"
    try:
        is_object = isinstance(json_text.loads(given), dict)
    except (ValueError, RecursionError):
        is_object = False
    if is_object:
        return ToolCall(id, name, given)
    ignored.add(f"{path}.arguments")
    return ToolCall(id, name, whole_members(given) if given.startswith("{") else "{}")


def tool_fields(tools: Sequence[Tool], choice: str, able: Capabilities, *, is_parallel: bool | None) -> dict[str, Any]:
    """The fields of a `Request` that offers these tools. Raises `Unsupported` where the model's calls are not known."""
    if not tools:
        if choice not in ("auto", "none"):
            raise BadRequest.at("tool_choice", f"{choice!r}, but there are no tools")
        return {}
    if choice == "none" and not able.tools:
        return {}  # none can be called, and no model is shown tools that it must not call
    wanted = choice if choice in ("auto", "none", "required") else "named"
    check_calls(able, "tools")
    if wanted not in able.tools:
        raise Unsupported.at("tool_choice", f"this server can do {', '.join(able.tools)}")
    return {"tools": tuple(tools), "tool_choice": choice, "parallel_tool_calls": is_parallel is not False}


def distinct(tools: Sequence[Tool]) -> list[int]:
    """Places of the tools; of those with one name and one schema the last alone: lists of several sources have such."""
    last = {(tool.name, json_text.dumps(tool.parameters, sort_keys=True)): place for place, tool in enumerate(tools)}
    return sorted(last.values())


def name_schemas(names: dict[str, str], places: Iterable[int], field: str) -> None:
    """Note under which name the tools that stand at these places of the body have their schema, for errors about it."""
    names |= {f"tools[{index}].parameters": f"tools[{place}].{field}" for index, place in enumerate(places)}


def check_calls(able: Capabilities, field: str) -> None:
    """Raise `Unsupported` where tools, or calls among messages, would be ignored."""
    if not able.tools:
        raise Unsupported.at(field, "the calls of this model cannot be told from its text; leave it out")


def openai_choice(value: Any, tools: Sequence[Tool]) -> tuple[list[int], str]:
    """OpenAI's `tool_choice`: the places of the tools that it leaves, and a word or the name of one of them.

    It is a word, a function by name, or `allowed_tools`: a word, and some of the tools by name. What is named stands
    flat or in an object of its own.
    """
    every = distinct(tools)
    if value is None:
        return every, "auto"
    if value in ("auto", "none", "required") and isinstance(value, str):
        return every, str(value)
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        return _allowed(value.get("allowed_tools", value), {tools[at].name: at for at in every})
    if (name := _function_name(value)) is not None:
        return every, named_choice(name)
    raise BadRequest.at(
        "tool_choice", f"expected auto, none, required, a function by name or allowed_tools, not {show(value)}"
    )


def _function_name(value: Any) -> str | None:
    if not isinstance(value, dict) or value.get("type") not in ("function", "custom"):
        return None
    inner = value.get(value["type"], value)
    if not isinstance(inner, dict):
        return None
    name, namespace = inner.get("name"), inner.get("namespace")
    if not isinstance(name, str) or not isinstance(namespace, str | None):
        return None
    name = full_name(name, namespace)
    return name if 1 <= len(name) <= MAX_NAME else None


def full_name(name: str, namespace: str | None) -> str:
    """The name of a function in a namespace, as the model reads it."""
    return name if namespace is None else f"{namespace}__{name}"


def _allowed(value: Any, places: Mapping[str, int]) -> tuple[list[int], str]:
    mode, listed = (value.get("mode"), value.get("tools")) if isinstance(value, dict) else (None, None)
    if mode not in ("auto", "required"):
        raise BadRequest.at("tool_choice", f"allowed_tools.mode: expected auto or required, not {show(mode)}")
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_TOOLS:
        raise BadRequest.at(
            "tool_choice", f"allowed_tools.tools: expected 1 to {MAX_TOOLS} functions by name, not {show(listed)}"
        )
    wanted = set()
    for index, each in enumerate(listed):
        if (name := _function_name(each)) is None:
            raise BadRequest.at(
                "tool_choice", f"allowed_tools.tools[{index}]: expected a function by name, not {show(each)}"
            )
        if name not in places:
            raise BadRequest.at("tool_choice", f"allowed_tools.tools[{index}]: no tool is called {name!r}")
        wanted.add(name)
    return [place for name, place in places.items() if name in wanted], mode


def named_choice(name: str) -> str:
    """The choice of the tool of this name. Raises `BadRequest` for a word of `tool_choice`: no tool is called so."""
    if name in ("auto", "none", "required"):
        raise BadRequest.at("tool_choice", f"no tool is called {name!r}")
    return name


def legacy(value: Any, field: str) -> None:
    """`functions` and `function_call`, which `tools` have replaced."""
    if value and value not in ("none", "auto"):
        raise Unsupported.at(field, "give tools and tool_choice, which have taken its place")


def with_names(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The conversation, in which each result names its tool, by the calls before it."""
    names: dict[str, str] = {}
    named = []
    for message in messages:
        names |= {call.id: call.name for call in message.tool_calls}
        if message.role == "tool" and message.name is None and message.tool_call_id in names:
            named.append(attrs.evolve(message, name=names[message.tool_call_id]))
        else:
            named.append(message)
    return tuple(named)
