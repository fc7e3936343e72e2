"""llama.cpp's log: its last lines are kept for error messages, and every line is passed to Python's `logging`.

The library has one logger for the whole process, so this module has one, too. Lines go to the logger `uma.llama` at
level DEBUG, which is only shown if logging is configured for it, or with `UMA_DEBUG=1`.
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

# The binding keeps two files open until the process ends, and then `python -W default` warns of them. Replace them by
# files that do not own their descriptors: these work until then, and cause no warning.
for name in ("outnull_file", "errnull_file"):
    with getattr(_utils, name) as file:
        setattr(_utils, name, open(os.dup(file.fileno()), "w", closefd=False))  # noqa: SIM115

KEPT_LINES = 400

DEBUG, INFO, WARN, ERROR, CONTINUED = range(1, 6)
"""`ggml_log_level`. CONTINUED continues the line before."""


@attrs.frozen
class LogLine:
    """A line of llama.cpp's log, without its line end. `thread` is the thread that llama.cpp logged it from."""

    number: int
    level: int
    thread: int
    text: str

    @property
    def is_problem(self) -> bool:
        """Whether it is a warning or an error."""
        return self.level in (WARN, ERROR)


class LlamaLog:
    """Ring buffer of the last lines. Any thread can read and write it."""

    def __init__(self) -> None:
        self._lines: deque[LogLine] = deque(maxlen=KEPT_LINES)
        self._lock = threading.Lock()
        self._unfinished: dict[int, tuple[int, str]] = {}
        self._count = 0

    def write(self, level: int, text: str) -> None:
        """Take a piece of llama.cpp's log: whole lines, or a part of one."""
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
        # Outside the lock: a handler can be slow, or itself log through llama.cpp.
        for line in lines:
            logger.debug("%s", line.text)

    def _add(self, level: int, thread: int, text: str) -> LogLine:
        self._count += 1
        line = LogLine(self._count, level, thread, text.rstrip())
        self._lines.append(line)
        return line

    @property
    def mark(self) -> int:
        """Current position in the log, for `since`."""
        with self._lock:
            return self._count

    def since(self, mark: int) -> list[LogLine]:
        """Lines that this thread's calls logged after `mark`, oldest first, as far as they are still kept."""
        thread = threading.get_ident()
        with self._lock:
            return [line for line in self._lines if line.number > mark and line.thread == thread]

    def last(self, count: int) -> list[str]:
        """The last `count` lines of all threads, oldest first."""
        with self._lock:
            return [line.text for line in islice(self._lines, max(0, len(self._lines) - count), None)]


LOG = LlamaLog()
"""Log of the process, because llama.cpp's logger belongs to the process."""


def _on_line(level: int, text: bytes | None, _user_data: int | None) -> None:
    LOG.write(level, (text or b"").decode("utf-8", "replace"))


def _on_abort(message: bytes | None) -> None:
    # Instead of ggml's own handler, which runs a debugger for a backtrace. The process ends either way.
    said = (message or b"").decode("utf-8", "replace")
    lines = [f"uma: error: llama.cpp gave up and ended the process: {said}", "its last lines were:", *LOG.last(8)]
    os.write(2, ("\n  ".join(lines) + "\n").encode())


CALLBACK = lib.llama_log_callback(_on_line)
_abort_callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_on_abort)
"""Referenced here because llama.cpp only holds the callbacks' addresses."""


def install() -> None:
    """Redirect llama.cpp's and ggml's log to `LOG`. Harmless when repeated."""
    if is_debugging() and not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.DEBUG)
    lib.llama_log_set(CALLBACK, ctypes.c_void_p(0))
    lib._lib.ggml_set_abort_callback(_abort_callback)
    atexit.unregister(_silence)
    atexit.register(_silence)


def _silence() -> None:
    """Have llama.cpp discard its log: a late line must not call into an interpreter that is ending.

    The callback is `abs` of the C library, which reads its first argument and has no effect.
    """
    nothing = ctypes.cast(ctypes.CDLL(posix.LIBC).abs, lib.llama_log_callback)
    lib.llama_log_set(nothing, ctypes.c_void_p(0))
