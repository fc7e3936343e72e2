"""The rows of a job at a server that has several models: each goes to the one that it names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager

import attrs
import trio

from uma import json_bytes
from uma.client import Client
from uma.errors import BadRequest, UmaError, UnknownModel
from uma.http.dialect import dumps
from uma.http.openai import OPENAI
from uma.http.problem import Problem
from uma.jobs import Progress, ReturningServer, RowAnswer, RowAsk
from uma.types import Source


@attrs.define(eq=False)
class NamedModels:
    """An `RowAsk` that has a session for each model which a row has named. Belongs to a Trio thread."""

    default: RowAsk
    """Model of rows that name none."""
    connect: Callable[[str], AbstractAsyncContextManager[Client]]
    """Opens a session with the model of this name; raises where there is none."""
    ask_of: Callable[[Source], RowAsk]
    say: Callable[[str], None]
    """See `ReturningServer`."""
    nursery: trio.Nursery
    """The sessions run here."""
    _asks: dict[str, RowAsk] = attrs.field(factory=dict, init=False)
    _opening: defaultdict[str, trio.Lock] = attrs.field(factory=lambda: defaultdict(trio.Lock), init=False)

    async def __call__(self, path: str, body: bytes, id: str) -> RowAnswer:
        """See `RowAsk`."""
        fields = json_bytes.loads(body)
        name = fields.get("model") if isinstance(fields, dict) else None
        if not isinstance(name, str):
            return await self.default(path, body, id)
        try:
            ask = await self._ask(name)
        except UmaError as error:
            # The protocol has one code for a model that is not there and for other requests that are refused.
            problem = Problem.of(UnknownModel(error.message) if isinstance(error, BadRequest) else error)
            return RowAnswer(problem.status, dumps(OPENAI.error(problem, id)), retry_after_ms=problem.retry_after_ms)
        return await ask(path, body, id)

    async def progress(self) -> Mapping[str, Progress]:
        """See `RowAsk`."""
        found: dict[str, Progress] = {}
        for ask in (self.default, *self._asks.values()):
            found |= await ask.progress()
        return found

    async def _ask(self, name: str) -> RowAsk:
        """That of the model's session, which the first row that names it opens."""
        async with self._opening[name]:
            if name not in self._asks:
                self._asks[name] = await self._opened(name)
            return self._asks[name]

    async def _opened(self, name: str) -> RowAsk:
        failures: list[UmaError] = []
        server = ReturningServer(lambda: self.connect(name), self.ask_of, self.say)
        is_open = trio.Event()

        async def stay() -> None:
            try:
                async with self.connect(name) as client:
                    is_open.set()
                    await server.keep(client)
            except UmaError as error:
                if is_open.is_set():
                    raise
                failures.append(error)
                is_open.set()

        self.nursery.start_soon(stay)
        await is_open.wait()
        if failures:
            raise failures[0]
        return server
