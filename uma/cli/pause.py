"""`uma pause`: a server computes nothing for a while; `uma resume` takes that back."""

from __future__ import annotations

import argparse

from uma.cli.options import load_settings
from uma.cli.table import print_wrapped
from uma.cli.trio_run import Interrupts, run
from uma.client import dialled


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    return paused(options, options.seconds, "computes nothing now; `uma resume` has it go on")


def paused(options: argparse.Namespace, seconds: float, told: str) -> int:
    """Have the server pause for so long, and say what that means."""
    path = load_settings(options).config.socket

    async def pause(_: Interrupts) -> int:
        async with dialled(path) as client:
            await client.pause(seconds)
        print_wrapped(f"the server on {path} {told}")
        return 0

    return run(pause)
