"""`uma gateway`: HTTP in front of a server that runs already and listens on a socket."""

from __future__ import annotations

import argparse
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress

import attrs
import trio

from uma.cli import say, words
from uma.cli.options import load_settings
from uma.cli.sanitize import sanitize_line
from uma.cli.source import connected
from uma.client import Client, models_there
from uma.config import BARE_HTTP, RuntimeConfig
from uma.errors import UmaError, sole_error
from uma.http.serve import HttpService, check
from uma.server.logs import logging_to
from uma.server.main import AT_ONCE_SEC, END_SEC, LAST_WORDS_SEC, STOP, end_process, receiving

KEEP_SEC = 1.0
"""Between two words to a server that nobody asks anything."""


def main(options: argparse.Namespace) -> int:
    """The command; its exit code. Without `--http` it listens where `uma run --http` does."""
    config = load_settings(options).config
    config = config if config.http else attrs.evolve(config, http=BARE_HTTP)
    check(config)
    with logging_to(config):
        try:
            received = trio.run(_serve, config)
        except BaseExceptionGroup as group:
            sole = sole_error(group, or_first=True)
        else:
            return _code(received)
        raise sole


def _code(received: list[int]) -> int:
    return 128 + signal.SIGINT if signal.SIGINT in received else 0


async def _serve(config: RuntimeConfig) -> list[int]:
    """Serve until a signal, and return those that came; or until the server behind the socket goes away, which raises
    `ConnectionLost`.

    A server that is loading its model is waited for.
    """
    services: list[HttpService] = []
    received: list[int] = []
    with receiving(STOP) as signals:
        async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
            nursery.start_soon(_heed, signals, received, services, nursery.cancel_scope, config.drain_timeout_sec)
            client = await connected(stack, config.socket, say.note, loads=False)
            models = client.info.models
            source = await stack.enter_async_context(models_there(config.socket, client)) if models else client
            service = HttpService(source, config)
            services.append(service)

            async def serve(*, task_status: trio.TaskStatus[None]) -> None:
                await service.serve(task_status=task_status)
                nursery.cancel_scope.cancel()

            await nursery.start(serve)
            nursery.start_soon(_keep, client)
            lines = [
                f"models  {words.names(models)}" if models else f"model   {words.model_line(client.info.model)}",
                f"socket  {config.socket}",
                *words.http_lines(config, service.url),
            ]
            if not words.is_json_log(config):
                say.plain("\n".join(map(sanitize_line, lines)))
            raise await client.lost()
    return received


async def _keep(client: Client) -> None:
    """Say something now and then: a server closes a session in which nothing runs for its `idle_timeout_sec`."""
    with suppress(UmaError):  # whose end `lost` tells
        while True:
            await trio.sleep(KEEP_SEC)
            await client.health(probe=False)


async def _heed(
    signals: AsyncIterator[int],
    received: list[int],
    services: list[HttpService],
    everything: trio.CancelScope,
    drain_timeout_sec: float,
) -> None:
    """A first signal drains, a second ends at once; so does the first where nothing is served yet. A terminal that is
    closed can send SIGHUP twice, and is one signal. Appends each to `received`.
    """
    async for number in signals:
        if received and signal.Signals(number).name == "SIGHUP":
            continue
        if received or not services:
            everything.deadline = trio.current_time() + (LAST_WORDS_SEC if services else 0)
        for service in services:
            service.begin_drain()
        end_process(AT_ONCE_SEC if received else drain_timeout_sec + END_SEC, lambda: _code(received))
        received.append(number)
