"""A table for people: rich where a terminal is wide enough, and elsewhere plain columns that are never cut."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import TextIO

from uma.cli.sanitize import sanitize_line

GAP = 3
"""Columns that rich leaves between two cells."""


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], file: TextIO | None = None) -> None:
    """Write rows under their columns' names to `file` (None: standard output), harmless and each on one line."""
    file = sys.stdout if file is None else file
    rows = [[sanitize_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    if file.isatty() and sum(widths) + GAP * len(widths) <= shutil.get_terminal_size().columns:
        _print_rich(columns, rows, file)
        return
    for row in (columns, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), file=file)


def _print_rich(columns: Sequence[str], rows: Sequence[Sequence[str]], file: TextIO) -> None:
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415  (a pipe has no use for it)
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(file=file).print(table)
