"""Runs a program as on Windows, as far as this system can show it: without POSIX's modules, calls, signals and Unix
sockets, with what Trio waits for bounded to sockets, and with `sys.platform` as UMA reads it.

    python tests/windows.py PROGRAM
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
from typing import Any

import trio

MODULES = ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty")
CALLS = [
    *("chown", "fchmod", "fchown", "fork", "fpathconf", "geteuid", "getuid", "getgid", "pidfd_open", "pread", "pwrite"),
    *("O_CLOEXEC", "O_DIRECTORY", "O_NONBLOCK", "sched_getaffinity", "set_blocking", "sysconf"),
]
SIGNALS = [
    *("SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGPROF", "SIGQUIT", "SIGSTOP", "SIGTSTP", "SIGUSR1", "SIGUSR2"),
    "SIGWINCH",
]


def become_windows() -> None:
    """All that other packages import is imported first: they are not what is tested, and know this system."""
    import uma

    for found in pkgutil.walk_packages(uma.__path__, "uma."):
        if "dynamo" not in found.name and "__main__" not in found.name:
            importlib.import_module(found.name)
    for name in [name for name in sys.modules if name == "uma" or name.startswith("uma.")]:
        del sys.modules[name]
    sys.platform = "win32"
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]  # importing it fails
    for owner, names in ((os, CALLS), (signal, SIGNALS), (socket, ["AF_UNIX"]), (select, ["poll"])):
        for name in names:
            delattr(owner, name)
    socket.socketpair = _pair  # type: ignore[assignment]
    _bound_waits()
    _rename_libraries()
    _refuse_sockets_for_children()


def _pair() -> tuple[socket.socket, socket.socket]:
    """What Python has there: two ends of a connection to this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        end = socket.create_connection(listener.getsockname())
        return listener.accept()[0], end


def _bound_waits() -> None:
    wait = trio.lowlevel.wait_readable

    async def of_sockets(end: Any) -> None:
        with socket.socket(fileno=os.dup(end if isinstance(end, int) else end.fileno())):  # raises for all else
            await wait(end)

    trio.lowlevel.wait_readable = of_sockets  # type: ignore[assignment]


def _rename_libraries() -> None:
    """Windows has no library without a name."""
    was = ctypes.CDLL.__init__

    def load(self: Any, name: Any, *args: Any, **named: Any) -> None:
        if name is None:
            raise TypeError("bad argument type for built-in operation")
        was(self, None if name in ("msvcrt", "ws2_32") else name, *args, **named)

    ctypes.CDLL.__init__ = load  # type: ignore[method-assign]


def _refuse_sockets_for_children() -> None:
    """A socket is no file there, which a child could have as its standard input."""

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **named: Any) -> None:
            raise OSError("no child process in this test")

    subprocess.Popen = Popen  # type: ignore[misc]


if __name__ == "__main__":
    become_windows()
    exec(sys.argv[1])
