"""`uma top`: what runs and waits on the servers of this machine, or on one over HTTP. Live on a terminal, else once."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

import attrs
import trio

from uma import posix
from uma.cli.options import load_settings
from uma.cli.ps import sockets
from uma.cli.sanitize import json_text
from uma.cli.top_feed import INTERVAL_SEC, Feed, HttpFeed, SocketFeed
from uma.cli.top_state import SHORT, End, Event, Frame, KeyPress, Note, TopState, pid_of, program_of, reduce
from uma.cli.trio_run import Interrupts, run
from uma.client.http import read_key
from uma.config import Loaded
from uma.errors import ConfigError, UmaError
from uma.metrics import LiveSeries

LOOK_SEC = 5.0
"""Between two looks for servers that were started meanwhile."""
FRAME_SEC = 0.1
"""Least time between two drawings."""
SNAPSHOT_COLUMNS = 120
"""Width of a snapshot that goes to no terminal."""
FRAMES_OF_A_SNAPSHOT = 3
"""Frames of each server before a snapshot: two are needed to tell a speed."""


def main(options: argparse.Namespace) -> int:
    """The command; its exit code."""
    loaded = load_settings(options)
    if options.url is None and options.key_file is not None:
        raise ConfigError("--key-file: a key is for --url; a socket asks for none")
    top = Top(loaded, options.url and options.url.rstrip("/"), read_key(options.key_file))
    is_dumb = os.environ.get("TERM", "dumb") == "dumb"
    if options.once or options.json or is_dumb or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return run(partial(_snapshot, top, options.json))
    return run(partial(_live, top))


@attrs.define(eq=False)
class Top:
    """The servers that are looked at, and what is known of them."""

    loaded: Loaded
    url: str | None
    key: str | None
    state: TopState = attrs.field(init=False)
    changed: trio.Event = attrs.field(factory=trio.Event, init=False)
    _feeds: dict[str, Feed] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.state = TopState(first=self.loaded.config.socket)

    def take(self, event: Event) -> End | str | None:
        """Take in what happened; what is to be done."""
        self.state, effect = reduce(self.state, event)
        self.changed.set()
        return effect

    async def follow(self) -> None:
        """Follow all servers until cancelled. Raises `ConnectionLost` where there is none at first."""
        async with trio.open_nursery() as nursery:
            if self.url is not None or self.loaded.origins["socket"] != "default":
                self._start(nursery, HttpFeed(self.url, self.key) if self.url else self._named(), is_needed=True)
                await trio.sleep_forever()
            while True:
                for path in (str(path) for path in sockets(self.loaded) if path.is_socket()):
                    if path not in self._feeds:
                        self._start(nursery, SocketFeed(path), is_needed=False)
                if not self._feeds:
                    self._start(nursery, self._named(), is_needed=not self.state.servers)
                await trio.sleep(LOOK_SEC)

    def _named(self) -> Feed:
        return SocketFeed(self.loaded.config.socket)

    def _start(self, nursery: trio.Nursery, feed: Feed, *, is_needed: bool) -> None:
        self._feeds[feed.where] = feed
        nursery.start_soon(self._follow, feed, is_needed)

    async def _follow(self, feed: Feed, is_needed: bool) -> None:
        try:
            await feed.follow(self.take)  # type: ignore[arg-type]  # what is to be done comes of keys alone
        except UmaError:
            del self._feeds[feed.where]
            # A socket that nothing of ours listens on is no news, unless it is the last.
            if is_needed or (not self._feeds and not self.state.servers):
                raise

    async def end(self, effect: End) -> None:
        """End a request, and tell what came of it."""
        feed = self._feeds.get(effect.where)
        if feed is None:
            return
        try:
            was_running = await feed.end(effect.number, effect.id)
        except UmaError as error:
            self.take(Note(error.message))
        else:
            self.take(Note(f"ended {effect.id}" if was_running else f"{effect.id} had ended already"))


async def _snapshot(top: Top, is_json: bool, _: Interrupts) -> int:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(top.follow)
        while not _is_enough(top.state):
            await top.changed.wait()
            top.changed = trio.Event()
        nursery.cancel_scope.cancel()
    if is_json:
        print(json_text(_as_json(top.state), indent=2))
        return 0
    from rich.console import Console  # noqa: PLC0415  (slow to import, and not needed for JSON)

    from uma.cli.top_view import MIN_COLUMNS, draw  # noqa: PLC0415

    columns = shutil.get_terminal_size((SNAPSHOT_COLUMNS, 0)).columns
    console = Console(width=max(MIN_COLUMNS, columns), highlight=False)
    console.print(draw(top.state, console.width))
    return 0


def _is_enough(state: TopState) -> bool:
    """Whether each server has told what a speed is made of, or does not answer."""
    known = state.servers.values()
    return bool(known) and all(server.lost or len(server.frames) >= FRAMES_OF_A_SNAPSHOT for server in known)


def _as_json(state: TopState) -> list[dict[str, Any]]:
    servers = []
    for where, server in state.servers.items():
        frame = server.newest or Frame(where, 0.0, "", LiveSeries().figures(0.0, {}, None, 0), {})
        rows = [row for row in state.rows() if row.where == where]
        servers.append(
            {
                "where": where,
                "model": frame.model or None,
                "pid": frame.pid,
                "rss_bytes": frame.rss_bytes,
                "lost": server.lost or None,
                "generated_per_second": round(frame.figures.written_per_sec, 1),
                "read_per_second": round(frame.figures.read_per_sec, 1),
                "figures": attrs.asdict(frame.figures),
                "tokens_by_program": {name: n for name, n in server.work().items() if name != SHORT},
                "metrics": dict(frame.metrics),
                "requests": [
                    {
                        **attrs.asdict(row.request),
                        "program": program_of(row.request.origin),
                        "model": row.model or None,
                        "pid": int(pid) if (pid := pid_of(row.request.origin)).isdigit() else None,
                        "state": row.state,
                        "place": row.place,
                        "starts_in_ms": row.starts_in_ms,
                        "tokens_per_second": round(row.tokens_per_sec, 1),
                    }
                    for row in rows
                ],
            }
        )
    return servers


async def _live(top: Top, _: Interrupts) -> int:
    from uma.cli.top_screen import Screen  # noqa: PLC0415  (slow to import: rich)

    # A server that is not there is told as any command does, before the screen is taken.
    async with trio.open_nursery() as nursery:
        nursery.start_soon(top.follow)
        await top.changed.wait()
        async with Screen.opened(sys.stdin.fileno(), sys.stdout.fileno()) as screen:
            nursery.start_soon(_note_resizes, top)
            nursery.start_soon(_obey, top, screen.keys(), nursery)
            # A terminal that is gone ends the command as a hang-up does, which the kernel sends too.
            with suppress(OSError):
                await _draw(top, screen)
        nursery.cancel_scope.cancel()
    return 0


async def _draw(top: Top, screen: Any) -> None:
    from uma.cli.top_view import draw  # noqa: PLC0415

    while True:
        top.changed = trio.Event()
        await screen.show(draw(top.state, *screen.size))
        await trio.sleep(FRAME_SEC)
        # Now and then also without news: a terminal can have been written to by another program.
        with trio.move_on_after(2 * INTERVAL_SEC):
            await top.changed.wait()


async def _note_resizes(top: Top) -> None:
    with trio.open_signal_receiver(*posix.signals("SIGWINCH")) as sizes:
        async for _ in sizes:
            top.changed.set()


async def _obey(top: Top, keys: AsyncIterator[str], nursery: trio.Nursery) -> None:
    async with aclosing(keys) as pressed:  # type: ignore[type-var]
        async for key in pressed:
            effect = top.take(KeyPress(key))
            if effect == "quit":
                break
            if isinstance(effect, End):
                nursery.start_soon(top.end, effect)
    nursery.cancel_scope.cancel()
