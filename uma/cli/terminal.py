"""The edges between UMA and a person's terminal: what a model's text can do there, and how output is written so that
a slow or vanished reader never blocks anything but that output.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import Any

import attrs
import trio

from uma.cli.sanitize import sanitize
from uma.cli.streams import OUTPUT
from uma.cli.table import cell_len, width_of

with suppress(ImportError):  # Windows
    import termios

WRITE_BYTES = 4096
"""A pipe that is writable takes this much without blocking (POSIX: PIPE_BUF is at least 512, here 4096)."""


@attrs.define
class WordWrap:
    """Streamed text for a terminal: a word that reaches the edge is taken back, and begins the next line.

    So each letter is shown as it comes. Lines between code fences are the terminal's to fold: what is copied from them
    has no newline of ours. A character that is two columns wide is a word of its own, as Chinese has no blanks.
    """

    columns: int
    _line: str = ""
    """What the text has in its line so far."""
    _word: str = ""
    """The last word, at the end of what is shown."""
    _at: int = 0
    """Column of the cursor."""
    _is_code: bool = False

    def __call__(self, text: str) -> str:
        """What has to be written for `text`."""
        return "".join(map(self._shown, text))

    def _shown(self, character: str) -> str:
        if character == "\n":
            self._is_code ^= self._line.lstrip().startswith("```")
            self._line, self._word, self._at = "", "", 0
            return character
        self._line = (self._line + character)[:8]  # enough to know a fence by
        if self._is_code:
            return character
        width = cell_len(character)
        # The last column stays free: a full line leaves the cursor in doubt.
        is_over = self._at + width >= self.columns
        if character.isspace():
            self._word = ""
            self._at += 0 if is_over else 8 - self._at % 8 if character == "\t" else 1
            return "" if is_over else character
        word = "" if width == 2 else self._word
        if is_over and self._at > (length := cell_len(word)):
            self._word, self._at = word + character, length + width
            return (f"\x1b[{length}D\x1b[K" if length else "") + f"\n{self._word}"
        self._word, self._at = word + character, (self._at + width) % self.columns
        return character


@attrs.define(eq=False)
class TextOutput:
    """Standard output for streamed text, in its own encoding, unbuffered. Belongs to the Trio thread.

    Raises `BrokenPipeError` where the reader is gone and `OSError` where the disk is full.
    """

    fd: int
    encoding: str
    is_terminal: bool
    _can_wait: bool = True
    _ends_line: bool = True
    _wrap: WordWrap | None = None

    @classmethod
    def standard(cls, encoding: str | None = None) -> TextOutput:
        """The process's standard output: as text, or in an `encoding` for programs. Text is wrapped at words on a
        terminal.
        """
        sys.stdout.flush()
        is_capable = encoding is None and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
        columns = width_of(sys.stdout) if is_capable else None
        return cls(
            sys.stdout.fileno(),
            encoding or sys.stdout.encoding or "utf-8",
            sys.stdout.isatty(),
            wrap=None if columns is None else WordWrap(columns),
        )

    async def write(self, text: str) -> None:
        """Write `text`, waiting for the reader as long as it takes; cancellation can leave a part written."""
        if not text:
            return
        shown = sanitize(text) if self.is_terminal else text
        if self._wrap is not None:
            self._wrap.columns = width_of(sys.stdout) or self._wrap.columns
            shown = self._wrap(shown)
        self._ends_line = text.endswith("\n")
        unsent = memoryview(shown.encode(self.encoding, "replace"))
        while unsent:
            await self._writable()
            unsent = unsent[self._write(unsent[:WRITE_BYTES]) :]

    def end_line(self) -> None:
        """A newline, unless the text ended with one."""
        if not self._ends_line:
            self._write(b"\n")
            self._ends_line = True
            if self._wrap is not None:
                self._wrap("\n")

    def _write(self, data: bytes | memoryview) -> int:
        try:
            return os.write(self.fd, data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OSError(error.errno, error.strerror, OUTPUT) from None

    async def _writable(self) -> None:
        if self._can_wait:
            try:
                await trio.lowlevel.wait_writable(self.fd)
            except (OSError, ValueError):  # a regular file or /dev/null: always writable, and not to be waited on
                self._can_wait = False


def modes_of(fd: int) -> list[Any] | None:
    """How a terminal takes what is typed; None where the descriptor is none, or one that has gone away."""
    if sys.platform != "win32":
        with suppress(termios.error):
            return termios.tcgetattr(fd)
    return None


def set_modes(fd: int, modes: list[Any] | None, *, drains: bool = False) -> None:
    """Have a terminal take what is typed as `modes_of` has told it; where it `drains`, once it has taken all that was
    written. Nothing happens where there were no modes, or where it has gone away.
    """
    if sys.platform == "win32" or modes is None:
        return
    while True:
        try:
            termios.tcsetattr(fd, termios.TCSADRAIN if drains else termios.TCSANOW, modes)
        except termios.error as error:
            # A signal has ended the wait for the output, and nothing is set yet.
            if error.args[0] == errno.EINTR:
                continue
        return


@attrs.define(eq=False)
class SilentTyping:
    """A terminal that does not echo; the next reader of standard input gets what is typed. Ctrl-C and Ctrl-Z work.

    Does nothing where the descriptor is no terminal, or one that has gone away.
    """

    _fd: int
    _before: list[Any] | None = None

    def begin(self) -> None:
        """Begin to take the terminal's keys."""
        self._before = modes_of(self._fd)
        if sys.platform != "win32" and self._before is not None:
            quiet = self._before[:]
            # Enter stays what the line editor expects it to be, which reads what was typed meanwhile.
            quiet[0] &= ~termios.ICRNL
            quiet[3] &= ~(termios.ECHO | termios.ECHONL)
            # Ctrl-C and Ctrl-Z would drop what the terminal has not shown yet: half a drawing, with its cursor moves.
            quiet[3] |= termios.NOFLSH
            set_modes(self._fd, quiet, drains=True)

    def __enter__(self) -> SilentTyping:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """The terminal is as it was before, once it has taken all that was written."""
        set_modes(self._fd, self._before, drains=True)
