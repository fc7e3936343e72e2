"""The commands that change what a running server keeps in memory, and whether it computes: `uma pin` and the like."""

from __future__ import annotations

import argparse
from functools import partial

import attrs

from uma.cli import say, words
from uma.cli.options import load_settings
from uma.cli.source import asking, show_load
from uma.cli.table import print_wrapped
from uma.cli.trio_run import Interrupts, run
from uma.client import Client
from uma.types import MAX_PAUSE_SEC


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    path = load_settings(options).config.socket

    async def steer(_: Interrupts) -> int:
        async with asking(path) as client:
            if options.command not in ("pause", "resume"):
                told = await _of_model(client, options.command, options.name)
            else:
                seconds = options.seconds if options.command == "pause" else 0.0
                was_paused = (await client.metrics()).get("paused_sec", 0) > 0
                await client.pause(seconds)
                told = f"the server on {path} {_paused(seconds)}"
                if not (seconds or was_paused):
                    told = f"nothing changes: the server on {path} was not paused"
        print_wrapped(told)
        return 0

    return run(steer)


def _paused(seconds: float) -> str:
    """What a pause of this length means; 0 ends one."""
    span = f"for {words.time_span(seconds)}" if seconds < MAX_PAUSE_SEC else "now"
    return f"computes nothing {span}; `uma resume` continues" if seconds else "continues"


async def _of_model(client: Client, command: str, name: str) -> str:
    """Load, unload, pin or unpin a model; what that means."""

    before = {model.name: model for model in await client.models()}
    try:
        if command == "load":
            model = await client.load(name, on_loading=partial(show_load, name))
        elif command == "unload":
            model = await client.unload(name)
        else:
            model = await client.pin(name, is_pinned=command == "pin", on_loading=partial(show_load, name))
    finally:
        say.passing()
    was = before.get(model.name, attrs.evolve(model, state="unloaded", is_pinned=False))
    if command == "load":
        if was.state == "loaded":
            return f"nothing changes: {model.name} was loaded already"
        return f"{model.name} is loaded; `uma pin {model.name}` keeps it loaded"
    if command == "unload":
        if model.state == "unloaded":
            return f"nothing changes: {model.name} was not loaded"
        busy = "its load has" if model.state == "loading" else "its requests have" if model.running else ""
        return f"{model.name} leaves" + (f" once {busy} ended" if busy else "")
    if command == "pin":
        return f"{model.name} is loaded and stays; `uma unpin {model.name}` undoes that"
    return f"{model.name} can leave again" if was.is_pinned else f"nothing changes: {model.name} was not pinned"
