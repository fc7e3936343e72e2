"""The terminal under `uma top`: its other screen, keys as they are pressed, and all as it was before at the end."""

from __future__ import annotations

import codecs
import os
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from io import StringIO

import attrs
import trio
from rich.console import Console, RenderableType

from uma.cli.terminal import TextOutput, set_modes
from uma.errors import ConfigError

with suppress(ImportError):  # Windows
    import termios

ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"
"""The other screen, empty and without a cursor."""
LEAVE = "\x1b[?25h\x1b[?1049l"
ESCAPES = {"A": "up", "B": "down"}
PLAIN = {"\r": "enter", "\n": "enter", "\x1b": "escape", "\x7f": "backspace", "\x08": "backspace"}
_KEY = re.compile(r"\x1b[\[O][0-9;]*([A-Za-z~])|(.)", re.DOTALL)
"""An escape sequence as terminals send for arrows and the like, or one character."""
READ_BYTES = 256


def keys_in(text: str) -> Iterator[str]:
    """The keys that make a terminal send `text`; those that have no name here are left out."""
    for found in _KEY.finditer(text):
        if found[1] is not None:
            if found[1] in ESCAPES:
                yield ESCAPES[found[1]]
        elif found[2] in PLAIN:
            yield PLAIN[found[2]]
        elif found[2].isprintable():
            yield found[2]


@attrs.define(eq=False)
class Screen:
    """A terminal that `opened` has taken over. Belongs to the Trio thread."""

    _keyboard: int
    _out: TextOutput
    _shown: str = attrs.field(default="", init=False)

    @classmethod
    @asynccontextmanager
    async def opened(cls, in_fd: int, out_fd: int) -> AsyncIterator[Screen]:
        """A block with the terminal; however it is left, the terminal is as it was before."""
        if sys.platform == "win32":
            raise ConfigError("uma top: unsupported on Windows: use --json, or the server's page over HTTP")
        before = termios.tcgetattr(in_fd)
        raw = before[:]
        raw[3] &= ~(termios.ICANON | termios.ECHO)
        raw[6] = list(before[6])
        raw[6][termios.VSUSP] = os.fpathconf(in_fd, "PC_VDISABLE").to_bytes(1, "little")
        screen = cls(in_fd, TextOutput(out_fd, "utf-8", is_terminal=False))
        try:
            set_modes(in_fd, raw, drains=True)
            await screen._out.write(ENTER)
            yield screen
        finally:
            # A terminal that is gone has nothing to be put right.
            with suppress(OSError), trio.CancelScope(shield=True), trio.move_on_after(1):
                await screen._out.write(LEAVE)
            set_modes(in_fd, before)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines just now."""
        size = os.get_terminal_size(self._out.fd)
        return max(1, size.columns), max(1, size.lines)

    async def show(self, what: RenderableType) -> None:
        """Draw a screen, where it differs from the one before."""
        columns, lines = self.size
        drawn = f"{columns}x{lines}" + _drawn(what, columns, lines)
        if drawn == self._shown:
            return
        is_resized = drawn.partition("\n")[0] != self._shown.partition("\n")[0]
        self._shown = drawn
        rows = drawn.split("\n")[1 : lines + 1]
        body = "\x1b[K\r\n".join(rows)
        await self._out.write(("\x1b[2J" if is_resized else "") + f"\x1b[H{body}\x1b[K\x1b[J")

    async def keys(self) -> AsyncIterator[str]:
        """Keys as they are pressed, until the terminal is gone."""
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        while True:
            await trio.lowlevel.wait_readable(self._keyboard)
            try:
                data = os.read(self._keyboard, READ_BYTES)
            except OSError:
                return
            if not data:
                return
            for key in keys_in(decode(data)):
                yield key


def _drawn(what: RenderableType, columns: int, lines: int) -> str:
    """A newline, and the lines that make it."""
    file = StringIO()
    console = Console(file=file, force_terminal=True, width=columns, height=lines, highlight=False)
    console.print(what)
    return "\n" + file.getvalue().rstrip("\n")
