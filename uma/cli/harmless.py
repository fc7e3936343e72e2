"""The one cleaner of what reaches a terminal: names from files, paths, errors, a model's text.

A terminal obeys control characters; bidirectional controls show a text in another order than it is in; invisible
characters make two names look alike; line separators make one line of output look like two. None of them gets through.
Cheap to import, since the answer to a mistyped option goes through it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

REPLACEMENT = "\ufffd"


def _span(*ranges: tuple[int, int]) -> Iterator[int]:
    for first, last in ranges:
        yield from range(first, last + 1)


_C0_AND_DELETE = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"} | {0x7F: "\u2421"}
_C1 = tuple(_span((0x80, 0x9F)))
_BIDI = tuple(_span((0x061C, 0x061C), (0x200E, 0x200F), (0x202A, 0x202E), (0x2066, 0x2069)))
_LINE_SEPARATORS = (0x2028, 0x2029)
_SURROGATES = tuple(_span((0xD800, 0xDFFF)))
_INVISIBLE = tuple(
    _span(
        (0x00AD, 0x00AD),  # soft hyphen
        (0x034F, 0x034F),  # combining grapheme joiner
        (0x180E, 0x180E),
        (0x200B, 0x200D),  # zero-width space, non-joiner, joiner
        (0x2060, 0x2065),  # word joiner, invisible operators
        (0x206A, 0x206F),
        (0xFEFF, 0xFEFF),  # zero-width no-break space, or byte order mark
        (0xFFF9, 0xFFFB),
        (0xE0000, 0xE0FFF),  # tags, which can spell out a hidden text
    )
)

TABLE: dict[int, str | None] = {
    **_C0_AND_DELETE,
    **dict.fromkeys((*_C1, *_BIDI, *_LINE_SEPARATORS, *_SURROGATES), REPLACEMENT),
    **dict.fromkeys(_INVISIBLE),
}
"""What stands for each harmful character: the picture of a control character, a replacement character, or nothing."""


def harmless(text: str) -> str:
    """`text` with nothing that a terminal would obey, or that is not what it looks like; newlines and tabs stay."""
    return text.translate(TABLE)


def harmless_line(text: str) -> str:
    """`harmless`, on one line: for a cell of a table, or a name within a sentence."""
    return harmless(text).replace("\n", " ").replace("\t", " ")


def json_text(value: Any, **how: Any) -> str:
    """`value` as JSON, with every harmful character of its strings as an escape: the same data, safe to show."""
    return "".join(_json_escape(char) if ord(char) in TABLE else char for char in _json(value, **how))


def toml_text(text: str) -> str:
    """`text` as a basic string of TOML, otherwise as `json_text`."""
    return "".join(_toml_escape(char) if ord(char) in TABLE else char for char in _json(text))


def _json(value: Any, **how: Any) -> str:
    import json  # noqa: PLC0415  (an error message has no use for it)

    return json.dumps(value, ensure_ascii=False, **how)


def _json_escape(char: str) -> str:
    import json  # noqa: PLC0415

    return f"\\u{ord(char):04x}" if char.isascii() else json.dumps(char)[1:-1]


def _toml_escape(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) <= 0xFFFF else f"\\U{ord(char):08x}"


def lines(text: str) -> Iterable[str]:
    """The lines of `text`, harmless; only a newline ends one."""
    return harmless(text).removesuffix("\n").split("\n")
