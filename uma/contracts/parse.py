"""From a peer's object to a contract's class: strict, and with every wrong field in one error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, TypeVar

from uma.constraints import show
from uma.errors import BadRequest
from uma.protocol.converter import MAX_LINES, structure, unknown_fields, unstructure

T = TypeVar("T")

Rule = Callable[[T], Iterable[str]]
"""What spans several fields of a contract, as lines that begin with a field's path; empty where all is well."""


def parse(value: Any, cls: type[T], rules: Rule[T] | None = None, *, strict: bool = True) -> T:
    """`value` as a `cls`. Raises `BadRequest` with a line for each wrong field, each with its path.

    `strict` refuses fields that the contract does not have; otherwise they are ignored (`ignored_fields` names them).
    `rules` are asked only where the fields themselves are right.
    """
    if not isinstance(value, Mapping):
        raise BadRequest(f"{cls.__name__}: expected an object, not {show(value)}")
    more = (lambda: _unknown(value, cls)) if strict else None
    made = structure(dict(value), cls, more)
    if rules is not None and (wrong := list(islice(rules(made), MAX_LINES))):
        raise BadRequest("\n".join(wrong))
    return made


def ignored_fields(value: Mapping[str, Any], cls: type) -> tuple[str, ...]:
    """The paths of the fields of `value`, which `parse` has taken, that `cls` does not have."""
    return tuple(unknown_fields(dict(value), cls))


def to_json(instance: Any) -> dict[str, Any]:
    """A contract's instance as what JSON carries, fields that hold their default left out."""
    return unstructure(instance)


def _unknown(value: Mapping[str, Any], cls: type) -> Iterator[str]:
    return (f"{path}: is not a field of {cls.__name__}" for path in unknown_fields(dict(value), cls))


def lines(*groups: Iterable[str]) -> Iterator[str]:
    """Several rules' lines, one after the other."""
    return chain.from_iterable(groups)
