"""Checks of JSON Schemas beyond llguidance's own, so that every completed output validates.

llguidance leaves gaps. A key that the model invents can be written with an escape (`"\\u0061"`), and then is not
recognised as one of the schema's names: `ESCAPES` allows one spelling of each string. Such a key can also come twice,
which parses to one member: refused where a number of members depends on it. And llguidance computes with 64 or 32 bits:
numbers that it would round are refused, and so are multiples that take it minutes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from math import gcd, isfinite, lcm
from typing import Any, TypeGuard
from urllib.parse import unquote

from uma.grammar_depth import too_deep
from uma.json_text import Number

ESCAPES = 'nrbtf\\"'
"""Letters allowed behind a backslash: without `u` each string has one spelling."""
COMPACT: dict[str, Any] = {"whitespace_flexible": False, "json_allowed_escapes": ESCAPES}
"""llguidance's options for JSON without white space."""
SPACED: dict[str, Any] = {**COMPACT, "item_separator": ", ", "key_separator": ": "}
"""llguidance's options for JSON as Python's `json.dumps` writes it, which is how most models were shown JSON."""

_SEPARATORS = {
    "item_separator": re.compile(r"[ \t\r\n]*,[ \t\r\n]*"),
    "key_separator": re.compile(r"[ \t\r\n]*:[ \t\r\n]*"),
}
_UNSPELLABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that JSON, or llguidance, can only spell as `\\u` and four digits."""
MAX_EXACT = 2**53
"""Maximum integer up to which 64-bit floats represent all integers exactly."""
MAX_INTEGER = 2**63 - 1
"""Maximum integer in a grammar's range."""
MAX_UNITS = 10**8
"""Maximum of `multipleOf`, in units of its last decimal place: llguidance computes remainders with 32 bits."""
MAX_MULTIPLE = 100_000
"""Maximum of the smallest integer that is a multiple of `multipleOf`. llguidance searches the remainders, which takes 2
s for 99,991 and over a minute for 9,999,991, and cannot be cancelled. A number of one or two digits and zeros takes
about a second at most."""


_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DAY = f"([0-9]{{4}}-(0[13-9]|1[0-2])-..|....-02-([01].|2[0-8])|{_LEAP}-02-29)"
_STRICTER = {
    "date": f"^{_DAY}$",
    "date-time": f"^{_DAY}T..:..:[0-5][^z]*$",
    "time": "^..:..:[0-5][^z]*$",
    "hostname": "^.{1,253}$",
}
"""Further patterns for values of a format: llguidance allows February 29 in each year, second 60 in each minute,
host names of any length, and the letters t and z in small, which few parsers read."""
COMBINATIONS = ("allOf", "anyOf", "oneOf")
"""Keywords that combine schemas."""
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value has a schema for each of its names."""
SCHEMA_LISTS = (*COMBINATIONS, "prefixItems", "items")
"""Keywords whose value is a list of schemas; `items` can also be one schema."""
_OF_PARTS = ("items", "additionalItems", "additionalProperties", "contains", "propertyNames")
SINGLE_SCHEMAS = (*_OF_PARTS, "not", "if", "then", "else")
"""Keywords whose value is one schema."""
EXCLUSIVE = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}
"""Keywords for bounds of numbers, and those for exclusive bounds; a value of `true` makes the bound itself
exclusive."""
OF_NUMBERS = (*EXCLUSIVE, *EXCLUSIVE.values(), "multipleOf")
"""Keywords that only affect numbers."""
_INNER = {"$ref", "multipleOf", *SCHEMAS_BY_NAME, *SCHEMA_LISTS, *SINGLE_SCHEMAS} - {"$defs", "definitions"}
"""Keywords that constrain multiples, or lead to a schema that can."""
_MAPS = (*SCHEMAS_BY_NAME, "dependencies")
"""Keywords whose value has arbitrary names as keys; those of `dependencies` can also lead to lists of names."""
_NOTES = ("default", "example", "examples")
"""Keywords without effect, whose value is data."""
_VALUES = ("const", "enum", *_NOTES)
"""Keywords whose value is data, and a schema only where a `$ref` leads into it."""


def for_llguidance(schema: dict[str, Any], style: dict[str, Any]) -> dict[str, Any]:
    """A schema without a `problem`, adapted for llguidance: its own `x-guidance` takes precedence over `style`."""
    return {**_adapted(schema), "x-guidance": {**style, **schema.get("x-guidance", {})}}


def _adapted(schema: Any) -> Any:
    if isinstance(schema, list | tuple):
        return [_adapted(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for word in SCHEMAS_BY_NAME:
        if isinstance(named := schema.get(word), dict):
            made[word] = {name: _adapted(inner) for name, inner in named.items()}
    # (Within `not` or `if` a stricter schema would loosen the whole, but llguidance refuses both.)
    for word in (*SCHEMA_LISTS, *SINGLE_SCHEMAS):
        if word in schema:
            made[word] = _adapted(schema[word])
    for word in _NOTES:
        if _holds_wide(schema.get(word)):
            del made[word]  # no effect, and llguidance cannot read such a number
    if schema.get("uniqueItems") is False:
        del made["uniqueItems"]  # no effect, and llguidance does not know the keyword
    form, also = schema.get("format"), made.get("allOf", [])
    if isinstance(form, str) and form in _STRICTER and isinstance(also, list):
        made["allOf"] = [*also, {"pattern": _STRICTER[form]}]
    return made


def problem(schema: dict[str, Any]) -> tuple[str, str] | None:
    """Place and reason of the first part that no grammar can express, such as `.items.minProperties`.

    Checks every object of the schema that can be a schema, because a `$ref` can lead to any.
    """
    found = _options_problem(schema.get("x-guidance", {}))
    if found is not None:
        return found
    if reason := too_deep(schema):
        return "", reason
    objects = list(_objects(schema))
    found = next((found for place, inner in objects for found in _problems(place, inner)), None)
    return found or _multiples_problem(objects)


def problems_of(schema: dict[str, Any]) -> list[str]:
    """Keywords of the schema itself, without those of its parts, that no grammar can express."""
    found = [place.partition(".")[2] for place, _ in _problems("", schema)]
    return list(dict.fromkeys(found + ["x-guidance"] * (_options_problem(schema.get("x-guidance", {})) is not None)))


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Schemas in a schema's own keywords, each with its place; `true` and `false` are left out."""
    for word, value in schema.items():
        if word in SCHEMAS_BY_NAME and isinstance(value, dict):
            yield from (
                (f".{word}{place_of(name)}", member) for name, member in value.items() if isinstance(member, dict)
            )
        elif word in SCHEMA_LISTS and isinstance(value, list | tuple):
            yield from ((f".{word}[{at}]", item) for at, item in enumerate(value) if isinstance(item, dict))
        elif word in SINGLE_SCHEMAS and isinstance(value, dict):
            yield f".{word}", value


def place_of(name: str) -> str:
    """A name as a part of a place."""
    return f".{name}" if name.isidentifier() else f"[{json.dumps(name, ensure_ascii=False)}]"


def _options_problem(options: Any) -> tuple[str, str] | None:
    """Problem of options that would change what is valid (`lenient`, `coerce_one_of`), or allow invalid JSON."""
    place = place_of("x-guidance")
    if not isinstance(options, dict):
        return place, "expected an object"
    for name, value in options.items():
        if name == "whitespace_flexible":
            if not isinstance(value, bool):
                return f"{place}.{name}", "expected true or false"
        elif name in _SEPARATORS:
            if not isinstance(value, str) or not _SEPARATORS[name].fullmatch(value):
                return f"{place}.{name}", "expected the comma or colon with white space around it"
        else:
            return (
                f"{place}{place_of(name)}",
                f"not available; available are whitespace_flexible, {', '.join(_SEPARATORS)}",
            )
    return None


def _objects(root: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """All objects that can be schemas, each with its place. That is every object, if a `$ref` leads into data."""
    leads_into_data = any(map(_leads_into_data, _references(root)))
    maps, data = (() if leads_into_data else words for words in (_MAPS, _VALUES))
    waiting: list[tuple[str, Any]] = [("", root)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, dict):
            yield place, value
            for word, inner in value.items():
                here = place + place_of(str(word))
                if word in maps and isinstance(inner, dict):
                    waiting += ((here + place_of(str(name)), deeper) for name, deeper in inner.items())
                elif word not in data:
                    waiting.append((here, inner))
        elif isinstance(value, list | tuple):
            waiting += ((f"{place}[{at}]", item) for at, item in enumerate(value))


def _references(root: dict[str, Any]) -> Iterator[str]:
    waiting: list[Any] = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if isinstance(pointer := value.get("$ref"), str):
                yield pointer
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value


def _leads_into_data(pointer: str) -> bool:
    """Whether a `$ref` leads into data, or to a map of schemas as if that were one."""
    is_name = False
    for step in unquote(pointer.partition("#")[2]).split("/")[1:]:
        if step in _VALUES and not is_name:
            return True
        is_name = not is_name and step in _MAPS
    return is_name


def _problems(place: str, schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for word, value in schema.items():
        if word not in _NOTES and _holds_wide(value if word in _VALUES or isinstance(value, Number) else None):
            yield place + place_of(word), "not available with numbers beyond 64 bits, which llguidance rounds"
    least, required = schema.get("minProperties"), schema.get("required")
    n_required = len(set(filter(_is_text, required))) if isinstance(required, list | tuple) else 0
    if isinstance(least, int) and least - n_required > 1:
        yield (
            f"{place}.minProperties",
            f"not available with {least - n_required} members that required does not name: no grammar keeps a name "
            "from coming twice",
        )
    for word in ("const", "enum"):
        if word in schema and _UNSPELLABLE.search("".join(_texts(schema[word]))):
            yield f"{place}.{word}", "not available with control characters that JSON has no letter for (\\u0000, say)"
        if word in schema and any(isinstance(item, int) and abs(item) > MAX_EXACT for item in _items(schema[word])):
            yield f"{place}.{word}", f"not available with integers beyond {MAX_EXACT:,}, which llguidance rounds"
    for word in (*EXCLUSIVE, *EXCLUSIVE.values()):
        if _is_number(bound := schema.get(word)) and not _is_exact(word, bound, schema):
            yield f"{place}.{word}", f"not available {_bound_problem(word, bound, schema)}"
    if _is_number(step := schema.get("multipleOf")):
        places = _places(step)
        units = _units(step, places)
        if units > MAX_UNITS:
            yield f"{place}.multipleOf", "not available with more than 8 digits, which llguidance rounds"
        elif not _is_quick(least := _least_whole(units, places)):
            yield f"{place}.multipleOf", f"not available: {_slowness(least)}"


def _is_exact(word: str, bound: float, schema: dict[str, Any]) -> bool:
    """Whether llguidance represents a bound exactly. It keeps it as a 64-bit float, writes that with as few digits as
    identify it, and moves an exclusive bound of an integer by 1.
    """
    if abs(bound) < MAX_EXACT:
        return True
    if word not in EXCLUSIVE or schema.get(EXCLUSIVE[word]) is True:
        return False
    if word == "maximum" and bound == MAX_INTEGER and schema.get("type") == "integer":
        return True  # llguidance clamps an integer's bound to this, as the float is larger
    return abs(bound) <= MAX_INTEGER and Decimal(repr(float(bound))) == bound == float(bound)


def _bound_problem(word: str, bound: float, schema: dict[str, Any]) -> str:
    if word == "maximum" and bound > MAX_INTEGER and schema.get("type") == "integer":
        return f"over {MAX_INTEGER:,}, where ranges of integers end in llguidance: name that, or leave {word} out"
    return f"beyond {MAX_EXACT - 1:,}, where llguidance rounds"


def _multiples_problem(objects: list[tuple[str, dict[str, Any]]]) -> tuple[str, str] | None:
    """Problem of several `multipleOf` for one number: llguidance computes their least common multiple, in 32 bits."""
    steps = [(place, step) for place, inner in objects if _is_number(step := inner.get("multipleOf")) and step]
    if len(steps) < 2 or not any(_is_intersection(inner) for _, inner in objects):
        return None
    places = max(_places(step) for _, step in steps)
    product, common, largest = 1, 1, 1
    for _, step in steps:
        units = min(_units(step, places), MAX_UNITS + 1)
        product, common, largest = min(product * units, MAX_UNITS + 1), lcm(common, units), max(largest, units)
        if min(product, common * largest) > MAX_UNITS:
            return f"{steps[-1][0]}.multipleOf", "not available beside others: llguidance rounds their common multiple"
    if not _is_quick(least := _least_whole(common, places)):
        return f"{steps[-1][0]}.multipleOf", f"not available beside others: {_slowness(least)}"
    return None


def _least_whole(units: int, places: int) -> int:
    """Smallest positive integer that is a multiple of so many units of a decimal place."""
    return units // gcd(units, 10**places)


def _is_quick(least: int) -> bool:
    return abs(least) <= MAX_MULTIPLE or len(str(abs(least)).rstrip("0")) <= 2


def _slowness(least: int) -> str:
    return (
        f"the least whole multiple is {least:,}, and one over {MAX_MULTIPLE:,} takes too long to compile unless it is "
        "one or two digits and zeros"
    )


def _is_intersection(schema: dict[str, Any]) -> bool:
    """Whether two schemas in this one can apply to the same value."""
    combined = schema.keys() & {"$ref", *COMBINATIONS}
    return "allOf" in combined or (bool(combined) and len(schema.keys() & _INNER) > 1)


def _places(step: float) -> int:
    """Number of decimal places, as few as identify the number."""
    exponent = Decimal(repr(float(step))).normalize().as_tuple().exponent if isinstance(step, float) else 0
    assert isinstance(exponent, int)
    return max(0, -exponent)


def _units(step: float, places: int) -> int:
    """A number as an integer multiple of a unit of a decimal place."""
    return int(Decimal(repr(float(step))).scaleb(places)) if isinstance(step, float) else step * 10**places


def _is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a finite number."""
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and isfinite(value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _holds_wide(value: Any) -> bool:
    """Whether a number in `value` needs more than 64 bits."""
    return any(isinstance(item, Number) for item in _items(value))


def _texts(value: Any) -> Iterator[str]:
    return (item for item in _items(value) if isinstance(item, str))


def _items(value: Any) -> Iterator[Any]:
    """Values and keys within a value, including itself."""
    waiting = [value]
    while waiting:
        yield (item := waiting.pop())
        if isinstance(item, dict):
            waiting += [*item, *item.values()]
        elif isinstance(item, list | tuple):
            waiting += item
