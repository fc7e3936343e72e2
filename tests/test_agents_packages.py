"""Coding agents from npm, unmodified, started by `uma launch`: a call that the agent runs, its result, a second turn
that goes on with the first, another session, and a question that is given up. Nothing leaves this machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import pytest
from agent_model import DONE, ENDLESS, PLAIN, RUN, command_of, write_agent_model
from http_server import HttpServer, running_http
from http_tap import Asked, tapped
from reference import real_model
from required import missing

from harness import PATIENCE_SEC, clean_environ, short_directory, until
from harness import uma_command as uma
from uma.cli.agents import AGENTS as LAUNCHED

MIN_CACHED, MIN_CACHED_ANEW = 0.97, 0.95
"""Of a later turn's prompts, and of the system prompt and tools of another session. Behind its question, which is
another one, Claude Code has instructions of 1,500 tokens."""

COMMAND = '{"command": "%s"}'

MANY_TOKENS = 100
"""Of an answer that does not end by itself."""


@attrs.frozen
class Agent:
    """How an agent is asked one question without a terminal."""

    package: str
    tool: str
    """The one that runs a command."""
    arguments: str
    """All that the tool requires, as JSON with `%s` for the command."""
    ask: Sequence[str]
    go_on: Sequence[str]
    """The same, in the last conversation."""
    is_required: bool = True
    """Whether it is missed where `TEST_REQUIRED` asks for agents; the others are run where they are installed."""
    uses_proxies: bool = True
    """Whether it can be given a proxy that leads nowhere: not where it takes it for loopback, too."""


AGENTS = {
    "claude": Agent(
        "@anthropic-ai/claude-code",
        "Bash",
        COMMAND,
        ["-p", "--allowedTools=Bash"],
        ["-p", "--continue"],
    ),
    "codex": Agent(
        "@openai/codex",
        "exec_command",
        '{"cmd": "%s"}',
        ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
        ["exec", "resume", "--last", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
    ),
    "opencode": Agent("opencode-ai", "bash", COMMAND, ["run"], ["run", "--continue"]),
    "qwen": Agent(
        "@qwen-code/qwen-code",
        "run_shell_command",
        COMMAND,
        ["--approval-mode", "yolo", "-p"],
        ["--approval-mode", "yolo", "--continue", "-p"],
        is_required=False,
        uses_proxies=False,
    ),
    "pi": Agent("@mariozechner/pi-coding-agent", "bash", COMMAND, ["-p"], ["-p", "--continue"], is_required=False),
    "continue": Agent(
        "@continuedev/cli",
        "Bash",
        COMMAND,
        ["--auto", "-p"],
        ["--auto", "--resume", "-p"],
        is_required=False,
        uses_proxies=False,
    ),
    "copilot": Agent(
        "@github/copilot",
        "bash",
        '{"command": "%s", "description": "makes a file"}',
        ["--allow-all-tools", "-p"],
        ["--allow-all-tools", "--continue", "-p"],
        is_required=False,
    ),
    "hermes": Agent(
        "hermes-agent, which is of PyPI's",
        "terminal",
        COMMAND,
        ["--yolo", "-z"],
        ["--yolo", "--continue", "-z"],
        is_required=False,
        uses_proxies=False,
    ),
    "cline": Agent(
        "cline",
        "run_commands",
        '{"commands": ["%s"]}',
        ["--auto-approve", "true"],
        ["--auto-approve", "true"],  # it goes on by a session's id alone, so this is another one
        is_required=False,
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A model that calls each agent's tool when it is asked to."""
    calls = {(agent.tool, agent.arguments) for agent in AGENTS.values()}
    model = write_agent_model(tmp_path_factory.mktemp("agents") / "agent.gguf", real_model("smollm2"), calls)
    with (
        short_directory() as directory,
        running_http(directory, "--model", str(model), "--store-responses", "1") as process,
    ):
        yield process


@attrs.frozen
class Desk:
    """An agent with a home and a folder to work in of its own."""

    name: str
    folder: Path
    environ: Mapping[str, str]

    @property
    def agent(self) -> Agent:
        """Which one it is."""
        return AGENTS[self.name]

    def launch(self, url: str) -> Sequence[str]:
        """The command that starts it with the server at `url`."""
        return uma("launch", self.name, "--url", url, "--")

    def ask(self, how: Sequence[str], question: str, url: str) -> str:
        """What the agent says to the question, with the server at `url`."""
        done = subprocess.run(
            [*self.launch(url), *how, question],
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=3 * PATIENCE_SEC,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, how: Sequence[str], question: str, url: str) -> subprocess.Popen[bytes]:
        """The agent at work on the question."""
        return subprocess.Popen(
            [*self.launch(url), *how, question],
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


@pytest.fixture(params=AGENTS)
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Desk:
    name: str = request.param
    agent = AGENTS[name]
    folders = [str(Path(each) / ".bin") for each in os.environ.get("NODE_PATH", "").split(os.pathsep) if each]
    path = os.pathsep.join([*folders, os.environ["PATH"]])
    if shutil.which(LAUNCHED[name].program, path=path) is None:
        why = f"there is no {name}: npm install {agent.package}, and NODE_PATH that leads to node_modules"
        missing("agents", why) if agent.is_required else pytest.skip(why)
    home, folder = tmp_path / "home", tmp_path / "work"
    for each in (home, folder):
        each.mkdir()
    (home / ".codex").mkdir()
    nowhere = "http://127.0.0.1:9" if agent.uses_proxies else ""  # so that nothing but this machine answers
    environ = clean_environ(
        PATH=path,
        HOME=str(home),
        PWD=str(folder),
        HTTP_PROXY=nowhere,
        HTTPS_PROXY=nowhere,
        NO_PROXY="127.0.0.1,localhost",
        DISABLE_TELEMETRY="1",
        DISABLE_AUTOUPDATER="1",
        OPENCODE_DISABLE_AUTOUPDATE="1",
        IS_SANDBOX="1",
    )
    return Desk(name, folder, environ)


def told_of(server: HttpServer, request_id: str) -> tuple[int, int]:
    """Tokens of a request's prompt, and how many of them came from the cache."""
    told = server.ask("GET", f"/v1/requests/{request_id}").json
    return int(told["prompt_tokens"]), int(told["cached_tokens"])


def without_question(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """What an agent has asked, up to the question: the system prompt and the tools."""
    turns = "input" if "input" in body else "messages"
    roles = [each.get("role") for each in body[turns]]
    return {**body, turns: [*body[turns][: roles.index("user")], {"role": "user", "content": "."}], "stream": False}


def test_an_agent_runs_a_call_and_goes_on_with_its_result_a_second_turn_and_another_session(
    desk: Desk, server: HttpServer
) -> None:
    def asked(how: Sequence[str], question: str) -> Asked:
        """The request with this question: not those that an agent sends beside it, such as for a title."""
        with tapped(server.port) as tap:
            assert PLAIN in desk.ask(how, question, tap.url)
        return next(each for each in tap.asked if each.body.get("tools"))

    assert DONE in desk.ask(desk.agent.ask, f"Please {RUN}.", server.url)
    made = (desk.folder / "made.txt").read_text()
    assert made.strip() in command_of(desk.agent.tool)
    prompt, cached = told_of(server, asked(desk.agent.go_on, "And now?").request_id)
    assert cached / prompt >= MIN_CACHED, (cached, prompt)
    anew = asked(desk.agent.ask, "What is new?")
    _, cached = told_of(server, anew.request_id)
    again = server.ask("POST", anew.path, without_question(anew.body))
    assert again.status == 200, again.body
    standing, _ = told_of(server, again.headers["x-request-id"])
    assert cached / standing >= MIN_CACHED_ANEW, (cached, standing)


def test_an_agent_that_is_given_up_takes_its_requests_with_it(desk: Desk, server: HttpServer) -> None:
    def found(name: str) -> int:
        return int(server.process.metrics()[name])

    before, written = found("requests_cancelled"), found("tokens_generated_total")
    with desk.start(desk.agent.ask, f"Please {ENDLESS}.", server.url) as process:
        try:
            # Behind what an agent asks beside the question, such as for a title: that is answered with a few words.
            until(lambda: found("tokens_generated_total"), lambda n: n > written + MANY_TOKENS, 3 * PATIENCE_SEC)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does it
            process.wait(PATIENCE_SEC)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    until(lambda: found("active_sequences"), lambda n: n == 0)
    assert found("requests_cancelled") > before
