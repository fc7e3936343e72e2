"""`uma ps`: the servers that run, each with its process, its sessions and since when, and its model or models."""

from __future__ import annotations

import argparse
import stat
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import attrs
import trio

from uma import figures
from uma.cli import say, words
from uma.cli.listening import listening_sockets
from uma.cli.options import load_settings
from uma.cli.sanitize import json_text, sanitize_line
from uma.cli.table import print_table, print_wrapped
from uma.cli.trio_run import Interrupts, run
from uma.client import Client, connect, dialled
from uma.config import Loaded
from uma.errors import ConnectionLost, ShuttingDown, UmaError
from uma.net.place import objection
from uma.types import ListedModel, LoadState

ANSWER_SEC = 5.0
"""Maximum wait for one server's answer: one that hangs must not hide the others."""
COLUMNS = ("pid", "model", "sessions", "since", "socket")
MODEL_COLUMNS = ("model", "state", "memory", "at most", "requests", "note")
"""Columns of the models of a server that has several; the last says when one leaves."""
SPARE = {"since": 100, "at most": 100}
"""Columns of both that a terminal goes without which is narrower than this."""


@attrs.frozen
class Running:
    """A server that answers."""

    pid: int | None
    socket: str
    model: str | None = None
    """None, as all below, while it is being loaded, or stops."""
    sessions: int | None = None
    """Without the one that asked."""
    since: datetime | None = None
    loading_percent: int | None = None
    """How much of its model is loaded; None once all is."""
    adapters: Sequence[str] = ()
    """LoRA adapters of its one model: `model+NAME` asks for it with one."""
    is_stopping: bool = False
    """Whether it lets what runs finish, and then ends."""
    trouble: str = ""
    """Why it tells no more, such as that it gives no answer."""
    paused_sec: float = 0
    """How long it computes nothing yet."""
    models: Sequence[ListedModel] = ()
    """Models of a server that has several."""
    memory_budget_bytes: int | None = None
    """What these can take together (`--memory`)."""

    @property
    def state(self) -> str:
        """First words of its row: its model, else what keeps it from serving one."""
        stops = "is stopping" if self.is_stopping else ""
        return self.model or self.trouble or stops or LoadState(self.loading_percent or 0).words


def main(options: argparse.Namespace) -> int:
    """The command; its exit code: 1 where no server runs."""
    loaded = load_settings(options)

    async def show(_: Interrupts) -> int:
        found = await running(loaded)
        if options.json:
            print(json_text([_as_json(server) for server in found], indent=2))
        elif found:
            is_here = found[0].socket == str(Path(loaded.config.socket))
            show_servers(found, found[:1] if is_here else found)
            if not is_here:
                say.note(f"none on {loaded.config.socket}, the one that commands use; --socket names one of these")
            elif len(found) > 1:
                of = loaded.origins["socket"]
                why = "" if of == "default" else f", as {of} says"
                say.note(f"commands use {found[0].socket}{why}; --socket names another")
        else:
            say.note(f"no server listens on {loaded.config.socket}; start one with `uma run`")
        return 0 if found else 1

    return run(show)


def show_servers(found: Sequence[Running], detailed: Sequence[Running]) -> None:
    """Write them for people to standard output, with the models of those that are `detailed`."""
    print_table(COLUMNS, [_row(server) for server in found], spare=SPARE, key="socket")
    for server in detailed:
        if server.models:
            budget = server.memory_budget_bytes
            most = f", {figures.size(budget)} together at most (--memory)" if budget else ""
            print()
            print_wrapped(f"models of {sanitize_line(server.socket)}: default {server.models[0].name}{most}")
            print_table(MODEL_COLUMNS, [_model_row(model) for model in server.models], spare=SPARE, key="model")
            for model in server.models:
                if (
                    reason := model.not_pinned
                    or model.failure
                    or (model.state == "loading" and model.load.words)
                    or (model.yielded and f"for other programs: {model.yielded}")
                ):
                    print_wrapped(reason if reason.startswith(model.name) else f"{model.name}: {reason}")


async def running(loaded: Loaded) -> list[Running]:
    """The servers that answer on `sockets`; what else is there is warned of."""
    found: list[Running] = []
    for path in sockets(loaded):
        pid = None
        try:
            with trio.fail_after(ANSWER_SEC):
                async with dialled(path) as client:
                    pid = client.server_pid
                    early_or_late = await _early_or_late(path, client)
                found.append(early_or_late or await _ask(path))
        except trio.TooSlowError:
            say.warn(words.hangs(str(path), ANSWER_SEC))
            found.append(Running(pid, str(path), trouble="gives no answer"))
        except ConnectionLost as error:
            if loaded.origins["socket"] == "--socket":
                raise
            if not isinstance(error.__cause__, OSError):
                say.warn(error.message)  # something listens there, and does not answer as a server does
        except UmaError as error:
            say.warn(f"{path}: {error.message}")
            found.append(Running(pid, str(path), trouble="refuses sessions"))
    return found


def sockets(loaded: Loaded) -> Iterator[Path]:
    """The socket that `--socket` names; without it that of the settings, those of this user's processes, and those
    beside the usual one.
    """
    usual = Path(loaded.config.socket)
    yield usual
    if loaded.origins["socket"] == "--socket":
        return
    others = set(listening_sockets())
    if loaded.origins["socket"] == "default" and objection(usual) is None and usual.parent.is_dir():
        others |= {path for path in usual.parent.iterdir() if stat.S_ISSOCK(path.lstat().st_mode)}
    yield from sorted(others - {usual})


async def _early_or_late(path: Path, client: Client) -> Running | None:
    """A server that loads its model, or stops."""
    try:
        health = await client.health(probe=False)
    except ShuttingDown:
        return Running(client.server_pid, str(path), is_stopping=True)
    is_loading = health.status == "loading"
    return Running(client.server_pid, str(path), loading_percent=health.loading_percent) if is_loading else None


async def _ask(path: Path) -> Running:
    async with connect(path, loads=False, waits=False) as client:
        metrics, models = await client.metrics(), await client.models() if client.info.models else ()
        return Running(
            pid=client.server_pid,
            model=f"{len(models)} models" if len(models) > 1 else [*client.info.models, client.info.model.name][0],
            adapters=client.info.capabilities.adapters,
            sessions=metrics["active_sessions"] - 1,
            since=datetime.now().astimezone() - timedelta(seconds=metrics.get("uptime_sec", 0)),
            socket=str(path),
            paused_sec=metrics.get("paused_sec", 0),
            models=models,
            memory_budget_bytes=metrics.get("memory_budget_bytes"),
        )


def _row(server: Running) -> tuple[str, ...]:
    untold = "" if server.trouble else "another container"
    pid = untold if server.pid is None else str(server.pid)
    if server.model is None or server.since is None:
        return pid, server.state, "", "", server.socket
    since = server.since.strftime("%Y-%m-%d %H:%M:%S")
    paused = f", {words.paused(server.paused_sec)}" if server.paused_sec else ""
    model = _adapted(server.model, server.adapters) + paused
    return pid, model, str(server.sessions), since, server.socket


def _as_json(server: Running) -> dict[str, Any]:
    since = None if server.since is None else server.since.isoformat(timespec="seconds")
    models = (
        {"models": [attrs.asdict(model, filter=attrs.filters.exclude("info")) for model in server.models]}
        if server.models
        else {}
    )
    return attrs.asdict(server, filter=attrs.filters.exclude("models")) | {"since": since} | models


def _model_row(model: ListedModel) -> tuple[str, ...]:
    memory = figures.size(model.taken_bytes) if model.taken_bytes else ""
    most = figures.size(model.memory_bytes) if model.memory_bytes else ""
    state: str = model.state
    if state == "unloaded" and model.failure:
        state = "failed" if model.fits else "too large"
    state = "waits" if model.waits_for else state
    waiting = f", {model.waiting} waiting" if model.waiting else ""
    requests = f"{model.running}{waiting}" if model.running or model.waiting else ""
    return _adapted(model.name, model.adapters), state, memory, most, requests, _leaves(model)


def _adapted(name: str, adapters: Sequence[str]) -> str:
    return ", ".join([name, *(f"+{adapter}" for adapter in adapters)])


def _leaves(model: ListedModel) -> str:
    """When a model leaves if no request comes."""
    if model.is_pinned:
        return "pinned"
    if model.leaves_in_sec is not None:
        return f"leaves in {timedelta(seconds=round(model.leaves_in_sec))}"
    return "leaves when its memory is needed" if model.state == "loaded" and not model.running else ""
