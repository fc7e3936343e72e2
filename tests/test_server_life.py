"""A server's life as a process: the socket's file, signals, ends of every kind, and the places its log can go to."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import socket
import stat
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import (
    BULKY,
    PATIENCE_SEC,
    Raw,
    RunInProcessText,
    Serve,
    ServerProcess,
    ask,
    clean_environ,
    running_server,
    uma_command,
)

FOREVER = {"max_tokens": 30_000, "metadata": BULKY}
"""A request whose reader has to read 240 MB before it can end."""


def serves(path: Path) -> bool:
    """Whether a whole request goes through."""
    with Raw(path) as raw:
        raw.send(ask())
        return bool(raw.rest()[-1]["reason"] == "length")


def is_refused(path: Path) -> bool:
    """Whether no server listens."""
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(str(path)) != 0


# The socket's file


def test_the_socket_and_a_directory_made_for_it_are_their_owner_s_alone(socket_dir: Path, tiny: Path) -> None:
    path = socket_dir / "new" / "s"
    with running_server(path, "--model", str(tiny)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_after_a_kill_the_next_server_takes_the_stale_socket_over_with_its_own_mode(serve: Serve) -> None:
    server = serve()
    server.signal(signal.SIGKILL)
    assert server.wait() == -signal.SIGKILL
    assert server.socket.is_socket()
    assert is_refused(server.socket)
    again = serve("--socket-mode", "666")
    assert serves(again.socket)
    assert stat.S_IMODE(again.socket.stat().st_mode) == 0o666


@pytest.fixture
def refusal(uma_told: RunInProcessText) -> Callable[..., str]:
    """Tells what `uma run` says when it does not start; it must be one short message and no traceback."""

    def ask(path: Path | str, *flags: str) -> str:
        done = uma_told("run", "--socket", str(path), *flags)
        assert done.returncode != 0
        assert "Traceback" not in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        return done.stderr

    return ask


def test_a_live_server_s_socket_is_refused_and_it_goes_on_serving(
    server: ServerProcess, refusal: Callable[..., str]
) -> None:
    refused = refusal(server.socket)
    assert "a server listens there already, which every program can use (uma chat)" in refused
    assert f"`uma stop --socket {server.socket}` ends it" in refused
    assert serves(server.socket)


def test_a_place_where_no_server_can_be_is_refused_in_one_sentence(
    socket_dir: Path, tiny: Path, refusal: Callable[..., str]
) -> None:
    notes, too_long = socket_dir / "notes.txt", socket_dir / ("x" * (108 - len(os.fsencode(socket_dir)) - 1))
    notes.write_text("precious")
    assert "is no socket" in refusal(notes)
    assert notes.read_text() == "precious"
    assert "is a directory" in refusal(socket_dir)
    assert len(os.fsencode(too_long)) == 108
    assert "108 bytes" in refusal(too_long)
    assert "cannot be made" in refusal("/proc/uma/s", "--model", str(tiny))


# Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_first_signal_lets_what_runs_finish_and_takes_nothing_new(serve: Serve, number: signal.Signals) -> None:
    server = serve("--drain-timeout-sec", str(PATIENCE_SEC))
    with server.connect() as raw, server.connect() as idle:
        idle.hello()
        raw.hello()
        raw.send(ask("runs", max_tokens=1_500, metadata=BULKY))
        raw.until_token("runs")
        server.signal(number)
        server.log.wait_for("event=server.draining")
        assert idle.rest()[-1]["code"] == "E_RUNTIME_SHUTDOWN"
        with server.connect() as late:
            assert late.rest()[-1]["code"] == "E_RUNTIME_SHUTDOWN"
        raw.send(ask("late"), {"type": "health"})
        told = {event["event"]: event for event in raw.rest()}
        assert told["health"]["status"] == "draining"
        assert (told["error"]["id"], told["error"]["code"]) == ("late", "E_RUNTIME_SHUTDOWN")
        assert (told["eos"]["id"], told["eos"]["usage"]["completion_tokens"]) == ("runs", 1_500)
        assert server.wait() == (130 if number == signal.SIGINT else 0)
        assert list(server.socket.parent.iterdir()) == []


def test_what_outlasts_the_drain_timeout_is_told_so(serve: Serve) -> None:
    server = serve("--drain-timeout-sec", "0.1", "--max-tokens", "30000")
    with server.connect() as raw:
        raw.hello()
        raw.send(ask("a", **FOREVER), ask("b", **FOREVER))
        raw.until_token("a")
        server.signal(signal.SIGTERM)
        ends = {event.get("id"): event["code"] for event in raw.rest() if event["event"] == "error"}
        assert ends["a"] == ends["b"] == "E_RUNTIME_SHUTDOWN"
        assert server.wait() == 0


def test_a_second_signal_ends_at_once_and_says_so(serve: Serve) -> None:
    server = serve("--drain-timeout-sec", "3600", "--max-tokens", "30000")
    with server.connect() as raw:
        raw.hello()
        raw.send(ask("a", **FOREVER))
        raw.until_token("a")
        server.signal(signal.SIGTERM)
        server.log.wait_for("event=server.draining")
        server.signal(signal.SIGTERM)
        assert (told := raw.last_of("a"))["code"] == "E_RUNTIME_SHUTDOWN", told
        assert server.wait() == 0
        assert not server.socket.exists()


ENDLESS_LOAD = """
import sys, threading
from uma.config import RuntimeConfig
from uma.llama.model import Model
from uma.server import run_server

def load(*_args, **_options):
    print("loading", flush=True)
    threading.Event().wait()

Model.load = load
sys.exit(run_server(RuntimeConfig(socket=sys.argv[1])))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_load_that_would_never_end_by_itself(socket_dir: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", ENDLESS_LOAD, str(socket_dir / "s")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=clean_environ()) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"loading\n"
            process.send_signal(number)
            assert process.wait(PATIENCE_SEC) == (130 if number == signal.SIGINT else 0)
        finally:
            process.kill()
    assert list(socket_dir.iterdir()) == []


AT_THE_END = """
import os, signal, trio
from uma.server.main import receiving

async def main(number):
    with receiving([number]) as signals:
        os.kill(os.getpid(), number)
        assert await anext(signals) == number
        os.kill(os.getpid(), number)
    os.kill(os.getpid(), number)

for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    trio.run(main, number)
    os.kill(os.getpid(), number)
"""


def test_signals_that_come_while_a_server_ends_make_no_failure_of_it() -> None:
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, timeout=PATIENCE_SEC, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_sigusr1_writes_the_metrics_to_the_log(server: ServerProcess) -> None:
    assert serves(server.socket)
    mark = server.log.mark()
    server.signal(signal.SIGUSR1)
    line = server.log.wait_for("event=metrics", since=mark)
    snapshot = json.loads(line.partition("snapshot=")[2])
    assert snapshot["tokens_generated_total"] >= 8
    assert snapshot["ttft_ms_buckets"]["inf"] == snapshot["ttft_ms_count"]


def test_a_second_hang_up_of_one_terminal_does_not_cut_off_what_runs(serve: Serve) -> None:
    server = serve("--drain-timeout-sec", str(PATIENCE_SEC))
    with server.connect() as raw:
        raw.send(ask("a", max_tokens=400, ignore_eos=True))
        raw.expect("token")
        for _ in range(2):
            mark = server.log.mark()
            server.signal(signal.SIGHUP)
            server.log.wait_for("name=SIGHUP", since=mark)
        assert raw.last_of("a")["reason"] == "length"
    assert server.wait() == 0


# The log


def test_a_request_is_one_line_with_its_session_and_id(server: ServerProcess) -> None:
    mark = server.log.mark()
    with server.connect() as raw:
        raw.send(ask('a "strange"\nid'))
        raw.rest()
    line = server.log.wait_for("event=request.finished", since=mark)
    assert 'request="a \\"strange\\"\\nid"' in line
    assert "reason=length" in line
    assert "session=s" in line


def test_a_terminal_that_goes_away_ends_the_server_in_order(socket_dir: Path, tiny: Path) -> None:
    ours, theirs = pty.openpty()
    path = socket_dir / "s"

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        uma_command("run", "--socket", str(path), "--model", str(tiny)),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=take_terminal,  # noqa: PLW1509  (one thread forks here, and the call is one ioctl)
        env=clean_environ(),
    )
    try:
        os.close(theirs)
        seen = b""
        while b"Ctrl-C ends the server" not in seen:
            assert select.select([ours], [], [], PATIENCE_SEC)[0], seen
            seen += os.read(ours, 4096)
        os.close(ours)  # the kernel hangs up on the session, and every write to the terminal fails from here on
        assert process.wait(PATIENCE_SEC) == 0
        assert not path.exists()
    finally:
        process.kill()
        process.wait()
