"""The server's small parts by themselves: the idle clock, log lines, the socket's file."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import socket
import subprocess
import sys
import tempfile
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from math import inf
from pathlib import Path
from typing import Any

import orjson
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from uma.config import RuntimeConfig
from uma.errors import ConfigError
from uma.http import serve
from uma.net.logfmt import LogEvent
from uma.server import server, socketfile
from uma.server.clock import IdleClock
from uma.server.logs import LineHandler, json_line, log, logfmt, logging_to, short_line, text_line
from uma.server.main import END_SEC

# The end


def test_last_words_fit_into_the_time_after_which_a_server_is_ended() -> None:
    """Which docs/operations.md tells as two seconds."""
    assert max(serve.FAREWELL_SEC, server.FAREWELL_SEC) < END_SEC < 2
    assert server.COUNT_SEC + server.FAREWELL_SEC <= END_SEC  # without any time for what runs


def test_a_process_that_has_served_ends_with_its_code_before_the_interpreter_is_taken_apart() -> None:
    program = (
        "import atexit, sys\nfrom uma.server import end_with\natexit.register(print, 'taken apart', flush=True)\n"
        "print('served', flush=True)\nsys.exit(end_with(130))"
    )
    ended = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stdout) == (130, b"served\n")


# The idle clock


async def test_an_idle_session_is_on_the_clock_and_a_busy_one_is_not(mock_clock: trio.testing.MockClock) -> None:
    clock = IdleClock(10)
    clock.update(is_idle=True, is_mid_frame=False, had_frame=False)
    assert clock.scope.deadline == trio.current_time() + 10
    clock.update(is_idle=False, is_mid_frame=False, had_frame=True)
    assert clock.scope.deadline == inf
    mock_clock.jump(100)
    clock.update(is_idle=True, is_mid_frame=False, had_frame=False)
    assert clock.scope.deadline == trio.current_time() + 10


async def test_half_a_frame_is_on_the_clock_from_its_first_byte_however_slowly_it_trickles(
    mock_clock: trio.testing.MockClock,
) -> None:
    clock, began = IdleClock(10), trio.current_time()
    for _ in range(5):
        clock.update(is_idle=False, is_mid_frame=True, had_frame=False)
        mock_clock.jump(1)
    assert clock.scope.deadline == began + 10
    # The frame is whole, and another one has begun in the same bytes.
    clock.update(is_idle=False, is_mid_frame=True, had_frame=True)
    assert clock.scope.deadline == trio.current_time() + 10


async def test_bytes_of_a_frame_do_not_keep_an_idle_session_alive(mock_clock: trio.testing.MockClock) -> None:
    clock = IdleClock(10)
    clock.update(is_idle=True, is_mid_frame=False, had_frame=False)
    mock_clock.jump(3)
    began = trio.current_time()
    clock.update(is_idle=True, is_mid_frame=True, had_frame=False)
    mock_clock.jump(3)
    clock.update(is_idle=True, is_mid_frame=True, had_frame=False)
    assert clock.scope.deadline == began + 10


# Log lines


@given(st.dictionaries(st.sampled_from(["id", "message"]), st.text()))
def test_a_log_line_is_one_line_whatever_a_client_puts_in_it(fields: dict[str, str]) -> None:
    line = logfmt({"event": "x", **fields})
    assert len(line.splitlines()) == 1
    assert line.startswith("event=x")


def test_floats_are_rounded_in_json_as_in_text() -> None:
    record = logging.makeLogRecord({"msg": LogEvent({"event": "x", "ms": 53.988133693698284, "sec": 3.0})})
    assert json_line(record, {}).endswith('"ms":54.0,"sec":3.0}')
    assert text_line(record, {}).endswith("ms=54.0 sec=3.0")


def test_plain_values_stand_as_they_are_and_others_are_quoted() -> None:
    assert logfmt({"a": 1, "b": 2.25, "c": "x y", "d": None, "e": "/tmp/s"}) == 'a=1 b=2.2 c="x y" e=/tmp/s'


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_lines_that_could_not_be_written_are_counted_in_the_next_one_that_can(tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    handler = LineHandler(full)
    for _ in range(3):
        handler.handle(logging.LogRecord("uma", logging.INFO, "", 0, "hello", None, None))
    assert handler.lines_lost == 3
    path = tmp_path / "log"
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), full)
    handler.handle(logging.LogRecord("uma", logging.INFO, "", 0, "hello", None, None))
    os.close(full)
    assert path.read_text().endswith("uma hello lines_lost=3\n")
    assert (handler.lines_lost, handler.lines_lost_total) == (0, 3)
    assert '"lines_lost":3' in json_line(
        logging.LogRecord("uma", logging.INFO, "", 0, "hello", None, None), {"lines_lost": 3}
    )


@pytest.mark.skipif(sys.platform != "linux", reason="a pipe's size is set as Linux does")
def test_a_line_that_was_written_in_part_is_no_beginning_of_the_next_one() -> None:
    reading, writing = os.pipe2(os.O_NONBLOCK)
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    handler = LineHandler(writing)
    handler.handle(logging.LogRecord("uma", logging.INFO, "", 0, "x" * 6_000, None, None))
    torn = os.read(reading, 10_000)
    assert len(torn) == 4096
    handler.handle(logging.LogRecord("uma", logging.INFO, "", 0, "hello", None, None))
    handler.handle(logging.LogRecord("uma", logging.INFO, "", 0, "again", None, None))
    lines = (torn + os.read(reading, 10_000)).decode().splitlines()
    os.close(reading)
    os.close(writing)
    assert [line.split()[3] for line in lines[1:]] == ["hello", "again"]
    assert lines[1].endswith("lines_lost=1")


@contextmanager
def log_in(path: Path) -> Iterator[None]:
    """A block whose log is in a file instead of standard error."""
    with path.open("wb") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr("uma.server.logs.STDERR", file.fileno())
        yield


@pytest.mark.parametrize(
    ("environ", "is_shown"), [({}, False), ({"UMA_DEBUG": "1"}, True), ({"UMA_DEBUG": "0"}, False)]
)
def test_debug_lines_are_shown_with_uma_debug(tmp_path: Path, environ: dict[str, str], is_shown: bool) -> None:
    path = tmp_path / "log"
    with log_in(path), logging_to(RuntimeConfig(), environ):
        log(logging.getLogger("uma.engine"), logging.DEBUG, "tick", rows=3)
        log(logging.getLogger("uma.engine"), logging.INFO, "shown", rows=3)
    assert ("event=tick rows=3" in path.read_text()) is is_shown
    assert "info uma.engine event=shown rows=3" in path.read_text()


@pytest.mark.parametrize(
    ("event", "fields", "line"),
    [
        (
            "http.failed",
            {"path": "/v1/chat/completions", "status": 404},
            "chat/completions 404 model: 'nosuch': not found",
        ),
        ("request.failed", {"code": "E_PROTO_BAD_REQUEST"}, "socket model: 'nosuch': not found"),
        ("http.malformed", {"status": 400}, "warning: a client sent what is no HTTP, as TLS to a plain port is"),
        ("http.failed", {"path": "/v1/x", "status": 500}, "warning: model: 'nosuch': not found; there are a"),
        ("request.failed", {"code": "E_RUNTIME"}, "warning: model: 'nosuch': not found; there are a"),
    ],
)
def test_a_client_s_own_error_is_one_short_line_on_a_terminal(event: str, fields: dict[str, Any], line: str) -> None:
    def told(message: str) -> str:
        record = logging.makeLogRecord({"levelno": logging.WARNING, "levelname": "WARNING"})
        record.msg = LogEvent({"event": event, "code": "E", **fields, "message": message})
        return short_line(record, {})[len("12:00 ") :]

    assert told("model: 'nosuch': not found; there are a").startswith(line)
    if not line.startswith("warning"):
        assert told("model: 'nosuch': not found; there are a, b") == line
        assert len(told("word " * 90)) <= 74


def test_a_terminal_shows_what_was_answered_where_to_ask_and_nothing_that_only_looked() -> None:
    master, slave = pty.openpty()
    tty.setraw(slave)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("uma.server.logs.STDERR", slave)
        with logging_to(RuntimeConfig()):
            http, server = logging.getLogger("uma.http"), logging.getLogger("uma.server")
            log(http, logging.INFO, "http.ready", url="http://127.0.0.1:8080")
            log(server, logging.INFO, "server.ready", model="m", socket="/run/uma.sock")
            log(http, logging.INFO, "http.request", method="GET", path="/v1/models", status=200, ms=1.0)
            log(http, logging.INFO, "http.request", method="POST", path="/ui/api/answers", status=200, ms=1.0)
            polled: dict[str, Any] = {"path": "/v1/models", "status": 503, "code": "E_LIMIT_OVERLOADED"}
            log(http, logging.INFO, "http.failed", **polled, message="the model is still being loaded (4 %); try again")
            asked: dict[str, Any] = {
                "method": "POST",
                "path": "/v1/chat/completions",
                "status": 200,
                "prompt": 49,
                "completion": 1140,
            }
            log(http, logging.INFO, "http.request", **asked, tokens_per_second=3.84, ms=900.0)
            log(http, logging.INFO, "http.request", **asked, code="E", ms=900.0)  # a stream's failure has its own line
            log(
                server,
                logging.INFO,
                "request.finished",
                prompt=3,
                completion=5,
                tokens_per_second=210.2,
                reason="cancelled",
            )
            log(http, logging.WARNING, "http.failed", code="E", message="no such path: /x\x1b[2J")
            log(server, logging.INFO, "cache.disk_enabled", folder="/c", most_mb=4000)
            log(server, logging.INFO, "model.loaded", model="Qwen2.5-Coder-0.5B-Instruct", ms=4928, bytes=3)
            log(server, logging.WARNING, "model.ended", model="m", reason="memory for n")
            log(server, logging.INFO, "request.ended", session="s5", number=65537, was_running=True)
            ended: dict[str, Any] = {"request": "chat-6033-1", "code": "E_RUNTIME_ENDED", "message": "it was ended"}
            log(server, logging.WARNING, "request.failed", **ended)
            log(
                server, logging.WARNING, "model.too_large", reason="gemma: beside all weights " + 3 * "there is memory "
            )
    os.write(slave, b"END")
    seen = b""
    while not seen.endswith(b"END"):
        seen += os.read(master, 65536)
    shown = seen.decode().removesuffix("END")
    os.close(master)
    os.close(slave)
    below = "\x1b[2mhttp://127.0.0.1:8080 · Ctrl-C ends the server\x1b[0m"
    assert shown.count(below) == 8
    *whole, wrapped = shown.replace(below, "").replace("\r\x1b[2K", "").splitlines()
    lines = [line[6:] for line in whole]
    assert lines == [
        "chat/completions 49 → 1,140 tokens, 3.84 tokens/s",
        "socket 3 → 5 tokens, 210 tokens/s, cancelled",
        "warning: no such path: /x\\u001b[2J",
        "Qwen2.5-Coder-0.5B-Instruct is loaded, after 4.9 s",
        "warning: m has left memory: memory for n",
        "chat-6033-1 was ended, by `uma top` or the live view",
        "warning: gemma: beside all weights there is memory there is memory there",
    ]
    assert wrapped == "  is memory"


ANY_TEXT = st.text(st.characters() | st.sampled_from('\ud800\n\r\u2028\x1b\x7f"'))


@given(text=ANY_TEXT, fields=st.dictionaries(st.sampled_from(["request", "message", "reason", "time"]), ANY_TEXT))
def test_a_log_in_json_is_an_object_a_line_whatever_a_client_puts_in_it(text: str, fields: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        with log_in(path), logging_to(RuntimeConfig(log_format="json")):
            log(logging.getLogger("uma.server"), logging.WARNING, "x", rows=3, wide=10**30, none=None, **fields)
            logging.getLogger("uma.engine").error("%s failed", text, exc_info=ValueError(text))
        written = path.read_text(encoding="utf-8")
    assert written.replace("\n", "").isprintable()
    event, sentence = map(orjson.loads, written.splitlines())
    assert datetime.fromisoformat(event.pop("time")).utcoffset() == timedelta(0)
    clean = {name: value.encode("utf-8", "replace").decode() for name, value in fields.items() if name != "time"}
    own = {"level": "warning", "logger": "uma.server", "event": "x", "rows": 3, "wide": str(10**30)}
    assert event == {"message": "x"} | clean | own
    assert (sentence["level"], sentence["logger"]) == ("error", "uma.engine")
    said = text.encode("utf-8", "replace").decode()
    assert sentence["message"] == f"{said} failed"
    assert sentence["traceback"].startswith("ValueError")


# The socket's file


def test_only_our_own_file_is_removed(socket_dir: Path) -> None:
    path = socket_dir / "s"
    ours = socketfile.listen(path, 0o600)
    path.unlink()
    theirs = socketfile.listen(path, 0o600)
    ours.remove()
    assert path.is_socket()
    theirs.remove()
    assert not path.exists()
    theirs.remove()  # gone already, which is what was wanted
    ours.close()
    theirs.close()


def test_no_client_can_connect_before_the_mode_is_set(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = socket_dir / "s"
    results = []

    def chmod(self: Path, mode: int) -> None:
        with socket.socket(socket.AF_UNIX) as early:
            results.append(early.connect_ex(str(self)))
        os.chmod(self, mode)  # noqa: PTH101

    monkeypatch.setattr(Path, "chmod", chmod)
    socketfile.listen(path, 0o600).close()
    assert results != [0]
    assert len(results) == 1


def test_a_server_with_a_full_backlog_is_alive(socket_dir: Path) -> None:
    path = str(socket_dir / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        waiting = []
        while True:
            sock = socket.socket(socket.AF_UNIX)
            sock.setblocking(False)
            waiting.append(sock)
            if sock.connect_ex(path):
                break
        with pytest.raises(ConfigError, match="a server listens there already"):
            socketfile.listen(Path(path), 0o600)
        for sock in waiting:
            sock.close()
