"""`uma launch`: a coding agent on a local model, with one command.

The agent talks to the server that listens on --socket, through a gateway that ends with it, or to a server of its own
where none listens; or to the one at --url.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from uma import posix
from uma.cli import say
from uma.cli.agents import AGENTS, MIN_TOKENS, Agent, AgentPlace
from uma.cli.config import as_toml
from uma.cli.options import load_settings
from uma.client.http import HttpClient, read_key
from uma.config import Loaded
from uma.errors import ConfigError, ConnectionLost, UmaError
from uma.http.keys import add
from uma.models.names import one_meant
from uma.types import EMBEDDINGS, RERANKER

STEP_SEC = 0.1
"""Between two looks at a server that starts."""
ANSWER_SEC = 10.0
"""Maximum wait for an answer about the model."""
LOAD_SEC = 600.0
"""Maximum wait for a model that the server loads for this."""
END_SEC = 30.0
"""Maximum wait for the end of a server that was started."""
LOG = ("--log-level", "info", "--log-format", "text")
_URL = re.compile(rb"event=http\.ready url=(\S+)")
"""The line of a log with those flags in which a server tells where it listens."""
NO_KEY = "none"
"""Sent where a server asks for no key: agents refuse an empty one."""


def main(options: argparse.Namespace) -> int:
    """The command; its exit code is the agent's."""
    agent = AGENTS[options.agent]
    program = shutil.which(agent.program)
    if program is None:
        raise ConfigError(f"there is no {agent.program} on this machine; install it with: {agent.install}")
    key = read_key(options.key_file) or NO_KEY
    for number in posix.signals("SIGTERM", "SIGHUP"):
        signal.signal(number, _leave)
    with tempfile.TemporaryDirectory(prefix="uma-launch-") as name:
        folder, loaded = Path(name), load_settings(options)
        asked = Path(loaded.config.model).name if loaded.origins["model"].startswith("--") else ""
        if options.url is not None:
            url = options.url.rstrip("/")
            return _run(agent, program, options.arguments, _place(url, key, asked, folder))
        is_own = not _listens(loaded.config.socket)
        with _server(loaded, folder, is_own=is_own) as (url, key):
            return _run(agent, program, options.arguments, _place(url, key, "" if is_own else asked, folder))


def _leave(number: int, _: Any) -> None:
    raise SystemExit(128 + number)


def _run(agent: Agent, program: str, arguments: list[str], place: AgentPlace) -> int:
    start = agent.start(place)
    if place.context_tokens < MIN_TOKENS:
        say.warn(
            f"{place.model} has {place.context_tokens:,} tokens of context; an agent needs about {MIN_TOKENS:,}. "
            "Name another by -m (`uma models` lists them), get one by `uma pull OWNER/NAME`, or give --n-ctx where the "
            "model was trained for more"
        )
    say.note(f"{agent.program} on {place.model} at {place.url}, {place.context_tokens:,} tokens of context")
    process = subprocess.Popen([program, *start.options, *arguments], env={**os.environ, **start.variables})
    try:
        return _waited(process)
    finally:
        _end(process)


def _waited(process: subprocess.Popen[bytes]) -> int:
    """The agent's exit code. Ctrl-C is the agent's: the terminal sends it to both."""
    kept = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, kept)
    return code if code >= 0 else 128 - code


def _place(url: str, key: str, asked: str, folder: Path) -> AgentPlace:
    """The model that is asked for, or the best for an agent, of the server at `url`, once it is loaded. Raises
    `UmaError` where it is no UMA server, or does not have that model.
    """
    listed = HttpClient(url, key, ANSWER_SEC).read_json("GET", "/v1/models")
    try:
        models = {str(model["id"]): model for model in listed["data"]}
        names = {name: (name, *model.get("aliases", ())) for name, model in models.items()}
        name = one_meant(asked, names) if asked else min(models, key=lambda name: _lacks(models[name]))
        tokens = models[name].get("max_model_len") or _loaded_tokens(url, key, name)
        return AgentPlace(url, name, int(tokens), key, folder)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UmaError(f"{url}: no UMA server answers there: {error}") from None


def _lacks(model: dict[str, Any]) -> tuple[bool, ...]:
    """What one of several models lacks for an agent, the gravest first; alike ones are in the server's order."""
    meta = model["meta"]
    return (
        meta.get("kind") in (EMBEDDINGS, RERANKER),
        not meta.get("fits", True),
        meta["n_ctx_train"] < MIN_TOKENS,
        not meta.get("has_tools"),
    )


def _loaded_tokens(url: str, key: str, name: str) -> int:
    """The context of one of several models, which this question has the server load."""
    say.note(f"waiting for the server to load {name}")
    for path in ("/api/generate", "/api/show"):  # the first loads it, as it has no prompt
        with HttpClient(url, key, LOAD_SEC).ask("POST", path, {"model": name}) as response:
            told = json.loads(response.read())
        if response.status != 200:
            raise UmaError(str(told["error"]))
    return next(int(value) for key, value in told["model_info"].items() if key.endswith(".context_length"))


@contextmanager
def _server(loaded: Loaded, folder: Path, *, is_own: bool) -> Iterator[tuple[str, str]]:
    """The URL and the key of a gateway to the server that runs, or of a server of its own; ended with the block.

    Other users of this machine can reach its port and see its arguments. So the system chooses the port, which the
    server holds from then on and tells in its log, and only the agent has the key: both are in a folder of this user's.
    """
    settings, keys = folder / "uma.toml", folder / "keys.toml"
    key = add(keys, "launch")
    command = [sys.executable, "-m", "uma"]
    if not is_own:
        command += ["gateway", "--socket", loaded.config.socket]
    else:
        settings.write_text(as_toml(loaded))
        say.note(f"no server listens on {loaded.config.socket}: starting one")
        command += ["run", "--config", str(settings), "--socket", str(folder / "uma.sock")]
    log = folder / "server.log"
    with log.open("wb") as file:
        # In a session of its own: Ctrl-C in the terminal is the agent's.
        process = subprocess.Popen(
            [*command, "--http", "127.0.0.1:0", "--http-keys", str(keys), "--http-jobs", "", *LOG],  # no batches
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            start_new_session=True,
        )
    try:
        while not (found := _URL.search(log.read_bytes())) or not _is_ready(url := found[1].decode()):
            if process.poll() is not None:
                said = log.read_text(errors="replace").splitlines() or ["it said nothing"]
                raise UmaError(f"the server ended at its start: {said[-1].removeprefix('uma: error: ')}")
            time.sleep(STEP_SEC)
        yield url, key
    finally:
        _end(process)


def _listens(path: str) -> bool:
    try:
        with posix.unix_socket() as end:
            end.connect(path)
    except OSError:
        return False
    return True


def _is_ready(url: str) -> bool:
    try:
        HttpClient(url, timeout_sec=ANSWER_SEC).read_json("GET", "/health")
    except ConnectionLost:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_SEC)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
