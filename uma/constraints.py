"""Constraints of fields, stated once in the field's type, and used by constructors, by the wire's converter, by the
command line and by the JSON Schemas.

A constraint is part of the field's type: `temperature: Annotated[float, Range(0, 2)]`. `check` checks the type and
constraints of all fields of an instance, and reports all errors together.
"""

from __future__ import annotations

import math
import re
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import chain, islice
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import attrs

from uma import json_text
from uma.errors import WrongValues
from uma.wrong import Wrong, nearest


@attrs.frozen
class Range:
    """A number from `ge` to `le`; `gt` instead of `ge` excludes the lower end."""

    ge: float | None = None
    le: float | None = None
    gt: float | None = None
    hint: str = ""
    """End of the message: what to use instead of a common wrong value."""

    def problem(self, value: Any) -> str | None:
        """Why `value` is not allowed, or None."""
        low_ok = (self.ge is None or value >= self.ge) and (self.gt is None or value > self.gt)
        return None if low_ok and (self.le is None or value <= self.le) else f"must be {self}{self.hint}"

    def __str__(self) -> str:
        if self.gt is not None:
            return f"over {_number(self.gt)}" + (f" and at most {_number(self.le)}" if self.le is not None else "")
        if self.le is None:
            return f"{_number(self.ge)} or more"
        return f"from {_number(self.ge)} to {_number(self.le)}"


def _number(value: float | None) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


@attrs.frozen
class Length:
    """A string of `ge` to `le` characters, or a list of so many items."""

    ge: int = 0
    le: int | None = None
    unit: str = "characters"

    def problem(self, value: Any) -> str | None:
        """Why `value` is not allowed, or None."""
        fits = len(value) >= self.ge and (self.le is None or len(value) <= self.le)
        return None if fits else f"must have {self}, not {len(value):,}"

    def __str__(self) -> str:
        return f"{self.ge:,} or more {self.unit}" if self.le is None else f"{self.ge:,} to {self.le:,} {self.unit}"


@attrs.frozen
class Pattern:
    """A string that matches a regular expression as a whole."""

    expression: str
    """Regular expression that JSON Schema and Python read alike, without anchors."""
    words: str
    """Description of matching strings."""

    def problem(self, value: Any) -> str | None:
        """Why `value` is not allowed, or None."""
        return None if re.fullmatch(self.expression, value) else f"must be {self.words}"

    def __str__(self) -> str:
        return self.words


@attrs.frozen
class Text:
    """A string that can be tokenized: without NUL, and without the lone surrogates that UTF-8 cannot encode."""

    def problem(self, value: Any) -> str | None:
        """Why `value` is not allowed, or None."""
        if (at := value.find("\0")) >= 0:
            return f"holds a NUL character, which no tokenizer takes (character {at + 1:,})"
        return None if is_utf8(value) else "holds a lone surrogate, which is no character"

    def __str__(self) -> str:
        return "no NUL"


@attrs.frozen
class Json:
    """A JSON object that is unchanged by encoding and decoding: at most `le` bytes, nested at most `depth` levels.

    The time of a check grows with the value's size, but only up to `le` bytes.
    """

    depth: int = 64
    le: int = 16_384
    """Maximum bytes as JSON, without any spaces."""
    members: int | None = None
    """Maximum members of each object in it; None: only bounded by `le`."""

    def problem(self, value: Any) -> str | None:
        """Why `value` is not allowed, or None."""
        size = _json_bytes(value)
        if size > self.le:
            return f"must be at most {self.le:,} bytes as JSON, not {size:,}"
        level, items = [value], 0
        for _ in range(self.depth + 1):
            items += len(level)
            if items > self.le:
                return f"must be at most {self.le:,} bytes as JSON"
            strange = next((item for item in level if not _is_json(item)), None)
            if strange is not None:
                return f"holds {show(strange)}, which JSON cannot carry"
            containers = [item for item in level if isinstance(item, dict | list | tuple)]
            if self.members is not None and any(isinstance(item, dict) and len(item) > self.members for item in level):
                return (
                    f"must have at most {self.members:,} members in each object, but {_too_large(value, self.members)}"
                )
            if not containers:
                return None
            level = [
                inner
                for container in containers
                for inner in (container.values() if isinstance(container, dict) else container)
            ]
        return f"must be nested at most {self.depth} levels deep"

    def __str__(self) -> str:
        members = "" if self.members is None else f", at most {self.members:,} members in each object"
        return f"at most {self.le:,} bytes, nested at most {self.depth} levels deep{members}"


def _too_large(value: Any, most: int) -> str:
    """Path of the outermost object with more than `most` members, and the number of its members."""
    level = [("", value)]
    while True:
        for place, item in level:
            if isinstance(item, dict) and len(item) > most:
                return f"{place[:200] or 'it'} has {len(item):,}"
        inner = [(place, item) for place, item in level if isinstance(item, dict | list | tuple)]
        level = [
            (f"{place}.{step}" if isinstance(item, dict) else f"{place}[{step}]", part)
            for place, item in inner
            for step, part in (item.items() if isinstance(item, dict) else enumerate(item))
        ]


def _json_bytes(value: Any) -> int:
    """Size of `value` as JSON, without any spaces; 0 where it is not JSON."""
    # Not at the top: the command line's parser imports this module, and does not need them.
    import orjson  # noqa: PLC0415

    from uma import json_bytes  # noqa: PLC0415

    # JSON's own types only: orjson would convert others, and decoding would give something else.
    as_it_is = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS
    try:
        return len(json_bytes.dumps(value, as_it_is))
    except (orjson.JSONEncodeError, RecursionError):
        return 0


@attrs.frozen
class Values:
    """An object whose values are all numbers in a range."""

    range: Range

    def problem(self, value: Any) -> str | None:
        """Why `value` is not allowed, or None."""
        for key, member in value.items():
            if not isinstance(key, str) or self.range.problem(member):
                return f"holds {show(key)}: {show(member)}; each value must be a number {self.range}"
        return None

    def __str__(self) -> str:
        return f"each value {self.range}"


def _is_json(value: Any) -> bool:
    if isinstance(value, str):
        return is_utf8(value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_utf8(key) for key in value)
    if isinstance(value, int):  # bool too
        return -(2**63) <= value < 2**64
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, list | tuple | json_text.Number)


def is_utf8(text: str) -> bool:
    """Whether a text has no lone surrogate. Paths whose bytes are not UTF-8 have some."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


Constraint = Range | Length | Pattern | Text | Json | Values

# Not `repr`: a value can be a megabyte long, or nested too deeply for it.
_brief = reprlib.Repr()
_brief.maxlevel = 3
_brief.maxstring = _brief.maxother = 57


def show(value: Any) -> str:
    """A value as error messages quote it: in JSON's words, and cut."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = _brief.repr(list(value[: _brief.maxlist + 1]) if isinstance(value, tuple) else value)
    return text if len(text) <= 60 else text[:57] + "..."


_NAMES = {str: "a string", int: "an integer", float: "a number", bool: "true or false", dict: "an object"}


def name_of(hint: Any) -> str:
    """A type as error messages name it: `a string`, `a list of integers`, `one of -1, 0, 1`.

    A string among a type's annotations is its name.
    """
    origin = get_origin(hint)
    if origin is typing.Annotated:
        base, *rest = get_args(hint)
        return next((alternative for alternative in rest if isinstance(alternative, str)), None) or name_of(base)
    if origin is Literal:
        return "one of " + ", ".join(map(show, get_args(hint)))
    if origin in (Union, types.UnionType):
        return " or ".join(name_of(arg) for arg in get_args(hint) if arg is not type(None))
    if origin in (list, tuple):
        return "a list of " + name_of(get_args(hint)[0]).removeprefix("an ").removeprefix("a ") + "s"
    return _NAMES.get(origin or hint, "an object" if attrs.has(hint) else getattr(hint, "__name__", str(hint)))


MAX_LINES = 20
"""Maximum errors reported for a message, and for the items of a field: a list can have 100,000 items."""


def problems(value: Any, hint: Any, path: str) -> Iterator[Wrong]:
    """All ways in which `value` is not a `hint`, as lines with paths. Of a list's wrong items at most `MAX_LINES` and
    one more, which shows that there are more.
    """
    origin = get_origin(hint)
    if origin is typing.Annotated:
        yield from _annotated_problems(value, hint, path)
    elif origin in (Union, types.UnionType):
        found = [list(problems(value, arg, path)) for arg in get_args(hint)]
        if all(found):
            deepest = [
                lines
                for lines in found
                if lines and not (lines[0].field == path and lines[0].why.startswith("expected"))
            ]
            yield from (deepest[0] if deepest else [Wrong(path, f"expected {name_of(hint)}, not {show(value)}")])
    elif not _is_a(value, hint, origin):
        known = [word for word in get_args(hint) if isinstance(word, str)] if origin is Literal else []
        near = nearest(value, known) if isinstance(value, str) else ""
        yield Wrong(path, f"expected {name_of(hint)}, not {show(value)}{near}")
    elif isinstance(value, float) and not math.isfinite(value):
        yield Wrong(path, f"expected a finite number, not {value}")
    elif origin in (list, tuple):
        item = get_args(hint)[0]
        wrong = (problems(value[index], item, f"{path}[{index}]") for index in _suspects(value, item))
        yield from islice(chain.from_iterable(wrong), MAX_LINES + 1)
    elif origin is dict and (member := get_args(hint)[1]) is not Any:
        wrong = (problems(found, member, f"{path}[{show(key)}]") for key, found in value.items())
        yield from islice(chain.from_iterable(wrong), MAX_LINES + 1)


def _annotated_problems(value: Any, hint: Any, path: str) -> Iterator[Wrong]:
    base, *rest = get_args(hint)
    constraints = [alternative for alternative in rest if isinstance(alternative, Constraint)]
    if isinstance(value, list | tuple):
        # A list that is too long is one problem, and its items are not checked.
        why = next((why for bound in constraints if isinstance(bound, Length) and (why := bound.problem(value))), None)
        if why:
            yield Wrong(path, why)
            return
    inner = list(problems(value, base, path))
    yield from inner
    if inner or value is None:
        return
    for constraint in constraints:
        if why := constraint.problem(value):
            yield Wrong(path, why if isinstance(constraint, Text) else f"{show(value)} {why}")


def _suspects(values: Sequence[Any], item: Any) -> Iterable[int]:
    """Indices of items that need a full check. Lists of integers are checked as a whole: a prompt can have 100,000s of
    them.
    """
    base = _base_and_rest(item)[0]
    if attrs.has(base):
        return (index for index, value in enumerate(values) if type(value) is not base)
    ranges = _ranges_of(item)
    if ranges is None:
        return range(len(values))
    if _are_whole_within(values, ranges):
        return ()
    return (
        index
        for index, value in enumerate(values)
        if type(value) is not int or any(bound.problem(value) for bound in ranges)
    )


def _ranges_of(item: Any) -> Sequence[Range] | None:
    """Ranges of integers; None where an item has another type, or further constraints."""
    base, *rest = _base_and_rest(item)
    return rest if base is int and all(isinstance(alternative, Range) for alternative in rest) else None


def _are_whole_within(values: Sequence[Any], ranges: Sequence[Range]) -> bool:
    """Whether all values are integers in these ranges."""
    if not set(map(type, values)) <= {int}:
        return False
    ends = (min(values), max(values)) if values else ()
    return not any(bound.problem(end) for bound in ranges for end in ends)


def _base_and_rest(hint: Any) -> tuple[Any, ...]:
    """A type, and its annotations."""
    return get_args(hint) if get_origin(hint) is typing.Annotated else (hint,)


def _is_a(value: Any, hint: Any, origin: Any) -> bool:
    if hint is Any or hint is object:
        return True
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(hint))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is type(None) or hint is None:
        return value is None
    return isinstance(value, origin or hint)


def hints_of(cls: type) -> dict[str, Any]:
    """Fields of an attrs class with their full types, including constraints."""
    key: Any = cls
    return _hints_of(key)


@cache
def _hints_of(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in attrs.fields(cls)}


def quick_check(hint: Any) -> Callable[[Any], bool]:
    """Fast check for common types. Values that it accepts are a `hint`; those that it rejects need `problems`."""
    if get_origin(hint) in (Union, types.UnionType):
        passes = [quick_check(arg) for arg in get_args(hint) if arg is not type(None)]
        if type(None) in get_args(hint):
            return lambda value: value is None or any(check(value) for check in passes)
        return lambda value: any(check(value) for check in passes)
    base, *rest = _base_and_rest(hint)
    whys = [alternative.problem for alternative in rest if isinstance(alternative, Constraint)]
    if get_origin(base) is Literal:
        choices = [(type(inner), inner) for inner in get_args(base)]
        return lambda value: (type(value), value) in choices
    if get_origin(base) is tuple:
        items_pass = _quick_check_of_items(get_args(base)[0])
        return lambda value: type(value) is tuple and not any(why(value) for why in whys) and items_pass(value)
    if base is float:
        whys.append(_FINITE.problem)
    elif base not in (str, int, bool) and not attrs.has(base):
        return lambda value: False
    return lambda value: type(value) is base and not any(why(value) for why in whys)


def _quick_check_of_items(item: Any) -> Callable[[Sequence[Any]], bool]:
    ranges = _ranges_of(item)
    if ranges is not None:
        return lambda values: _are_whole_within(values, ranges)
    passes = quick_check(item)
    return lambda values: all(map(passes, values))


_FINITE = Range(ge=-sys.float_info.max, le=sys.float_info.max)


@cache
def _quick_checks_of(cls: Any) -> list[tuple[str, Any, Callable[[Any], bool], Any]]:
    defaults = {field.name: field.default for field in attrs.fields(cls)}
    return [(name, hint, quick_check(hint), defaults[name]) for name, hint in hints_of(cls).items()]


_is_checked: ContextVar[bool] = ContextVar("_is_checked", default=False)


@contextmanager
def already_checked() -> Iterator[None]:
    """A block that constructs instances from values that were already checked: `check` does nothing there.

    A value from the wire is checked once, by the converter, which knows its path. Rules that span fields are not part
    of `check`, and also apply here.
    """
    token = _is_checked.set(True)
    try:
        yield
    finally:
        _is_checked.reset(token)


def check(instance: Any) -> None:
    """Check all fields of an attrs instance against their types and constraints, except in an `already_checked` block.

    Raises `ValueError` with a line for each wrong field. For `__attrs_post_init__` of classes that users construct.
    """
    if _is_checked.get():
        return
    wrong: list[Wrong] = []
    for name, hint, passes, default in _quick_checks_of(instance.__class__):
        value = getattr(instance, name)
        if value is not default and not passes(value):
            wrong += problems(value, hint, name)
    if wrong:
        raise WrongValues(*wrong)
