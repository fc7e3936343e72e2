"""Which view a chat has: the terminal's, or plain lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from uma.cli.terminal import TextOutput
from uma.cli.view import PROMPT, ChatView, PlainLines, PlainView


def standard_view(commands: Iterable[str], *, keeps_history: bool) -> ChatView:
    """The view that this process's standard input and output allow; with `keeps_history` later chats know its lines."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
        from uma.cli.terminal_view import TerminalView  # noqa: PLC0415  (slow to import, and a pipe has no use for it)

        return TerminalView.standard(commands, keeps_history=keeps_history)
    return PlainView(PlainLines(0, PROMPT if is_terminal else ""), TextOutput.standard())
