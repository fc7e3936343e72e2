"""POSIX calls that Windows lacks, with errors or defaults there.

Modules that Windows lacks (`fcntl`, `resource`, `termios`, `pwd`) are only imported and used behind `sys.platform`, so
that mypy checks the code of each system.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import sys
from contextlib import suppress

with suppress(ImportError):  # Windows
    import fcntl

LIBC = "msvcrt" if sys.platform == "win32" else None
"""Name of the C library for `ctypes`."""
HAS_UNIX_SOCKETS = hasattr(socket, "AF_UNIX")

_PR_SET_PDEATHSIG = 1
"""Option of Linux's `prctl`: signal to this process when the thread that has started it ends."""


def end_with_parent() -> None:
    """Have Linux kill this process when its parent ends, even if the process is stopped then (SIGSTOP)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def user_id() -> int:
    """User id of this process; 0 on Windows, where files also report owner 0."""
    if sys.platform == "win32":
        return 0
    return os.geteuid()


def signals(*names: str) -> tuple[signal.Signals, ...]:
    """Signals of these names, without those that this system lacks."""
    return tuple(signal.Signals(getattr(signal, name)) for name in names if hasattr(signal, name))


def unix_socket() -> socket.socket:
    """A new Unix socket. Raises `FileNotFoundError` on systems without: no server can be behind a path there."""
    if sys.platform == "win32":
        raise FileNotFoundError(errno.ENOENT, "unsupported: this system has no Unix sockets; use HTTP")
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def lock(handle: int, *, waits: bool = False) -> None:
    """Lock an open file against other processes, until it is closed.

    Raises `BlockingIOError` where another process has locked it, unless `waits`; `OSError` on Windows.
    """
    if sys.platform == "win32":
        raise unsupported("locks of files")
    fcntl.flock(handle, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))


def pread(handle: int, size: int, at: int) -> bytes:
    """`os.pread`. Raises `OSError` on Windows."""
    if sys.platform == "win32":
        raise unsupported("reading at a place")
    return os.pread(handle, size, at)


def pwrite(handle: int, data: bytes | memoryview, at: int) -> int:
    """`os.pwrite`. Raises `OSError` on Windows."""
    if sys.platform == "win32":
        raise unsupported("writing at a place")
    return os.pwrite(handle, data, at)


def unsupported(what: str) -> OSError:
    """Error of a call that Windows lacks."""
    return OSError(errno.ENOTSUP, f"unsupported on Windows: {what}")
