"""Answers to a job's rows from a server that can go away and come back meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import attrs
import trio

from uma.errors import ConnectionLost, Overloaded, TooManySessions, UmaError
from uma.jobs.ask import Progress, RowAnswer, RowAsk
from uma.jobs.journal import JobChanged
from uma.types import Source

RETRY_SEC = 1.0
"""Time between two attempts to reach a server that is gone, and after which its rows are asked again."""
_GONE = b'{"error": {"message": "the server is gone", "type": "server_error", "param": null, "code": null}}'


class Session(Source, Protocol):
    """A source that can be lost: a client of a server."""

    async def lost(self) -> UmaError:
        """Wait until the session is over; the reason."""


@attrs.define(eq=False)
class ReturningServer(RowAsk):
    """An `RowAsk` of whichever server listens on a socket. While none does, the same works later."""

    connect: Callable[[], AbstractAsyncContextManager[Session]]
    ask_of: Callable[[Source], RowAsk]
    say: Callable[[str], None]
    """Gets a line when the server goes away, and when it is back."""
    _ask: RowAsk | None = attrs.field(default=None, init=False)

    async def __call__(self, path: str, body: bytes, id: str) -> RowAnswer:
        if self._ask is None:
            return RowAnswer(503, _GONE, retry_after_ms=int(1000 * RETRY_SEC))
        return await self._ask(path, body, id)

    async def progress(self) -> Mapping[str, Progress]:
        return {} if self._ask is None else await self._ask.progress()

    def loading(self) -> str:
        return "" if self._ask is None else self._ask.loading()

    async def keep(self, client: Session) -> None:
        """Stay with `client`, and with whatever follows when it is lost; to be cancelled. Raises `JobChanged` where a
        server with another model follows.
        """
        model = model_of(client)
        await self._stay(client)
        while True:
            await trio.sleep(RETRY_SEC)
            try:
                async with self.connect() as fresh:
                    if (now := model_of(fresh)) != model:
                        raise JobChanged(
                            f"the server is back with {now['name']}, and this job has {model['name']}; the same "
                            "command goes on with a server that has it"
                        )
                    self.say("the server is back")
                    await self._stay(fresh)
            except (ConnectionLost, TooManySessions, Overloaded):
                continue

    async def _stay(self, client: Session) -> None:
        self._ask = self.ask_of(client)
        try:
            loss = await client.lost()
        finally:
            self._ask = None
        self.say(f"{loss.message}; the rows wait until a server is back")


def model_of(source: Source) -> dict[str, Any]:
    """What makes a model another one, as a job's journal has it."""
    model = source.info.model
    return {
        "name": model.name,
        "parameters": model.parameters,
        "size_bytes": model.size_bytes,
        "quantization": model.quantization,
    }
