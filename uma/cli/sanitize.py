"""The one cleaner of what reaches a terminal: names from files, paths, errors, a model's text.

No character of `uma.net.controls` gets through. Cheap to import, since the answer to a mistyped option goes through it
too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from uma.net.controls import TABLE, json_escape


def sanitize(text: str) -> str:
    """`text` with nothing that a terminal would obey, or that is not what it looks like; newlines and tabs stay."""
    return text.translate(TABLE)


def sanitize_line(text: str) -> str:
    """`sanitize`, on one line: for a cell of a table, or a name within a sentence."""
    return sanitize(text).replace("\n", " ").replace("\t", " ")


def json_text(value: Any, **how: Any) -> str:
    """`value` as JSON, with every harmful character of its strings as an escape: the same data, safe to show."""
    return "".join(json_escape(char) if ord(char) in TABLE else char for char in _json(value, **how))


def toml_text(text: str) -> str:
    """`text` as a basic string of TOML, otherwise as `json_text`."""
    return "".join(_toml_escape(char) if ord(char) in TABLE else char for char in _json(text))


def _json(value: Any, **how: Any) -> str:
    import json  # noqa: PLC0415  (an error message has no use for it)

    return json.dumps(value, ensure_ascii=False, **how)


def _toml_escape(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) <= 0xFFFF else f"\\U{ord(char):08x}"


def lines(text: str) -> Iterable[str]:
    """The lines of `text`, harmless; only a newline ends one."""
    return sanitize(text).removesuffix("\n").split("\n")
