"""Tools of OpenAI's Responses API: functions, custom tools, and namespaces of both, as functions that a model calls.

Templates and grammars know functions alone. So a custom tool, whose input is a text, is a function of one string, whose
grammar is that string's `pattern`; a function in a namespace has a name that says both, and the first one tells what is
said of the namespace. `Offered` leads from the name that the model calls back to what the client calls it. Tools that
run at OpenAI's are left out, and named as ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import attrs

from uma import json_text
from uma.chat.lark_pattern import NoPatternError, pattern_of
from uma.chat.partial_json import whole_members
from uma.constraints import Length, Text, show
from uma.errors import BadRequest
from uma.http.ignored import Ignored
from uma.http.reader import Reader
from uma.http.tools import MAX_NAME, Function, Name, full_name
from uma.types import MAX_TOOLS, Tool

INPUT = "input"
"""The one argument of a custom tool, as a function."""
_PATTERN = f"properties.{INPUT}.pattern"
"""Where the schema of such a function has the tool's grammar."""


@attrs.frozen(kw_only=True)
class FunctionBody(Function):
    """A function, described in the entry itself."""

    type: str = "function"


@attrs.frozen(kw_only=True)
class CustomBody:
    """A custom tool; `format` is free text or a grammar of it."""

    name: Name
    type: str = "custom"
    description: Annotated[str, Text()] | None = None
    format: dict[str, Any] | None = None

    def tool(self, name: str, path: str, ignored: Ignored) -> Tool:
        """The tool as a function called `name`. Its grammar is named as ignored where it is no regular expression."""
        about = [self.description] if self.description else []
        text = {"type": "string"}
        form = self.format or {}
        if form.get("type") == "grammar":
            syntax, definition = form.get("syntax"), form.get("definition")
            try:
                text["pattern"] = _pattern(syntax, definition)
            except NoPatternError:
                ignored.add(f"{path}.format")
            if "pattern" not in text or syntax == "lark":  # a model has read more of Lark than of what is made of it
                about += [f"{INPUT} must follow this {syntax} grammar:\n{definition}"] if definition else []
        schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
        return Tool(name, "\n\n".join(about), schema)


def _pattern(syntax: Any, definition: Any) -> str:
    """The texts that a grammar allows, as a regular expression. Raises `NoPatternError` where there is none."""
    if not isinstance(definition, str):
        raise NoPatternError("a definition is a text")
    if syntax == "regex":
        return f"^(?:{definition})$"
    if syntax == "lark":
        return pattern_of(definition)
    raise NoPatternError("known are lark and regex")


@attrs.frozen(kw_only=True)
class NamespaceBody:
    """Functions and custom tools whose names are those of one namespace."""

    name: Name
    tools: Annotated[tuple[Any, ...], Length(0, MAX_TOOLS, "tools")]
    type: str = "namespace"
    description: Annotated[str, Text()] | None = None


@attrs.frozen
class Called:
    """What the client calls a tool."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@attrs.frozen
class Offered:
    """The tools of a request."""

    tools: Sequence[Tool] = ()
    paths: Sequence[str] = ()
    """Where each stands in the body."""
    by_name: Mapping[str, Called] = attrs.field(factory=dict)
    """Tools by the name that the model calls."""

    def called(self, name: str) -> Called:
        """What the client calls the tool that the model calls `name`."""
        return self.by_name.get(name) or Called(name)

    def name_schemas(self, names: dict[str, str], places: Iterable[int]) -> None:
        """Note where the tools at these places have their schema in the body, for errors about it."""
        for at, place in enumerate(places):
            path, is_custom = self.paths[place], self.called(self.tools[place].name).is_custom
            own = (f".{_PATTERN}", f"{path}.format") if is_custom else ("", f"{path}.parameters")
            names[f"tools[{at}].parameters{own[0]}"] = own[1]


def offered(bodies: Sequence[Any], reader: Reader) -> Offered:
    """The tools of a body. Those that run at OpenAI's are named as ignored. Raises `BadRequest` for what is no tool."""
    found = list(_tools(bodies, "tools", None, reader))
    if len(found) > MAX_TOOLS:
        raise BadRequest.at("tools", f"{len(found)} functions, those in namespaces counted, are more than {MAX_TOOLS}")
    by_name = {tool.name: called for _, called, tool in found}
    return Offered([tool for _, _, tool in found], [path for path, _, _ in found], by_name)


def _tools(
    bodies: Sequence[Any], field: str, namespace: str | None, reader: Reader
) -> Iterator[tuple[str, Called, Tool]]:
    for index, body in enumerate(bodies):
        path = f"{field}[{index}]"
        if not isinstance(body, dict):
            raise BadRequest.at(path, f"expected an object, not {show(body)}")
        kind = body.get("type", "function")
        if kind == "function":
            function = reader.part(body, FunctionBody, path)
            name = checked_name(function.name, namespace, path)
            yield path, Called(function.name, namespace), attrs.evolve(function.tool, name=name)
        elif kind == "custom":
            custom = reader.part(body, CustomBody, path)
            name = checked_name(custom.name, namespace, path)
            yield path, Called(custom.name, namespace, is_custom=True), custom.tool(name, path, reader.ignored)
        elif kind == "namespace" and namespace is None:
            space = reader.part(body, NamespaceBody, path)
            about = f"Of all {full_name('…', space.name)}: {space.description}" if space.description else ""
            for place, called, tool in _tools(space.tools, f"{path}.tools", space.name, reader):
                description = "\n\n".join(filter(None, (about, tool.description)))
                yield place, called, attrs.evolve(tool, description=description)
                about = ""
        elif isinstance(kind, str):
            reader.ignored.add(path)
        else:
            raise BadRequest.at(f"{path}.type", f"expected a string, not {show(kind)}")


def checked_name(name: str, namespace: str | None, path: str) -> str:
    """What the model calls a function. Raises `BadRequest` where that is too long; `path` is the function's."""
    full = full_name(name, namespace)
    if len(full) > MAX_NAME:
        raise BadRequest.at(f"{path}.name", f"{full!r}, the namespace included, is longer than {MAX_NAME} characters")
    return full


def custom_arguments(given: str) -> str:
    """The arguments of a call of a custom tool, as those of a function."""
    return json.dumps({INPUT: given}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The input of a call of a custom tool; empty where the call is cut off."""
    given = json_text.loads(whole_members(arguments)).get(INPUT, "")
    return given if isinstance(given, str) else ""
