"""`uma ps`: the servers that run, each with its process, its model, its sessions and since when."""

from __future__ import annotations

import argparse
import stat
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import attrs
import trio

from uma.cli import say
from uma.cli.elsewhere import listening_sockets
from uma.cli.harmless import json_text
from uma.cli.options import load_settings
from uma.cli.table import print_table
from uma.cli.trio_run import Interrupts, run
from uma.client import connect, dialled
from uma.config import Loaded
from uma.errors import ConnectionLost, Loading, UmaError
from uma.net.place import objection

ANSWER_SEC = 10.0
"""Maximum wait for one server's answer: one that hangs must not hide the others."""
COLUMNS = ("pid", "model", "sessions", "since", "socket")


@attrs.frozen
class Running:
    """A server that answers."""

    pid: int | None
    socket: str
    model: str | None = None
    """None, as all below, while it is being loaded."""
    sessions: int | None = None
    """Without the one that asked."""
    since: datetime | None = None
    loading_percent: int | None = None
    """How much of its model is loaded; None once all is."""


def main(options: argparse.Namespace) -> int:
    """The command; its exit code: 1 where no server runs."""
    loaded = load_settings(options)

    async def show(_: Interrupts) -> int:
        found = [each async for each in _running(loaded)]
        if options.json:
            print(json_text([_as_json(each) for each in found], indent=2))
        elif found:
            print_table(COLUMNS, [_row(each) for each in found])
        else:
            say.note(f"no server listens on {loaded.config.socket}; start one with `uma run`")
        return 0 if found else 1

    return run(show)


async def _running(loaded: Loaded) -> Any:
    for path in sockets(loaded):
        try:
            yield await _ask_within(ANSWER_SEC, path)
        except trio.TooSlowError:
            say.warn(f"{path}: the server there gave no answer within {ANSWER_SEC:g} s")
        except ConnectionLost as error:
            if loaded.origins["socket"] != "default":
                raise
            if not isinstance(error.__cause__, OSError):
                say.warn(error.message)  # something listens there, and does not answer as a server does
        except UmaError as error:
            say.warn(f"{path}: {error.message}")


def sockets(loaded: Loaded) -> Iterator[Path]:
    """The socket that was named; by default the usual one, those beside it, and those of this user's processes."""
    usual = Path(loaded.config.socket)
    yield usual
    if loaded.origins["socket"] != "default":
        return
    others = set(listening_sockets())
    if objection(usual) is None and usual.parent.is_dir():
        others |= {each for each in usual.parent.iterdir() if stat.S_ISSOCK(each.lstat().st_mode)}
    yield from sorted(others - {usual})


async def _ask_within(seconds: float, path: Path) -> Running:
    with trio.fail_after(seconds):
        return await _ask(path)


async def _ask(path: Path) -> Running:
    try:
        return await _ask_ready(path)
    except Loading:
        async with dialled(path) as client:
            health = await client.health(probe=False)
            if health.status != "loading":
                raise
            return Running(client.server_pid, str(path), loading_percent=health.loading_percent)


async def _ask_ready(path: Path) -> Running:
    async with connect(path, waits=False) as client:
        metrics = await client.metrics()
        return Running(
            pid=client.server_pid,
            model=client.info.model.called,
            sessions=metrics["active_sessions"] - 1,
            since=datetime.now().astimezone() - timedelta(seconds=metrics.get("uptime_sec", 0)),
            socket=str(path),
        )


def _row(server: Running) -> tuple[str, ...]:
    pid = "another container" if server.pid is None else str(server.pid)
    if server.model is None or server.since is None:
        return pid, f"loading, {server.loading_percent} %", "", "", server.socket
    since = server.since.strftime("%Y-%m-%d %H:%M:%S")
    return pid, server.model, str(server.sessions), since, server.socket


def _as_json(server: Running) -> dict[str, Any]:
    since = None if server.since is None else server.since.isoformat(timespec="seconds")
    return attrs.asdict(server) | {"since": since}
