"""`uma trace`: what a server's threads do within a few seconds, as a file that Perfetto shows."""

from __future__ import annotations

import argparse
import os

from uma.cli import say
from uma.cli.options import load_settings
from uma.cli.source import asking
from uma.cli.streams import naming
from uma.cli.trio_run import Interrupts, run
from uma.errors import ConfigError


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    config = load_settings(options).config

    async def write(_: Interrupts) -> int:
        # Before anything is traced: it is too late to hear then that nothing can be written there. Ids of requests are
        # in it: for this user alone, as the log's file.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            file = os.fdopen(os.open(options.out, flags, 0o600), "w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{options.out}: cannot be written: {error.strerror}; name another file") from None
        with naming(options.out), file:
            async with asking(config.socket) as client:
                trace = await client.trace(options.seconds)
            file.write(trace)
        say.note(f"{options.out}: open it in https://ui.perfetto.dev or chrome://tracing")
        return 0

    return run(write)
