"""A server that is loading its model answers: how far it is, and that everything else works later.

The load is llama.cpp's own, of a real file; only its progress callback is held up, until the test lets it go on.
"""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from http_server import RawHttp

from harness import (
    HELLO,
    ONE_THREAD,
    PATIENCE_SEC,
    Log,
    Raw,
    RunInProcessText,
    ServerProcess,
    ask,
    clean_environ,
    uma_command,
)
from models import write_model
from uma import RuntimeConfig, connect, open_engine
from uma.errors import Overloaded
from uma.types import LoadProgress

HELD_UP = """
import sys
from uma.cli import main
from uma.types import LoadProgress

def report(self, fraction, real=LoadProgress.report):
    was = self.percent
    real(self, fraction)
    if was < 30 <= self.percent:
        print("held", flush=True)
        sys.stdin.readline()

LoadProgress.report = report
sys.exit(main(sys.argv[1:]))
"""
"""`uma`, whose load waits for a line on standard input once it has come to 30 % or more."""


class Loading(ServerProcess):
    """A server in the middle of loading its model."""

    def go_on(self) -> None:
        """Let the load come to its end, and wait for it."""
        self.let_go()
        self.log.wait_for("event=server.ready")

    def let_go(self) -> None:
        """Let the load go on."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which single tensors are a good part."""
    return write_model(tmp_path_factory.mktemp("model") / "large.gguf", feed_forward=24_000)


@contextmanager
def loading(path: Path, model: Path, *flags: str, stderr: int = subprocess.PIPE) -> Iterator[Loading]:
    """`uma run`, in the middle of its load."""
    command = [sys.executable, "-c", HELD_UP, "run", "--socket", str(path), "--model", str(model), *ONE_THREAD, *flags]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=clean_environ()
    )
    assert process.stdout is not None
    server: Any = None
    try:
        assert process.stdout.readline() == b"held\n"
        server = Loading(process, path) if stderr == subprocess.PIPE else process
        yield server
    finally:
        process.kill()
        process.wait(PATIENCE_SEC)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def test_health_says_how_far_it_is_and_sessions_that_were_refused_go_on_once_it_is_loaded(
    socket_dir: Path, model: Path
) -> None:
    with loading(socket_dir / "s", model) as server, server.connect() as plain, server.connect() as raw:
        with server.connect() as asker:
            asker.send({"type": "health"})
            (health,) = asker.rest()
        assert (health["status"], health["tokens_generated"]) == ("loading", 0)
        assert 30 <= health["loading_percent"] < 100
        for session, message in ((plain, ask("p", keep_alive=True)), (raw, HELLO)):
            session.send(message)
            refused = session.expect("error")
            assert refused["code"] == "E_LIMIT_OVERLOADED"
            assert refused.get("id") == message.get("id")
            assert refused["retry_after_ms"] > 0
            assert f"{health['loading_percent']} %" in refused["message"]
        server.go_on()
        raw.hello()
        raw.send(ask("h"), {"type": "health", "id": "now", "probe": False})
        assert raw.last_of("h")["reason"] == "length"
        plain.send(ask("p"))
        assert plain.last_of("p")["reason"] == "length"


def test_http_answers_as_llama_server_does_and_its_page_is_there(socket_dir: Path, model: Path) -> None:
    with loading(socket_dir / "s", model, "--http", "127.0.0.1:0") as server:
        found = re.search(r":(\d+)$", server.log.wait_for("event=http.ready"))
        assert found is not None
        raw = RawHttp(int(found[1]))
        health = raw.ask("GET", "/health")
        assert health.status == 503
        assert health.json == {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
        assert 30 <= int(health.headers["x-uma-loading-percent"]) < 100
        chat = raw.ask("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]})
        assert (chat.status, chat.json["error"]["code"]) == (503, "service_unavailable")
        assert int(chat.headers["retry-after"]) > 0
        assert raw.ask("GET", "/").status == 200
        server.go_on()
        assert raw.ask("GET", "/health").status == 200
        raw.close()


def test_ps_doctor_and_stop_know_a_server_that_loads(socket_dir: Path, model: Path, uma_told: RunInProcessText) -> None:
    with loading(socket_dir / "s", model) as server:
        at = ("--socket", str(server.socket))
        (told,) = json.loads(uma_told("ps", "--json", *at).stdout)
        assert (told["pid"], told["model"]) == (server.pid, None)
        assert f"loading, {told['loading_percent']} %" in uma_told("ps", *at).stdout
        checks = json.loads(uma_told("doctor", "--json", *at).stdout)["checks"]
        (finding,) = [each["finding"] for each in checks if each["name"] == "server"]
        assert finding == f"loading its model, {told['loading_percent']} %"
        # The load never goes on: the process ends all the same.
        stopped = uma_told("stop", *at)
        assert stopped.stdout == f"stopped process {server.pid}, which was loading its model on {server.socket}\n"
        assert server.wait() == 0
        assert not server.socket.exists()


async def test_a_client_waits_for_a_server_that_loads_and_fills_no_log(socket_dir: Path, model: Path) -> None:
    told: list[str] = []
    with loading(socket_dir / "s", model) as server:
        with trio.fail_after(PATIENCE_SEC):

            def tell(error: Overloaded) -> None:
                told.append(error.message)
                if len(told) == 2:
                    server.let_go()

            async with connect(server.socket, on_loading=tell) as client:
                assert (await client.health(probe=False)).status == "ok"
        assert len(told) >= 2
        assert all(re.search(r"still being loaded \(\d+ %\)", each) for each in told)
        assert "request.failed" not in server.log.text


def test_generate_waits_for_a_server_that_loads(socket_dir: Path, model: Path) -> None:
    with loading(socket_dir / "s", model) as server:
        command = uma_command("generate", "--socket", str(server.socket), "--max-tokens", "4", "Once")
        asking = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_environ())
        said = Log(asking.stderr)
        said.wait_for("waiting for the server: the model is still being loaded")
        server.go_on()
        assert asking.wait(PATIENCE_SEC) == 0, said.join()
        assert asking.stdout is not None
        assert asking.stdout.read()
        asking.stdout.close()


def test_a_gateway_waits_for_a_server_that_loads(socket_dir: Path, model: Path) -> None:
    with loading(socket_dir / "s", model) as server:
        with gateway(server.socket) as stopped:
            stopped.signal(signal.SIGTERM)
            assert stopped.wait() == 0
        with gateway(server.socket) as served:
            server.go_on()
            served.log.wait_for("event=http.ready")


@contextmanager
def gateway(socket: Path) -> Iterator[ServerProcess]:
    """`uma gateway` that waits for the server on `socket`."""
    command = uma_command("gateway", "--socket", str(socket), "--http", "127.0.0.1:0")
    process = ServerProcess(subprocess.Popen(command, stderr=subprocess.PIPE, env=clean_environ()), socket)
    try:
        process.log.wait_for("waiting for the server: the model is still being loaded")
        yield process
    finally:
        process.stop()


def test_newline_sessions_are_told_too(socket_dir: Path, model: Path) -> None:
    with loading(socket_dir / "s", model, "--protocol", "newline") as server, server.connect() as raw:
        raw.send_bytes(b"Once\n")
        assert raw.sock.recv(1000).startswith(b"E_LIMIT_OVERLOADED: the model is still being loaded")


def test_a_terminal_shows_the_progress(socket_dir: Path, model: Path) -> None:
    ours, theirs = pty.openpty()
    with loading(socket_dir / "s", model, stderr=theirs), os.fdopen(ours, "rb", buffering=0) as screen:
        os.close(theirs)
        seen = b""
        while not re.search(rb"loading \S+large.gguf: [3-9]\d %", seen):
            seen += screen.read(1000)


async def test_a_cancelled_load_ends_before_its_next_tensor(model: Path) -> None:
    told: list[int] = []

    def cancel(percent: int) -> None:
        told.append(percent)
        trio.from_thread.run_sync(scope.cancel)

    with trio.CancelScope() as scope:
        async with open_engine(RuntimeConfig(model=str(model)), LoadProgress(cancel)):
            pytest.fail("it was loaded")
    assert scope.cancelled_caught
    assert len(told) == 1


def test_a_signal_ends_a_load_and_the_server_leaves_nothing_behind(socket_dir: Path, model: Path) -> None:
    with loading(socket_dir / "s", model) as server, Raw(server.socket) as raw:
        server.signal(signal.SIGINT)
        assert raw.receive() is None  # its sessions are closed; and the load goes on to its next tensor
        server.let_go()
        assert server.wait() == 130
    assert list(socket_dir.iterdir()) == []
