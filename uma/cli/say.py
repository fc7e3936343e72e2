"""What a command says beside its output: notes, warnings and errors, on standard error, made harmless.

Saying something is never what a command is called for: where standard error is full or closed, the command goes on.
"""

from __future__ import annotations

import sys
from contextlib import suppress

from uma.cli.sanitize import lines, sanitize_line

ERASE_LINE = "\r\x1b[2K"


def note(text: str) -> None:
    """`uma: text`."""
    _say("uma: ", text)


def warn(text: str) -> None:
    """`uma: warning: text`."""
    _say("uma: warning: ", text)


def complain(text: str) -> None:
    """`uma: error: text`."""
    _say("uma: error: ", text)


def plain(text: str) -> None:
    """`text` as it is, but harmless."""
    _say("", text)


def passing(text: str = "") -> None:
    """`text` on a terminal, in a line that the next one replaces; without `text` it is empty."""
    with suppress(OSError, ValueError):
        if sys.stderr.isatty():
            print(f"{ERASE_LINE}{sanitize_line(text)}", end="", file=sys.stderr, flush=True)


def _say(prefix: str, text: str) -> None:
    print("\n".join(prefix + line for line in lines(text)), file=sys.stderr, flush=True)
