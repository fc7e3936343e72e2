"""Commands of `uma` in processes of their own that begin at once: forked from one that has imported what they need.

Most of what a command's process takes is its imports, and the tests start hundreds of them. This file is run as that
one process too; it has no threads but those that numpy sees to.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import IO

PR_SET_PDEATHSIG = 1


class Forked:
    """`uma` with these arguments, as `subprocess.Popen` would start it; standard streams are descriptors, or pipes."""

    def __init__(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.DEVNULL,
        stderr: int = subprocess.DEVNULL,
        cwd: str | None = None,
        has_terminal: bool = False,
        prelude: str = "",
    ) -> None:
        """With `has_terminal` standard input becomes the terminal that controls it; `prelude` is code that it runs
        before the command.
        """
        self.args = arguments
        self.returncode: int | None = None
        ours: dict[int, IO[bytes]] = {}
        theirs = []
        for number, given in enumerate((stdin, stdout, stderr)):
            if given == subprocess.PIPE:
                read, write = os.pipe()
                ours[number] = os.fdopen(read, "rb") if number else os.fdopen(write, "wb", buffering=0)
                theirs.append(write if number else read)
            else:
                theirs.append(os.open(os.devnull, os.O_RDWR) if given == subprocess.DEVNULL else os.dup(given))
        self.stdin, self.stdout, self.stderr = map(ours.get, range(3))
        self._state, state = socket.socketpair()
        theirs.append(state.detach())
        line = json.dumps([[*arguments], dict(environ), cwd or str(Path.cwd()), has_terminal, prelude]).encode() + b"\n"
        sent = socket.send_fds(_parent(), [line], theirs)
        _parent().sendall(line[sent:])
        for each in theirs:
            os.close(each)
        self.pid = int(self._state.makefile("rb", buffering=0).readline())

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(1e-6)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; the exit code."""
        if self.returncode is None:
            self._state.settimeout(timeout)
            try:
                self.returncode = int(self._state.recv(100))
            except TimeoutError:
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout) from None
            self._state.close()
        return self.returncode

    def communicate(self, timeout: float) -> tuple[bytes, bytes]:
        """Close standard input, and wait for its end; what else it says on standard output and standard error."""
        if self.stdin is not None:
            self.stdin.close()
        with ThreadPoolExecutor() as pool:
            out, err = pool.map(lambda pipe: pipe.read() if pipe else b"", (self.stdout, self.stderr))
        self.wait(timeout)
        return out, err

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it by force."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Forked:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        self.wait()


@cache
def _parent() -> socket.socket:
    """The way to the process that forks, which ends with this one."""
    from harness import clean_environ

    ours, theirs = socket.socketpair()
    theirs.set_inheritable(True)
    # (Its words are those by which `uma ps` knows a server.)
    command = [sys.executable, __file__, str(theirs.fileno()), "uma", "run"]
    os.posix_spawn(sys.executable, command, clean_environ(), setpgroup=0)
    theirs.close()
    return ours


def main(control: socket.socket) -> int:
    """Fork for each request a process that begins the command and tells of its end, until the tests have ended."""
    commands = ("parser", "run", "chat", "generate", "batch", "top", "ps")
    for name in (*(f"uma.cli.{command}" for command in commands), "uma.http.serve", "prompt_toolkit"):
        import_module(name)
    # Else each child's garbage collector looks at all of that, and has the system copy the memory for it: two thirds of
    # the time that a short command takes.
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        data, descriptors, *_ = socket.recv_fds(control, 1 << 20, 4)
        while data and not data.endswith(b"\n"):
            data += control.recv(1 << 20)
        if not data:
            return 0
        if os.fork() == 0:
            end_with_parent()
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if (pid := os.fork()) == 0:
                end_with_parent()
                return begin(data, descriptors)
            for each in descriptors[:3]:
                os.close(each)
            os.write(descriptors[3], b"%d\n" % pid)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.write(descriptors[3], b"%d" % code)
            os._exit(0)
        for each in descriptors:
            os.close(each)


def end_with_parent() -> None:
    """Have the system kill this process once its parent is gone: tests that are killed leave no server behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def begin(request: bytes, descriptors: Sequence[int]) -> int:
    """Run a command in this process, which has its streams and its variables."""
    arguments, environ, cwd, has_terminal, prelude = json.loads(request)
    for number, each in enumerate(descriptors[:3]):
        os.dup2(each, number)
    for each in descriptors:
        os.close(each)
    if has_terminal:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115  (to the end)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.argv = ["uma", *arguments]
    exec(prelude, {})
    from uma.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main(socket.socket(fileno=int(sys.argv[1]))))
