"""`uma pin`: one of a server's models is loaded and stays; `uma unpin` takes that back."""

from __future__ import annotations

import argparse

from uma.cli import say
from uma.cli.options import load_settings
from uma.cli.table import print_wrapped
from uma.cli.trio_run import Interrupts, run
from uma.client import dialled
from uma.errors import BadRequest, ModelError


def main(options: argparse.Namespace, *, is_pinned: bool = True) -> int:
    """The command; its exit code."""
    config = load_settings(options).config

    def tell(percent: int) -> None:
        say.passing(f"loading {options.name}: {percent} %")

    async def pin(_: Interrupts) -> int:
        try:
            async with dialled(config.socket) as client:  # without a hello, which would load the default model
                model = await client.pin(options.name, is_pinned=is_pinned, on_loading=tell)
        except BadRequest as error:  # there is no such model
            raise ModelError(error.message) from None
        finally:
            say.passing()
        what = f"is loaded and stays; `uma unpin {model.name}` takes that back" if is_pinned else "can leave again"
        print_wrapped(f"{model.name} {what}")
        return 0

    return run(pin)
