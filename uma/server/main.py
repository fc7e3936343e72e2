"""`uma run` without its terminal: logging, signals, engine, server, and an exit code."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import attrs
import trio

from uma import posix
from uma.config import RuntimeConfig
from uma.engine import Engine, open_engine
from uma.errors import ConfigError, ShuttingDown, UmaError, sole_error
from uma.server import otel, socketfile
from uma.server.connection import ServedEngine
from uma.server.logs import log, logging_to
from uma.server.recording import recording
from uma.server.server import Server, SilentServer
from uma.types import LoadProgress, ServerInfo, Source

logger = logging.getLogger("uma.server")

STOP = frozenset(posix.signals("SIGTERM", "SIGINT", "SIGHUP"))
"""Signals that end a server in order. SIGHUP is a closed terminal's."""
WATCHED = (*STOP, *posix.signals("SIGUSR1", "SIGRTMIN"))

INTERRUPTED = 128 + signal.SIGINT

LOAD_END_SEC = 1.0
"""Maximum time for a load to end that a signal has cancelled. It ends before its next tensor; but a tensor on a slow
disk, and the little that is done beside the weights, cannot be interrupted."""

END_SEC = 1.5
"""Time from `drain_timeout_sec` on after which the process is ended, `FAREWELL_SEC` in it: within two seconds it is."""
AT_ONCE_SEC = 1.0
"""Maximum time from a second signal on until the process has ended."""
LAST_WORDS_SEC = 0.5
"""Part of it in which what runs is told so."""
SWITCH_SEC = 0.0005
"""Time after which a thread in Python code lets another one run. Behind threads that parse bodies Trio's thread waits
this long for its turn after each system call: with Python's 5 ms, hundreds of large bodies held up all else for twice
as long."""

GC_THRESHOLDS = (50_000, 20, 20)
"""Objects made before Python looks for cycles among the young ones, and how often among older ones. With its defaults a
frame of 200,000 empty lists is looked through some 300 times while it is read: 150 ms for all, where 15 are needed."""

OnReady = Callable[[ServerInfo], None]


class Service(Protocol):
    """Something that serves the engine beside the socket, with the same life."""

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Serve until `begin_drain`, and return when all has ended."""

    def begin_drain(self) -> None:
        """Take no more requests, and let `serve` come to its end. Called again: now, and what runs is told so."""


class EarlyService(Service, Protocol):
    """A service that answers while the model is being loaded, too."""

    def be_ready(self, engine: ServedEngine, /) -> None:
        """The model is loaded: take requests from now on."""


Open = Callable[[RuntimeConfig, LoadProgress], AbstractAsyncContextManager[ServedEngine]]
"""Opens what a server serves, for as long as the block."""
MakeServer = Callable[[LoadProgress, RuntimeConfig], Server]
MakeService = Callable[[Source, RuntimeConfig], Service]
MakeEarlyService = Callable[[LoadProgress, RuntimeConfig, Server], EarlyService]


def run_server(
    config: RuntimeConfig,
    on_ready: OnReady | None = None,
    beside: Sequence[MakeService] = (),
    *,
    early: Sequence[MakeEarlyService] = (),
    progress: LoadProgress | None = None,
    opened: Open | None = None,
    make_server: MakeServer | None = None,
    log_fields: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Serve until SIGTERM or SIGINT, from the main thread. Returns the exit code: 0, or 130 after SIGINT.

    The socket answers at once: while the model is being loaded, `health` says how far that is, and everything else
    waits, told of it, until it is loaded or, with `E_RUNTIME_SHUTDOWN`, will not be. `on_ready` is called once requests
    are taken. A first signal drains, a second ends at once; while the model is being loaded, the first one ends the
    load. A terminal that is closed is as SIGTERM, once. SIGUSR1 writes the metrics to the log, and SIGRTMIN
    drops half of the prefixes in host memory. The services that `beside` makes share the server's life from then on,
    those of `early` from its beginning. `opened` opens what is served, and `make_server` makes what it is served by: by
    default an engine, and a server on the socket. Each line of the log has `log_fields`. Raises `ConfigError` or
    `ModelError` where it cannot start.
    """
    progress = progress or LoadProgress()
    sys.setswitchinterval(SWITCH_SEC)
    with logging_to(config, fields=log_fields):
        try:
            return trio.run(
                _main, config, on_ready, beside, early, progress, opened or _with_grammars, make_server or _on_socket
            )
        except BaseExceptionGroup as group:
            sole = sole_error(group)
        raise sole


async def _main(
    config: RuntimeConfig,
    on_ready: OnReady | None,
    beside: Sequence[MakeService],
    early: Sequence[MakeEarlyService],
    progress: LoadProgress,
    opened: Open,
    make_server: MakeServer,
) -> int:
    otel.check(config)  # before a model is loaded in vain
    with ExitStack() as at_end, receiving(WATCHED) as signals:
        async with trio.open_nursery() as nursery:
            server = make_server(progress, config)
            at_end.callback(server.tell_stopped)
            first: list[EarlyService] = [server, *(make(progress, config, server) for make in early)]
            run = ServerRun(nursery, server, [*first], at_end)
            nursery.start_soon(run.watch, signals)
            for service in first:
                await nursery.start(run.serve, service)
            async with AsyncExitStack() as stack:
                try:
                    engine = await stack.enter_async_context(opened(config, progress))
                except UmaError as error:
                    await server.give_up(server.farewell_of(error))
                    raise
                finally:
                    run.load_ended.set()
                for service in first:
                    service.be_ready(engine)
                for make in beside:
                    run.services.append(make(engine, config))
                    await nursery.start(run.serve, run.services[-1])
                # Objects made by now live as long as the server: a collection that looked through them would be a gap.
                gc.collect()
                gc.freeze()
                gc.set_threshold(*GC_THRESHOLDS)
                _announce(on_ready, engine.info)
                model, level = ",".join(engine.info.models), logging.DEBUG if server.is_child else logging.INFO
                model = model or engine.info.model.name
                log(logger, level, "server.ready", model=model, socket=config.socket, protocol=config.protocol)
                await run.ended.wait()
            nursery.cancel_scope.cancel()
    return run.code


@asynccontextmanager
async def _with_grammars(config: RuntimeConfig, progress: LoadProgress) -> AsyncIterator[Engine]:
    async with (
        open_engine(config, progress, prepares_grammars=True, owns_process=True) as engine,
        otel.exporting(engine, config),
        recording(engine, config),
    ):
        yield engine


def _on_socket(progress: LoadProgress, config: RuntimeConfig) -> Server:
    if not posix.HAS_UNIX_SOCKETS:
        if not config.http:
            raise ConfigError("unsupported: this system has no Unix sockets; serve over HTTP, with --http")
        return SilentServer(progress, config)
    socketfile.check(Path(config.socket))  # before a model is loaded in vain
    return Server(progress, config)


def end_process(within_sec: float, code: Callable[[], int]) -> threading.Timer:
    """End the process after so long, unless the timer is cancelled. A thread can be inside work that nothing
    interrupts, such as a prompt's tokens or a disk that does not answer, and Trio waits for some of them.
    """
    timer = threading.Timer(within_sec, lambda: os._exit(code()))
    timer.daemon = True
    timer.start()
    return timer


def end_with(code: int) -> int:
    """The exit code of a process that then ends at once: the interpreter's own end takes seconds on a busy machine."""
    atexit.register(os._exit, code)
    return code


@contextmanager
def receiving(numbers: Iterable[signal.Signals]) -> Iterator[AsyncIterator[int]]:
    """Receive signals for as long as the process has something to do.

    After an orderly end they are ignored, Ctrl-C excepted: one that comes while the interpreter ends, such as a second
    SIGTERM, makes no failure of it.
    """
    wanted = heeded(numbers)
    # The receiver restores what was there before, and raises again what nobody has taken from it.
    before = {number: signal.signal(number, lambda *_: None) for number in wanted if number != signal.SIGINT}
    afterwards = before
    try:
        with trio.open_signal_receiver(*wanted) as signals:
            yield signals
        afterwards = dict.fromkeys(before, signal.SIG_IGN)
    finally:
        for number, handler in afterwards.items():
            signal.signal(number, handler)


def heeded(signals: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Signals of these that our parent has not chosen to ignore (nohup, a background job of a plain shell)."""
    return [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]


def _announce(on_ready: OnReady | None, info: ServerInfo) -> None:
    if on_ready is None:
        return
    try:
        on_ready(info)
    except OSError as error:  # the terminal is gone: the server serves all the same
        log(logger, logging.WARNING, "server.cannot_announce", reason=error.strerror)


@attrs.define(eq=False)
class ServerRun:
    """A server's life, and the signals that change it."""

    nursery: trio.Nursery
    """All of it: cancelled, everything ends at once."""
    server: Server
    services: list[Service]
    """All that serves, the server first."""
    at_end: ExitStack
    """What is undone once all has ended."""
    code: int = 0
    """What the process ends with: a person's Ctrl-C is told from an orderly stop, as by any other command."""
    load_ended: trio.Event = attrs.field(factory=trio.Event)
    """The model is loaded, or will not be."""
    ended: trio.Event = attrs.field(factory=trio.Event)

    async def serve(self, service: Service, *, task_status: trio.TaskStatus[None]) -> None:
        """Serve to the end; the last of the services lets `ended` say so."""
        with self.server.counted():
            await service.serve(task_status=task_status)
        if not self.server.serving:
            self.ended.set()

    async def watch(self, signals: AsyncIterator[int]) -> None:
        """Act on signals for as long as there is a server."""
        stops = 0
        async for number in signals:
            name = signal.Signals(number).name
            log(logger, logging.DEBUG if self.server.is_child else logging.INFO, "signal", name=name)
            if name == "SIGUSR1":
                await self._log_metrics()
            elif name == "SIGRTMIN" and self.load_ended.is_set():
                self.server.engine.yield_memory()
            elif number in STOP and not (stops and name == "SIGHUP"):
                # (The kernel and the shell can both send SIGHUP for one terminal.)
                stops += 1
                self.code = INTERRUPTED if number == signal.SIGINT else self.code
                within_sec = AT_ONCE_SEC if stops > 1 else self.server.config.drain_timeout_sec + END_SEC
                self.at_end.callback(end_process(within_sec, lambda: self.code).cancel)
                if not self.load_ended.is_set():
                    await self._end_load()
                else:
                    for service in self.services:
                        service.begin_drain()
                    if stops > 1:
                        self.nursery.cancel_scope.deadline = trio.current_time() + LAST_WORDS_SEC

    async def _end_load(self) -> None:
        """End everything; the whole process, where the load goes on all the same. Sockets are closed by then."""
        await self.server.give_up(ShuttingDown("the server is stopping, before its model was loaded"))
        self.nursery.cancel_scope.cancel()
        with trio.move_on_after(LOAD_END_SEC, shield=True):
            await self.load_ended.wait()
            return
        os._exit(self.code)

    async def _log_metrics(self) -> None:
        if self.load_ended.is_set():
            log(logger, logging.WARNING, "metrics", snapshot=dict(await self.server.metrics()))
