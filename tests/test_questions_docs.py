"""docs/questions.md is true: its commands run as they are pasted, and its settings are settings."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
from contextlib import closing
from pathlib import Path

import attrs
import pytest
from http_server import ServeModels, new_key
from hub_server import running_hub
from required import required_command

import uma
from harness import PATIENCE_SEC, RunInProcessText, clean_environ, run_to_end, running_server, uma_command
from uma.cli.parser import build_parser
from uma.config import RuntimeConfig

QUESTIONS = Path(__file__).parents[1] / "docs" / "questions.md"
PAGE = QUESTIONS.read_text(encoding="utf-8").replace("\n", " ")
COMMANDS = list(dict.fromkeys(re.findall(r"`(uma [^`]+)`", PAGE)))
OPTIONS = sorted(set(re.findall(r"`(--[a-z-]+)", PAGE)))
PARSED = {
    "uma generate --image FILE": "needs a model that sees, as the line before it says",
    "uma service install -- --http": "needs the user's systemd",
    "uma service remove": "needs the user's systemd",
    "uma service status": "needs the user's systemd",
    "uma launch claude": "needs Claude Code; `test_cli_launch` has one that writes down what it gets",
    "uma top": "looks until it is ended",
    "uma stop": "ends the server that the other commands ask",
}
"""Commands that are only parsed here, and why."""
SERVERS = [command for command in COMMANDS if command.startswith("uma run")]
PULLED = re.findall(r"`uma pull (\S+)`", PAGE)
MODEL = "alpha"
"""The model that stands for each `NAME`."""


def arguments(command: str) -> list[str]:
    """What is pasted, for what there is here: on a free port of this machine alone."""
    here = re.sub(r"--http( [\d.:]+)?(?= |$)", "--http 127.0.0.1:0", command)
    return shlex.split(re.sub(r"(?<!/)\bNAME\b", MODEL, here))[1:]


@pytest.mark.parametrize("command", PARSED)
def test_a_command_that_this_machine_may_not_run_is_one_that_uma_takes(command: str) -> None:
    assert command in COMMANDS
    build_parser().parse_args(shlex.split(command)[1:])


def test_every_server_of_an_answer_starts(tmp_path: Path, socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    new_key("anna", tmp_path / "keys.toml")
    assert len(SERVERS) > 5
    for number, command in enumerate(SERVERS):
        with running_server(socket_dir / f"{number}.sock", *arguments(command)[1:], XDG_DATA_HOME=f"d{number}"):
            pass


def test_every_other_command_of_an_answer_can_be_pasted(
    serve_models: ServeModels,
    folder: Path,
    tmp_path: Path,
    uma_told: RunInProcessText,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = serve_models()
    asked = server.ask("POST", "/v1/completions", {"model": MODEL, "prompt": "Once", "max_tokens": 2})
    (tmp_path / "schema.json").write_text('{"type": "object", "properties": {}, "additionalProperties": false}')
    (tmp_path / "in.jsonl").write_text('{"prompt": "Once", "max_tokens": 2}')
    monkeypatch.chdir(tmp_path)
    model = (folder / f"{MODEL}.gguf").read_bytes()
    environ = {"HOME": str(tmp_path), "UMA_MODELS": str(folder), "UMA_SOCKET": str(server.process.socket)}
    with running_hub({name: {f"{name.lower().rpartition('/')[2]}-q4_k_m.gguf": model} for name in PULLED}) as hub:
        environ |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
        for command in COMMANDS:
            if command in SERVERS or command in PARSED:
                continue
            words = [asked.headers["x-request-id"] if word == "ID" else word for word in arguments(command)]
            if words[0] == "pull":  # its library reads these variables when it is imported
                done = run_to_end(*uma_command(*words), environ=clean_environ(**environ))
            else:
                done = uma_told(*words, stdin=b"Once", **environ)
            assert done.returncode in ((0, 1) if words == ["doctor"] else (0,)), f"{command}: {done}"
            assert done.stdout + done.stderr, command


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_an_answer_is_a_setting(option: str) -> None:
    assert option.removeprefix("--").replace("-", "_") in {field.name for field in attrs.fields(RuntimeConfig)}


SEARCHED = "limit .* memory|slow|several models|API key|VS Code|LangChain|timeout|8 GB|context length|"
SEARCHED += "GPU|uninstall|upgrade|rate limit|out of memory|CUDA|quantization|systemd|nginx|reverse proxy|"
SEARCHED += (
    "CORS|Continue|Open WebUI|Cursor|Codex|Claude Code|embeddings|JSON mode|`stop`|`seed`|`logprobs`|Docker|temperature"
)
SEARCHED += "|OpenAI SDK|TLS|HTTPS|tools|picture|Python without a server"
SEARCHED += "|Windows|WSL2|internet|telemetry|update a model|ready build|ensurepath|update-shell"
SEARCHED += "|Where are my models|change the port|another machine|stop the server|Where is the log"
"""What people search for on this page."""


@pytest.mark.parametrize("searched", SEARCHED.split("|"))
def test_what_people_search_for_is_in_an_answer_that_leads_on(searched: str) -> None:
    assert any(re.search(searched, answer) and "](" in answer for answer in PAGE.split("  ### "))


OF_OTHERS: tuple[str, ...] = (
    "command not found",
    "CMAKE_CXX_COMPILER",
    "Could not find the compiler",
    "externally-managed-environment",
)
OF_OTHERS += ("requires a different Python", "No matching distribution", "Connection refused", "Address already in use")
"""Messages of the shell, of pip, of curl and of the system."""


def test_every_message_among_the_common_errors_is_one_of_uma() -> None:
    table = QUESTIONS.read_text(encoding="utf-8").partition("## Common errors")[2]
    messages = [told for row in re.findall(r"^\| (.*?) \| ", table, re.M) for told in re.findall(r"`([^`]+)`", row)]
    said = "".join(path.read_text(encoding="utf-8") for path in Path(uma.__file__).parent.rglob("*.py"))
    said = re.sub(r'"\s*f?"', "", said)
    parts = {
        part.strip() for told in messages for part in told.split("…") if not any(each in told for each in OF_OTHERS)
    }
    assert len(parts) > 8
    assert {part for part in parts if part not in said} == set()


def test_the_command_that_waits_for_a_server_ends_when_it_is_ready(socket_dir: Path) -> None:
    required_command("curl")
    (command,) = set(re.findall(r"`(curl --retry [^`]+)`", PAGE))
    with closing(socket.create_server(("127.0.0.1", 0))) as held:
        place = "{}:{}".format(*held.getsockname())
    words = shlex.split(command.replace("127.0.0.1:8080", place))
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as waiting:
        try:
            with running_server(socket_dir / "s.sock", "--http", place):
                out, _ = waiting.communicate(timeout=PATIENCE_SEC)
        finally:
            waiting.kill()
    assert (waiting.returncode, out) == (0, b'{"status":"ok"}')


def test_there_are_25_questions() -> None:
    assert len(re.findall(r"### (?:How do I|Why)", PAGE)) >= 25
