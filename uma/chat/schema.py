"""JSON Schema of single values, for models that do not write the arguments of their calls as JSON.

Such forms have text in place of JSON's quoted strings, which a JSON grammar cannot describe, but regular expressions
can. What these cannot describe raises `UnservableError` with its place in the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count, product
from math import prod
from operator import ge, gt, le, lt
from typing import Any

from llguidance import regex_to_lark

from uma import json_text
from uma.chat.forms import KINDS
from uma.json_schema import COMBINATIONS, OF_NUMBERS, SCHEMAS_BY_NAME, subschemas
from uma.types import Tool

Schema = dict[str, Any]
ANY = r"(.|\n)"
"""Regular expression of llguidance for any character."""
MAX_DEPTH = 16
"""Maximum nesting of references and combinations in the schema of one value."""
MAX_ALTERNATIVES = 64
"""Maximum combinations of the alternatives in one string's schema."""
MAX_PARTS = 256
"""Maximum schemas that one value's schema combines: by references a short text can name any number of them."""

MAX_CHECKS = 10_000
"""Maximum schemas that one value is validated against: references and alternatives multiply them."""

_NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
_NOTES = frozenset(
    """
    $schema $id $comment $defs definitions title description default examples deprecated readOnly writeOnly x-guidance
    """.split()  # noqa: SIM905  (a word a line would be a page)
)
"""Keywords that do not affect validity."""
_CHOICES = frozenset({"type", "enum", "const", "$ref", *COMBINATIONS})
_OF_STRINGS = frozenset({"minLength", "maxLength", "pattern", "format"})
_OF_NUMBERS = frozenset(OF_NUMBERS)
_OF_ARRAYS = frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"})
_OF_OBJECTS = frozenset({"properties", "required", "additionalProperties", "patternProperties"})
_OF_OTHERS = _OF_NUMBERS | _OF_ARRAYS | _OF_OBJECTS
NOT_OF_OBJECTS = _OF_STRINGS | _OF_NUMBERS | _OF_ARRAYS
"""Keywords that do not affect objects."""

_LISTS = frozenset({"enum", "required", *COMBINATIONS})
_OBJECTS = frozenset({*SCHEMAS_BY_NAME, "x-guidance"})
_TEXTS = frozenset({"pattern", "format", "$ref"})
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems"})
_SHAPES: dict[str, Any] = {
    **dict.fromkeys(_LISTS, list),
    **dict.fromkeys(_OBJECTS, dict),
    **dict.fromkeys(_TEXTS, str),
    **dict.fromkeys(_COUNTS, int),
    "type": (str, list),
}
_SHAPE_NAMES: dict[Any, str] = {
    list: "a list",
    dict: "an object",
    str: "a string",
    int: "a whole number",
    (str, list): "JSON types",
}

_DAY = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS = {
    "date": _DAY,
    "time": _TIME,
    "date-time": f"{_DAY}T{_TIME}",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "email": r"[a-zA-Z0-9_%+\-]+(\.[a-zA-Z0-9_%+\-]+)*@[a-zA-Z0-9]([a-zA-Z0-9\-]*[a-zA-Z0-9])?(\.[a-zA-Z]{2,12})+",
    "uri": r"[a-z][a-z0-9+.\-]*:\/\/[a-zA-Z0-9.\-]+(:[0-9]{1,5})?(\/[a-zA-Z0-9._~%\-]*)*(\?[a-zA-Z0-9._~%=&\-]*)?",
}
"""Regular expression for each format, some narrower than the format itself: only days that every month has."""
_SCALARS = {"null": "null", "boolean": "true|false", "integer": "-?(0|[1-9][0-9]*)"}
_SCALARS["number"] = _SCALARS["integer"] + r"(\.[0-9]+)?([eE][+\-]?[0-9]+)?"


class UnservableError(Exception):
    """A part of a schema that a form of calls cannot express: its place, such as `.properties.x.not`, and the reason.

    `tool` is the tool's index among those that can be called.
    """

    def __init__(self, place: str, reason: str, tool: int = 0) -> None:
        super().__init__(f"{place}: {reason}")
        self.place = place
        self.reason = reason
        self.tool = tool


def schema_of(tool: Tool) -> Schema:
    """JSON Schema of a tool's arguments, which are always an object."""
    return {"type": "object", **tool.parameters} if tool.parameters else _NO_ARGUMENTS


def check_shape(root: Schema) -> None:
    """Raise `UnservableError` for a keyword with a value of a type that JSON Schema does not allow there."""
    waiting = [("", root)]
    while waiting:
        place, schema = waiting.pop()
        for word, value in schema.items():
            here = f"{place}.{word}"
            shape = _SHAPES.get(word, object)
            if not isinstance(value, shape) or (isinstance(value, bool) and shape is int):
                raise UnservableError(here, f"expected {_SHAPE_NAMES[shape]}")
            if word in ("type", "required") and not all(isinstance(item, str) for item in value):
                raise UnservableError(here, "expected strings")
        waiting += ((place + step, subschema) for step, subschema in subschemas(schema))


def properties_of(schema: Schema, root: Schema) -> dict[str, Schema]:
    """An object's properties by name, including those that only `required` names."""
    schema = _object(schema, root, "")
    given = schema.get("properties", {})
    known = {name: {} if inner is True else inner for name, inner in given.items() if inner is not False}
    return known | {name: {} for name in schema.get("required", ()) if name not in given}


def check_object(schema: Schema, root: Schema, place: str) -> None:
    """Raise `UnservableError` where the validity of an object does not follow from that of each of its properties."""
    schema = _object(schema, root, place)
    for word in schema:
        if word not in _NOTES | {"type", "properties", "required", "additionalProperties"}:
            raise UnservableError(f"{place}.{word}", "this model's calls have each argument for itself")
    for name in schema.get("required", ()):
        if schema.get("properties", {}).get(name) is False:
            raise UnservableError(f"{place}.required", f"{name!r} is required and forbidden")


def required_of(schema: Schema, root: Schema) -> frozenset[str]:
    """Names of an object's required properties."""
    return frozenset(_object(schema, root, "").get("required", ()))


def _object(schema: Schema, root: Schema, place: str) -> Schema:
    """The schema that a `$ref` leads to; a `type` beside it is ignored."""
    if "$ref" in schema:
        schema = {word: member for word, member in schema.items() if word != "type"}
    return resolved(schema, root, place)


def resolved(schema: Schema, root: Schema, place: str) -> Schema:
    """The schema that a `$ref` leads to; without one, the schema itself."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, dict):
            raise UnservableError(place, "expected a schema")
        pointer = schema.get("$ref")
        if pointer is None:
            return schema
        if set(schema) - _NOTES - {"$ref"}:
            raise UnservableError(f"{place}.$ref", "other keywords beside it are not available here")
        schema = _target(pointer, root, place)
    raise UnservableError(f"{place}.$ref", "it leads to references only")


def kinds_of(schema: Any, root: Schema, place: str = "") -> frozenset[str]:
    """JSON types that a value can have. Raises `UnservableError` where the schema combines more than `MAX_PARTS`
    schemas.
    """
    return _kinds(schema, root, place, 0, count(1))


def _kinds(schema: Any, root: Schema, place: str, depth: int, parts: Iterator[int]) -> frozenset[str]:
    """JSON types of values within a combination; `parts` counts its schemas."""
    if schema is True:
        return KINDS
    if not isinstance(schema, dict):
        return frozenset()
    if depth > MAX_DEPTH:
        raise UnservableError(place, "it is nested too deeply")
    if next(parts) > MAX_PARTS:
        raise UnservableError(place, "too many alternatives")
    schema = resolved(schema, root, place)
    kinds = KINDS
    if "type" in schema:
        named = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        kinds &= frozenset(named) | ({"integer"} if "number" in named else set())
    for value_list in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if value_list is not None:
            kinds &= frozenset(kind for value in value_list for kind in _kinds_of_value(value))
    for word in ("anyOf", "oneOf"):
        if word in schema:
            places = ((one, f"{place}.{word}[{at}]") for at, one in enumerate(schema[word]))
            kinds &= frozenset().union(*(_kinds(one, root, there, depth + 1, parts) for one, there in places))
    for at, one in enumerate(schema.get("allOf", ())):
        kinds &= _kinds(one, root, f"{place}.allOf[{at}]", depth + 1, parts)
    return kinds


def text_of(schema: Schema, root: Schema, place: str) -> str:
    """Strings that a schema allows, as a terminal of Lark; other types that it allows are left out."""
    ways = _ways(schema, root, place, 0)
    return " | ".join(f"({' & '.join(f'/{regex}/' for regex in way or [f'{ANY}*'])})" for way in ways)


def text_or_scalar(schema: Schema, root: Schema, place: str) -> str:
    """Strings that a schema allows, and JSON of other types except arrays and objects, as a terminal of Lark. A string
    that reads as such JSON is excluded, because the reader takes it for the JSON (`value_in_text`).
    """
    kinds = kinds_of(schema, root, place)
    scalars = [_SCALARS[kind] for kind in ("null", "boolean", "integer", "number") if kind in kinds]
    _check_scalars(schema, root, place, 0)
    text = text_of(schema, root, place)
    if kinds & {"array", "object"}:
        scalars_text = [rf"[ \t\r\n]*[\[\{{]{ANY}*", *(rf"[ \t\r\n]*({scalar})[ \t\r\n]*" for scalar in scalars)]
    else:
        scalars_text = [rf"[ \t\r\n]*({scalar})[ \t\r\n]*" for scalar in scalars]
    text = f"({text})" + "".join(f" & ~/{scalar}/" for scalar in scalars_text)
    return " | ".join([f"({text})", *(f"/{scalar}/" for scalar in scalars)])


def value_in_text(text: str, kinds: frozenset[str]) -> str:
    """JSON of an argument that is written as `text`, where its schema allows `kinds`. Raises `ValueError` for invalid
    text.
    """
    if kinds == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    try:
        value = json_text.loads(text)
    except (ValueError, RecursionError):
        if "string" not in kinds or (kinds & {"array", "object"} and text.lstrip(" \t\r\n")[:1] in ("[", "{")):
            raise ValueError("an argument is not JSON") from None
        return json.dumps(text, ensure_ascii=False)
    if "string" not in kinds or (not isinstance(value, str) and kinds.intersection(_kinds_of_value(value))):
        return text.strip(" \t\r\n")
    if kinds & {"array", "object"} and isinstance(value, list | dict):
        raise ValueError("an argument has none of its schema's types")
    return json.dumps(text, ensure_ascii=False)


def _ways(schema: Schema, root: Schema, place: str, depth: int) -> list[list[str]]:
    """Strings of a schema as lists of regular expressions: a string matches all expressions of at least one list."""
    if depth > MAX_DEPTH:
        raise UnservableError(place, "it is nested too deeply")
    schema = resolved(schema, root, place)
    for word in schema:
        if word not in _NOTES | _CHOICES | _OF_STRINGS | _OF_OTHERS:
            raise UnservableError(f"{place}.{word}", "not available for a text, which this model's calls do not quote")
    own = list(_own(schema, place))
    choices = [[own]]
    for word in ("anyOf", "oneOf"):
        if word in schema:
            choices.append(_either(word, schema[word], root, place, depth))
    choices += [_ways(part, root, f"{place}.allOf[{at}]", depth + 1) for at, part in enumerate(schema.get("allOf", ()))]
    if prod(map(len, choices)) > MAX_ALTERNATIVES:
        raise UnservableError(place, "too many alternatives")
    return [[regex for way in ways for regex in way] for ways in product(*choices)]


def _either(word: str, branches: list[Any], root: Schema, place: str, depth: int) -> list[list[str]]:
    texts = [
        (at, branch)
        for at, branch in enumerate(branches)
        if "string" in kinds_of(branch, root, f"{place}.{word}[{at}]")
    ]
    if word == "oneOf" and len(texts) > 1:
        values = [value for _, text in texts for value in _values(text, place)]
        if len(set(map(json.dumps, values))) < len(values):
            raise UnservableError(f"{place}.oneOf", "two of its alternatives allow the same text")
    return [
        way
        for at, text in texts
        for way in _ways(text if text is not True else {}, root, f"{place}.{word}[{at}]", depth + 1)
    ]


def _values(schema: Any, place: str) -> list[Any]:
    if isinstance(schema, dict) and ("enum" in schema or "const" in schema):
        return list(schema["enum"]) if "enum" in schema else [schema["const"]]
    raise UnservableError(f"{place}.oneOf", "several alternatives that are texts, but for lists of values")


def _own(schema: Schema, place: str) -> Iterator[str]:
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if values is not None:
            texts = [literal(value) for value in values if isinstance(value, str)]
            if not texts:
                raise UnservableError(place, "it allows no text where one is expected")
            yield "|".join(texts)
    if "minLength" in schema or "maxLength" in schema:
        yield f"{ANY}{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
    if "pattern" in schema:
        yield _searched(schema["pattern"], f"{place}.pattern")
    if "format" in schema:
        if schema["format"] not in _FORMATS:
            known = ", ".join(_FORMATS)
            raise UnservableError(
                f"{place}.format", f"this model's calls do not quote texts, where these can be: {known}"
            )
        yield _FORMATS[schema["format"]]


def _searched(pattern: str, place: str) -> str:
    """A pattern that can match anywhere in a string, as one that matches the whole string."""
    ways = []
    for branch in _branches(pattern, place):
        begins, ends = branch.startswith("^"), branch.endswith("$") and not re.search(r"(?<!\\)(\\\\)*\\\$$", branch)
        inner = branch[begins : len(branch) - ends]
        ways.append(f"{'' if begins else ANY + '*'}({inner}){'' if ends else ANY + '*'}")
    try:
        return str(regex_to_lark("|".join(ways), "dw"))
    except ValueError as error:
        raise UnservableError(place, str(error).partition("\n")[0]) from None


def _branches(pattern: str, place: str) -> list[str]:
    """Alternatives of a pattern. Raises `UnservableError` for `^` and `$` anywhere but at their ends."""
    branches, depth, in_class, at = [""], 0, False, 0
    while at < len(pattern):
        char = pattern[at : at + 2] if pattern[at] == "\\" else pattern[at]
        at += len(char)
        if char == "|" and not depth and not in_class:
            branches.append("")
            continue
        if not in_class:
            depth += (char == "(") - (char == ")")
            is_end = at == len(pattern) or (pattern[at] == "|" and not depth)
            if (char == "^" and branches[-1]) or (char == "$" and (depth or not is_end)):
                raise UnservableError(place, f"{char} stands within the expression, where it is not available")
        in_class = char == "[" or (in_class and char != "]")
        branches[-1] += char
    return branches


def _check_scalars(schema: Any, root: Schema, place: str, depth: int) -> None:
    """Raise `UnservableError` for keywords about numbers where the value can also be a text."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return
    schema = resolved(schema, root, place)
    for word in schema.keys() & _OF_NUMBERS:
        raise UnservableError(f"{place}.{word}", "not available for a value that can be a text as well")
    for word in ("enum", "const"):
        values = schema.get(word, ()) if word == "enum" else [schema[word]] if word in schema else []
        if any(value is not None and not isinstance(value, str) for value in values):
            raise UnservableError(f"{place}.{word}", "texts and other values together are not available")
    for word in ("anyOf", "oneOf", "allOf"):
        for at, option in enumerate(schema.get(word, ())):
            _check_scalars(option, root, f"{place}.{word}[{at}]", depth + 1)


def container_of(schema: Schema, root: Schema, place: str = "") -> Schema:
    """Schema of the lists or objects that a value can be; at most one of its alternatives has these."""
    for _ in range(MAX_DEPTH):
        schema = resolved(schema, root, place)
        options = [option for word in ("anyOf", "oneOf") for option in schema.get(word, ())]
        options = [option for option in options if kinds_of(option, root, place) & {"array", "object"}]
        if not options:
            return schema
        schema = options[0]
    raise UnservableError(place, "it is nested too deeply")


def _target(pointer: Any, root: Schema, place: str) -> Schema:
    found: Any = root
    if not isinstance(pointer, str) or not pointer.startswith("#"):
        raise UnservableError(f"{place}.$ref", "only places within the schema can be referred to")
    for step in filter(None, pointer[1:].split("/")):
        key = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or key not in found:
            raise UnservableError(f"{place}.$ref", f"there is no {pointer}")
        found = found[key]
    if not isinstance(found, dict):
        raise UnservableError(f"{place}.$ref", f"{pointer} is no schema")
    return found


def _kinds_of_value(value: Any) -> Iterable[str]:
    if value is None:
        return ("null",)
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, int):
        return ("integer", "number")
    if isinstance(value, float):
        return ("number",)
    return ("string" if isinstance(value, str) else "array" if isinstance(value, list) else "object",)


def follows(value: Any, root: Schema) -> bool:
    """Whether a value certainly validates against a schema; False where a keyword is unknown here."""
    try:
        return _follows(value, root, root, count(1))
    except (UnservableError, RecursionError, TypeError):
        return False


def _follows(value: Any, schema: Any, root: Schema, checks: Iterator[int]) -> bool:
    if isinstance(schema, bool):
        return schema
    if next(checks) > MAX_CHECKS or isinstance(value, json_text.Number):
        return False
    schema = resolved(schema, root, "")
    return all(_keeps(value, word, schema, root, checks) for word in schema if word not in _NOTES)


def _keeps(value: Any, word: str, schema: Schema, root: Schema, checks: Iterator[int]) -> bool:
    """Whether a value validates against one keyword of its schema."""
    wanted, kinds = schema[word], set(_kinds_of_value(value))
    if word == "type":
        return bool(kinds & ({wanted} if isinstance(wanted, str) else set(wanted)))
    if word in ("enum", "const"):
        return json_text.dumps(value) in map(json_text.dumps, wanted if word == "enum" else [wanted])
    if word in COMBINATIONS:
        found = sum(_follows(value, option, root, checks) for option in wanted)
        return found == {"allOf": len(wanted), "oneOf": 1}.get(word, max(found, 1))
    if word in _OF_OBJECTS and "object" in kinds:
        known = schema.get("properties", {})
        if word == "required":
            return set(wanted) <= set(value)
        if word == "properties":
            return all(_follows(value[key], known[key], root, checks) for key in value.keys() & known)
        return word == "additionalProperties" and all(
            _follows(value[key], wanted, root, checks) for key in value.keys() - known
        )
    if word == "items" and "array" in kinds:
        return not isinstance(wanted, list) and all(_follows(item, wanted, root, checks) for item in value)
    if word in _BOUNDS:
        kind, fits = _BOUNDS[word]
        return kind not in kinds or (not isinstance(wanted, bool) and fits(value, wanted))
    of_kind = _OF_ARRAYS | _OF_OBJECTS
    return word in of_kind and not kinds & {"array", "object"}


_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "minLength": ("string", lambda value, least: len(value) >= least),
    "maxLength": ("string", lambda value, most: len(value) <= most),
    "minItems": ("array", lambda value, least: len(value) >= least),
    "maxItems": ("array", lambda value, most: len(value) <= most),
    "minimum": ("number", ge),
    "maximum": ("number", le),
    "exclusiveMinimum": ("number", gt),
    "exclusiveMaximum": ("number", lt),
}
"""Keywords that bound values of one type."""


def literal(text: str) -> str:
    """Regular expression of llguidance that matches only `text`."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)
