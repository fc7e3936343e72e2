"""`uma pin`, `unpin`, `pause` and `resume`: what a server that runs keeps in memory, and whether it computes."""

from __future__ import annotations

import argparse

from uma.cli import say, words
from uma.cli.options import load_settings
from uma.cli.table import print_wrapped
from uma.cli.trio_run import Interrupts, run
from uma.client import Client, dialled
from uma.errors import BadRequest, ModelError


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    path = load_settings(options).config.socket

    async def steer(_: Interrupts) -> int:
        async with dialled(path) as client:  # without a hello, which would load the default model
            if options.command in ("pin", "unpin"):
                told = await _pin(client, options.name, is_pinned=options.command == "pin")
            else:
                is_paused = options.command == "pause"
                await client.pause(options.seconds if is_paused else 0)
                does = "computes nothing now; `uma resume` has it go on" if is_paused else "goes on"
                told = f"the server on {path} {does}"
        print_wrapped(told)
        return 0

    return run(steer)


async def _pin(client: Client, name: str, *, is_pinned: bool) -> str:
    """Pin a model, or take that back; what that means."""
    try:
        model = await client.pin(
            name,
            is_pinned=is_pinned,
            on_loading=lambda percent: say.passing(f"loading {words.bar(percent)} {name}"),
        )
    except BadRequest as error:  # there is no such model
        raise ModelError(error.message) from None
    finally:
        say.passing()
    what = f"is loaded and stays; `uma unpin {model.name}` takes that back" if is_pinned else "can leave again"
    return f"{model.name} {what}"
