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

with suppress(ImportError):  # Windows
    import termios

WRITE_BYTES = 4096
"""A pipe that is writable takes this much without blocking (POSIX: PIPE_BUF is at least 512, here 4096)."""


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

    @classmethod
    def standard(cls, encoding: str | None = None) -> TextOutput:
        """The process's standard output; in its own encoding, where none is given."""
        sys.stdout.flush()
        return cls(sys.stdout.fileno(), encoding or sys.stdout.encoding or "utf-8", sys.stdout.isatty())

    async def write(self, text: str) -> None:
        """Write `text`, waiting for the reader as long as it takes; cancellation can leave a part written."""
        if not text:
            return
        shown = sanitize(text) if self.is_terminal else text
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

    def _write(self, data: bytes | memoryview) -> int:
        try:
            return os.write(self.fd, data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OSError(error.errno, error.strerror, "standard output") from None

    async def _writable(self) -> None:
        if self._can_wait:
            try:
                await trio.lowlevel.wait_writable(self.fd)
            except (OSError, ValueError):  # a regular file or /dev/null: always writable, and not to be waited on
                self._can_wait = False


@attrs.define(eq=False)
class SilentTyping:
    """A terminal that does not echo; the next reader of standard input gets what is typed. Ctrl-C and Ctrl-Z work.

    Does nothing where the descriptor is no terminal, or one that has gone away.
    """

    _fd: int
    _before: list[Any] | None = None

    def begin(self) -> None:
        """Begin to take the terminal's keys."""
        if sys.platform == "win32":
            return
        with suppress(termios.error):
            self._before = termios.tcgetattr(self._fd)
            quiet = self._before[:]
            # Enter stays what the line editor expects it to be, which reads what was typed meanwhile.
            quiet[0] &= ~termios.ICRNL
            quiet[3] &= ~(termios.ECHO | termios.ECHONL)
            # Ctrl-C and Ctrl-Z would drop what the terminal has not shown yet: half a drawing, with its cursor moves.
            quiet[3] |= termios.NOFLSH
            self._set(quiet)

    def end(self) -> None:
        """The terminal is as it was before, once it has taken all that was written."""
        if sys.platform != "win32" and self._before is not None:
            with suppress(termios.error):
                self._set(self._before)

    def _set(self, modes: list[Any]) -> None:
        if sys.platform == "win32":
            return
        while True:
            try:
                termios.tcsetattr(self._fd, termios.TCSADRAIN, modes)
            except termios.error as error:
                # A signal has ended the wait for the output, and nothing is set yet.
                if error.args[0] != errno.EINTR:
                    raise
            else:
                return
