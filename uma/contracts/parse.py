"""Parser for contract objects of a peer: strict, with all wrong fields in one error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

from uma.constraints import MAX_LINES, show
from uma.errors import BadRequest
from uma.protocol.converter import cut, structure, unknown_fields
from uma.wrong import Wrong

T = TypeVar("T")

Rule = Callable[[T], Iterable[str]]
"""Check of several fields together. Yields lines that begin with a field's path; none where all is well."""


def parse(value: Any, cls: type[T], rules: Rule[T] | None = None, *, strict: bool = True) -> T:
    """`value` as a `cls`. Raises `BadRequest` with a line for each wrong field.

    With `strict`, fields that the contract does not have are refused; otherwise they are ignored. `rules` are also
    checked on a value without its wrong fields, unless a required one is among these, so they must accept that any
    optional field is absent.
    """
    if not isinstance(value, Mapping):
        raise BadRequest.at(cls.__name__, f"expected an object, not {show(value)}")
    more = (lambda: _unknown(value, cls)) if strict else None
    try:
        made = structure(dict(value), cls, more)
    except BadRequest as error:
        if rules is None:
            raise
        besides = _broken_besides(error.lines, value, cls, rules)
        raise BadRequest(*cut([*error.lines, *besides], "wrong")) from None
    if rules is not None and (wrong := list(islice(rules(made), MAX_LINES + 1))):
        raise BadRequest(*cut(wrong, "wrong"))
    return made


def _broken_besides(wrong: Iterable[str], value: Mapping[str, Any], cls: type[T], rules: Rule[T]) -> list[str]:
    """Lines of the rules about `value` without the fields that `wrong` is about."""
    rest: Mapping[str, Any] = value
    for line in wrong:
        if isinstance(line, Wrong):
            rest = _less(rest, line.field.partition("[")[0].split("."))
    try:
        return list(islice(rules(structure(dict(rest), cls)), MAX_LINES + 1))
    except BadRequest:
        return []


def _less(value: Mapping[str, Any], path: list[str]) -> Mapping[str, Any]:
    """`value` without the field at `path`."""
    name, *further = path
    inner = value.get(name)
    if further and isinstance(inner, Mapping):
        return {**value, name: _less(inner, further)}
    return {member: kept for member, kept in value.items() if member != name}


def _unknown(value: Mapping[str, Any], cls: type) -> Iterator[str]:
    return (f"{path}: is not a field of {cls.__name__}" for path in unknown_fields(dict(value), cls))
