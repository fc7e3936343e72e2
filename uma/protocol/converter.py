"""The one cattrs converter: every rule by which the wire's JSON becomes the project's classes, and back.

Structuring is strict (no `true` for 1, no string for a number; 2.0 is the integer 2), and reports all wrong fields of a
message in one `BadRequest`, a line each. The constraints of a field are stated with the field (`uma.constraints`), not
here.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import islice
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import attrs
import cattrs
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn

from uma.constraints import MAX_LINES, Length, already_checked, hints_of, name_of, problems, quick_check, show
from uma.errors import BadRequest, ConfigError, WrongValues
from uma.json_text import Spelled
from uma.types import Answer, Message, Tool, Usage
from uma.wrong import Wrong

T = TypeVar("T")


def structure(value: Mapping[str, Any], cls: type[T], more: Callable[[], Iterator[str]] | None = None) -> T:
    """`value` as a `cls`. Raises `BadRequest` with a line for each wrong field.

    `more` adds lines for rules that span fields; it is called whether or not the fields themselves are right.
    """
    lines: list[str] = []
    result: T | None = None
    try:
        with already_checked():  # each hook checks its own value, so the constructors need not
            result = _converter.structure(value, cls)
    except cattrs.BaseValidationError as error:
        lines += _lines(error, "")
    if more is not None:
        lines += islice(more(), MAX_LINES + 1)
    if result is None or lines:
        raise BadRequest(*cut(lines, "wrong"))
    return result


def from_table(table: Any, cls: type[T], setting: str, where: str) -> T:
    """Instance of `cls` from a TOML table in a file that `setting` names. Raises `ConfigError`, whose message begins
    with `where`, for anything else, unknown names included.
    """
    known = ", ".join(hints_of(cls))
    if not isinstance(table, dict):
        raise ConfigError.at(setting, f"{where}: expected a table of {known}")
    try:
        return structure(
            table, cls, lambda: (f"{name}: no such limit; there are {known}" for name in unknown_fields(table, cls))
        )
    except BadRequest as error:
        raise ConfigError.at(setting, f"{where}: {error.message}") from None


def unstructure(instance: Any) -> dict[str, Any]:
    """An attrs instance as JSON values. Its own fields that have their default are left out."""
    return {
        field.name: _converter.unstructure(value)
        for field in attrs.fields(instance.__class__)
        if (value := getattr(instance, field.name)) != field.default
    }


def unknown_fields(value: Any, hint: Any, path: str = "") -> Iterator[str]:
    """Paths of the fields of `value` that a `hint` does not have; for a `value` that `structure` accepts."""
    hints, item = _shape(hint)
    if hints is not None and isinstance(value, dict):
        for name, member in value.items():
            if name not in hints:
                yield path + field_name(name)
            elif isinstance(member, dict | list):
                yield from unknown_fields(member, hints[name], f"{path}{name}.")
    elif item is not None and isinstance(value, list):
        for index, element in enumerate(value):
            yield from unknown_fields(element, item, f"{path.removesuffix('.')}[{index}].")


def field_name(name: str) -> str:
    """A field's name for messages: quoted and cut unless it is a short identifier."""
    return name if name.isidentifier() and len(name) <= 60 else show(name)


@cache
def _shape(hint: Any) -> tuple[dict[str, Any] | None, Any]:
    """Fields of an object of this type, and the type of a list's items if these are objects; None for other types."""
    inner = _plain(hint)
    if attrs.has(inner):
        return hints_of(inner), None
    return None, get_args(inner)[0] if get_origin(inner) is tuple and _any_class(inner) else None


def cut(lines: list[str], what: str) -> list[str]:
    """`lines`, with those over `MAX_LINES` replaced by one."""
    return lines if len(lines) <= MAX_LINES else [*lines[:MAX_LINES], f"and more that are {what}"]


class _WrongError(Exception):
    """A value that its field does not accept. The paths of `lines` are relative to that field."""

    def __init__(self, *lines: Wrong) -> None:
        super().__init__(*lines)
        self.lines = lines


def _lines(error: BaseException, path: str) -> Iterator[Wrong]:
    """Each leaf of cattrs' tree of errors, as a line with its path."""
    if isinstance(error, cattrs.ClassValidationError):
        for field_error, field in error.group_exceptions()[0]:
            if isinstance(field_error, KeyError):
                yield Wrong(field.name, f"is required ({name_of(field.type)})").below(path)
            else:
                yield from _lines(field_error, Wrong(field.name, "").below(path).field)
        for instance_error in error.group_exceptions()[1]:
            yield from _lines(instance_error, path)
    elif isinstance(error, _WrongError | WrongValues):
        yield from (line.below(path) for line in error.lines if isinstance(line, Wrong))
    else:
        yield from (Wrong(path, line) for line in str(error).splitlines())


def _structure_leaf(hint: Any) -> Callable[[Any, Any], Any]:
    """Structure hook of types without a class of ours, which the constraints check completely."""
    is_tuple = _any_tuple(hint)
    passes = quick_check(hint)

    def structure_leaf(value: Any, _: Any) -> Any:
        # The classes are frozen, so they have tuples for JSON's lists.
        value = tuple(value) if is_tuple and isinstance(value, list) else value
        value = float(value) if isinstance(value, Spelled) else value
        if passes(value):
            return value
        value = _whole(value)
        if lines := list(islice(problems(value, hint, ""), MAX_LINES + 1)):
            raise _WrongError(*lines)
        return value

    return structure_leaf


def _whole(value: Any) -> Any:
    """2.0 as the integer 2, as JSON Schema defines it. (Where a float is expected, `passes` has accepted it before.)"""
    if isinstance(value, tuple):
        return tuple(map(_whole, value))
    return int(value) if isinstance(value, float) and abs(value) < 2**63 and value.is_integer() else value


def _structure_nested(hint: Any) -> Callable[[Any, Any], Any]:
    """Structure hook of an optional object of our classes, or an optional list of them."""
    inner = _plain(hint)
    is_optional = NoneType in get_args(hint)
    lengths = [constraint for constraint in _constraints(hint) if isinstance(constraint, Length)]

    def structure_nested(value: Any, _: Any) -> Any:
        if value is None and is_optional:
            return None
        if attrs.has(inner):
            return _converter.structure(value, inner)
        if not isinstance(value, list):
            raise _WrongError(Wrong("", f"expected {name_of(inner)}, not {show(value)}"))
        for length in lengths:
            if why := length.problem(value):
                raise _WrongError(Wrong("", why))
        return _structure_items(value, get_args(inner)[0])

    return structure_nested


def _structure_items(values: list[Any], cls: Any) -> tuple[Any, ...]:
    hook = _converter.get_structure_hook(cls)
    items: list[Any] = []
    lines: list[Wrong] = []
    for index, value in enumerate(values):
        try:
            items.append(hook(value, cls))
        except (cattrs.BaseValidationError, _WrongError) as error:
            lines += _lines(error, f"[{index}]")
        if len(lines) > MAX_LINES:
            break
    if lines:
        raise _WrongError(*lines)
    return tuple(items)


def _structure_class(cls: Any) -> Callable[[Any, Any], Any]:
    from_fields = make_dict_structure_fn(cls, _converter, _cattrs_detailed_validation=True)

    def structure_class(value: Any, _: Any) -> Any:
        if not isinstance(value, dict):
            raise _WrongError(Wrong("", f"expected an object, not {show(value)}"))
        return from_fields(value, cls)

    return structure_class


def _unstructure_items(values: tuple[Any, ...]) -> Any:
    # Not converted one by one: token ids can be 100,000. (The last item, as a prompt's first log probability is None.)
    return list(map(_converter.unstructure, values)) if values and attrs.has(type(values[-1])) else values


def _plain(hint: Any) -> Any:
    """`hint` without constraints and without `| None`."""
    if get_origin(hint) is typing.Annotated:
        return _plain(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        rest = [arg for arg in get_args(hint) if arg is not NoneType]
        return _plain(rest[0]) if len(rest) == 1 else hint
    return hint


def _constraints(hint: Any) -> Iterator[Any]:
    if get_origin(hint) is typing.Annotated:
        yield from get_args(hint)[1:]
    elif get_origin(hint) in (Union, UnionType):
        for arg in get_args(hint):
            yield from _constraints(arg)


def _any_class(hint: Any) -> bool:
    if get_origin(hint) is typing.Annotated:
        return _any_class(get_args(hint)[0])  # the rest are constraints, classes of ours too
    return attrs.has(hint) or any(map(_any_class, get_args(hint)))


def _any_tuple(hint: Any) -> bool:
    return get_origin(hint) is tuple or any(map(_any_tuple, get_args(hint)))


_converter = cattrs.Converter(detailed_validation=True)
# cattrs uses the hook registered last that fits: leaves, then types that nest a class, then the classes themselves.
_converter.register_structure_hook_factory(lambda hint: True, _structure_leaf)
_converter.register_structure_hook_factory(_any_class, _structure_nested)
_converter.register_structure_hook_factory(attrs.has, _structure_class)
for _plainest in (str, int, float, bool):  # cattrs has hooks of its own for these, which convert instead of check
    _converter.register_structure_hook(_plainest, _structure_leaf(_plainest))
_converter.register_unstructure_hook_func(lambda cls: not attrs.has(cls), lambda value: value)
# Unstructure by the value's class, not by the declared type.
_converter.register_unstructure_hook_func(
    lambda cls: not attrs.has(cls) and _any_class(cls),
    lambda value: _converter.unstructure(value),  # noqa: PLW0108
)
_converter.register_unstructure_hook(tuple, _unstructure_items)
# Fields that older versions of these classes lacked are written only where they are set.
for _sparse in (Message, Tool, Answer, Usage):
    _converter.register_unstructure_hook(
        _sparse, make_dict_unstructure_fn(_sparse, _converter, _cattrs_omit_if_default=True)
    )
