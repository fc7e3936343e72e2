"""A person at a terminal, for tests: a command of `uma` in a pseudo-terminal, and the screen that its output draws.

    with Terminal(uma_command("chat"), clean_environ(), columns=40) as terminal:
        terminal.type("hello\r")
        terminal.wait_for("tokens/s")

Waiting is for what the screen shows, never for time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import pyte

from forked import Forked
from harness import PATIENCE_SEC, uma_command
from uma.cli.table import cell_len

SCREENS = Path(__file__).parent / "screens"
WIDTHS = (60, 80, 100, 200)


def check_screen(name: str, columns: int, shown: str) -> None:
    """Fail unless this is what the file of that screen has; with `TEST_SCREENS=write` it is written there."""
    file = SCREENS / f"{name}-{columns}.txt"
    if os.environ.get("TEST_SCREENS") == "write":
        file.write_text(shown, encoding="utf-8")
    assert max(map(cell_len, shown.splitlines())) <= columns
    assert shown == file.read_text(encoding="utf-8")


class Terminal:
    """A program that believes it runs in a terminal of this size. It ends with the block, if need be by force."""

    def __init__(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        *,
        columns: int = 80,
        lines: int = 24,
        cwd: str | None = None,
        prelude: str = "",
    ) -> None:
        """`prelude`: see `Forked`."""
        self._screen = pyte.HistoryScreen(columns, lines, history=5000, ratio=0.5)
        self._screen.write_process_input = self.type
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""
        """All bytes the program wrote."""
        self._master, slave = pty.openpty()
        self._set_size(columns, lines)
        environ = {**environ, "TERM": environ.get("TERM", "xterm-256color")}
        own = arguments[len(uma_command()) :]
        streams = {"stdin": slave, "stdout": slave, "stderr": slave}
        self.process = Forked(own, environ, **streams, cwd=cwd, has_terminal=True, prelude=prelude)
        os.close(slave)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        self.hang_up()

    def type(self, keys: str) -> None:
        """Press keys; `\\r` is Enter, `\\x03` Ctrl-C, `\\x04` Ctrl-D."""
        os.write(self._master, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        """Drag the window's corner."""
        self._screen.resize(lines, columns)
        self._set_size(columns, lines)

    def hang_up(self) -> None:
        """Close the window."""
        if self._master >= 0:
            os.close(self._master)
            self._master = -1

    def signal(self, number: signal.Signals) -> None:
        """Send the program a signal."""
        self.process.send_signal(number)

    @property
    def text(self) -> str:
        """What scrolled away and what is on the screen, line by line."""
        above = ["".join(line[column].data for column in range(len(line))) for line in self._screen.history.top]
        return "\n".join(line.rstrip() for line in [*above, *self._screen.display])

    @property
    def screen(self) -> list[str]:
        """The lines on the screen."""
        return [line.rstrip() for line in self._screen.display]

    @property
    def is_cursor_shown(self) -> bool:
        """Whether the person can see the cursor."""
        return not self._screen.cursor.hidden

    @property
    def echoes(self) -> bool:
        """Whether the terminal itself shows what is typed."""
        return bool(termios.tcgetattr(self._master)[3] & termios.ECHO)

    @property
    def drops_output(self) -> bool:
        """Whether Ctrl-C and Ctrl-Z have the terminal drop output that it has not shown yet."""
        return not termios.tcgetattr(self._master)[3] & termios.NOFLSH

    def wait_for(self, text: str, times: int = 1) -> None:
        """Wait until `text` is to be seen (`times` over). Fails when the program ends first or nothing comes."""
        self.wait_until(lambda: self.text.count(text) >= times, f"{text!r} x {times}")

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait until the screen is as `is_so` wants it."""
        deadline = time.monotonic() + PATIENCE_SEC
        while not is_so():
            if not self._read(deadline - time.monotonic()) and not is_so():
                raise AssertionError(f"{what} never came. The screen:\n{self.text}")

    def wait(self) -> int:
        """Wait for the end of the program; its exit code, as a shell gives it."""
        deadline = time.monotonic() + PATIENCE_SEC
        while self._master >= 0 and self._read(deadline - time.monotonic()):
            pass
        code = self.process.wait(PATIENCE_SEC)
        return code if code >= 0 else 128 - code

    def _read(self, patience_sec: float) -> bool:
        """Take in some output; False where there is none to come."""
        if patience_sec <= 0 or not select.select([self._master], [], [], patience_sec)[0]:
            return False
        with contextlib.suppress(OSError):  # Linux reports the program's end as EIO
            data = os.read(self._master, 65536)
            self.raw += data
            self._stream.feed(data)
            return bool(data)
        return False

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
