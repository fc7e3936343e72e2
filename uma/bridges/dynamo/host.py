"""An engine on a Trio thread of its own, for an asyncio program: requests go over, batches of events come back.

Dynamo runs on asyncio. The two loops meet only in `TrioToken.run_sync_soon` and `loop.call_soon_threadsafe`. Not Trio's
guest mode on Dynamo's own loop: with a thread, whatever blocks that loop does not delay the engine's deadlines and
deliveries.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import attrs
import trio

from uma.config import RuntimeConfig
from uma.contracts.load import RequestTimes
from uma.engine import Engine, open_engine
from uma.errors import InternalError, ShuttingDown, UmaError
from uma.net.logfmt import log
from uma.types import Finished, Health, Prompt, Request, Token

Background = Callable[[Engine], Awaitable[None]]
"""A task that runs beside the engine on its Trio thread, until the engine ends."""

_log = logging.getLogger("uma.bridges.dynamo")


@attrs.define(eq=False)
class DynamoJob:
    """One request. `next`, `leave` and `cancel` belong to the asyncio loop, `put` and `lose` to the Trio thread."""

    _host: EngineHost
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _events: deque[Prompt | Token | Finished | UmaError | None] = attrs.field(factory=deque, init=False)
    _arrived: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)
    _is_left: bool = attrs.field(default=False, init=False)

    def put(self, event: Prompt | Token | Finished | UmaError | None) -> None:
        """Pass an event on; None is the end."""
        self._events.append(event)
        self._host.loop.call_soon_threadsafe(self._arrived.set)

    async def next(self) -> list[Prompt | Token | Finished]:
        """All events that have come, at least one; empty at the end.

        Raises the request's `UmaError`; `ShuttingDown` where the engine ended before the answer did.
        """
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        ready: list[Prompt | Token | Finished] = []
        while self._events and not isinstance(self._events[0], UmaError | None):
            ready.append(self._events.popleft())  # type: ignore[arg-type]
        if not ready:
            self.leave()
            if isinstance(self._events[0], UmaError):
                raise self._events[0]
        return ready

    def leave(self) -> None:
        """The reader has taken all events, so a drain no longer waits for it. Harmless when repeated."""
        if not self._is_left:
            self._is_left = True
            self._host.job_left()

    def cancel(self) -> None:
        """Cancel the request: by the next tick its sequence and cells are free."""
        self.leave()
        self._host.call(self._scope.cancel)

    def lose(self) -> None:
        """End the job with an error where the engine ends before the request began. Called on the Trio thread."""
        self.put(ShuttingDown("the worker stopped before the request began"))
        self.put(None)

    async def run(self, engine: Engine, request: Request) -> None:
        """Generate, on the Trio thread."""
        try:
            with self._scope:
                async with engine.generate(request) as stream:
                    async for event in stream:
                        if isinstance(event, Finished):
                            times = event.metrics
                            self._host.times.add(times.queue_ms, times.prefill_ms, times.decode_ms)
                        if isinstance(event, Prompt | Token | Finished):
                            self.put(event)
        except UmaError as error:
            # `ShuttingDown` has the frontend migrate the request: another worker can continue the answer.
            self.put(ShuttingDown("the worker's engine failed") if engine.worker.has_failed else error)
        except Exception as fault:  # noqa: BLE001  (the request's own; other requests go on)
            log(_log, logging.ERROR, "dynamo.internal_error", request=request.id, fault=fault)
            self.put(InternalError("the request failed in the worker; its log has the traceback"))
        except BaseException:
            # The engine ends before the request does. Without an error the frontend would take the part for the whole.
            self.put(ShuttingDown("the worker stopped before the answer ended"))
            raise
        finally:
            self.put(None)


@attrs.define(eq=False)
class EngineHost:
    """Starts, serves and ends an engine. Its methods belong to the asyncio loop."""

    config: RuntimeConfig
    background: tuple[Background, ...] = ()
    on_fault: Callable[[], None] = attrs.field(default=lambda: None)
    """Called on the loop where a fault ended the engine after its start."""
    fault: BaseException | None = attrs.field(default=None, init=False)
    """The exception that ended the engine after its start."""
    loop: asyncio.AbstractEventLoop = attrs.field(init=False)
    times: RequestTimes = attrs.field(factory=RequestTimes, init=False)
    """Times of finished requests. Belongs to the Trio thread."""
    _thread: threading.Thread | None = attrs.field(default=None, init=False)
    _engine: Engine | None = attrs.field(default=None, init=False)
    _token: trio.lowlevel.TrioToken | None = attrs.field(default=None, init=False)
    _nursery: trio.Nursery | None = attrs.field(default=None, init=False)
    _stop: trio.Event | None = attrs.field(default=None, init=False)
    _started: asyncio.Future[Engine] = attrs.field(init=False)
    _running: int = attrs.field(default=0, init=False)
    _idle: asyncio.Event = attrs.field(init=False)
    _is_draining: bool = attrs.field(default=False, init=False)

    @property
    def engine(self) -> Engine:
        """The engine, once it has started."""
        assert self._engine is not None
        return self._engine

    async def start(self) -> Engine:
        """Load the model. Raises what `open_engine` raises."""
        self.loop = asyncio.get_running_loop()
        self._started, self._idle = self.loop.create_future(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="uma-trio")
        self._thread.start()
        return await self._started

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:  # noqa: BLE001  (told to the loop, which raises it)
            self.loop.call_soon_threadsafe(self._tell_failure, error)

    def _tell_failure(self, error: BaseException) -> None:
        self._token = None
        if not self._started.done():
            self._started.set_exception(error)
            return
        self.fault = error
        log(_log, logging.CRITICAL, "dynamo.engine_failed", fault=error)
        if not self._is_draining:
            self.on_fault()

    async def _main(self) -> None:
        async with open_engine(self.config, prepares_grammars=True) as engine, trio.open_nursery() as nursery:
            self._engine, self._nursery, self._stop = engine, nursery, trio.Event()
            self._token = trio.lowlevel.current_trio_token()
            for task in self.background:
                nursery.start_soon(task, engine)
            self.loop.call_soon_threadsafe(self._started.set_result, engine)
            await self._stop.wait()
            nursery.cancel_scope.cancel()

    def call(self, function: Callable[..., Any], *args: Any) -> bool:
        """Call a function on the Trio thread, soon. From any thread; False once the engine has ended."""
        token = self._token
        if token is not None:
            try:
                token.run_sync_soon(function, *args)
            except trio.RunFinishedError:
                self._token = None
        return self._token is not None

    def run_beside(self, task: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Start a task beside the engine, with the engine as its first argument, until the engine ends."""
        self.call(self._begin, lambda: None, task, self._engine, *args)

    def _begin(self, lost: Callable[[], None], task: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Start a task on the Trio thread; call `lost` instead where the engine is about to end."""
        assert self._nursery is not None
        try:
            self._nursery.start_soon(task, *args)
        except RuntimeError:  # the nursery is closed; raised in Trio's callback, this would be a fault of the engine
            lost()

    def submit(self, request: Request) -> DynamoJob:
        """Start a request. Raises `ShuttingDown` once the worker is draining."""
        job = DynamoJob(self)
        if self._is_draining or not self.call(self._begin, job.lose, job.run, self._engine, request):
            raise ShuttingDown("the worker is stopping and takes no new requests")
        self._running += 1
        return job

    def job_left(self) -> None:
        """Note that a job's reader has left it."""
        self._running -= 1
        if self._running == 0:
            self._idle.set()

    async def health(self) -> Health:
        """Health probe, ahead of all other requests. Raises `UmaError`, which is `ShuttingDown` once the worker is
        draining.
        """
        found: asyncio.Future[Health] = self.loop.create_future()

        def tell(health: Health | None) -> None:
            if found.done():
                return
            if health is None:
                found.set_exception(InternalError("the engine ended before it answered"))
            else:
                found.set_result(health)

        async def probe() -> None:
            assert self._engine is not None
            health = None
            try:
                health = await self._engine.health()
            finally:
                self.loop.call_soon_threadsafe(tell, health)

        lost = partial(self.loop.call_soon_threadsafe, tell, None)
        if self._is_draining or not self.call(self._begin, lost, probe):
            raise ShuttingDown("the worker is stopping")
        return await found

    async def close(self, drain_sec: float) -> None:
        """Accept no more requests, give running ones `drain_sec` to end and to be read, then end the engine. Can be
        repeated.
        """
        self._is_draining = True
        if self._running:
            self._idle.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), drain_sec)
        if self._stop is not None:
            self.call(self._stop.set)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
