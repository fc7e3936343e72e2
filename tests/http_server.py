"""What tests of HTTP share: the real `uma run --http`, and raw connections to it."""

from __future__ import annotations

import json
import logging
import re
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import attrs
import trio
import trio.testing

from forked import Forked
from harness import PATIENCE_SEC, ServerProcess, clean_environ, running_server
from uma.config import RuntimeConfig
from uma.engine import Engine, open_engine
from uma.http.gateway import Gateway
from uma.http.keys import add
from uma.http.serve import HttpService
from uma.types import Source

T = TypeVar("T")

STREAM_ERRORS = {
    "/v1/chat/completions": b"data: {",
    "/v1/completions": b"data: {",
    "/v1/messages": b"event: error\ndata: {",
    "/completion": b"data: {",
    "/api/chat": b'{"error":',
}
"""How an error in a stream begins, in each dialect, by a path of it."""


@attrs.frozen
class Answered:
    """A whole HTTP answer, read by nothing but bytes."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, which must be JSON."""
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Those of a stream, whose body it must be."""
        return events_of(self.body)


def events_of(data: bytes) -> list[Any]:
    """The objects that a stream tells, as server-sent events or a line each."""
    return [json.loads(line) for line in re.findall(rb"^(?:data: )?(\{.*)$", data, re.MULTILINE)]


class RawHttp:
    """A connection that writes and reads HTTP/1.1 as bytes."""

    def __init__(self, port: int, receive_buffer: int | None = None, segment_bytes: int | None = None) -> None:
        """With small `segment_bytes` the system holds some 50 KB for a client that does not read, else megabytes."""
        self.sock = socket.socket()
        self.sock.settimeout(PATIENCE_SEC)
        if receive_buffer is not None:  # counts only where it is set before the connection is made
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        if segment_bytes is not None:
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment_bytes)
        self.sock.connect(("127.0.0.1", port))
        self._file = self.sock.makefile("rb")

    def close(self) -> None:
        """Hang up."""
        self._file.close()
        self.sock.close()

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> None:
        """Send a request; `body` as JSON unless it is bytes."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        given = {"host": "localhost", "content-length": str(len(data))}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        self.sock.sendall(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + data)

    def head(self) -> tuple[int, dict[str, str]]:
        """The status and headers of the next answer."""
        status = self._file.readline()
        assert status, "the server closed the connection"
        headers = {}
        while (line := self._file.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        return int(status.split()[1]), headers

    def chunks(self) -> Iterator[bytes]:
        """The chunks of a chunked body, to its end."""
        while size := int(self._file.readline(), 16):
            yield self._file.read(size)
            self._file.readline()
        self._file.readline()

    def answer(self) -> Answered:
        """The next answer, whole."""
        status, headers = self.head()
        if headers.get("transfer-encoding", "").lower() == "chunked":
            return Answered(status, headers, b"".join(self.chunks()))
        return Answered(status, headers, self.read(int(headers.get("content-length", "0"))))

    def read(self, size: int) -> bytes:
        """So many bytes of a body; fewer where the server closes before."""
        return self._file.read(size)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answered:
        """Send a request and read its answer."""
        self.send(method, path, body, **headers)
        return self.answer()

    def is_closed(self) -> bool:
        """Whether the server has closed, which this waits for."""
        try:
            return self._file.read(1) == b""
        except ConnectionResetError:
            return True


class Reachable:
    """What listens on a port of 127.0.0.1."""

    @property
    def port(self) -> int:
        """That port."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    @contextmanager
    def connect(self, receive_buffer: int | None = None, segment_bytes: int | None = None) -> Iterator[RawHttp]:
        """A bare connection, closed with the block."""
        with closing(RawHttp(self.port, receive_buffer, segment_bytes)) as raw:
            yield raw

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answered:
        """One request on a connection of its own."""
        with self.connect() as raw:
            return raw.ask(method, path, body, **headers)


@attrs.frozen
class HttpServer(Reachable):
    """A real server, and where its HTTP listens."""

    process: ServerProcess
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


ServeModels = Callable[..., HttpServer]
"""`uma run --http` with several models and these flags."""


@contextmanager
def running_http(directory: Path, *flags: str, **environ: str) -> Iterator[HttpServer]:
    """`uma run --http` on a port of the system's choice, ready for clients; ended with the block. Its folder of jobs is
    its own, unless the flags name one: of several servers on one folder one alone takes changes.
    """
    if "--http-jobs" not in flags:
        flags = (*flags, "--http-jobs", str(directory / "jobs"))
    with running_server(directory / "http.sock", "--http", "127.0.0.1:0", *flags, **environ) as process:
        yield HttpServer(process, _url(process))
    _check_crashes(process.log.join())


def new_key(name: str, keys: Path, bounds: str = "") -> str:
    """A key of this name with these bounds, of which the file `keys` has the hash."""
    key = add(keys, name)
    with keys.open("a") as file:
        file.write(bounds)
    return key


@contextmanager
def running_gateway(server: ServerProcess, *flags: str) -> Iterator[HttpServer]:
    """`uma gateway` in front of a server, ready for clients; ended with the block."""
    arguments = ("gateway", "--socket", str(server.socket), "--http", "127.0.0.1:0", *flags)
    process = ServerProcess(Forked(arguments, clean_environ(), stderr=subprocess.PIPE), server.socket)
    try:
        yield HttpServer(process, _url(process))
    finally:
        process.stop()
    _check_crashes(process.log.join())


def _check_crashes(log: str) -> None:
    """No connection, request or answer may have met a fault of the server, whatever its clients were told."""
    assert "crashed" not in log, log


def _url(process: ServerProcess) -> str:
    found = re.search(r"url=(\S+)", process.log.wait_for("event=http.ready"))
    assert found is not None
    return found[1]


@attrs.frozen
class HostedHttp(Reachable):
    """The real engine and HTTP service in a Trio thread of this very process, whose tasks a test can count."""

    engine: Engine
    gateway: Gateway
    port: int
    _token: trio.lowlevel.TrioToken

    def call(self, what: Callable[[], T]) -> T:
        """Call `what` in the Trio thread."""
        return trio.from_thread.run_sync(what, trio_token=self._token)


@contextmanager
def hosted_http(config: RuntimeConfig, source_of: Callable[[Engine], Source] | None = None) -> Iterator[HostedHttp]:
    """Serve `config`'s model in a thread, ready for clients; ended with the block. `config.http` must have port 0.

    `source_of` makes of the engine what is served in its place, and that can have faults.
    """
    if config.http_jobs != RuntimeConfig().http_jobs:
        with _hosted(config, source_of) as hosted:
            yield hosted
        return
    # Of a store that is being opened as the server ends, the thread that opens it closes it, later than the server.
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as jobs,
        _hosted(attrs.evolve(config, http_jobs=jobs), source_of) as hosted,
    ):
        yield hosted


@contextmanager
def _hosted(config: RuntimeConfig, source_of: Callable[[Engine], Source] | None) -> Iterator[HostedHttp]:
    ready: list[HostedHttp] = []
    is_ready = threading.Event()
    crashes = _Crashes()
    logging.getLogger("uma.http").addHandler(crashes)
    ends: list[Callable[[], None]] = []

    async def serve() -> None:
        async with open_engine(config) as engine, trio.open_nursery() as nursery:
            service = HttpService(engine if source_of is None else source_of(engine), config)
            await nursery.start(service.serve)
            ends.append(service.begin_drain)
            port, token = int(service.url.rpartition(":")[2]), trio.lowlevel.current_trio_token()
            ready.append(HostedHttp(engine, service.gateway, port, token))
            is_ready.set()

    def run() -> None:
        try:
            trio.run(serve)
        finally:
            is_ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert is_ready.wait(PATIENCE_SEC)
    try:
        yield ready[0]
    finally:
        ready[0].call(ends[0])
        thread.join(PATIENCE_SEC)
        logging.getLogger("uma.http").removeHandler(crashes)
        assert not thread.is_alive()
    if source_of is None:
        _check_crashes(crashes.text)


class _Crashes(logging.Handler):
    """Keeps what a server in this process says of its own faults."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        if "crashed" in record.getMessage():
            self.text += self.format(record) + "\n"
