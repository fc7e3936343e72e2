"""`uma doctor`: what this machine and this build of llama.cpp can do, what is in the way, and what to do about it.

It loads no model.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from contextlib import suppress

import attrs
import trio

from uma.cli import checks
from uma.cli.checks import Check
from uma.cli.default_model import with_all, with_default
from uma.cli.options import load_settings
from uma.cli.ps import Running, running
from uma.cli.sanitize import json_text
from uma.cli.table import print_table, print_wrapped
from uma.config import Loaded, RuntimeConfig
from uma.errors import ConnectionLost, ModelError
from uma.supervisor import too_large

NEEDS_DOING = 1


def main(options: argparse.Namespace) -> int:
    """The command; exit code 1 where something needs doing. Advice for speed is no such thing, nor is a model that
    cannot be loaded where others can.
    """
    loaded = load_settings(options)
    missing = []
    try:
        missing = _too_large(with_all(loaded))
        loaded = with_default(loaded)
    except ModelError as error:
        missing = [Check("served models", "not all of those that the settings name are here", error.message)]
    servers = _servers(loaded)
    pids = [server.pid for server in servers if server.pid is not None]
    found = [*examine(loaded.config, pids), *missing]
    needs_doing = any(check.todo for check in found)
    if options.json:
        every = [attrs.asdict(result, filter=attrs.filters.exclude("is_detail")) for result in found]
        print(json_text({"ok": not needs_doing, "checks": every}, indent=2))
    else:
        show_checks(found, has_details=options.details)
    return NEEDS_DOING if needs_doing else 0


def examine(config: RuntimeConfig, pids: Iterable[int] = ()) -> list[Check]:
    """Every check, in the order in which a reader wants them; `pids` are those of the servers that run."""
    return [
        *checks.versions(),
        checks.extra_buffer_types(config),
        *checks.computing(config),
        *checks.machine(config),
        *checks.folders(config),
        *checks.access(config, pids),
        *checks.disks(config, pids),
        *checks.models(config),
        checks.server(config),
    ]


def _too_large(loaded: Loaded) -> list[Check]:
    """A check of the models that a server with these settings could never load, where there are any."""
    found = trio.run(too_large, loaded.config, loaded.models) if loaded.config.models else ()
    return [Check("too large", f"{len(found)} of the models", lacks="; ".join(found))] if found else []


def _servers(loaded: Loaded) -> list[Running]:
    """Servers that `uma ps` lists."""
    with suppress(ConnectionLost):  # a check of its own tells that
        return trio.run(running, loaded)
    return []


def show_checks(found: Sequence[Check], *, has_details: bool = False) -> None:
    """Write them for people to standard output: what they have to know first, then what was looked at."""
    todo = [result for result in found if result.todo]
    faster = [result for result in found if result.faster and (has_details or not result.is_detail)]
    lacking = [result for result in found if result.lacks]
    works = "UMA works here, and could be faster:" if faster else "UMA works here."
    works = "UMA works here, but not with every model:" if lacking else works
    print("Something is in the way:" if todo else works)
    for result in [*todo, *lacking]:
        print_wrapped(f"! {result.name}: {result.todo or result.lacks}")
    if faster and (todo or lacking):
        print("What would make it faster:")
    for result in faster:
        print_wrapped(f"+ {result.name}: {result.faster}")
    print()
    shown = [result for result in found if has_details or result.todo or not result.is_detail]
    print_table(("", "what", "finding"), [(_mark(result), result.name, result.finding) for result in shown])
    if left_out := len(found) - len(shown):
        print()
        print_wrapped(f"`uma doctor --details` has {left_out} more, about which nothing needs doing.")


def _mark(check: Check) -> str:
    return "!" if check.todo else "+" if check.faster else ""
