"""A source of text on a Trio loop in a thread of its own, called from synchronous code."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from itertools import count
from queue import SimpleQueue
from typing import Any, TypeVar

import outcome
import trio

from uma.client import Client
from uma.engine import Engine
from uma.errors import ConnectionLost, InternalError, TimedOut, UmaError, WrongKind, WrongPlace, WrongValues
from uma.jobs import model_of
from uma.net.trio_only import require_asyncio
from uma.types import Source

T = TypeVar("T")


NO_THREADS = (
    "this LLM belongs to the process that made it, and {elsewhere} has none of its threads; "
    "make the LLM in the child (with multiprocessing: in the worker's initializer, or use 'spawn')"
)
"""Why an LLM cannot be used in another process."""


class Deadline:
    """The moment up to which a call of `LLM` can take, `timeout` seconds from now; None: there is none."""

    def __init__(self, timeout: float | None) -> None:
        if isinstance(timeout, bool) or not isinstance(timeout, float | int | None):
            raise WrongKind(f"timeout: expected seconds, not {timeout!r}")
        if timeout is not None and not timeout >= 0:
            raise WrongValues(f"timeout: {timeout} must be 0 or more seconds")
        self._timeout = timeout
        # A time that no clock holds is as good as the longest that a thread can wait.
        self._end_sec = math.inf if timeout is None else time.monotonic() + min(timeout, threading.TIMEOUT_MAX)

    async def keep(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run an async function of Trio's, which is cancelled at that moment. Raises `TimedOut` then."""
        with trio.move_on_after(max(0.0, self._end_sec - time.monotonic())):
            return await function(*args)
        raise TimedOut(f"it took longer than its timeout of {self._timeout:g} s, and was cancelled")


FOREVER = Deadline(None)


class SourceThread:
    """An open source, an engine or a client of a server, on a Trio loop in its own thread."""

    def __init__(self, opened: Callable[[], AbstractAsyncContextManager[Source]]) -> None:
        self._opened = opened
        self._numbers = count(1)
        self._process_id = os.getpid()
        self.is_closed = False
        self._stop = trio.Event()
        self.source: Source
        """The source, once it is open; a session with a server can be over."""
        self._renewing = trio.Lock()
        self._refused_sec = -math.inf
        self._refusal: UmaError | None = None
        """Why the last attempt at a new session failed, at `_refused_sec`."""
        self._is_ready = threading.Event()
        self._ended: outcome.Outcome[None] | None = None
        loop: SimpleQueue[trio.lowlevel.TrioToken | None] = SimpleQueue()
        # A daemon: at the interpreter's end the finalizer stops it; a thread that is none would be waited for first.
        self._thread = threading.Thread(target=self._run, args=(loop,), name="uma-llm", daemon=True)
        self._thread.start()
        token = loop.get()
        if token is None:
            raise self._why_no_loop()
        self._token = token
        try:
            self._is_ready.wait()
        except BaseException:
            # The caller never gets this LLM, so its model must not stay loaded.
            self._post(self._stop.set)
            raise
        if self._ended is not None:
            self._ended.unwrap()

    def check_process(self) -> None:
        """Raise `WrongPlace` in a forked child, which has the memory of an engine and none of its threads."""
        if os.getpid() != self._process_id:
            raise WrongPlace(NO_THREADS.format(elsewhere="a forked child"))

    def next_number(self) -> int:
        """A number for a request's id, never given before. Safe in every thread."""
        return next(self._numbers)

    @property
    def is_engine(self) -> bool:
        """Whether the model is in this process; else it is a server's."""
        return isinstance(self.source, Engine)

    @property
    def has_failed(self) -> bool:
        """Whether the engine had a fault, which ends this loop."""
        return isinstance(self.source, Engine) and self.source.worker.has_failed

    async def live(self, since: float = math.inf) -> Source:
        """The source, in a new session where that with a server is over. Runs on the loop; waits for the server's hello
        and while it loads its model. Raises `ConnectionLost` where there is no new session with the same model: at once
        if another call had that answer after `since`, in Trio's seconds, so that many rows wait for one attempt only.
        """
        async with self._renewing:
            if isinstance(self.source, Client) and self.source.is_lost:
                if self._refusal is None or self._refused_sec <= since:
                    try:
                        self.source = await self._nursery.start(self._renew, model_of(self.source))
                    except UmaError as error:
                        self._refusal, self._refused_sec = error, trio.current_time()
                    else:
                        return self.source
                raise ConnectionLost(
                    self._refusal.message, retry_after_ms=self._refusal.retry_after_ms
                ) from self._refusal
            return self.source

    async def _renew(self, model: dict[str, Any], *, task_status: trio.TaskStatus[Client]) -> None:
        """Hold a new session with a server that has this model, until it is lost."""
        async with self._opened() as session:
            assert isinstance(session, Client)
            if (now := model_of(session)) != model:
                raise ConnectionLost(
                    f"the server went away, and the one that listens there now has another model, {now['name']}, and "
                    f"not {model['name']} as before; make a new LLM to use that"
                )
            task_status.started(session)
            await session.lost()

    def spawn(self, function: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Start an async function on the loop. Raises where the loop has ended."""

        async def start() -> None:
            self._nursery.start_soon(function, *args)

        self.call(start)

    def call(self, function: Callable[..., Awaitable[T]], *args: Any, deadline: Deadline = FOREVER) -> T:
        """Run an async function on the loop and wait for its result. Ctrl-C cancels it first, then is raised."""
        self.check_process()
        scope, done = trio.CancelScope(), Future[outcome.Outcome[T] | None]()
        try:
            self._begin(scope, done, deadline.keep, function, *args)
            ended = done.result()
        except BaseException:
            self._post(scope.cancel)
            done.result()
            raise
        if ended is None:
            raise self.why_closed()
        return ended.unwrap()

    async def call_async(self, function: Callable[..., Awaitable[T]], *args: Any, deadline: Deadline = FOREVER) -> T:
        """`call` for a task of asyncio's: cancelling that cancels the function. Raises `WrongPlace` without asyncio."""
        import asyncio  # noqa: PLC0415  (whoever has a task has imported it)

        require_asyncio()
        self.check_process()
        scope, done = trio.CancelScope(), Future[outcome.Outcome[T] | None]()
        try:
            self._begin(scope, done, deadline.keep, function, *args)
            ended = await asyncio.wrap_future(done)
        except BaseException:
            self._post(scope.cancel)
            raise
        if ended is None:
            raise self.why_closed()
        return ended.unwrap()

    def _begin(
        self,
        scope: trio.CancelScope,
        done: Future[outcome.Outcome[T] | None],
        function: Callable[..., Awaitable[T]],
        *args: Any,
    ) -> None:
        """Run the function on the loop inside `scope`; `done` gets its outcome, or None where the loop ended first."""
        done.set_running_or_notify_cancel()  # only the loop settles it, cancelled or not

        async def run() -> None:
            result = None
            try:
                with scope:
                    ended = await outcome.acapture(function, *args)
                    # What is no `Exception` is the end of the loop: no result.
                    if isinstance(ended, outcome.Value) or isinstance(ended.error, Exception):
                        result = ended
            finally:
                done.set_result(result)

        def start() -> None:
            if self._is_open:
                self._nursery.start_soon(run)
            else:
                done.set_result(None)

        if not self._post(start):
            done.set_result(None)

    def close(self) -> None:
        """Cancel what runs, free the model, end the thread. In a forked child there is nothing to end."""
        if os.getpid() != self._process_id:
            return
        self.is_closed = True
        self._post(self._stop.set)
        # The garbage collector can end an LLM on any thread, even on its own.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def post(self, function: Callable[[], object]) -> None:
        """Call a function on the loop soon, if there is one in this process."""
        if os.getpid() == self._process_id:
            self._post(function)

    def _post(self, function: Callable[[], object]) -> bool:
        """Call a function on the loop soon; False if that has ended."""
        try:
            self._token.run_sync_soon(function)
        except trio.RunFinishedError:
            return False
        return True

    def why_closed(self) -> Exception:
        """What ended the loop: a fault, or `close`. Waits until it has ended."""
        self._thread.join()
        if isinstance(self._ended, outcome.Error) and isinstance(self._ended.error, Exception):
            return self._ended.error
        return WrongPlace("this LLM is closed")

    def _why_no_loop(self) -> Exception:
        """Why Trio could not start, mostly for want of file descriptors."""
        self._thread.join()
        assert isinstance(self._ended, outcome.Error)
        error = self._ended.error
        if isinstance(error, OSError):
            return OSError(error.errno, f"the LLM's thread cannot start: {error.strerror}; raise `ulimit -n`")
        return InternalError(f"the LLM's thread cannot start ({type(error).__name__}: {error})")

    def _run(self, loop: SimpleQueue[trio.lowlevel.TrioToken | None]) -> None:
        self._ended = outcome.capture(trio.run, self._serve, loop)
        loop.put(None)  # read only where there was no loop
        self._is_ready.set()

    async def _serve(self, loop: SimpleQueue[trio.lowlevel.TrioToken | None]) -> None:
        self._is_open = False
        loop.put(trio.lowlevel.current_trio_token())
        async with self._opened() as self.source, trio.open_nursery() as self._nursery:
            self._is_open = True
            self._is_ready.set()
            try:
                await self._stop.wait()
            finally:
                self._is_open = False
                self._nursery.cancel_scope.cancel()
