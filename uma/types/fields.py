"""What fields of several classes share: converters that take any iterable and give a tuple, a bound, and a `repr`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

MAX_MEMBERS = 512
"""Maximum members of one object in a JSON Schema: the time to compile it grows with their square, 5,000 take 10 s."""


def tuple_or_none(items: Iterable[Any] | None) -> Any:
    """A tuple of the items. A text, what has no items, and None are returned unchanged, for `check` to refuse by name:
    the items of a text would be its letters.
    """
    return tuple(items) if isinstance(items, Iterable) and not isinstance(items, str | bytes | Mapping) else items


def tuple_of_strings(given: str | Iterable[str] | None) -> Any:
    """One string, several or None as a tuple. Anything else is returned unchanged, for `check` to refuse by name."""
    return tuple_or_none(() if given is None else (given,) if isinstance(given, str) else given)


MAX_SHOWN = 200
"""Characters of one field in a `repr`."""
_ENDS = {"(": ")", "[": "]", "{": "}"}


def short_repr(self: Any) -> str:
    """The fields of an attrs class that are not at their defaults, long ones cut and their brackets closed."""
    fields = ((field.name, getattr(self, field.name), field.default) for field in attrs.fields(type(self)))
    told = ((name, repr(value)) for name, value, default in fields if value not in (default, ()))
    shown = (f"{name}={text if len(text) <= MAX_SHOWN else _cut(text)}" for name, text in told)
    return f"{type(self).__name__}({', '.join(shown)})"


def _cut(text: str) -> str:
    """The beginning of a `repr`, no number of it cut, with the ends of what it opened."""
    start = re.sub(r"\b[-+.\d]+$", "", text[: MAX_SHOWN - 1])
    opened = list[str]()
    for mark in re.finditer(r"""(['"])(?:\\.|(?!\1).)*(\1|$)|[()\[\]{}]""", start):
        if mark[1]:
            opened += [] if mark[2] else [mark[1]]
        elif mark[0] in _ENDS:
            opened.append(_ENDS[mark[0]])
        elif opened:
            opened.pop()
    return start + "…" + "".join(reversed(opened))
