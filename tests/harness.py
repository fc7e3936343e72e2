"""What tests of the running server share: the real `uma run` process, and a client that knows nothing but bytes.

Nothing here sleeps to wait. A server's log is followed line by line, so a test waits for what it needs to have happened
and fails with the log in hand if it never does.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

import uma
from forked import Forked

PATIENCE_SEC = 60.0
"""How long anything may take before the test gives up; never how long anything is expected to take."""

ONE_THREAD = ("--threads", "1")
"""The test models are so small that more threads only wait for each other, and for whatever else the machine does."""

EXACT = ("--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32")
"""Options for a server whose answers are compared: flash attention adds up in 16 bits on a CPU, in the order in which
cells happen to lie, so that a near tie of two tokens can go either way."""

CHECKOUT = str(Path(uma.__file__).parents[1])

T = TypeVar("T")


Pair = tuple[socket.socket, socket.socket]
"""Two sockets that are connected, ours and the peer's; neither blocks."""


class Log:
    """The lines a process has written so far, and a way to wait for one."""

    def __init__(self, stream: Any) -> None:
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._follow, args=(stream,), daemon=True)
        self._thread.start()

    def _follow(self, stream: Any) -> None:
        with stream:
            for line in stream:
                with self._changed:
                    self._lines.append(line.decode("utf-8", "replace").rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    @property
    def text(self) -> str:
        """All of it."""
        with self._changed:
            return "\n".join(self._lines)

    def mark(self) -> int:
        """Where the log is now, for `wait_for(since=…)`."""
        with self._changed:
            return len(self._lines)

    def wait_for(self, pattern: str, *, since: int = 0) -> str:
        """The first line that `pattern` is found in. Fails where the process ends or patience does."""
        found: list[str] = []

        def is_there() -> bool:
            found.extend(line for line in self._lines[since:] if re.search(pattern, line))
            return bool(found) or self._is_over

        with self._changed:
            self._changed.wait_for(is_there, PATIENCE_SEC)
        if not found:
            raise AssertionError(f"{pattern!r} never came. The log:\n{self.text}")
        return found[0]

    def join(self) -> str:
        """Wait for the end of the stream; all of it."""
        self._thread.join(PATIENCE_SEC)
        return self.text


class ServerProcess:
    """A real `uma run`, and its log."""

    def __init__(self, process: subprocess.Popen[bytes] | Forked, path: Path) -> None:
        self.process = process
        self.socket = path
        self.log = Log(process.stderr)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def signal(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for its end; the exit code."""
        return self.process.wait(PATIENCE_SEC)

    def connect(self, timeout: float = PATIENCE_SEC) -> Raw:
        """A connection that knows nothing but bytes."""
        return Raw(self.socket, timeout)

    def metrics(self) -> dict[str, Any]:
        """The snapshot of now."""
        with self.connect() as raw:
            raw.send({"type": "metrics"})
            event = raw.receive()
        assert event is not None
        assert event["event"] == "metrics"
        return event

    def settled(self) -> dict[str, Any]:
        """The metrics once nothing runs and this question's is the only session."""
        return until(self.metrics, is_settled)

    def stop(self) -> int:
        """End it if it still runs; the exit code."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGTERM)
        try:
            return self.wait()
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.wait()


def is_settled(metrics: Mapping[str, Any]) -> bool:
    """Nothing runs, and one session, the asker's, is open."""
    return (metrics["active_sequences"], metrics["queued_requests"], metrics["active_sessions"]) == (0, 0, 1)


def until(ask: Callable[[], T], is_right: Callable[[T], bool], patience_sec: float = PATIENCE_SEC) -> T:
    """Ask again until the answer is right. Each question is a whole round trip, so this is no busy loop."""
    give_up = time.monotonic() + patience_sec
    while not is_right(answer := ask()):
        assert time.monotonic() < give_up, f"still not: {answer}"
    return answer


def uma_command(*args: str) -> list[str]:
    """The `uma` command of this very checkout."""
    return [sys.executable, "-m", "uma", *args]


def is_own(command: Sequence[str]) -> bool:
    """Whether it is one of `uma`."""
    return [*command[: len(uma_command())]] == uma_command()


def clean_environ(**more: str) -> dict[str, str]:
    """This process's variables without any `UMA_…` one, and with `more`. Python finds this very checkout with them.

    Nor has it `COLUMNS` and `LINES`, which a parent that imports `readline` leaves to its children. Compute threads
    sleep while they wait for each other: spinning, they would take the cores of the tests beside.
    """
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("UMA_") and name not in ("COLUMNS", "LINES")
    }
    path = os.pathsep.join(filter(None, [CHECKOUT, os.environ.get("PYTHONPATH", "")]))
    return plain | {"PYTHONPATH": path, "OMP_WAIT_POLICY": "passive"} | more


def run_uma(
    arguments: Sequence[str],
    *,
    stdin: bytes = b"",
    stdout: IO[bytes] | None = None,
    environ: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """A command of `uma` to its end, with what it says; its output can go to a file instead."""
    with ExitStack() as stack:
        given, out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        given.write(stdin)
        given.seek(0)
        streams = {"stdin": given, "stdout": stdout or out, "stderr": err}
        descriptors: dict[str, Any] = {name: file.fileno() for name, file in streams.items()}
        code = Forked(arguments, environ or clean_environ(), **descriptors).wait(3 * PATIENCE_SEC)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read(), err.read())


def run_to_end(
    *command: str, stdin: str = "", environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command without any `UMA_…` setting, unless `environ` says otherwise, to its end, whatever that is."""
    if is_own(command):
        given = stdin.encode(errors="surrogateescape")
        done = run_uma(command[len(uma_command()) :], stdin=given, environ=environ)
        texts = [each.decode(errors="surrogateescape") for each in (done.stdout, done.stderr)]
        return subprocess.CompletedProcess(command, done.returncode, *texts)
    return subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        encoding="utf-8",
        errors="surrogateescape",
        timeout=3 * PATIENCE_SEC,
        env=clean_environ() if environ is None else environ,
        check=False,
    )


def start_server(path: Path, *flags: str, prelude: str = "", **environ: str) -> ServerProcess:
    """Start `uma run` on `path`; it may not be ready yet, and may never be. Where nothing says which model, with the
    built-in one, whatever else this machine has. `prelude` is code that its process runs first.
    """
    chosen = () if {"--model", "--models", "--config"} & {*flags} else ("--model", "builtin")
    arguments = ("run", "--socket", str(path), *ONE_THREAD, *chosen, *flags)
    process = Forked(arguments, clean_environ(**environ), stderr=subprocess.PIPE, prelude=prelude)
    return ServerProcess(process, path)


RunInProcess = Callable[..., "subprocess.CompletedProcess[bytes]"]
"""`uma` within this process, to its end: what it is asked for, and as keywords `stdin` and variables."""

RunInProcessText = Callable[..., "subprocess.CompletedProcess[str]"]
"""The same, with what it says as text."""

Serve = Callable[..., ServerProcess]
"""`uma run` with the tiny model and these flags."""


@contextmanager
def running_server(path: Path, *flags: str, **environ: str) -> Iterator[ServerProcess]:
    """`uma run` on `path`, ready for clients; ended with the block. Its log must go to standard error."""
    server = start_server(path, *flags, **environ)
    try:
        server.log.wait_for(r"event(=|\":\")server\.ready")
        yield server
    finally:
        server.stop()


@contextmanager
def short_directory() -> Iterator[Path]:
    """A directory for sockets: pytest's own have names too long for a Unix socket on some systems."""
    path = Path(tempfile.mkdtemp(prefix="uma-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def frame(message: Mapping[str, Any] | bytes) -> bytes:
    """A frame, made without any of UMA's code."""
    payload = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack("<I", len(payload)) + payload


def ask(id: str = "a", **fields: Any) -> dict[str, Any]:
    """A request for a few tokens, whatever the model would like."""
    return {"id": id, "prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True, **fields}


BULKY = {"pad": "x" * 8_000}
"""Metadata that makes each token's event 8 KB, so that a socket's buffers are full after a few dozen tokens."""

HELLO = {"type": "hello", "versions": ["1.0"], "client": "raw/1"}


class Raw:
    """A blocking connection that knows nothing but bytes: what a client in any other language would be."""

    def __init__(self, path: Path, timeout: float = PATIENCE_SEC) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(timeout)
        self.sock.connect(str(path))

    def __enter__(self) -> Raw:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.sock.close()

    def send_bytes(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.sock.sendall(data)

    def send(self, *messages: Mapping[str, Any] | bytes) -> None:
        """Send messages (or payloads) as frames, in one go."""
        self.send_bytes(b"".join(map(frame, messages)))

    def receive(self) -> dict[str, Any] | None:
        """The next event, or None where the server has closed."""
        header = self._exactly(4)
        if header is None:
            return None
        payload = self._exactly(struct.unpack("<I", header)[0])
        assert payload is not None, "the server closed within a frame"
        event = json.loads(payload)
        assert isinstance(event, dict)
        return event

    def hello(self, **fields: Any) -> dict[str, Any]:
        """Open a hello session; the server's answer."""
        self.send({**HELLO, **fields})
        event = self.receive()
        assert event is not None
        assert event["event"] == "hello", event
        return event

    def next(self) -> dict[str, Any]:
        """The next event, which must be there."""
        event = self.receive()
        assert event is not None, "the server closed"
        return event

    def expect(self, kind: str) -> dict[str, Any]:
        """The next event, which must be of this kind."""
        event = self.next()
        assert event["event"] == kind, event
        return event

    def rest(self) -> list[dict[str, Any]]:
        """All events until the server closes."""
        return list(iter(self.receive, None))

    def last_of(self, id: str) -> dict[str, Any]:
        """The event that ends request `id`; events before it are dropped."""
        while (event := self.receive()) is not None:
            if event.get("id") == id and event["event"] in ("eos", "error"):
                return event
        raise AssertionError(f"the server closed before the end of {id}")

    def until_token(self, id: str) -> dict[str, Any]:
        """The first token of request `id`."""
        while (event := self.receive()) is not None:
            if event["event"] == "token" and event["id"] == id:
                return event
            assert event.get("id") != id, event
        raise AssertionError(f"the server closed before a token of {id}")

    def _exactly(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            try:
                more = self.sock.recv(size - len(data))
            except ConnectionResetError:
                more = b""
            if not more:
                assert not data, "the server closed within a frame"
                return None
            data += more
        return bytes(data)


def write_certificate(directory: Path, days: int = 2) -> tuple[Path, Path]:
    """Write a certificate for localhost, and its key."""
    cert, key = directory / "c.pem", directory / "k.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(cert), "-days", str(days), "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key
