"""JSON Schema of a Python class: pydantic models provide it themselves; for attrs classes and dataclasses it is derived
from the fields' types, for functions from the arguments'.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from enum import Enum
from inspect import Parameter, signature
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints
from uuid import UUID

import attrs

from uma.errors import WrongKind

_BOUNDS = {"minimum": 1 - 2**53, "maximum": 2**53 - 1}
"""Bounds of an integer without its own, because small models write digits without end: integers that every JSON parser
represents exactly."""
_PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer", **_BOUNDS},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    date: {"type": "string", "format": "date"},
    datetime: {"type": "string", "format": "date-time"},
    UUID: {"type": "string", "format": "uuid"},
    Any: {},
}


_OF_SCHEMAS = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf")
"""Keywords of pydantic's schemas whose value is a schema or a list of schemas."""


def schema_of(kind: Any) -> dict[str, Any] | None:
    """Schema of a class with fields of JSON types; None for anything that is not such a class. Raises `WrongKind` for a
    field whose type JSON lacks.
    """
    if callable(tells := getattr(kind, "model_json_schema", None)):
        found: dict[str, Any] = _bounded(tells())
        return found
    if not isinstance(kind, type) or not (attrs.has(kind) or dataclasses.is_dataclass(kind)):
        return None
    return _of_class(kind, ())


def _bounded(schema: Any) -> Any:
    """The schema with `additionalProperties: false` where an object does not state it, because pydantic ignores further
    members (unless `extra="allow"`), and with bounds for integers that lack them.
    """
    if isinstance(schema, list):
        return [_bounded(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _bounded(value) if name in _OF_SCHEMAS else value for name, value in schema.items()}
    for name in ("properties", "$defs"):
        if name in schema:
            closed[name] = {key: _bounded(value) for key, value in schema[name].items()}
    if schema.get("type") == "integer" and not {"enum", "const"} & {*schema}:
        closed |= {name: most for name, most in _BOUNDS.items() if not {name, f"exclusive{name.title()}"} & {*schema}}
    return {"additionalProperties": False, **closed} if "properties" in schema else closed


def _of_class(kind: type, inside: tuple[type, ...]) -> dict[str, Any]:
    if kind in inside:
        raise WrongKind(f"{kind.__name__} has a field of its own type; write its JSON Schema out")
    hints = get_type_hints(kind, include_extras=False)
    fields = attrs.fields(kind) if attrs.has(kind) else dataclasses.fields(kind)
    names = [field.name for field in fields if field.init]
    known = {name: _of(hints.get(name, Any), f"{kind.__name__}.{name}", (*inside, kind)) for name in names}
    needed = [field.name for field in fields if field.init and not _has_default(field)]
    return {"type": "object", "properties": known, "required": needed, "additionalProperties": False}


def parameters_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Schema of a function's arguments; text beside a type, `Annotated[str, "A city"]`, describes one. A date,
    a time or a UUID is a string in its format. Raises `WrongKind` for arguments that cannot be passed by name.
    """
    try:
        hints, known, needed = get_type_hints(function, include_extras=True), dict[str, Any](), list[str]()
    except NameError as error:  # for example a name that is only imported for type checkers
        raise WrongKind(f"{function.__name__}: its annotations: {error}; write its JSON Schema out") from None
    for name, parameter in signature(function).parameters.items():
        if parameter.kind not in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
            raise WrongKind(f"{function.__name__}: {parameter} cannot be given by name; write its JSON Schema out")
        known[name] = _of(hints.get(name, Any), f"{function.__name__}.{name}", ())
        needed += [name] if parameter.default is Parameter.empty else []
    return {"type": "object", "properties": known, "required": needed, "additionalProperties": False}


def _has_default(field: Any) -> bool:
    none = (attrs.NOTHING, dataclasses.MISSING)
    return field.default not in none or getattr(field, "default_factory", dataclasses.MISSING) not in none


def _of(hint: Any, where: str, inside: tuple[type, ...]) -> dict[str, Any]:
    origin, parts = get_origin(hint), get_args(hint)
    if hint in _PLAIN:
        return _PLAIN[hint]
    if origin is Annotated:
        told = next((part for part in parts[1:] if isinstance(part, str)), None)
        return _of(parts[0], where, inside) | ({} if told is None else {"description": told})
    if origin is Literal:
        return {"enum": list(parts)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_of(part, where, inside) for part in parts]}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"enum": [member.value for member in hint]}
    kind = origin or hint
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return {"type": "object", "additionalProperties": _of(parts[1] if parts else Any, where, inside)}
    if isinstance(kind, type) and issubclass(kind, Sequence | set | frozenset):
        return {"type": "array", "items": _of(parts[0] if parts else Any, where, inside)}
    if callable(getattr(hint, "model_json_schema", None)) or attrs.has(hint) or dataclasses.is_dataclass(hint):
        return schema_of(hint) or {} if hasattr(hint, "model_json_schema") else _of_class(hint, inside)
    raise WrongKind(f"{where}: JSON has no type for {hint!r}; write the JSON Schema out")
