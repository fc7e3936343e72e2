"""Child processes that answer one question at a time, and are killed if an answer takes too long.

A thread cannot be stopped, and a regular expression or a C extension can hold the GIL. So computations over untrusted
texts or programs, whose time is unbounded, run in a child. Both sides are here: `Child` for the parent, `serve` for the
child's program. A message is JSON and bytes, each with its length before it.

The deadline counts the child's own CPU time, so that no text is blamed for a busy machine.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.spawn import get_executable
from queue import LifoQueue
from threading import Lock
from typing import Any, BinaryIO

from uma import json_text, posix

with suppress(ImportError):  # Windows
    import resource

START_SEC = 30.0
"""Maximum time for a child process to start, on a busy machine."""
STALL_SEC = 30.0
"""Maximum wall-clock time for an answer, even if the child gets no CPU."""
KILL_SEC = 10.0
"""Maximum time between SIGKILL and a child's end. A process that waits for a disk or a driver can outlive it for ever,
and would block its parent."""
HEADER_BYTES = 4

_PROGRAM = "import runpy, sys; sys.path[:] = {path!r}; runpy.run_path({file!r}, run_name='__main__')"


_ENVIRON = ("PATH", "PYTHONHOME", "TMPDIR", "LANG", "LC_ALL", "TZ", "LLAMA_CPP_LIB_PATH")
"""Variables that a child inherits, beside the loader's (`LD_…`, `DYLD_…`): the parent's others can contain keys and
tokens."""

_PR_SET_NO_NEW_PRIVS = 38
(_OVERTIME,) = posix.signals("SIGPROF") or (0,)
"""Signal that ends a child at its deadline."""


class ChildClosedError(Exception):
    """The child was closed for good."""


class ChildBusyError(Exception):
    """The machine was too busy for the child."""


class ChildEndedError(Exception):
    """The child ended, was killed from outside, or sent an invalid answer; the message says which."""


class Child:
    """One child process, or none at the moment. Belongs to one thread at a time.

    `file` is its program, which calls `serve` and gets `setup`; `deadline_sec` is the maximum CPU time for an answer;
    an answer longer than `max_answer_bytes` is invalid.
    """

    def __init__(self, file: str, setup: Any, *, deadline_sec: float, max_answer_bytes: int) -> None:
        self._file = file
        self._setup = setup
        self._deadline_sec = deadline_sec
        self._max_answer_bytes = max_answer_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._is_fresh = True
        self._is_closed = False

    def start(self) -> None:
        """Start the process if there is none, without waiting for it. Raises `OSError` where that is impossible, and
        `ChildClosedError`.
        """
        if self._process is not None:
            return
        if self._is_closed:
            raise ChildClosedError
        if sys.platform == "win32":
            raise posix.unsupported("a child process at the end of a socket")
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                # A session of its own, so that Ctrl-C in the parent's terminal only reaches the parent.
                self._process = subprocess.Popen(
                    [_executable(), "-c", _PROGRAM.format(path=sys.path, file=self._file)],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    env=_environ(),
                )
            except OSError:
                ours.close()
                raise
        self._sock, self._is_fresh = ours, True
        if self._is_closed:  # meanwhile
            self._kill()
            raise ChildClosedError

    def ask(self, question: Any) -> Any:
        """The answer. Raises as `start` does; `TimeoutError` at the deadline, `ChildBusyError` and `ChildEndedError`,
        after which the process is killed and the next question starts another; `ChildClosedError` after `interrupt`.
        """
        return self.ask_about(question, b"")[0]

    def ask_about(self, question: Any, data: bytes) -> tuple[Any, bytes]:
        """Answer to a question about `data`, and bytes that belong to it. Raises as `ask` does."""
        self.start()
        try:
            if self._is_fresh:
                started_by = time.monotonic() + START_SEC
                self._send([self._deadline_sec, self._setup], b"", started_by)
                self._answer(started_by)  # the child is ready
                self._is_fresh = False
            due = time.monotonic() + STALL_SEC
            self._send(question, data, due)
            return self._answer(due)
        except TimeoutError:
            self._kill()
            raise ChildBusyError from None
        except (OSError, EOFError, ValueError) as error:
            code = self._kill()
            if self._is_closed:
                raise ChildClosedError from None
            if code == -_OVERTIME:
                raise TimeoutError from None
            raise ChildEndedError(str(error) or type(error).__name__) from None
        except BaseException:
            # Also after a `MemoryError`: the rest of this answer must not become the next one's.
            self._kill()
            raise

    def interrupt(self) -> None:
        """End the current question at once, and start no other process. Any thread; call `close` as well."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """Kill the process, if there is one, and start no other. Harmless when repeated."""
        self._is_closed = True
        self._kill()

    def _kill(self) -> int | None:
        """End the process, if there is one. Returns its exit code, negative for a signal; None where it has not ended,
        because it waits for a disk or a driver.
        """
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        try:
            return process.wait(KILL_SEC)
        except subprocess.TimeoutExpired:
            return None

    def _send(self, message: Any, data: bytes, due: float) -> None:
        for part in _parts(message, data):
            self._until(due).sendall(part)

    def _answer(self, due: float) -> tuple[Any, bytes]:
        return json_text.loads(self._receive_part(due).decode()), self._receive_part(due)

    def _receive_part(self, due: float) -> bytes:
        size = int.from_bytes(self._receive(HEADER_BYTES, due), "little")
        if size > self._max_answer_bytes:
            raise ValueError("its answer is too long")
        return self._receive(size, due)

    def _receive(self, size: int, due: float) -> bytes:
        data = memoryview(bytearray(size))
        filled = 0
        while filled < size:
            more = self._until(due).recv_into(data[filled:])
            if not more:
                raise EOFError("it has closed its end")
            filled += more
        return bytes(data)

    def _until(self, due: float) -> socket.socket:
        assert self._sock is not None
        left = due - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)
        return self._sock


class Children:
    """A few child processes of one program; see `Child`. Any thread; a thread that finds all busy waits."""

    def __init__(self, count: int, file: str, setup: Any, *, deadline_sec: float, max_answer_bytes: int) -> None:
        self._all = [
            Child(file, setup, deadline_sec=deadline_sec, max_answer_bytes=max_answer_bytes) for _ in range(count)
        ]
        self._closing = Lock()
        self._free: LifoQueue[Child] = LifoQueue()
        for child in self._all:
            self._free.put(child)

    @contextmanager
    def taken(self) -> Iterator[Child]:
        """A block with a child: the one that was used last, so that its process is running."""
        child = self._free.get()
        try:
            yield child
        finally:
            self._free.put(child)

    def close(self) -> None:
        """Kill the processes, whatever they are computing, and start no others. Harmless when repeated."""
        for child in self._all:
            child.interrupt()
        with self._closing:  # otherwise two threads could each hold a child and wait for the other's
            every = [self._free.get() for _ in self._all]
            for child in every:
                child.close()
                self._free.put(child)


def serve(prepare: Callable[[Any], Callable[[Any], Any]], max_memory_bytes: int | None = None) -> None:
    """Run the child: answer questions by the function that `prepare` returns for the setup, until the parent closes the
    connection.

    `max_memory_bytes` limits its address space, where the system can; None: `prepare` does that.
    """

    def prepared(setup: Any) -> Callable[[Any, bytes], tuple[Any, bytes]]:
        answer = prepare(setup)
        return lambda question, _: (answer(question), b"")

    serve_about(prepared, max_memory_bytes)


def serve_about(
    prepare: Callable[[Any], Callable[[Any, bytes], tuple[Any, bytes]]], max_memory_bytes: int | None
) -> None:
    """Run the child where questions and answers have bytes beside them (`Child.ask_about`)."""
    if sys.platform == "win32":  # (no child starts there)
        return
    if max_memory_bytes is not None:
        bound_memory(max_memory_bytes)
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    (deadline_sec, setup), _ = _read(questions)
    answer = prepare(setup)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, whatever it is doing
    _write(answers, {}, b"")  # ready: from now on the deadline counts
    with suppress(EOFError):
        while True:
            signal.setitimer(signal.ITIMER_PROF, deadline_sec)
            _write(answers, *answer(*_read(questions)))


def bound_memory(most_bytes: int) -> None:
    """Limit this process's address space from now on."""
    if sys.platform != "win32":
        with suppress(ValueError, OSError):  # without such a limit, the deadline remains
            resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))


def confine() -> None:
    """Confine a child that has loaded all it needs: from now on it can open, write to, connect and start nothing.

    A limit of 0 open files leaves open ones usable. Where a limit does not exist, or root could raise it, the others
    remain. This is not a full sandbox: system calls that need no new file are not filtered.
    """
    if sys.platform == "win32":
        return
    names = ("RLIMIT_CORE", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_NPROC")
    for limit in (getattr(resource, name, None) for name in names):
        if limit is not None:
            with suppress(ValueError, OSError):
                resource.setrlimit(limit, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name in _ENVIRON or name.startswith(("LD_", "DYLD_"))}


def _read(stream: BinaryIO) -> tuple[Any, bytes]:
    return json_text.loads(_read_part(stream).decode()), _read_part(stream)


def _read_part(stream: BinaryIO) -> bytes:
    header = stream.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        raise EOFError
    return stream.read(int.from_bytes(header, "little"))


def _write(stream: BinaryIO, message: Any, data: bytes) -> None:
    stream.writelines(_parts(message, data))
    stream.flush()


def _parts(message: Any, data: bytes) -> tuple[bytes, bytes]:
    payload = json_text.dumps(message, ensure_ascii=True).encode()
    first = len(payload).to_bytes(HEADER_BYTES, "little") + payload + len(data).to_bytes(HEADER_BYTES, "little")
    return first, data


def _executable() -> str:
    found = get_executable()
    return found.decode() if isinstance(found, bytes) else str(found)
