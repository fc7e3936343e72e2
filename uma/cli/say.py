"""What a command says beside its output: notes, warnings and errors, on standard error, made harmless.

Saying something is never what a command is called for: where standard error is full or closed, the command goes on.
"""

from __future__ import annotations

import sys
from contextlib import suppress

from uma.cli.sanitize import lines, sanitize_line
from uma.cli.table import cell_len, cropped, width_of, wrapped

ERASE_LINE = "\r\x1b[2K"


class _Screen:
    """What standard error's terminal shows."""

    has_passing = False
    """Whether the last line is to be replaced by whatever is said next."""


def note(text: str) -> None:
    """`uma: text`."""
    _say("uma: ", text)


def warn(text: str) -> None:
    """`uma: warning: text`."""
    _say("uma: warning: ", text)


def complain(text: str) -> None:
    """`uma: error: text`."""
    _say("uma: error: ", text)


def plain(text: str, *, folds: bool = True) -> None:
    """`text` as it is, but harmless; without `folds`, for commands to copy, the terminal alone wraps its lines."""
    _say("", text, folds=folds)


def passing(text: str = "") -> None:
    """`text` on a terminal, in a line that whatever is said next replaces, and cut where the terminal is too narrow;
    without `text` it is empty.
    """
    with suppress(OSError, ValueError):
        if sys.stderr.isatty():
            shown, most = sanitize_line(text), passing_columns()
            if most is not None and cell_len(shown) >= most:  # of a line that wraps only the end would be replaced
                shown = f"{cropped(shown, most - 2)}…"
            print(f"{ERASE_LINE}{shown}", end="", file=sys.stderr, flush=True)
            _Screen.has_passing = bool(shown)


def passing_columns() -> int | None:
    """The width of a passing line; two columns stay free for `^C`, which the terminal itself writes behind it."""
    width = columns()
    return None if width is None else width - len("^C")


def columns() -> int | None:
    """The width of the terminal that standard error goes to; None where there is none, or it does not tell."""
    return width_of(sys.stderr)


def settle() -> None:
    """Take a passing line off the screen, where there is one."""
    if _Screen.has_passing:
        passing()


def _say(prefix: str, text: str, *, folds: bool = True) -> None:
    settle()
    told = [part for line in lines(text) for part in wrapped(prefix + line, columns() if folds else None, "  ")]
    print("\n".join(told), file=sys.stderr, flush=True)
