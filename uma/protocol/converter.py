"""The one cattrs converter: every rule by which the wire's JSON becomes the project's classes, and back.

Structuring is strict (no `true` for 1, no string for a number; 2.0 is the integer 2) and thorough: all wrong fields of
a message come out of one `BadRequest`, a line each. What a field can hold is said beside the field
(`uma.constraints`), not here.
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

    `more` adds the rules that span fields, as lines; it is asked whether or not the fields themselves are right.
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
    """The instance that a table describes, in a file that `setting` names. Raises `ConfigError`, which begins with
    `where`, for anything else, a name that `cls` does not have included.
    """
    known = ", ".join(hints_of(cls))
    if not isinstance(table, dict):
        raise ConfigError.at(setting, f"{where}: expected a table of {known}")
    try:
        return structure(
            table, cls, lambda: (f"{name}: no such bound; there are {known}" for name in unknown_fields(table, cls))
        )
    except BadRequest as error:
        raise ConfigError.at(setting, f"{where}: {error.message}") from None


def unstructure(instance: Any) -> dict[str, Any]:
    """An attrs instance as what JSON carries. Its own fields that hold their default are left out."""
    return {
        field.name: _converter.unstructure(value)
        for field in attrs.fields(instance.__class__)
        if (value := getattr(instance, field.name)) != field.default
    }


def unknown_fields(value: Any, hint: Any, path: str = "") -> Iterator[str]:
    """The paths of the fields of `value` that a `hint` does not have; for a `value` that `structure` has taken."""
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
    """A member's name as messages write it: quoted and cut where it is no short identifier."""
    return name if name.isidentifier() and len(name) <= 60 else show(name)


@cache
def _shape(hint: Any) -> tuple[dict[str, Any] | None, Any]:
    """The fields of an object of this type, and what the items of a list of objects are; None where it is neither."""
    inner = _plain(hint)
    if attrs.has(inner):
        return hints_of(inner), None
    return None, get_args(inner)[0] if get_origin(inner) is tuple and _any_class(inner) else None


def cut(lines: list[str], what: str) -> list[str]:
    """`lines`, with what goes over `MAX_LINES` told in one."""
    return lines if len(lines) <= MAX_LINES else [*lines[:MAX_LINES], f"and more that are {what}"]


class _WrongError(Exception):
    """A value that is not what its field takes; the paths of `lines` are below that field."""

    def __init__(self, *lines: Wrong) -> None:
        super().__init__(*lines)
        self.lines = lines


def _lines(error: BaseException, path: str) -> Iterator[Wrong]:
    """Each leaf of cattrs' tree of errors."""
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
    """Structure hook of types that hold no class of ours: the constraints know all about them."""
    is_tuple = _any_tuple(hint)
    passes = quick_check(hint)

    def structure_leaf(value: Any, _: Any) -> Any:
        # JSON has one kind of list; the classes, being frozen, have tuples.
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
    """2.0 is the integer 2, as JSON Schema has it. Where a float is taken it has passed before."""
    if isinstance(value, tuple):
        return tuple(map(_whole, value))
    return int(value) if isinstance(value, float) and abs(value) < 2**63 and value.is_integer() else value


def _structure_nested(hint: Any) -> Callable[[Any, Any], Any]:
    """Structure hook of an optional object, or an optional list of objects, of our classes."""
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
    # Token ids by the 100,000 are left as they are. (Of a prompt's log probabilities, the first is None.)
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
# The last registered that fits is taken: leaves, then what nests a class, then the classes themselves.
_converter.register_structure_hook_factory(lambda hint: True, _structure_leaf)
_converter.register_structure_hook_factory(_any_class, _structure_nested)
_converter.register_structure_hook_factory(attrs.has, _structure_class)
for _plainest in (str, int, float, bool):  # cattrs has hooks of its own for these, which convert instead of check
    _converter.register_structure_hook(_plainest, _structure_leaf(_plainest))
_converter.register_unstructure_hook_func(lambda cls: not attrs.has(cls), lambda value: value)
# By what it is, and not by what it was declared as.
_converter.register_unstructure_hook_func(
    lambda cls: not attrs.has(cls) and _any_class(cls),
    lambda value: _converter.unstructure(value),  # noqa: PLW0108
)
_converter.register_unstructure_hook(tuple, _unstructure_items)
# Fields that they did not always have are written where they are given.
for _sparse in (Message, Tool, Answer, Usage):
    _converter.register_unstructure_hook(
        _sparse, make_dict_unstructure_fn(_sparse, _converter, _cattrs_omit_if_default=True)
    )
