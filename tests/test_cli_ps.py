"""`uma ps` and `uma stop`: which servers run, and the end of one."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from http_server import running_http

from forked import Forked
from harness import (
    PATIENCE_SEC,
    RunInProcessText,
    ServerProcess,
    ask,
    clean_environ,
    run_to_end,
    running_server,
    uma_command,
    until,
)


def process(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A command of `uma` as a process of its own, to its end."""
    return run_to_end(*uma_command(*arguments), environ=clean_environ(**environ))


def sockets_told(uma_told: RunInProcessText, folder: Path, **environ: str) -> list[Path]:
    """The sockets in `folder` that `uma ps` tells of; servers of others may run on this machine."""
    told = [Path(each["socket"]) for each in json.loads(uma_told("ps", "--json", **environ).stdout)]
    return [each for each in told if each.is_relative_to(folder)]


def test_a_server_is_told_with_its_process_model_sessions_and_since_when(
    server: ServerProcess, uma_told: RunInProcessText
) -> None:
    before = json.loads(uma_told("ps", "--json", "--socket", str(server.socket)).stdout)[0]["sessions"]
    with server.connect() as raw:
        raw.hello()
        done = uma_told("ps", "--json", "--socket", str(server.socket))
    (told,) = json.loads(done.stdout)
    assert done.returncode == 0
    assert (told["pid"], told["socket"], told["sessions"]) == (server.pid, str(server.socket), before + 1)
    assert told["model"] == "builtin"
    assert datetime.fromisoformat(told["since"]) <= datetime.now(UTC)
    table = uma_told("ps", "--socket", str(server.socket)).stdout
    assert table.splitlines()[0].split() == ["pid", "model", "sessions", "since", "socket"]
    assert table.splitlines()[1].startswith(f"{server.pid} ")
    assert uma_told("ps", "--socket", f"{server.socket.parent}//{server.socket.name}").stderr == "", "it is that one"


def test_by_default_the_usual_socket_is_asked_and_those_beside_it(socket_dir: Path, uma_told: RunInProcessText) -> None:
    runtime = {"XDG_RUNTIME_DIR": str(socket_dir)}
    assert sockets_told(uma_told, socket_dir, **runtime) == []
    (socket_dir / "uma").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(socket_dir / "uma" / "dead.sock"))
    usual, other = socket_dir / "uma" / "uma.sock", socket_dir / "uma" / "other.sock"
    with running_server(usual) as first, running_server(other) as second:
        assert sockets_told(uma_told, socket_dir, **runtime) == [usual, other]
        assert f"uma: commands use {usual}; --socket names another" in " ".join(
            uma_told("ps", **runtime).stderr.split()
        )
        named = " ".join(uma_told("ps", UMA_SOCKET=str(other), XDG_RUNTIME_DIR=str(socket_dir)).stderr.split())
        assert f"uma: commands use {other}, as UMA_SOCKET says; --socket names another" in named
        elsewhere = uma_told("ps", UMA_SOCKET=str(socket_dir / "none"), **runtime).stderr
        assert f"uma: none on {socket_dir / 'none'}, the one that commands use; --socket names" in elsewhere
        assert uma_told("stop", **runtime).returncode == 0
        assert first.wait() == 0
        assert second.process.poll() is None


def test_a_socket_that_a_variable_names_and_nobody_listens_on_hides_no_server_and_no_model(
    server: ServerProcess, socket_dir: Path, uma_told: RunInProcessText
) -> None:
    nowhere = {"UMA_SOCKET": str(socket_dir / "none")}
    assert server.socket in sockets_told(uma_told, server.socket.parent, **nowhere)
    listed = uma_told("models", **nowhere)
    assert (listed.returncode, "builtin" in listed.stdout) == (0, True)
    assert uma_told("models", "--socket", str(socket_dir / "none")).returncode == 1


def test_where_none_listens_on_the_named_socket_ps_says_so_and_fails(
    socket_dir: Path, uma_told: RunInProcessText
) -> None:
    none = uma_told("ps", "--socket", str(socket_dir / "none"))
    assert (none.returncode, none.stdout) == (1, "")
    path = socket_dir / "none"
    assert f"{path}: no server listens there; start one with `uma run --socket {path}`" in none.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell of its sockets")
def test_a_server_elsewhere_is_found_and_other_programs_are_left_alone(server: ServerProcess, socket_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other_program:
        other_program.bind(str(socket_dir / "other"))
        other_program.listen()
        other_program.setblocking(False)
        assert server.socket in sockets_told(process, server.socket.parent, XDG_RUNTIME_DIR=str(socket_dir))
        with pytest.raises(BlockingIOError):  # no connection has come
            other_program.accept()


def test_stop_ends_the_server_and_says_so_when_it_is_gone(socket_dir: Path, uma_told: RunInProcessText) -> None:
    with running_server(socket_dir / "s") as server, running_server(socket_dir / "other") as other:
        done = uma_told("stop", "--socket", str(server.socket))
        # It is gone by now: not its parent's wait ends it, and nothing is left in its place.
        assert server.process.wait(PATIENCE_SEC) == 0
        assert done.returncode == 0
        assert done.stdout.startswith(f"stopped process {server.pid}, which served on {server.socket}")
        assert not server.socket.exists()
        assert other.process.poll() is None
        again = uma_told("stop", "--socket", str(server.socket))
        asked = [uma_told(*words, "--socket", str(server.socket)).stderr for words in (("pause",), ("explain", "x"))]
        if sys.platform == "linux":
            assert all("no server listens there; `uma ps` lists those that run" in told for told in asked)
    assert again.returncode == 1
    assert again.stderr.startswith(
        f"uma: error: {server.socket}: no server listens there; `uma ps` lists those that run"
    )


@pytest.mark.parametrize("is_now", [False, True])
def test_what_runs_may_finish_unless_it_is_to_end_now(is_now: bool, socket_dir: Path, tiny: Path) -> None:
    flags = ("--model", str(tiny), "--drain-timeout-sec", str(PATIENCE_SEC))
    with running_server(socket_dir / "s", *flags) as server, server.connect() as raw:
        raw.hello()
        raw.send(ask("runs", max_tokens=6_000))
        raw.until_token("runs")
        command = ("stop", "--socket", str(server.socket), *(["--now"] if is_now else []))
        with Forked(command, clean_environ(), stderr=subprocess.PIPE) as stopping:
            events = raw.rest()
            assert stopping.wait(PATIENCE_SEC) == 0
        # The second signal can come when the server has ended by itself, and its process is about to.
        assert server.wait() in ((0, -signal.SIGTERM) if is_now else (0,))
    is_whole = any(each["event"] == "eos" and each["reason"] == "length" for each in events)
    assert is_whole or is_now


def test_a_server_that_stops_is_listed_and_waited_for_until_it_is_gone(socket_dir: Path, tiny: Path) -> None:
    flags = ("--model", str(tiny), "--drain-timeout-sec", str(PATIENCE_SEC), "--max-tokens", "30000")
    with running_server(socket_dir / "s", *flags) as server, server.connect() as raw:
        raw.hello()
        raw.send(ask("runs", max_tokens=30_000, metadata={"of": "x" * 2_000}))
        raw.until_token("runs")
        server.signal(signal.SIGTERM)
        server.log.wait_for("event=server.draining")
        listed = process("ps", "--socket", str(server.socket))
        assert listed.returncode == 0
        assert f"{server.pid}  is stopping" in listed.stdout
        (told,) = json.loads(process("ps", "--json", "--socket", str(server.socket)).stdout)
        assert (told["pid"], told["is_stopping"], told["model"]) == (server.pid, True, None)
        assert "the server is stopping" in process("top", "--once", "--socket", str(server.socket)).stdout
        with Forked(("stop", "--socket", str(server.socket)), clean_environ(), stdout=subprocess.PIPE) as stopping:
            raw.send({"event": "cancel", "id": "runs"})
            assert raw.last_of("runs")["reason"] == "cancelled", "the command has not cut it off"
            assert stopping.wait(PATIENCE_SEC) == 0
            assert stopping.stdout is not None
            assert f"stopped process {server.pid}, which was stopping".encode() in stopping.stdout.read()
        assert server.wait() == 0


@pytest.mark.parametrize("models", ["--model", "--models"])
def test_a_server_that_stops_with_a_stream_over_http_alone_is_listed_and_ended_by_stop_now(
    socket_dir: Path, tiny: Path, models: str
) -> None:
    bounds = ("--drain-timeout-sec", str(PATIENCE_SEC), "--n-ctx", "32768", "--max-tokens", "30000")
    with running_http(socket_dir, models, str(tiny), *bounds) as server, server.connect(4_096, 536) as raw:
        raw.send("POST", "/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 30_000, "ignore_eos": True})
        assert raw.head()[0] == 200
        server.process.signal(signal.SIGTERM)
        server.process.log.wait_for("event=server.draining")
        at = ("--socket", str(server.process.socket))
        assert f"{server.process.pid}  is stopping" in process("ps", *at).stdout
        with server.process.connect() as refused:
            assert refused.rest()[-1]["code"] == "E_RUNTIME_SHUTDOWN"
        assert f"stopped process {server.process.pid}, which was stopping" in process("stop", "--now", *at).stdout
        # The second signal can come when the server has ended by itself, and its process is about to.
        assert server.process.wait() in (0, -signal.SIGTERM)


@pytest.mark.parametrize("is_frozen_late", [False, True])
def test_a_server_that_hangs_is_ended_by_stop_now_with_the_processes_of_its_models(
    socket_dir: Path, tiny: Path, is_frozen_late: bool
) -> None:
    flags = ("--models", str(tiny), "--drain-timeout-sec", str(PATIENCE_SEC))
    with running_server(socket_dir / "s", *flags) as server, server.connect() as raw:
        raw.hello()
        raw.send(ask("runs", max_tokens=20_000))
        raw.until_token("runs")
        if is_frozen_late:
            server.signal(signal.SIGTERM)
            server.log.wait_for("event=server.draining")
        children = Path(f"/proc/{server.pid}/task").glob("*/children")
        pids = [int(pid) for file in children for pid in file.read_text().split()]
        assert pids
        server.signal(signal.SIGSTOP)
        done = process("stop", "--now", "--socket", str(server.socket))
        assert (done.returncode, server.wait()) == (0, -signal.SIGKILL), done.stderr
        assert f"stopped process {server.pid}, which did not answer on" in done.stdout
        until(lambda: [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()], lambda left: not left)


def test_stop_now_gives_up_on_what_takes_no_session(socket_dir: Path) -> None:
    path = socket_dir / "full.sock"
    with socket.socket(socket.AF_UNIX) as listener, ExitStack() as waiting:
        listener.bind(str(path))
        listener.listen(0)
        with suppress(BlockingIOError):
            while True:
                client = waiting.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(str(path))
        done = process("stop", "--now", "--socket", str(path))
    assert done.returncode == 1
    assert "timeout: too many sessions wait already" in " ".join(done.stderr.split())


def test_a_server_that_hangs_or_refuses_is_listed_and_not_told_as_none(socket_dir: Path, tiny: Path) -> None:
    flags = ("--model", str(tiny), "--max-sessions", "1")
    at = ("--socket", str(socket_dir / "s"))
    with running_server(socket_dir / "s", *flags) as server:
        with server.connect() as only:
            only.hello()
            refused = process("ps", *at)
            server.signal(signal.SIGSTOP)
            hangs = process("ps", *at)
            server.signal(signal.SIGCONT)
            assert process("stop", *at).returncode == 0, "also where all its sessions are taken"
        assert server.wait() == 0
    for done, state in ((refused, "refuses sessions"), (hangs, "gives no answer")):
        assert (done.returncode, "no server listens" in done.stderr) == (0, False)
        assert f"{server.pid}  {state}" in done.stdout
    assert "max_sessions" in refused.stderr
    assert "`uma stop --now --socket" in hangs.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell what a process was started as")
def test_stop_now_ends_no_silent_program_of_another_kind(socket_dir: Path) -> None:
    path = socket_dir / "other.sock"
    program = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); print(flush=True); "
        "input()"
    )
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        done = process("stop", "--now", "--socket", str(path))
        assert done.returncode == 1
        assert f"process {other.pid}, which listens there, is no UMA server" in " ".join(done.stderr.split())
        other.communicate(b"\n", PATIENCE_SEC)
        assert other.returncode == 0, "it has got no signal"


def test_what_is_no_server_gets_no_signal(socket_dir: Path) -> None:
    """This process listens itself, and would end."""
    path = socket_dir / "other.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()

        def answer_otherwise() -> None:
            conversation, _ = other.accept()
            with conversation:
                conversation.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        came: list[int] = []
        before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
        thread = threading.Thread(target=answer_otherwise)
        thread.start()
        try:
            done = process("stop", "--socket", str(path))
        finally:
            thread.join(PATIENCE_SEC)
            signal.signal(signal.SIGTERM, before)
    assert done.returncode == 1
    assert "does not speak UMA's protocol" in done.stderr
    assert came == []


def test_ctrl_c_ends_a_server_with_130(socket_dir: Path) -> None:
    with running_server(socket_dir / "s") as server:
        server.signal(signal.SIGINT)
        assert server.wait() == 130
