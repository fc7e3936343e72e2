"""`uma run` without its terminal: logging, signals, engine, server, and an exit code."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Protocol

import attrs
import orjson
import trio

from uma.config import RuntimeConfig
from uma.engine import open_engine
from uma.errors import sole_error
from uma.server import socketfile
from uma.server.logs import log, logging_to
from uma.server.server import Server
from uma.server.users import Users
from uma.types import ServerInfo, Source

logger = logging.getLogger("uma.server")

STOP = frozenset({signal.SIGTERM, signal.SIGINT})
WATCHED = (*STOP, signal.SIGHUP, signal.SIGUSR1)
"""A signal among them that our parent has chosen to ignore (a background job of a plain shell) stays ignored."""

INTERRUPTED = 128 + signal.SIGINT

GC_THRESHOLDS = (50_000, 20, 20)
"""Objects made before Python looks for cycles among the young ones, and how often among older ones. With its defaults a
frame of 200,000 empty lists is looked through some 300 times while it is read: 150 ms for all, where 15 are needed."""

OnReady = Callable[[ServerInfo], None]


class Service(Protocol):
    """Something that serves the engine beside the socket, with the same life."""

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Serve until `begin_drain`, and return when all has ended."""

    def begin_drain(self) -> None:
        """Take no more requests, and let `serve` come to its end."""


MakeService = Callable[[Source, RuntimeConfig], Service]


def run_server(config: RuntimeConfig, on_ready: OnReady | None = None, beside: Sequence[MakeService] = ()) -> int:
    """Serve until SIGTERM or SIGINT, from the main thread. Returns the exit code: 0, or 130 after SIGINT.

    `on_ready` is called once clients can connect. A first signal drains, a second ends at once; while the model is
    being loaded, which nothing can interrupt, the first one ends the process with that code itself. SIGUSR1 writes the
    metrics to the log; SIGHUP is only noted. The services that `beside` makes share the server's life. Raises
    `ConfigError` or `ModelError` where the server cannot start.
    """
    with logging_to(config):
        try:
            return trio.run(_main, config, on_ready, beside)
        except BaseExceptionGroup as group:
            sole = sole_error(group)
        raise sole


async def _main(config: RuntimeConfig, on_ready: OnReady | None, beside: Sequence[MakeService]) -> int:
    socketfile.check(Path(config.socket))  # before a model is loaded in vain
    Users.load(config.socket_users)
    heeded = [each for each in WATCHED if signal.getsignal(each) is not signal.SIG_IGN]
    with trio.open_signal_receiver(*heeded) as signals:
        async with trio.open_nursery() as nursery:
            run = Run(nursery.cancel_scope)
            nursery.start_soon(run.watch, signals)
            async with open_engine(config) as engine:
                run.server = Server(engine, config)
                run.services = [run.server, *(make(engine, config) for make in beside)]
                for service in run.services:
                    await nursery.start(run.serve, service)
                # What is there by now stays: looking through it again at each collection would be felt as a gap.
                gc.collect()
                gc.freeze()
                gc.set_threshold(*GC_THRESHOLDS)
                _announce(on_ready, engine.info)
                log(logger, logging.INFO, "server.ready", socket=config.socket, protocol=config.protocol)
                await run.ended.wait()
            nursery.cancel_scope.cancel()
    return run.code


def _announce(on_ready: OnReady | None, info: ServerInfo) -> None:
    if on_ready is None:
        return
    try:
        on_ready(info)
    except OSError as error:  # the terminal is gone: the server serves all the same
        log(logger, logging.WARNING, "server.cannot_announce", reason=error.strerror)


@attrs.define(eq=False)
class Run:
    """A server's life, and the signals that change it."""

    scope: trio.CancelScope
    """All of it: cancelled, everything ends at once."""
    server: Server | None = None
    """None while the model is being loaded."""
    services: Sequence[Service] = ()
    """All that serves, the server first."""
    code: int = 0
    """What the process ends with: a person's Ctrl-C is told from an orderly stop, as by any other command."""
    _n_ended: int = 0
    ended: trio.Event = attrs.field(factory=trio.Event)

    async def serve(self, service: Service, *, task_status: trio.TaskStatus[None]) -> None:
        """Serve to the end; the last of the services lets `ended` say so."""
        await service.serve(task_status=task_status)
        self._n_ended += 1
        if self._n_ended == len(self.services):
            self.ended.set()

    async def watch(self, signals: AsyncIterator[int]) -> None:
        """Act on signals for as long as there is a server."""
        stops = 0
        async for number in signals:
            log(logger, logging.INFO, "signal", name=signal.Signals(number).name)
            if number == signal.SIGUSR1:
                await self._log_metrics()
            elif number in STOP:
                stops += 1
                self.code = INTERRUPTED if number == signal.SIGINT else self.code
                if self.server is None:
                    # A cancelled load would still be waited for, minutes for a large model. There is nothing to give
                    # back yet: no socket, no session, and the log is not buffered.
                    os._exit(self.code)
                if stops > 1:
                    self.scope.cancel()
                else:
                    for service in self.services:
                        service.begin_drain()

    async def _log_metrics(self) -> None:
        if self.server is not None:
            snapshot = orjson.dumps(await self.server.metrics()).decode()
            logger.warning("event=metrics snapshot=%s", snapshot)
