"""`uma launch` gives an agent a server and its own arguments. The agents here write down what they get."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from http_server import HttpServer, ServeModels

from forked import Forked
from harness import clean_environ, run_to_end, uma_command, until
from models import write_model
from uma.cli.agents import AGENTS

WRITES = """\
#!{python}
import json, os, pathlib, sys, urllib.request
url = os.environ.get("ANTHROPIC_BASE_URL", "")
told = {{"arguments": sys.argv[1:], "variables": dict(os.environ)}}
given = [*sys.argv[1:], *os.environ.values()]
places = [pathlib.Path(each) for each in given if "uma-launch-" in each and os.path.exists(each)]
told["files"] = [file.read_text() for each in places for file in (each, *each.glob("*")) if file.is_file()]
key = {{"x-api-key": os.environ.get("ANTHROPIC_AUTH_TOKEN", "")}}
models = urllib.request.Request((url or "http://none") + "/v1/models", headers=key)
told["answer"] = json.load(urllib.request.urlopen(models)) if url else None
print(json.dumps(told))
sys.exit(int(os.environ.get("AGENT_EXIT", "0")))
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with a program for each agent."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for agent in AGENTS.values():
        program = folder / agent.program
        program.write_text(WRITES.format(python=sys.executable))
        program.chmod(0o755)
    return folder


def launch(programs: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return run_to_end(*uma_command("launch", *arguments), environ=clean_environ(PATH=path, **environ))


def told(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_gets_the_server_the_model_and_its_own_arguments_and_nothing_is_written_where_the_user_keeps_things(
    http_server: HttpServer, programs: Path, name: str, tmp_path: Path
) -> None:
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    for folder in (home, temporary):
        folder.mkdir()
    places = {"HOME": str(home), "TMPDIR": str(temporary)}
    got = told(launch(programs, name, "--url", http_server.url, "--", "--continue", "-p", "x", **places))
    model = http_server.ask("GET", "/v1/models").json["data"][0]
    assert got["arguments"][-3:] == ["--continue", "-p", "x"]
    given = " ".join([*got["arguments"], *got["variables"].values(), *got["files"]])
    assert http_server.url in given
    assert model["id"] in given
    if name not in ("claude", "cline", "copilot"):  # cannot use one as small; does not ask; has it in two parts
        assert str(model["max_model_len"]) in given
    assert (list(home.iterdir()), list(temporary.iterdir())) == ([], [])


def test_an_agent_s_exit_code_is_the_command_s(http_server: HttpServer, programs: Path) -> None:
    assert launch(programs, "codex", "--url", http_server.url, AGENT_EXIT="7").returncode == 7


def test_the_server_that_runs_is_used_through_a_gateway(http_server: HttpServer, programs: Path) -> None:
    got = told(launch(programs, "claude", "--socket", str(http_server.process.socket)))
    assert got["variables"]["ANTHROPIC_BASE_URL"] != http_server.url
    assert got["answer"]["data"][0]["id"] == http_server.ask("GET", "/v1/models").json["data"][0]["id"]


def test_of_several_models_the_one_that_is_named_is_loaded_and_used(serve_models: ServeModels, programs: Path) -> None:
    socket = str(serve_models().process.socket)
    loading = launch(programs, "codex", "--socket", socket, "--model", "bet")
    assert "waiting for the server to load beta" in loading.stderr
    assert 'model="beta"' in told(loading)["arguments"]
    assert "model not found; did you mean alpha" in launch(programs, "codex", "--socket", socket, "-m", "alhpa").stderr


def test_of_several_models_one_that_calls_tools_and_has_the_context_for_an_agent_is_taken_unasked(
    tmp_path: Path, programs: Path, socket_dir: Path
) -> None:
    told_of_tools = "{% if tools %}{{ tools }}{% endif %}{{ messages }}"
    write_model(tmp_path / "a-short.gguf", chat_template=told_of_tools, context_length=8_192)
    write_model(tmp_path / "b-mute.gguf", chat_template="{{ messages }}", context_length=32_768)
    write_model(tmp_path / "c-able.gguf", chat_template=told_of_tools, context_length=32_768)
    done = launch(programs, "codex", "--socket", str(socket_dir / "no.sock"), UMA_MODELS=str(tmp_path))
    assert 'model="c-able"' in told(done)["arguments"]
    assert "warning" not in done.stderr


def test_a_context_too_short_for_an_agent_is_warned_of_with_both_figures(programs: Path, socket_dir: Path) -> None:
    done = launch(programs, "claude", "--socket", str(socket_dir / "no.sock"), "--model", "builtin")
    assert "builtin has 2,048 tokens of context; an agent needs about 20,000" in done.stderr
    assert done.returncode == 0


def test_where_no_server_runs_one_is_started_and_ended_with_the_agent(
    tiny: Path, programs: Path, socket_dir: Path
) -> None:
    done = launch(programs, "claude", "--socket", str(socket_dir / "no.sock"), "--model", str(tiny))
    got = told(done)
    assert "starting one" in done.stderr
    assert got["answer"]["data"][0]["max_model_len"] > 0
    port = int(got["variables"]["ANTHROPIC_BASE_URL"].rpartition(":")[2])
    assert not _listens(port)


def _listens(port: int) -> bool:
    import socket

    with socket.socket() as end:
        return end.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def waiting_agent(model: Path, folder: Path, socket_dir: Path, says: str) -> Iterator[tuple[Forked, list[str]]]:
    """`uma launch` with a server of its own and an agent that says these words of a shell, and then waits."""
    note, program = folder / "note", folder / "claude"
    program.write_text(f"#!/bin/sh\necho {says} >{note}.new\nmv {note}.new {note}\nexec cat\n")
    program.chmod(0o755)
    environ = clean_environ(PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")
    command = ("launch", "claude", "--socket", str(socket_dir / "no.sock"), "--model", str(model))
    with Forked(command, environ, stdin=subprocess.PIPE) as process:
        until(note.exists, bool)
        yield process, note.read_text().split()


def test_a_signal_ends_the_agent_and_the_server(tiny: Path, tmp_path: Path, socket_dir: Path) -> None:
    with waiting_agent(tiny, tmp_path, socket_dir, '"$ANTHROPIC_BASE_URL"') as (process, said):
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
    assert not _listens(int(said[0].rpartition(":")[2]))


def test_other_users_find_neither_the_port_nor_the_key_in_what_runs_and_are_refused_without_it(
    tiny: Path, tmp_path: Path, socket_dir: Path
) -> None:
    says = '"$ANTHROPIC_BASE_URL" "$ANTHROPIC_AUTH_TOKEN"'
    with waiting_agent(tiny, tmp_path, socket_dir, says) as (process, (url, key)):
        port, seen = url.rpartition(":")[2].encode(), b""
        for lines in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                seen += lines.read_bytes()
        with pytest.raises(HTTPError) as refused:
            urlopen(f"{url}/v1/models")
        process.send_signal(signal.SIGTERM)
    refused.value.close()
    assert refused.value.code == 401
    assert b"127.0.0.1:0\0" in seen
    assert b"127.0.0.1:" + port not in seen
    assert key.encode() not in seen


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (
            ("claude",),
            2,
            "there is no claude on this machine; install it with: npm install -g @anthropic-ai/claude-code",
        ),
        (("claud",), 2, "did you mean claude?"),
    ],
)
def test_what_is_missing_is_told_with_how_to_get_it(
    tmp_path: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    done = run_to_end(*uma_command("launch", *arguments), environ=clean_environ(PATH=str(tmp_path)))
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def test_a_place_without_a_server_and_a_model_that_is_not_there_are_told(
    programs: Path, tmp_path: Path, socket_dir: Path
) -> None:
    nowhere = launch(programs, "codex", "--url", "http://127.0.0.1:9")
    assert (nowhere.returncode, "Connection refused; start a server with" in nowhere.stderr) == (1, True)
    no_model = launch(programs, "codex", "--socket", str(socket_dir / "no.sock"), "--model", str(tmp_path / "no.gguf"))
    assert (no_model.returncode, "no.gguf" in no_model.stderr) == (1, True), no_model.stderr
    no_key = launch(programs, "codex", "--url", "http://127.0.0.1:9", "--key-file", str(tmp_path / "none"))
    assert (no_key.returncode, "cannot be read" in no_key.stderr) == (2, True)
