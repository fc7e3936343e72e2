"""`uma generate`: for people, for pipes, with a server and without one.

As a real process where its streams, its signals or its end are what is claimed, else within this one: most of a
process's time is its start.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import termios
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import IO

import pytest
from projectors import png, write_projector, write_seeing_model
from pty_screen import Terminal

from forked import Forked
from harness import (
    ONE_THREAD,
    PATIENCE_SEC,
    RunInProcess,
    RunInProcessText,
    ServerProcess,
    clean_environ,
    run_to_end,
    run_uma,
    running_server,
    uma_command,
    until,
)
from models import write_model
from uma.cli.words import BASE, DEMONSTRATION, NEXT

LONG = ("--ignore-eos", "--max-tokens", "1500")
HALF_A_PIPE = 32_768
NOTICE = "This is the small built-in demonstration model"


def generate(
    *arguments: str, stdin: bytes = b"", stdout: IO[bytes] | None = None, **environ: str
) -> subprocess.CompletedProcess[bytes]:
    """Run it to its end."""
    return run_uma(("generate", *arguments), stdin=stdin, stdout=stdout, environ=clean_environ(**environ))


@pytest.fixture
def generate_here(uma_here: RunInProcess) -> RunInProcess:
    """Runs it to its end within this process; as `generate`."""
    return partial(uma_here, "generate")


@contextmanager
def started(*arguments: str) -> Iterator[Forked]:
    """Start it; it is gone after the block."""
    with Forked(("generate", *arguments), clean_environ(), stdout=PIPE, stderr=PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def read_some(process: Forked) -> bytes:
    """The first output; it comes before the end."""
    assert process.stdout is not None
    return os.read(process.stdout.fileno(), 65536)


@pytest.fixture
def at(server: ServerProcess) -> tuple[str, str]:
    """The option that leads to the shared server."""
    return ("--socket", str(server.socket))


def test_a_file_with_a_damaged_header_is_refused_before_it_is_said_to_be_loaded(
    uma_told: RunInProcessText, tiny: Path, tmp_path: Path
) -> None:
    (cut := tmp_path / "cut.gguf").write_bytes(tiny.read_bytes()[:400])
    for command in ("generate", "chat"):
        done = uma_told(command, "--model", str(cut), *(["hi"] if command == "generate" else []))
        assert done.returncode != 0
        assert "header is cut short" in done.stderr and "loading" not in done.stderr


def test_the_text_alone_is_on_standard_output(at: tuple[str, str]) -> None:
    done = generate("Tell me a story about a fox", *at, "--max-tokens", "20")
    assert done.returncode == 0
    assert len(done.stdout.decode().split()) > 5
    assert done.stdout.endswith(b"\n")
    assert NOTICE in done.stderr.decode()
    assert "uma pull" in done.stderr.decode()
    assert done.stderr.splitlines()[1:] == [b"uma: warning: the answer was cut at 20 tokens: the limit of --max-tokens"]


def test_a_server_that_listens_is_used(at: tuple[str, str], server: ServerProcess) -> None:
    before = server.metrics()["tokens_generated_total"]
    assert generate("hello", *at, "--max-tokens", "7", "--ignore-eos").returncode == 0
    assert server.settled()["tokens_generated_total"] == before + 7


@pytest.mark.parametrize("arguments", [("--local", "--model", "builtin"), ("--model", "builtin", "--n-ctx", "1024")])
def test_the_model_is_loaded_here_where_it_is_asked_for(
    arguments: tuple[str, ...], at: tuple[str, str], server: ServerProcess
) -> None:
    before = server.metrics()["tokens_generated_total"]
    done = generate("hello", *at, *arguments, *ONE_THREAD[:2], "--max-tokens", "5")
    assert done.returncode == 0
    assert server.settled()["tokens_generated_total"] == before


def test_another_model_than_the_server_has_is_loaded_here_and_that_is_said_unless_its_socket_was_named(
    at: tuple[str, str], tiny: Path, socket_dir: Path
) -> None:
    done = generate("hello", *at, "--model", str(tiny), "--max-tokens", "5")
    assert (done.returncode, f"not {tiny}; --local loads it here" in done.stderr.decode()) == (2, True)
    usual = socket_dir / "uma" / "uma.sock"
    usual.parent.mkdir(mode=0o700)
    usual.symlink_to(at[1])
    done = generate("hello", "--model", str(tiny), "--max-tokens", "5", XDG_RUNTIME_DIR=str(socket_dir))
    assert done.returncode == 0, done.stderr
    assert f"not {tiny}: loading that here" in done.stderr.decode()


def test_the_model_that_the_server_has_is_not_loaded_again(
    at: tuple[str, str], server: ServerProcess, generate_here: RunInProcess
) -> None:
    before = server.metrics()["tokens_generated_total"]
    assert generate_here("hello", *at, "--model", "builtin", "--max-tokens", "3", "--ignore-eos").returncode == 0
    assert server.settled()["tokens_generated_total"] == before + 3


def test_a_model_that_does_not_exist_is_an_error_also_beside_a_server(
    at: tuple[str, str], generate_here: RunInProcess
) -> None:
    done = generate_here("hello", *at, "--model", "/nowhere/model.gguf")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert b"/nowhere/model.gguf: model not found, and no such file" in done.stderr


@pytest.mark.parametrize("state", ["none", "stale"])
def test_without_a_server_in_the_usual_place_the_model_is_loaded_here_and_that_is_said(
    state: str, socket_dir: Path, tiny: Path
) -> None:
    path = socket_dir / "uma" / "uma.sock"
    if state == "stale":
        path.parent.mkdir(mode=0o700)
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
    done = generate(
        "hello", "--model", str(tiny), "--max-tokens", "5", "--temperature", "0", XDG_RUNTIME_DIR=str(socket_dir)
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.decode().splitlines()[0] == f"uma: no server listens on {path}: loading {tiny} here"
    assert done.stdout


@pytest.mark.parametrize("options", [(), ("--n-ctx", "512")])
def test_a_name_that_is_wrong_is_told_before_anything_is_said_of_loading_it(
    options: tuple[str, ...], alone: dict[str, str], uma_here: RunInProcess
) -> None:
    done = uma_here("generate", "hello", "-m", "bultin", *options, **alone)
    told = b"uma: error: bultin: model not found, and no such file; did you mean builtin?\n"
    assert (done.returncode, done.stderr) == (2, told)


@pytest.fixture
def alone(socket_dir: Path) -> dict[str, str]:
    """Variables of a user without a server and without a model but the built-in one."""
    return {"XDG_RUNTIME_DIR": str(socket_dir), "HOME": str(socket_dir), "XDG_CACHE_HOME": str(socket_dir)}


@pytest.mark.parametrize("command", ["generate", "embed", "chat", "batch"])
@pytest.mark.parametrize("has_model", [True, False])
def test_without_a_server_and_without_a_name_it_is_the_model_that_uma_run_would_have(
    command: str, has_model: bool, alone: dict[str, str], tiny: Path, tmp_path: Path, uma_here: RunInProcess
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    arguments: dict[str, tuple[str, ...]] = {
        "batch": (str(tmp_path / "rows.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--max-tokens", "2")
    }
    if command in ("generate", "chat"):
        arguments[command] = ("--max-tokens", "2")
    models = {"UMA_MODELS": str(tiny.parent)} if has_model else {}
    done = uma_here(command, *arguments.get(command, ()), stdin=b"hello\n", **alone, **models)
    said = done.stderr.decode()
    assert done.returncode == 0, said
    name = "tiny" if has_model else "the built-in model"
    assert f": loading {name} here, as `uma run` would\n" in said
    assert (NOTICE in said) != has_model


def test_a_terminal_is_told_the_same(alone: dict[str, str]) -> None:
    environ = clean_environ(**alone)
    with Terminal(
        uma_command("generate", "hello", "--max-tokens", "4", *ONE_THREAD[:2]), environ, columns=200
    ) as terminal:
        terminal.wait_for("loading the built-in model here, as `uma run` would")
        terminal.wait_for(NOTICE)


@pytest.mark.parametrize("option", [("--n-ctx", "512"), ("--local",)])
@pytest.mark.parametrize("served", [("--model",), ("--models",)])
def test_beside_a_server_it_is_the_servers_model_that_is_loaded_with_other_settings(
    served: tuple[str], option: tuple[str, ...], socket_dir: Path, tiny: Path, generate_here: RunInProcess
) -> None:
    with running_server(socket_dir / "s", *served, str(tiny)) as server:
        at_it = ("hello", "--socket", str(server.socket), "--max-tokens", "8", "--temperature", "0")
        done = generate_here(*at_it, *option, UMA_MODELS=str(socket_dir))
        assert server.metrics()["tokens_generated_total"] == 0
    assert (done.returncode, bool(done.stdout)) == (0, True), done.stderr
    why = f"loading tiny here, as the server has it, because of {option[0]}"
    assert done.stderr.decode().splitlines()[0] == f"uma: {why}"
    assert NOTICE not in done.stderr.decode()


@pytest.mark.parametrize("named", ["option", "variable", "file"])
def test_a_file_is_filled_by_the_demonstration_where_that_is_named(
    named: str, socket_dir: Path, tmp_path: Path, generate_here: RunInProcess
) -> None:
    (tmp_path / "uma.toml").write_text('model = "builtin"\n')
    arguments = {"option": ("--model", "builtin"), "variable": (), "file": ("--config", str(tmp_path / "uma.toml"))}
    variables = {"UMA_MODEL": "builtin"} if named == "variable" else {}
    done = generate_here("hello", *arguments[named], "--max-tokens", "4", XDG_RUNTIME_DIR=str(socket_dir), **variables)
    assert (done.returncode, bool(done.stdout)) == (0, True), done.stderr


@pytest.mark.parametrize("state", ["none", "stale", "a file"])
@pytest.mark.parametrize("way", ["option", "variable", "chat"])
def test_a_socket_that_was_named_must_have_a_server(
    way: str, state: str, socket_dir: Path, generate_here: RunInProcess, uma_here: RunInProcess
) -> None:
    path = socket_dir / "uma.sock"
    if state == "stale":
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
    elif state == "a file":
        path.touch()
    if way == "chat":
        done = uma_here("chat", "--socket", str(path), stdin=b"hello\n")
    elif way == "option":
        done = generate_here("hello", "--socket", str(path))
    else:
        done = generate_here("hello", UMA_SOCKET=str(path))
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode() == (
        f"uma: error: {path}: no server listens there; start one with `uma run --socket {path}`, "
        "or load the model here with --local\n"
    )


def test_text_comes_as_it_is_generated(at: tuple[str, str], server: ServerProcess) -> None:
    with started("Tell me a story", *at, *LONG) as process:
        assert read_some(process)
        assert server.metrics()["active_sequences"] >= 1


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_the_prompt_comes_from_standard_input(
    arguments: tuple[str, ...], at: tuple[str, str], generate_here: RunInProcess
) -> None:
    greedy = (*at, "--temperature", "0", "--max-tokens", "12")
    piped = generate(*arguments, *greedy, stdin="Tell me about a fox and a ü\n".encode())
    given = generate_here("Tell me about a fox and a ü", *greedy)
    assert piped.returncode == 0
    assert piped.stdout == given.stdout


def test_words_and_standard_input_are_one_prompt(at: tuple[str, str], generate_here: RunInProcess) -> None:
    greedy = (*at, "--temperature", "0", "--max-tokens", "12", "--ignore-eos")
    expected = generate_here("Summarise this:\n\nA fox\nand an owl", *greedy).stdout
    assert generate_here("Summarise", "this:", *greedy, stdin=b"A fox\nand an owl\n").stdout == expected
    assert generate_here("Summarise this:", "-", *greedy, stdin=b"A fox\nand an owl\n").stdout == expected
    around = generate_here("A", "-", "B", *greedy, stdin=b"text\n").stdout
    assert around == generate_here("A\n\ntext\n\nB", *greedy).stdout
    literal = generate_here("--raw", "A fox and", *greedy).stdout
    assert generate_here("--raw", "A fo", *greedy, stdin=b"x and").stdout == literal


def test_a_standard_input_that_does_not_begin_is_told(at: tuple[str, str]) -> None:
    command = ("generate", "hello", *at, "--max-tokens", "2")
    with Forked(command, clean_environ(), stdin=PIPE, stderr=PIPE) as process:
        assert process.stderr is not None
        assert b"waiting for standard input" in process.stderr.readline()
        process.communicate(timeout=PATIENCE_SEC)
    assert process.returncode == 0


@pytest.fixture
def usage(generate_here: RunInProcess, at: tuple[str, str]) -> Callable[..., int]:
    """Tells the prompt tokens of a request."""

    def ask(*arguments: str, stdin: bytes = b"") -> int:
        done = generate_here(*arguments, *at, "--json", "--max-tokens", "1", stdin=stdin)
        tokens: int = json.loads(done.stdout.splitlines()[-1])["usage"]["prompt_tokens"]
        return tokens

    return ask


def test_the_prompt_goes_through_the_chat_template_unless_it_is_raw(usage: Callable[..., int]) -> None:
    templated = usage("hello")
    raw = usage("--raw", "hello")
    instructed = usage("--system", "Be kind.", "hello")
    assert raw < templated < instructed


def test_a_picture_goes_with_the_prompt(generate_here: RunInProcess, at: tuple[str, str], tmp_path: Path) -> None:
    model = write_seeing_model(tmp_path / "model.gguf", "llava")
    write_projector(tmp_path / "mmproj.gguf")
    (tmp_path / "a.png").write_bytes(png(40, 30))
    picture, missing = ("--image", str(tmp_path / "a.png")), ("--image", str(tmp_path / "b.png"))
    here = ("--model", str(model), "--local", *ONE_THREAD, "--n-ctx", "512", "--json", "--max-tokens", "1")
    read = [
        json.loads(generate_here("What?", *here, *pictures).stdout.splitlines()[-1])["usage"]["prompt_tokens"]
        for pictures in ((), picture, (*picture, *picture))
    ]
    assert read[2] - read[1] == read[1] - read[0] == 16
    refused = [generate_here("What?", *place, *given) for place, given in ((at, picture), (here, missing))]
    assert [each.returncode for each in refused] == [2, 2]
    assert b"--image: this model does not support image input; one that has a projector" in refused[0].stderr
    assert b"b.png: cannot be read" in refused[1].stderr
    assert generate_here("What?", *here, "--raw", *picture).returncode == 2


def test_a_raw_prompt_keeps_its_last_newline(usage: Callable[..., int]) -> None:
    assert usage("--raw", stdin=b"hello\n") == usage("--raw", stdin=b"hello") + 1


def test_json_gives_the_events_of_the_protocol_line_by_line(at: tuple[str, str], generate_here: RunInProcess) -> None:
    done = generate_here("hello", *at, "--json", "--max-tokens", "6", "--ignore-eos", "--seed", "3")
    *tokens, eos = map(json.loads, done.stdout.splitlines())
    assert [event["event"] for event in tokens] == ["token"] * len(tokens)
    assert eos["event"] == "eos"
    assert (eos["reason"], eos["seed"], eos["usage"]["completion_tokens"]) == ("length", 3, 6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--regex", "("), "--regex: unclosed group"),
        (("--json-schema", '{"type": "objct"}'), "--json-schema: type: expected "),
        (("--model", "nothing", "--local"), "nothing: model not found"),
    ],
)
def test_what_of_the_command_line_cannot_be_used_has_the_code_that_the_help_says(
    options: tuple[str, ...], said: str, at: tuple[str, str]
) -> None:
    done = generate("Once", *at, *options)
    assert (done.returncode, said in done.stderr.decode()) == (2, True), done.stderr


def test_json_ends_with_an_error_event_where_it_fails(at: tuple[str, str]) -> None:
    done = generate(*at, "--json", stdin=b"word " * 5000)
    assert done.returncode == 2
    assert json.loads(done.stdout)["code"] == "E_LIMIT_PROMPT_TOO_LARGE"
    assert done.stderr.splitlines()[-1].startswith(b"uma: error: ")


def test_stats_are_told_on_standard_error(at: tuple[str, str], generate_here: RunInProcess) -> None:
    done = generate_here("hello", *at, "--stats", "--max-tokens", "6", "--ignore-eos", "--seed", "11")
    said = done.stderr.decode()
    for words in ("time to first token:", "tokens/s", "of them cached", "6 tokens, cut at the limit", "seed:"):
        assert words in said
    assert b"tokens/s" not in done.stdout


def test_a_seed_makes_the_text_repeatable(at: tuple[str, str], generate_here: RunInProcess) -> None:
    first, second = (generate_here("hello", *at, "--seed", "5", "--max-tokens", "20").stdout for _ in range(2))
    assert first == second


def test_a_server_started_with_a_temperature_draws_for_requests_that_do_not_name_one(
    socket_dir: Path, generate_here: RunInProcess
) -> None:
    with running_server(socket_dir / "s", "--temperature", "1.5") as warm:
        to_it = ("Tell me a story", "--socket", str(warm.socket), "--max-tokens", "20", "--ignore-eos")
        assert len({generate_here(*to_it).stdout for _ in range(3)}) > 1
        assert len({generate_here(*to_it, "--temperature", "0").stdout for _ in range(2)}) == 1


def test_the_servers_warnings_are_told(at: tuple[str, str], generate_here: RunInProcess) -> None:
    done = generate_here("hello", *at, "--max-tokens", "100000", "--stop", "e")
    assert "uma: warning: " in done.stderr.decode()


@pytest.mark.parametrize("place", ["server", "here"])
def test_ctrl_c_stops_it_with_130(place: str, at: tuple[str, str], server: ServerProcess, tiny: Path) -> None:
    where = at if place == "server" else ("--local", "--model", str(tiny))
    with started("hello", *where, "--ignore-eos", "--stats") as process:
        assert read_some(process)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_SEC)
    assert process.returncode == 130
    assert "Traceback" not in said.decode()
    assert ", stopped" in said.decode()
    assert server.settled()["active_sequences"] == 0


def unread_bytes(process: Forked) -> int:
    """What waits in the pipe of its output."""
    assert process.stdout is not None
    count = array("i", [0])
    fcntl.ioctl(process.stdout, termios.FIONREAD, count)
    return count[0]


def test_ctrl_c_while_the_output_is_not_read_stops_it_too(at: tuple[str, str], server: ServerProcess) -> None:
    with started("hello", *at, *LONG, "--json") as process:
        seen: deque[int] = deque(maxlen=100)

        def look_again() -> bool:
            """Whether a hundred questions of the server have made the pipe no fuller."""
            server.metrics()
            seen.append(unread_bytes(process))
            return len(seen) == seen.maxlen and HALF_A_PIPE < seen[0] == seen[-1]

        until(look_again, bool)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_SEC) == 130


def test_sigterm_ends_it_with_143(at: tuple[str, str], server: ServerProcess) -> None:
    with started("hello", *at, *LONG) as process:
        assert read_some(process)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=PATIENCE_SEC)
    assert process.returncode == 143
    assert "Traceback" not in said.decode()
    assert server.settled()["active_sequences"] == 0


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_closed_pipe_ends_it_quietly(form: tuple[str, ...], at: tuple[str, str], server: ServerProcess) -> None:
    with started("hello", *at, *LONG, *form) as process:
        assert read_some(process)
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read().decode()
        assert process.wait(PATIENCE_SEC) == 141
    assert len(said.splitlines()) == 1
    assert NOTICE in said
    assert server.settled()["active_sequences"] == 0


def through_shell(line: str) -> subprocess.CompletedProcess[bytes]:
    """`uma` in a line of a shell, which is what closes and redirects descriptors."""
    return subprocess.run(
        ["sh", "-c", line.replace("uma ", shlex.join(uma_command()) + " ", 1)],
        stdin=subprocess.DEVNULL, capture_output=True, timeout=3 * PATIENCE_SEC, env=clean_environ(), check=False,
    )  # fmt: skip


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-"])
def test_an_answer_comes_also_where_nothing_can_be_said_beside_it(redirection: str, at: tuple[str, str]) -> None:
    greedy = ("hello", *at, "--max-tokens", "8", "--ignore-eos", "--temperature", "0")
    done = through_shell(f"uma generate {shlex.join(greedy)} {redirection}")
    assert (done.returncode, done.stdout) == (0, generate(*greedy).stdout)


@pytest.mark.parametrize(
    "command", ["generate hello --max-tokens 4 {at}", "--help", "models {at}", "ps {at}", "schema"]
)
@pytest.mark.parametrize("output", ["/dev/full", "&-"])
def test_a_standard_output_that_takes_nothing_is_an_error(command: str, output: str, at: tuple[str, str]) -> None:
    if output == "/dev/full" and not Path(output).exists():
        pytest.skip("this system has no /dev/full")
    done = through_shell(f"uma {command.format(at=shlex.join(at))} >{output}")
    assert done.returncode == 1
    why = "No space left on device" if output == "/dev/full" else "Bad file descriptor"
    assert done.stderr.decode().splitlines()[-1] == f"uma: error: standard output: {why}"


def test_a_disk_without_space_for_any_file_keeps_no_command_from_working() -> None:
    done = through_shell("ulimit -f 0; uma models")
    assert (done.returncode, b"builtin" in done.stdout, b"Traceback" in done.stderr) == (0, True, False), done.stderr


@pytest.mark.parametrize("command", ["trace {file} --seconds 0.1 {at}", "key new one --keys {file}"])
def test_a_disk_that_takes_no_more_is_told_with_the_file(command: str, at: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "out"
    done = through_shell(f"ulimit -f 0; uma {command.format(file=file, at=shlex.join(at))}")
    assert re.fullmatch(f"uma: error: {file}: .*File too large\n", done.stderr.decode())


def test_a_context_of_another_size_than_was_asked_for_is_told(tiny: Path) -> None:
    to_tiny = ("hello", "--local", "--model", str(tiny), "--max-tokens", "2", *ONE_THREAD)
    done = generate(*to_tiny, "--n-ctx", "10")
    assert (done.returncode, b"the context has 256 tokens, and not 10 (n_ctx)" in done.stderr) == (0, True)
    assert b"event=" not in done.stderr, "a command has no lines of a log"
    assert b"n_ctx" not in generate(*to_tiny, "--n-ctx", "1024").stderr


def test_output_goes_to_a_file(at: tuple[str, str], tmp_path: Path) -> None:
    greedy = ("hello", *at, "--max-tokens", "5", "--ignore-eos", "--temperature", "0")
    with (tmp_path / "out.txt").open("wb") as file:
        assert generate(*greedy, stdout=file).returncode == 0
    assert (tmp_path / "out.txt").read_bytes() == generate(*greedy).stdout != b""


@pytest.mark.parametrize(
    ("stdin", "code", "words"),
    [
        (b"", 2, "the prompt is empty"),
        (b" \n\n", 2, "the prompt is empty"),
        (b"a\xff", 2, "not UTF-8 from byte 2 on"),
        (b"a\0b", 2, "NUL"),
        (b"word " * 5000, 2, "tokens"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_told_in_one_line(
    stdin: bytes, code: int, words: str, at: tuple[str, str], generate_here: RunInProcess
) -> None:
    done = generate_here(*at, stdin=stdin)
    assert done.returncode == code
    assert done.stdout == b""
    last = done.stderr.decode().splitlines()[-1]
    assert last.startswith("uma: error: ")
    assert words in last
    assert "Traceback" not in done.stderr.decode()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--model", "/nowhere/model.gguf", "--local"), 2, "/nowhere/model.gguf: model not found, and no such file"),
        (("--model", "/dev/null", "--local"), 2, "/dev/null"),
        (("--config", "/nowhere.toml"), 2, "/nowhere.toml: cannot be read"),
        (("--raw", "--system", "x"), 2, "--system needs the chat template"),
        (("--socket", "/" + "x" * 200), 1, "x" * 200),
    ],
)
def test_what_cannot_be_done_is_told_in_one_line(
    arguments: tuple[str, ...], code: int, words: str, generate_here: RunInProcess
) -> None:
    done = generate_here("hello", *arguments)
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.decode().startswith("uma: error: ")
    assert words in done.stderr.decode()


def test_a_socket_that_is_not_ours_to_use_is_an_error_and_not_a_reason_to_load_the_model(socket_dir: Path) -> None:
    path = socket_dir / "other.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with Forked(("generate", "hello", "--socket", str(path)), clean_environ(), stderr=PIPE) as process:
            conversation, _ = other.accept()
            with conversation:
                conversation.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                _, said = process.communicate(timeout=PATIENCE_SEC)
    assert process.returncode == 1
    assert str(path) in said.decode()
    assert len(said.splitlines()) == 1


def test_a_traceback_is_shown_only_with_uma_debug(generate_here: RunInProcess) -> None:
    done = generate_here("hello", "--local", "--model", "/nowhere", UMA_DEBUG="1")
    assert "Traceback" in done.stderr.decode()
    assert done.stderr.decode().splitlines()[-1].startswith("uma: error: /nowhere: ")


def test_on_a_terminal_the_shells_prompt_begins_on_a_line_of_its_own(at: tuple[str, str]) -> None:
    command = uma_command("generate", "hello", *at, "--max-tokens", "4", "--ignore-eos")
    with Terminal(command, clean_environ()) as terminal:
        assert terminal.wait() == 0
        assert terminal.raw.endswith(b"\n")


@pytest.mark.parametrize(("more", "is_told"), [((), True), (("--system", "Be kind."), True), (("--raw",), False)])
def test_a_terminal_is_told_that_a_base_model_has_no_chat_template(
    more: tuple[str, ...], is_told: bool, tmp_path: Path
) -> None:
    base = write_model(tmp_path / "base.gguf", chat_template=None)
    command = uma_command("generate", "hello", "--local", "--model", str(base), "--max-tokens", "4", *more)
    with Terminal(command, clean_environ(), columns=120) as terminal:
        assert terminal.wait() == 0
        assert (f"uma: {BASE}" in terminal.text) is is_told, "as `uma chat` says it"
    assert "template" not in run_to_end(*command).stderr


@pytest.mark.parametrize("is_named", [True, False])
def test_a_story_of_the_built_in_model_ends_with_what_could_be_next(is_named: bool, socket_dir: Path) -> None:
    own = ("--model", "builtin") if is_named else ("--socket", str(socket_dir / "none"))
    command = uma_command("generate", "hello", "--local", "--max-tokens", "4", "--ignore-eos", *own)
    with Terminal(command, clean_environ(HOME=str(socket_dir)), columns=200) as terminal:
        assert terminal.wait() == 0
        assert (f"uma: {NEXT}" in terminal.text) is is_named
        assert (f"uma: {DEMONSTRATION}" in terminal.text) is not is_named, "one of them says it"
    assert NEXT not in run_to_end(*command).stderr


def test_ctrl_c_on_a_terminal_leaves_the_line(at: tuple[str, str]) -> None:
    with Terminal(uma_command("generate", "hello", *at, *LONG), clean_environ()) as terminal:
        terminal.wait_until(lambda: len(terminal.text.split()) > 30, "some text")
        terminal.type("\x03")
        assert terminal.wait() == 130
        assert terminal.raw.endswith(b"\n")
        assert "Traceback" not in terminal.text


def test_a_prompt_typed_on_a_terminal_ends_with_ctrl_d(at: tuple[str, str]) -> None:
    with Terminal(uma_command("generate", *at, "--max-tokens", "4"), clean_environ()) as terminal:
        terminal.wait_for("Ctrl-D on a line of its own ends it")
        terminal.type("hello\r\x04")
        assert terminal.wait() == 0


# The form of the answer


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--max-tokens", "3"), 0, "the answer was cut at 3 tokens: the limit of --max-tokens"),
        (("--max-tokens", "3", "--stats", "--json"), 0, "the answer was cut at 3 tokens: the limit of --max-tokens"),
        (("--n-ctx", "256"), 0, "tokens: the context is full"),
        (("--max-tokens", "3", "--n", "2"), 0, "2 of 2 answers were cut at 3 tokens: the limit of --max-tokens"),
        (
            ("--max-tokens", "3", "--n", "2", "--regex", "[a-c]{40}"),
            1,
            "2 of 2 answers were cut at 3 tokens, before they had the form asked for",
        ),
    ],
)
def test_an_answer_that_is_cut_is_told_of(
    arguments: tuple[str, ...], code: int, said: str, tiny: Path, generate_here: RunInProcess
) -> None:
    done = generate_here("hello", "--model", str(tiny), *ONE_THREAD, *arguments, "--ignore-eos")
    assert done.returncode == code
    (line,) = [line for line in done.stderr.decode().splitlines() if " cut at " in line and "warning" in line]
    assert line.endswith(said)


def test_an_answer_that_is_whole_is_told_of_by_nothing(tiny: Path, generate_here: RunInProcess) -> None:
    done = generate_here("hello", "--model", str(tiny), *ONE_THREAD, "--regex", "[a-c]{3}", "--max-tokens", "9")
    assert done.returncode == 0
    assert b"warning" not in done.stderr


def test_an_answer_fits_the_schema_in_a_file(tmp_path: Path, generate_here: RunInProcess) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(
        json.dumps(
            {
                "type": "object",
                "properties": {"age": {"enum": [1, 2]}},
                "required": ["age"],
                "additionalProperties": False,
            }
        )
    )
    done = generate_here(
        "--model", "builtin", *ONE_THREAD, "--json-schema", str(schema), "--max-tokens", "400", "How old?"
    )
    assert done.returncode == 0
    assert isinstance(json.loads(done.stdout)["age"], int)
    written = generate_here(
        "--model", "builtin", *ONE_THREAD, "--json-schema", schema.read_text(), "--max-tokens", "400", "How old?"
    )
    assert isinstance(json.loads(written.stdout)["age"], int)


@pytest.mark.parametrize(
    ("flags", "matches"),
    [(("--choice", "yes", "--choice", "no"), "yes|no"), (("--regex", "[a-c]{3}-[0-9]{2}"), "[a-c]{3}-[0-9]{2}")],
)
def test_an_answer_is_one_of_the_choices_or_matches_the_expression(
    flags: tuple[str, ...], matches: str, generate_here: RunInProcess
) -> None:
    done = generate_here("--model", "builtin", *ONE_THREAD, *flags, "Is it so?")
    assert re.fullmatch(matches, done.stdout.decode().strip())


def test_an_answer_that_is_cut_before_it_has_its_form_is_told_of_and_is_a_failure(generate_here: RunInProcess) -> None:
    done = generate_here("--model", "builtin", *ONE_THREAD, "--regex", "[a-c]{40}", "--max-tokens", "3", "Is it so?")
    assert done.returncode == 1
    assert re.fullmatch("[a-c]+", done.stdout.decode().strip())
    assert b"uma: warning: the answer was cut at 3 tokens, before it had the form asked for" in done.stderr


def test_the_prompt_and_its_log_probabilities_come_before_the_answer(
    at: tuple[str, str], generate_here: RunInProcess
) -> None:
    ask = ("Once upon a time", "--raw", "--echo", "--prompt-logprobs", "1", "--max-tokens", "2", *at)
    done = generate_here(*ask)
    assert done.stdout.decode().startswith("Once upon a time")
    lines = [line for line in done.stderr.decode().splitlines() if not line.startswith("uma: ")]
    prompt, *tokens, eos = map(json.loads, generate_here(*ask, "--json").stdout.splitlines())
    assert (prompt["event"], prompt["text"], prompt["logprobs"][0]) == ("prompt", "Once upon a time", None)
    assert len(lines) == len(prompt["logprobs"]) - 1 == len(prompt["token_ids"]) - 1
    assert ([event["event"] for event in tokens], eos["event"]) == (["token"] * len(tokens), "eos")
    both = generate_here(*ask, "-n", "2", "--temperature", "1", "--seed", "1").stdout.decode().splitlines()
    assert both[0] == "Once upon a time"
    assert len(both) >= 3


def test_log_probabilities_come_on_standard_error(generate_here: RunInProcess) -> None:
    done = generate_here("--model", "builtin", *ONE_THREAD, "--logprobs", "2", "--max-tokens", "3", "Once upon a time")
    lines = [line for line in done.stderr.decode().splitlines() if not line.startswith("uma: ")]
    assert len(lines) == 3
    assert all(float(line.split()[0]) <= 0 for line in lines)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--regex", "a(b"), "error: --regex: unclosed group"),
        (
            ("--json-schema", '{"type": "objct"}'),
            "error: --json-schema: type: expected array, boolean, integer, null, ",
        ),
        (("--json-schema", "/nowhere.json"), "/nowhere.json: cannot be read"),
        (("--regex", "a", "--choice", "b"), "not allowed with argument"),
        (("--logit-bias", "x"), "expected TOKEN=X"),
        (("--logprobs", "21"), "must be from 0 to 20"),
    ],
)
def test_a_form_that_cannot_be_used_says_why(
    arguments: tuple[str, ...], complaint: str, generate_here: RunInProcess
) -> None:
    done = generate_here("--model", "builtin", *ONE_THREAD, *arguments, "Hi")
    assert done.returncode != 0
    assert complaint in done.stderr.decode()


def test_what_is_said_after_a_prompt_that_was_typed_begins_its_own_line(server: ServerProcess) -> None:
    command = uma_command("generate", "--socket", str(server.socket), "--max-tokens", "4")
    with Terminal(command, clean_environ()) as terminal:
        terminal.wait_for("Ctrl-D on a line of its own ends it")
        terminal.type("Tell me\x04\x04")
        assert terminal.wait() == 0
        assert "Tell me" in terminal.text.splitlines()


def test_a_projector_that_is_named_for_the_built_in_model_is_not_ignored(uma_told: RunInProcessText) -> None:
    done = uma_told("generate", "--model", "builtin", "--mmproj", "/nope", "Once", "--max-tokens", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "/nope: the projector cannot be read" in done.stderr
