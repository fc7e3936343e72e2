"""A server that is loading its model answers: how far it is, and that everything else works later.

The load is llama.cpp's own, of a real file; only its progress callback is held up, until the test lets it go on.
"""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from http_server import RawHttp

from forked import Forked
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
    frame,
)
from models import write_model
from uma import LLM, RuntimeConfig, SamplingParams, connect, open_engine
from uma.cli.source import connected
from uma.client import dial
from uma.errors import Loading as StillLoading
from uma.errors import ModelUnusable, ShuttingDown
from uma.types import LoadProgress, LoadState

HELLO_1_1 = {**HELLO, "versions": ["1.1"]}

HELD_UP = """
import sys
from uma.types import LoadProgress

def report(self, fraction, real=LoadProgress.report):
    was = self.percent
    real(self, fraction)
    if was < 30 <= self.percent:
        print("held", flush=True)
        sys.stdin.readline()

LoadProgress.report = report
"""
"""With it a load waits for a line on standard input once it has come to 30 % or more."""


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
    arguments = ("run", "--socket", str(path), "--model", str(model), *ONE_THREAD, *flags)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr}
    with Forked(arguments, clean_environ(), prelude=HELD_UP, **pipes) as process:
        assert process.stdout is not None
        server: Any = None
        try:
            assert process.stdout.readline() == b"held\n"
            server = Loading(process, path) if stderr == subprocess.PIPE else process
            yield server
        finally:
            process.kill()


def test_requests_wait_while_the_model_is_loaded_and_are_told_how_far_it_is(socket_dir: Path, model: Path) -> None:
    with (
        loading(socket_dir / "s", model) as server,
        server.connect() as plain,
        server.connect() as many,
        server.connect() as old,
    ):
        plain.send(ask("p"))
        old.send(HELLO, ask("o"))
        many.send(
            HELLO_1_1,
            ask("a"),
            ask("b", max_tokens=400),
            {"event": "cancel", "id": "b"},
            {"type": "metrics", "id": "m"},
        )
        for _ in range(2):  # again and again
            for session in (plain, many):
                assert 30 <= session.expect("loading")["percent"] < 100
        server.go_on()
        assert [each["event"] for each in plain.rest()][-1] == "eos"
        assert past_loading(many)["version"] == "1.1"
        ended: dict[str, str] = {}
        while len(ended) < 2:
            if (event := many.next())["event"] == "eos":
                ended[event["id"]] = event["reason"]
        assert ended == {"a": "length", "b": "cancelled"}
        assert old.expect("hello")["version"] == "1.0", "it does not know how far the load is"
        assert old.last_of("o")["reason"] == "length"
        assert "request.failed" not in server.log.text


def test_health_is_answered_at_once_also_behind_what_waits(socket_dir: Path, model: Path) -> None:
    question = {"type": "health", "id": "h"}
    with loading(socket_dir / "s", model) as server, server.connect() as plain, server.connect() as many:
        with server.connect() as asker:
            asker.send(question)
            (health,) = asker.rest()
        assert (health["status"], health["tokens_generated"]) == ("loading", 0)
        assert 30 <= health["loading_percent"] < 100
        for session, first in ((plain, ask("p", keep_alive=True)), (many, HELLO_1_1)):
            session.send(first, question)
            assert past_loading(session) == health
        server.go_on()
        assert plain.last_of("p")["reason"] == "length"
        assert past_loading(many)["event"] == "hello"
        for session in (plain, many):
            session.send(question)
            assert session.expect("health")["status"] == "ok"


def test_sessions_have_their_turn_in_the_order_in_which_they_began_to_wait(socket_dir: Path, model: Path) -> None:
    with loading(socket_dir / "s", model, "--max-sequences", "1") as server, ExitStack() as stack:
        names = [f"r{number}" for number in range(8)]
        sessions = [stack.enter_context(server.connect()) for _ in names]
        for session, name in zip(sessions, names, strict=True):
            session.send(ask(name))
            session.expect("loading")
        server.go_on()
        assert all(session.last_of(name)["event"] == "eos" for session, name in zip(sessions, names, strict=True))
        for name in names:
            server.log.wait_for(f"event=request.finished .*request={name} ")
        assert re.findall(r"event=request\.finished .*request=(\w+) ", server.log.text) == names


def test_what_one_session_has_waiting_is_bounded_and_nothing_of_it_is_lost(socket_dir: Path, model: Path) -> None:
    frames = [ask(f"r{number}", metadata={"text": "x" * 15_000}, max_tokens=1) for number in range(100)]
    with loading(socket_dir / "s", model) as server, server.connect() as raw, server.connect() as other:
        raw.send(HELLO_1_1)
        raw.expect("loading")
        raw.sock.settimeout(1)  # the server reads no more: the system's own buffers fill up
        unsent = b"".join(map(frame, frames))
        n_sent = 0
        with pytest.raises(TimeoutError):
            while n_sent < len(unsent):
                n_sent += raw.sock.send(unsent[n_sent : n_sent + 65_536])
        assert n_sent < 1_500_000
        other.send({"type": "health"})
        assert other.expect("health")["status"] == "loading"
        server.let_go()
        raw.sock.settimeout(PATIENCE_SEC)
        sending = threading.Thread(target=raw.send_bytes, args=(unsent[n_sent:],))
        sending.start()
        ended: set[str] = set()
        while len(ended) < len(frames):
            if (event := raw.next())["event"] in ("eos", "error"):
                assert event["event"] == "eos", event
                ended.add(event["id"])
        sending.join()


def test_clients_that_hang_up_while_they_wait_cost_nothing_more(socket_dir: Path, model: Path) -> None:
    with loading(socket_dir / "s", model, "--max-sessions", "2", "--max-frame-bytes", "1000") as server:
        for data in (frame(HELLO_1_1), frame(HELLO_1_1) + 20 * frame({"type": "hello", "client": "x" * 100})):
            with server.connect() as gone:
                gone.send_bytes(data)
                gone.expect("loading")
        with server.connect() as half:
            half.send(HELLO_1_1, ask("a"))
            half.sock.shutdown(socket.SHUT_WR)  # but this one still reads
            # Its session and this one are all that can be open. One too many is refused, and may see the end alone.
            while True:
                with server.connect() as late:
                    late.send({"type": "health"})
                    if (event := late.receive()) is not None and event["event"] == "health":
                        break
            server.go_on()
            assert half.last_of("a")["reason"] == "length"


async def test_those_that_wait_are_told_that_the_model_cannot_be_loaded(socket_dir: Path, model: Path) -> None:
    with (
        loading(socket_dir / "s", model, "--speculate", "auto", "--draft", "builtin") as server,
        server.connect() as raw,
    ):
        raw.send(ask("a"))
        raw.expect("loading")
        with pytest.raises(ShuttingDown, match=r"the server ends: draft: .*") as refused:
            async with connect(server.socket, on_loading=lambda _: server.let_go()):
                pytest.fail("a session was opened")
        assert past_loading(raw) == {"event": "error", "code": "E_RUNTIME_SHUTDOWN", "message": refused.value.message}
        assert raw.receive() is None
        assert server.wait() == 2
        assert refused.value.message.removeprefix("the server ends: ") in server.log.text


def past_loading(session: Raw) -> dict[str, Any]:
    """The next event that is not about the load."""
    while (event := session.next())["event"] == "loading":
        pass
    return event


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
        assert f"the model is still being loaded ({told['loading_percent']} %)" in finding
        # The load never goes on: the process ends all the same.
        stopped = uma_told("stop", *at)
        assert stopped.stdout == f"stopped process {server.pid}, which was loading its model on {server.socket}\n"
        assert server.wait() == 0
        assert not server.socket.exists()


async def test_a_client_waits_for_a_server_that_loads_if_it_is_to_and_fills_no_log(
    socket_dir: Path, model: Path, mock_clock: trio.testing.MockClock
) -> None:
    told: list[LoadState] = []
    with loading(socket_dir / "s", model) as server:
        with pytest.raises(StillLoading, match=r"the model is still being loaded \(\d+ %\)"):
            async with connect(server.socket, waits=False):
                pytest.fail("a session was opened")
        with trio.fail_after(PATIENCE_SEC):

            def tell(load: LoadState) -> None:
                told.append(load)
                # As long as it is told it waits: twice is more than its patience with a server that says nothing.
                mock_clock.jump(0.6 * dial.HELLO_TIMEOUT_SEC)
                if len(told) == 4:
                    server.let_go()

            async with connect(server.socket, on_loading=tell) as client:
                assert (await client.health(probe=False)).status == "ok"
        assert len(told) >= 4
        assert all(30 <= each.percent <= 100 for each in told)
        assert "request.failed" not in server.log.text


def test_the_library_a_command_and_a_gateway_wait_for_a_server_that_loads(socket_dir: Path, model: Path) -> None:
    with loading(socket_dir / "s", model) as server:
        with gateway(server.socket) as stopped:
            stopped.signal(signal.SIGTERM)
            assert stopped.wait() == 0
        command = ("generate", "--socket", str(server.socket), "--max-tokens", "4", "Once")
        asking = Forked(command, clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        said = Log(asking.stderr)
        said.wait_for("waiting for the server to load the model")
        with gateway(server.socket) as served:
            letting_go = threading.Timer(0, server.let_go)
            letting_go.start()
            with LLM(socket=server.socket) as llm:
                assert llm.generate("Once", SamplingParams(max_tokens=2))[0].outputs[0].token_ids
            letting_go.join()
            served.log.wait_for("event=http.ready")
        assert asking.wait(PATIENCE_SEC) == 0, said.join()
        assert asking.stdout is not None
        assert asking.stdout.read()
        asking.stdout.close()


@pytest.mark.parametrize(("percents", "is_told"), [((0,), False), ((0, 0), True), ((7,), True)])
async def test_a_command_says_that_it_waits_for_a_model_unless_that_is_refused_at_once(
    socket_dir: Path, percents: tuple[int, ...], is_told: bool
) -> None:
    said: list[str] = []
    with trio.socket.socket(trio.socket.AF_UNIX) as listening:
        await listening.bind(str(socket_dir / "s"))
        listening.listen()

        async def refuse() -> None:
            connection, _ = await listening.accept()
            with connection:
                for percent in percents:
                    await connection.send(frame({"event": "loading", "percent": percent}))
                    await trio.testing.wait_all_tasks_blocked(0.01)
                await connection.send(frame({"event": "error", "code": ModelUnusable.code, "message": "too large"}))
                await connection.recv(4096)

        async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
            nursery.start_soon(refuse)
            with pytest.raises(ModelUnusable):
                await connected(stack, str(socket_dir / "s"), said.append)
    assert bool(said) is is_told


@contextmanager
def gateway(socket: Path) -> Iterator[ServerProcess]:
    """`uma gateway` that waits for the server on `socket`."""
    command = ("gateway", "--socket", str(socket), "--http", "127.0.0.1:0")
    process = ServerProcess(Forked(command, clean_environ(), stderr=subprocess.PIPE), socket)
    try:
        process.log.wait_for("waiting for the server to load the model")
        yield process
    finally:
        process.stop()


def test_newline_sessions_wait_too(socket_dir: Path, model: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(loading(socket_dir / "s", model, "--protocol", "newline", "--max-tokens", "2"))
        raw = stack.enter_context(server.connect())
        lines = stack.enter_context(raw.sock.makefile("rb"))
        raw.send_bytes(b"Once\nOnce\n")
        assert re.fullmatch(rb"waiting: the model is still being loaded \(\d+ %\)\n", lines.readline())
        server.go_on()
        first = lines.readline()
        assert not first.startswith((b"waiting", b"E_"))
        assert lines.readline() == first


def test_a_terminal_shows_the_progress(socket_dir: Path, model: Path) -> None:
    ours, theirs = pty.openpty()
    with loading(socket_dir / "s", model, stderr=theirs), os.fdopen(ours, "rb", buffering=0) as screen:
        os.close(theirs)
        seen = b""
        while not re.search(rb"large.gguf: \S+ loading, [3-9]\d %", seen):
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
        raw.send(ask("a"))
        raw.expect("loading")
        server.signal(signal.SIGINT)
        assert past_loading(raw)["code"] == "E_RUNTIME_SHUTDOWN"
        assert raw.receive() is None  # its sessions are closed; and the load goes on to its next tensor
        server.let_go()
        assert server.wait() == 130
    assert list(socket_dir.iterdir()) == []
