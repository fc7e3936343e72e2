"""llama.cpp's own log: the last lines kept for error messages, every line passed on to Python's `logging`.

The library has one logger for the whole process, so this file has one too. It is quiet: lines go to the logger
`uma.llama` at level DEBUG, which is not shown unless logging is set up so, or `UMA_DEBUG=1` is set.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
from collections import deque
from itertools import islice

import attrs
import llama_cpp.llama_cpp as lib
from llama_cpp import _utils

from uma import posix
from uma.config import is_debugging

logger = logging.getLogger("uma.llama")

# The binding keeps two files open for as long as the process lives, of which `python -W default` warns at its end. In
# their place stand files that own no descriptor: these can be used until then, and end without a warning.
for name in ("outnull_file", "errnull_file"):
    with getattr(_utils, name) as file:
        setattr(_utils, name, open(os.dup(file.fileno()), "w", closefd=False))  # noqa: SIM115

KEPT_LINES = 400

DEBUG, INFO, WARN, ERROR, CONTINUED = range(1, 6)
"""`ggml_log_level`. CONTINUED goes on with the line before."""


@attrs.frozen
class LogLine:
    """One line of llama.cpp's log, without its line end. `thread` is the thread that llama.cpp logged it from."""

    number: int
    level: int
    thread: int
    text: str

    @property
    def is_problem(self) -> bool:
        """A warning or an error."""
        return self.level in (WARN, ERROR)


class LlamaLog:
    """The ring of last lines. Any thread can read it, and any thread of llama.cpp's can write it."""

    def __init__(self) -> None:
        self._lines: deque[LogLine] = deque(maxlen=KEPT_LINES)
        self._lock = threading.Lock()
        self._unfinished: dict[int, tuple[int, str]] = {}
        self._count = 0

    def write(self, level: int, text: str) -> None:
        """Take a piece of log as llama.cpp gives it: with its line end, or as part of a line."""
        thread = threading.get_ident()
        with self._lock:
            if level == CONTINUED:
                level, begun = self._unfinished.pop(thread, (INFO, ""))
            else:
                begun = ""
            *whole, rest = (begun + text).split("\n")
            if rest:
                self._unfinished[thread] = (level, rest)
            lines = [self._add(level, thread, line) for line in whole if line.strip()]
        # Outside the lock: a handler can be slow, or can itself end up here.
        for line in lines:
            logger.debug("%s", line.text)

    def _add(self, level: int, thread: int, text: str) -> LogLine:
        self._count += 1
        line = LogLine(self._count, level, thread, text.rstrip())
        self._lines.append(line)
        return line

    @property
    def mark(self) -> int:
        """A point in the log, for `since`."""
        with self._lock:
            return self._count

    def since(self, mark: int) -> list[LogLine]:
        """What this thread's calls logged after `mark`, oldest first, as far as the ring still has it."""
        thread = threading.get_ident()
        with self._lock:
            return [line for line in self._lines if line.number > mark and line.thread == thread]

    def last(self, count: int) -> list[str]:
        """The last `count` lines of all threads, oldest first."""
        with self._lock:
            return [line.text for line in islice(self._lines, max(0, len(self._lines) - count), None)]


LOG = LlamaLog()
"""The process's log, as llama.cpp's logger is the process's."""


def _on_line(level: int, text: bytes | None, _user_data: int | None) -> None:
    LOG.write(level, (text or b"").decode("utf-8", "replace"))


def _on_abort(message: bytes | None) -> None:
    # ggml's own way is a backtrace of C frames by a debugger, if there is one. The process ends either way.
    said = (message or b"").decode("utf-8", "replace")
    lines = [f"uma: error: llama.cpp gave up and ended the process: {said}", "its last lines were:", *LOG.last(8)]
    os.write(2, ("\n  ".join(lines) + "\n").encode())


CALLBACK = lib.llama_log_callback(_on_line)
_abort_callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_on_abort)
"""Both are kept here because llama.cpp holds only their addresses."""


def install() -> None:
    """Point llama.cpp's and ggml's logger here. Harmless when repeated."""
    if is_debugging() and not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.DEBUG)
    lib.llama_log_set(CALLBACK, ctypes.c_void_p(0))
    lib._lib.ggml_set_abort_callback(_abort_callback)
    atexit.unregister(_silence)
    atexit.register(_silence)


def _silence() -> None:
    """Let llama.cpp log into nothing: a late line must not call into an interpreter that is going away.

    `abs` of the C library stands in for "do nothing": it reads its first argument and has no effect.
    """
    nothing = ctypes.cast(ctypes.CDLL(posix.LIBC).abs, lib.llama_log_callback)
    lib.llama_log_set(nothing, ctypes.c_void_p(0))
