"""A connection for debugging by hand (`nc -U`): a line in is a prompt, its text comes out, a newline ends it.

Lines are answered one after another; while the model is being loaded they wait, and one line says so. Errors come out
as a line too, `E_…: message`, since nothing else could be seen.
"""

from __future__ import annotations

import socket
from collections import deque
from itertools import count

import orjson
import trio

from uma.errors import BadRequest, InvalidJson, UmaError
from uma.net.metering import metered
from uma.protocol.newline import METRICS_LINE, LineDecoder
from uma.server.connection import Connection, ConnectionHost, SessionWork
from uma.types import Finished, LoadState, Request, Token

MAX_WAITING_LINES = 64
"""Maximum lines taken in while one is answered; beyond it the session's input waits."""


class NewlineConnection(Connection):
    """One session of lines."""

    def __init__(self, name: str, sock: socket.socket, server: ConnectionHost) -> None:
        super().__init__(name, sock, server)
        self._lines = LineDecoder(server.config.max_prompt_bytes)
        self._waiting: deque[str | UmaError] = deque()
        self._taken = trio.lowlevel.ParkingLot()
        self._is_answering = False
        self._has_warned = False
        self._is_closing = False
        self._numbers = count(1)

    @property
    def is_mid_frame(self) -> bool:
        return self._lines.is_mid_line

    @property
    def is_idle(self) -> bool:
        return not self._is_answering

    def is_over(self) -> bool:
        return self._is_closing and not self.work

    def fail(self, error: UmaError) -> None:
        self.link.post(_line_of(error))
        self._end()

    def drain(self) -> None:
        self._end()

    def abort(self, error: UmaError) -> None:
        super().abort(error)
        self._end()

    def _end(self) -> None:
        self._is_closing = True
        self._waiting.clear()
        self.link.post(b"")

    async def take(self, data: bytes) -> bool:
        if self._is_closing:
            return False
        self._lines.feed(data)
        had_line = False
        while not self._is_closing and (line := self._next_line()) is not None:
            had_line = True
            self._waiting.append(line)
            if not self._is_answering:
                self._is_answering = True
                self._tasks.start_soon(self._answer_all)
            while len(self._waiting) >= MAX_WAITING_LINES:
                await self._taken.park()
        return had_line

    def _next_line(self) -> str | UmaError | None:
        try:
            return self._lines.next_line()
        except (BadRequest, InvalidJson) as error:
            return error
        except UmaError as error:
            self.server.note_refused(error.code)
            self.fail(error)
            return None

    async def _answer_all(self) -> None:
        if not self.server.is_ready:
            await self.loaded(self._tell_loading)
        while self._waiting:
            line = self._waiting.popleft()
            self._taken.unpark_all()
            key = f"{self.name}-{next(self._numbers)}"
            work = self.begin(key)
            try:
                with work.scope:
                    await self._answer(line, key, work)
                work.raise_if_aborted()
            except Exception as fault:  # noqa: BLE001  (whatever it is, it is this line's alone)
                error = self.as_uma_error(fault, key)
                self.log_failure(key, error)
                await self.say(_line_of(error))
            self.done(key, work)
        self._is_answering = False
        self._update_clock(had_frame=False)
        self.link.post(b"")

    def _tell_loading(self, load: LoadState) -> None:
        if not self._has_warned:
            self._has_warned = True
            self.link.post(f"waiting: the model is still being loaded ({load.step})\n".encode())

    async def _answer(self, line: str | UmaError, id: str, work: SessionWork) -> None:
        if isinstance(line, UmaError):
            self.server.note_refused(line.code)
            raise line
        if line == METRICS_LINE:
            await self.say(orjson.dumps(await self.server.metrics()) + b"\n")
            self._end()
            return
        if not line:
            await self.say(b"\n")
            return
        request = self.enter(Request(id, prompt=line))
        try:
            async with self.engine.generate(request) as stream, metered(stream, self.account) as meter:
                async for event in work.attach(stream):
                    if isinstance(event, Token):
                        await self.say(event.text.encode())
                    elif isinstance(event, Finished):
                        meter.usage = event.usage
                        self.log_finished(event)
        finally:
            self.leave()
        await self.say(b"\n")


def _line_of(error: UmaError) -> bytes:
    return f"{error.code}: {error.message}".replace("\n", " ").encode("utf-8", "replace") + b"\n"
