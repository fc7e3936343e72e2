"""`uma pin`, `unpin`, `pause` and `resume`: what a server that runs keeps in memory, and whether it computes."""

from __future__ import annotations

import argparse

from uma.cli import say, words
from uma.cli.options import load_settings
from uma.cli.source import asking
from uma.cli.table import print_wrapped
from uma.cli.trio_run import Interrupts, run
from uma.client import Client
from uma.types import MAX_PAUSE_SEC


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    path = load_settings(options).config.socket

    async def steer(_: Interrupts) -> int:
        async with asking(path) as client:
            if options.command in ("pin", "unpin"):
                told = await _pin(client, options.name, is_pinned=options.command == "pin")
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
    return f"computes nothing {span}; `uma resume` has it go on" if seconds else "goes on"


async def _pin(client: Client, name: str, *, is_pinned: bool) -> str:
    """Pin a model, or take that back; what that means."""
    try:
        pinned = {model.name for model in await client.models() if model.is_pinned}
        model = await client.pin(
            name,
            is_pinned=is_pinned,
            on_loading=lambda load: say.passing(f"{name}: {words.bar(load)}"),
        )
    finally:
        say.passing()
    if not is_pinned and model.name not in pinned:
        return f"nothing changes: {model.name} was not pinned"
    what = f"is loaded and stays; `uma unpin {model.name}` takes that back" if is_pinned else "can leave again"
    return f"{model.name} {what}"
