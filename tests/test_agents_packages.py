"""Claude Code, Codex and opencode from npm, unmodified, started by `uma launch`: a call that the agent runs, its
result, a second turn that goes on with the first, and a question that is given up. Nothing leaves this machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import attrs
import pytest
from agent_model import DONE, ENDLESS, PLAIN, RUN, command_of, write_agent_model
from http_server import HttpServer, running_http
from reference import real_model
from required import missing

from harness import PATIENCE_SEC, clean_environ, short_directory, until
from harness import uma_command as uma

LEAST_CACHED, LEAST_CACHED_ANEW = 0.97, 0.92
"""Of a later turn's prompts, and of the first one's of another session: all that comes before the question. Claude Code
has instructions of 1,500 tokens behind it."""

MANY_TOKENS = 100
"""Of an answer that does not end by itself."""


@attrs.frozen
class Agent:
    """How an agent is asked one question without a terminal."""

    package: str
    tool: str
    """The one that runs a command."""
    argument: str
    """What that tool calls the command."""
    ask: Sequence[str]
    go_on: Sequence[str]
    """The same, in the last conversation."""
    variables: Mapping[str, str] = attrs.field(factory=dict)


AGENTS = {
    "claude": Agent(
        "@anthropic-ai/claude-code",
        "Bash",
        "command",
        ["-p", "--allowedTools=Bash"],
        ["-p", "--continue"],
    ),
    "codex": Agent(
        "@openai/codex",
        "exec_command",
        "cmd",
        ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
        ["exec", "resume", "--last", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
    ),
    "opencode": Agent("opencode-ai", "bash", "command", ["run"], ["run", "--continue"]),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A model that calls each agent's tool when it is asked to."""
    calls = {agent.tool: agent.argument for agent in AGENTS.values()}
    model = write_agent_model(tmp_path_factory.mktemp("agents") / "agent.gguf", real_model("smollm2"), calls)
    with short_directory() as directory, running_http(directory, "--model", str(model)) as process:
        yield process


@attrs.frozen
class Desk:
    """An agent with a home and a folder to work in of its own."""

    agent: Agent
    command: Sequence[str]
    folder: Path
    environ: Mapping[str, str]

    def ask(self, how: Sequence[str], question: str) -> str:
        """What the agent says to the question."""
        done = subprocess.run(
            [*self.command, *how, question],
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

    def start(self, how: Sequence[str], question: str) -> subprocess.Popen[bytes]:
        """The agent at work on the question."""
        return subprocess.Popen(
            [*self.command, *how, question],
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


@pytest.fixture(params=AGENTS)
def desk(request: pytest.FixtureRequest, server: HttpServer, tmp_path: Path) -> Desk:
    name: str = request.param
    agent = AGENTS[name]
    folders = [str(Path(each) / ".bin") for each in os.environ.get("NODE_PATH", "").split(os.pathsep) if each]
    path = os.pathsep.join([*folders, os.environ["PATH"]])
    if shutil.which(name, path=path) is None:
        missing("agents", f"there is no {name}: npm install {agent.package}, and NODE_PATH that leads to node_modules")
    home, folder = tmp_path / "home", tmp_path / "work"
    for each in (home, folder):
        each.mkdir()
    (home / ".codex").mkdir()
    nowhere = "http://127.0.0.1:9"  # so that nothing but this machine answers
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
    return Desk(agent, uma("launch", name, "--url", server.url, "--"), folder, environ)


def counted(server: HttpServer) -> tuple[int, int]:
    """Tokens of all prompts so far, and how many of them came from the cache."""
    metrics = server.process.metrics()
    return int(metrics["prompt_tokens_total"]), int(metrics["cached_tokens_total"])


def test_an_agent_runs_a_call_and_goes_on_with_its_result_a_second_turn_and_another_session(
    desk: Desk, server: HttpServer
) -> None:
    assert DONE in desk.ask(desk.agent.ask, f"Please {RUN}.")
    made = (desk.folder / "made.txt").read_text()
    assert made.strip() in command_of(desk.agent.tool)
    for how, question, least in (
        (desk.agent.go_on, "And now?", LEAST_CACHED),
        (desk.agent.ask, "What is new?", LEAST_CACHED_ANEW),
    ):
        before = counted(server)
        assert PLAIN in desk.ask(how, question)
        prompt, cached = (now - then for now, then in zip(counted(server), before, strict=True))
        assert cached / prompt >= least, (question, cached, prompt)


def test_an_agent_that_is_given_up_takes_its_requests_with_it(desk: Desk, server: HttpServer) -> None:
    def found(name: str) -> int:
        return int(server.process.metrics()[name])

    before, written = found("requests_cancelled"), found("tokens_generated_total")
    with desk.start(desk.agent.ask, f"Please {ENDLESS}.") as process:
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
