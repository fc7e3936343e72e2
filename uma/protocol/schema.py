"""JSON Schemas (2020-12) of the messages, generated from the classes that the parser uses, so that they cannot differ.

Two rules of the parser cannot be expressed: a number written as `1.0` is no integer, and `metadata` and a grammar's
`json_schema` can be nested at most 64 levels deep.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
import typing
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import attrs

from uma.constraints import Json, Length, Pattern, Range, Text, Values, hints_of
from uma.protocol.versions import SUPPORTED
from uma.protocol.wire import COMMANDS, EVENTS, FLAT_METRICS, OWNERS, REQUESTS
from uma.types import GRAMMAR_FIELDS, PROMPT_FIELDS, Grammar, Media

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", NoneType: "null"}


def schemas() -> dict[str, dict[str, Any]]:
    """Schema of each message by name: `generate`, `cancel` … for a client's, `event.token` … for a server's."""
    made = {kind: _request(kind) for kind in REQUESTS}
    for name, (_, flat) in COMMANDS.items():
        made[name] = _message(name, flat, {"event": {"const": name}}, ["event"])
    for name, cls in (EVENTS | {"metrics": FLAT_METRICS}).items():
        made[f"event.{name}"] = _message(f"event.{name}", cls, {"event": {"const": name}}, ["event"])
    return made


def _request(kind: str) -> dict[str, Any]:
    is_default = kind == "generate"
    of_type: dict[str, Any] = {"const": kind} | ({"default": kind} if is_default else {})
    schema = _message(kind, REQUESTS[kind], {"type": of_type}, [] if is_default else ["type"])
    if set(PROMPT_FIELDS) <= schema["properties"].keys():
        schema["oneOf"] = _exactly_one(PROMPT_FIELDS)
    if is_default:
        # A frame with `event` and no `type` is read as a command about a running request.
        schema["anyOf"] = [{"required": ["type"]}, {"properties": {"event": False}}]
    return schema


def _exactly_one(names: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in names]


def _message(name: str, cls: type, tag: dict[str, Any], required: list[str]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    schema = object_schema(cls, nested)
    schema["properties"] = tag | schema["properties"]
    schema["required"] = required + schema["required"]
    return {"$schema": DIALECT, "$id": _id(name), "title": name} | schema | ({"$defs": nested} if nested else {})


def _id(name: str) -> str:
    return f"urn:uma:protocol:{SUPPORTED[-1]}:{name}"


def object_schema(cls: type, nested: dict[str, Any]) -> dict[str, Any]:
    """Schema of an object with the fields of `cls`. Adds schemas of nested classes to `nested`. Unknown fields are
    allowed, because the parser ignores them.
    """
    owners = OWNERS.get(cls, (cls,))
    described = (base for owner in owners for base in reversed(owner.__mro__) if attrs.has(base))
    docs = {field: text for base in described for field, text in _docs_of(base).items()}
    properties: dict[str, Any] = {}
    required = []
    defaults = {field.name: field.default for field in attrs.fields(cls)}
    for name, hint in hints_of(cls).items():
        properties[name] = _schema_of(hint, nested)
        if name in docs:
            properties[name]["description"] = docs[name]
        default = defaults[name]
        if default is attrs.NOTHING:
            required.append(name)
        elif isinstance(default, str | int | float):  # None and () stand for: not given
            properties[name]["default"] = default
    summary = _summary(owners[-1])
    schema = {"description": summary, "type": "object", "properties": properties, "required": required}
    if cls is Grammar:
        return schema | {"oneOf": _exactly_one(GRAMMAR_FIELDS)}
    if cls is Media:
        there = {"required": ["data"], "properties": {"data": {"minLength": 1}}}
        return schema | {"oneOf": [there, *_exactly_one(("url", "path"))]}
    return schema


def _schema_of(hint: Any, nested: dict[str, Any]) -> dict[str, Any]:
    origin, args = get_origin(hint), get_args(hint)
    if origin is typing.Annotated:
        schema = _schema_of(args[0], nested)
        for constraint in args[1:]:
            schema |= _bounds(constraint, _COUNTED.get(schema.get("type", ""), "Length"))
        return schema
    if origin in (Union, UnionType):
        return {"anyOf": [_schema_of(arg, nested) for arg in args]}
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (list, tuple):
        return {"type": "array", "items": _schema_of(args[0], nested)}
    if attrs.has(hint):
        if hint.__name__ not in nested:
            nested[hint.__name__] = object_schema(hint, nested)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    return {} if hint in (Any, bytes) else {"type": _TYPES[origin or hint]}


_COUNTED = {"array": "Items", "object": "Properties"}
"""Suffix of JSON Schema's keywords for a length (`minItems`), by type."""


def _bounds(constraint: Any, counted: str = "Length") -> dict[str, Any]:
    match constraint:
        case Range():
            ends = {"minimum": constraint.ge, "exclusiveMinimum": constraint.gt, "maximum": constraint.le}
        case Length():
            ends = {f"min{counted}": constraint.ge or None, f"max{counted}": constraint.le}
        case Pattern():
            return {"pattern": f"^({constraint.expression})$"}
        case Text():
            return {"pattern": r"^[^\u0000]*$"}
        case Values():
            return {"additionalProperties": {"type": "number"} | _bounds(constraint.range)}
        case Json():
            return {"$comment": str(constraint)}
        case _:
            return {}
    return {word: end for word, end in ends.items() if end is not None}


def _summary(cls: type) -> str:
    return inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0].replace("\n", " ")


_PARSING = threading.Lock()
"""Lock for parsing source code: Python 3.11's `ast.parse` raises `SystemError` when two threads call it at once."""


@cache
def _docs_of(cls: Any) -> dict[str, str]:
    """Text below each field, which is how attrs classes here document their fields. Empty where there is no source."""
    try:
        with _PARSING:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):
        return {}
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef)).body
    return {
        field.target.id: inspect.cleandoc(text.value.value).replace("\n", " ")
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
