"""Characters that must not reach a terminal, in the log or on standard output, and JSON escapes for them.

A terminal executes control characters. Bidirectional controls display text in another order than it is stored in.
Invisible characters make different names look alike. Line separators make one line of output look like two.
"""

from __future__ import annotations

from collections.abc import Iterator

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
"""Replacement of each harmful character, for `str.translate`: the symbol of a control character, U+FFFD, or nothing."""


def json_escape(char: str) -> str:
    """A character as a JSON escape: a surrogate pair outside of the basic plane."""
    units = char.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
