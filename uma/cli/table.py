"""A table for people: columns as long as the terminal has room for them, elsewhere columns that are never cut.

No word is folded: columns that can be spared go first, then the last one wraps at words, and where even that does not
fit, each row is a line with its first cell and one below it with the others by name.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TextIO

from uma.cli.sanitize import sanitize_line

GAP = "  "
"""Between two cells."""
NOTE = "note"
"""Name of a column of sentences, which need no name where each row is by itself."""
LEAST_PROSE = 32
"""Minimum columns of a last column that wraps: below, its words would stand one below the other."""


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    file: TextIO | None = None,
    *,
    spare: Sequence[str] = (),
    key: str = "",
) -> None:
    """Write rows under their columns' names to `file` (None: standard output), harmless. See `laid_out`."""
    file = sys.stdout if file is None else file
    for line in laid_out(columns, rows, width_of(file), spare=spare, key=key or columns[0]):
        print(line, file=file)


def print_wrapped(text: str, file: TextIO | None = None, end: str = "\n") -> None:
    """Write one line of prose, harmless, wrapped at words where `file` is a terminal, and `end` at once."""
    file = sys.stdout if file is None else file
    print("\n".join(wrapped(sanitize_line(text), width_of(file), GAP)), end=end, file=file, flush=True)


def width_of(file: TextIO) -> int | None:
    """Columns of the terminal that `file` goes to; None where it goes to none, or to one that does not tell."""
    with suppress(OSError, ValueError):
        if file.isatty():
            return os.get_terminal_size(file.fileno()).columns or None
    return None


def wrapped(text: str, width: int | None, indent: str = "") -> list[str]:
    """`text` as lines of at most `width` columns, those behind the first indented. What stands between backquotes, a
    command to copy, stays on one line; what is longer than a line is left to the terminal.
    """
    if width is None or len(text) <= width:
        return [text]
    whole = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    wrapper = _Wrapper(width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in wrapper.wrap(whole)]


class _Wrapper(textwrap.TextWrapper):
    """Wraps at words, and a path that is longer than a line behind its slashes."""

    def _split(self, text: str) -> list[str]:
        parts = (
            re.split(r"(?<=/)", word) if len(word) > self.width and "\0" not in word else [word]
            for word in super()._split(text)
        )
        return [part for word in parts for part in word]


def laid_out(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None, *, spare: Sequence[str], key: str
) -> list[str]:
    """The lines of a table in `width` columns; None: without an end. Columns of `spare` are left out where that is too
    narrow, the first of them first, and so are empty ones; `key` is the one that tells rows apart.
    """
    cells = [[sanitize_line(cell) for cell in row] for row in rows]
    if width is None or not cells:
        return _side_by_side(columns, cells)
    filled = {name: [row[at] for row in cells] for at, name in enumerate(columns) if any(row[at] for row in cells)}
    shown = dict(filled)
    for name in spare:
        if _total(shown) > width:
            shown.pop(name, None)
    last = next(reversed(shown))
    left = width - _total({name: shown[name] for name in shown if name != last}) - len(GAP)
    if _total(shown) <= width:
        return _side_by_side(list(shown), list(zip(*shown.values(), strict=True)))
    prose = [wrapped(cell, max(left, LEAST_PROSE)) for cell in shown[last]]
    if left < LEAST_PROSE or max(len(part) for parts in prose for part in parts) > left:
        return _below(filled, width, spare, key)
    wraps = [
        [*("" if at else cell for cell in row[:-1]), part]
        for row, parts in zip(zip(*shown.values(), strict=True), prose, strict=True)
        for at, part in enumerate(parts)
    ]
    return _side_by_side(list(shown), wraps)


def _total(columns: Mapping[str, Sequence[str]]) -> int:
    """Width of a table."""
    return sum(max(map(len, (name, *cells))) for name, cells in columns.items()) + len(GAP) * (len(columns) - 1)


def _side_by_side(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    return [
        GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (columns, *rows)
    ]


def _below(columns: Mapping[str, Sequence[str]], width: int, spare: Sequence[str], key: str) -> list[str]:
    """Each row's `key`, and in a line below it the others, each behind its column's name."""
    left = [name for name in columns if name != key]
    for missing in (None, *spare):
        left = [name for name in left if name != missing]
        told = [
            GAP + " · ".join(cells[name] if name == NOTE else f"{name} {cells[name]}" for name in left if cells[name])
            for cells in (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        ]
        if max(map(len, told)) <= width:
            break
    return [
        line
        for name, others in zip(columns[key], told, strict=True)
        for line in (*wrapped(name, width, GAP), *(wrapped(others, width, GAP) if others.strip() else ()))
    ]
