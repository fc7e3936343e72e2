"""`uma run`: the server, and the few lines that tell a person what runs and how to reach it. Then logs."""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial

from uma.cli import words
from uma.cli.options import load_settings
from uma.config import RuntimeConfig, default_socket
from uma.server import run_server
from uma.types import ServerInfo


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    config = load_settings(options).config
    return run_server(config, on_ready=partial(announce, config))


def announce(config: RuntimeConfig, info: ServerInfo) -> None:
    """Say on standard error which model runs, where, and how to talk to it."""
    print("\n".join(banner(config, info)), file=sys.stderr, flush=True)


def banner(config: RuntimeConfig, info: ServerInfo) -> list[str]:
    """The lines of `announce`."""
    at = "" if config.socket == default_socket() else f" --socket {shlex.quote(config.socket)}"
    lines = [
        f"model   {words.model_line(info.model)}",
        f"        {words.context_line(info)}",
        f"socket  {config.socket}",
    ]
    if config.protocol == "json":
        lines += [f"try     uma chat{at}", f'        uma generate{at} "Tell me a story about a fox"']
    else:
        lines += [f"try     nc -U {shlex.quote(config.socket)}"]
    notice = words.demonstration(info.model, "uma run")
    return [*lines, notice] if notice else lines
