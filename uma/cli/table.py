"""A table for people, whose columns depend on the terminal's width alone, not on its rows. Elsewhere all are whole.

Where the cells are too long, the longest are cut in their middle, but for the last column, which wraps at words.
Widths are the terminal's cells, of which a Chinese character or an emoji takes two.
"""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import TextIO

from uma.cli.sanitize import sanitize_line

GAP = "  "
"""Between two cells."""
NONE: Mapping[str, int] = MappingProxyType({})


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    file: TextIO | None = None,
    *,
    spare: Mapping[str, int] = NONE,
    key: str = "",
) -> None:
    """Write rows under their columns' names to `file` (None: standard output), harmless. See `laid_out`."""
    file = sys.stdout if file is None else file
    for line in laid_out(columns, rows, width_of(file), spare=spare, key=key):
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
    command to copy, stays on one line; what is longer than a line is left to the terminal, but for paths, which break
    behind a slash, and wide characters, among which Chinese has no blanks.
    """
    if width is None or cell_len(text) <= width:
        return [text]
    told = [""]
    for word in re.findall(r"\s*(?:[^\s`]|`[^`]*`|`)+", text):
        is_long = cell_len(word) > width - len(indent) and "`" not in word
        for part in re.split(r"(?<=[/\u2e80-\U0003ffff])", word) if is_long else [word]:
            if told[-1].strip() and cell_len(told[-1] + part) > width:
                told.append(indent + part.lstrip())
            else:
                told[-1] += part
    return told


def cell_len(text: str) -> int:
    """Columns that a terminal gives to a text."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def _cells(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cropped(text: str, width: int) -> str:
    """The beginning of a text that fits in so many columns."""
    end = min(len(text), width)
    while cell_len(text[:end]) > width:
        end -= 1
    return text[:end]


def cut(text: str, width: int) -> str:
    """`text` in at most so many columns, without its middle where it is longer: both ends tell names apart."""
    if cell_len(text) <= width:
        return text
    head, tail = cropped(text, width // 2), cropped(text[::-1], width - 1 - width // 2)[::-1]
    return f"{head.rstrip()}…{tail.lstrip()}"


def laid_out(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None,
    *,
    spare: Mapping[str, int] = NONE,
    key: str = "",
) -> list[str]:
    """The lines of a table in `width` columns; None: without an end. A column of `spare` is left out below the width
    that stands there. A cell of `key`, which is to be copied, has a line of its own where it is too long: above the
    rest of its row, or below it where it is the last one.
    """
    width = sys.maxsize if width is None else width
    shown = [at for at, name in enumerate(columns) if spare.get(name, 0) <= width]
    cells = [[sanitize_line(row[at]) for at in shown] for row in (columns, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    most = min(max(widths), width)
    while most > 1 and sum(min(most, whole) + len(GAP) for whole in widths) > width + len(GAP):
        most -= 1

    def line(row: Sequence[str]) -> str:
        fitting = (cut(cell, most) for cell in row)
        padded = (cell + " " * (min(most, whole) - cell_len(cell)) for cell, whole in zip(fitting, widths, strict=True))
        return GAP.join(padded).rstrip()

    told = list[str]()
    for row in cells:
        below = list[str]()
        for at, cell in enumerate(row):
            if columns[shown[at]] == key and cell_len(cell) > most:
                (told if at < len(row) - 1 else below).extend(wrapped(cell, width, GAP))
                row[at] = ""
        first, *more = wrapped(row[-1], most)
        told += [line([*row[:-1], first]), *(line([*[""] * (len(row) - 1), part]) for part in more), *below]
    return list(filter(None, told))
