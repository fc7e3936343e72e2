"""What a command says beside its output: notes, warnings and errors, on standard error, made harmless.

Saying something is never what a command is called for: where standard error is full or closed, the command goes on.
"""

from __future__ import annotations

import sys

from uma.cli.harmless import lines


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


def _say(prefix: str, text: str) -> None:
    print("\n".join(prefix + line for line in lines(text)), file=sys.stderr, flush=True)
