"""A server that goes away under a job, and what comes back in its place."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import trio.testing

from uma.errors import ConnectionLost, UmaError
from uma.jobs import JobChanged, Progress, ReturningServer, RowAnswer


class Session:
    """One that is lost at once."""

    def __init__(self, name: str) -> None:
        model = SimpleNamespace(name=name, parameters=1, size_bytes=1, quantization="F32")
        self.info: Any = SimpleNamespace(model=model)

    async def lost(self) -> UmaError:
        return ConnectionLost("the server went away")


class Good:
    """An `Ask` that answers everything."""

    async def __call__(self, path: str, body: bytes, id: str) -> RowAnswer:
        return RowAnswer(200, b"{}")

    async def progress(self) -> dict[str, Progress]:
        return {}

    def loading(self) -> str:
        return ""


async def test_another_model_that_comes_back_ends_the_job_and_says_how_it_goes_on(
    autojump_clock: trio.testing.MockClock,
) -> None:
    names, said = iter(["tiny", "other"]), list[str]()

    @asynccontextmanager
    async def connect() -> AsyncIterator[Any]:
        yield Session(next(names))

    server = ReturningServer(connect, lambda _: Good(), said.append)
    with pytest.raises(JobChanged, match=r"back with other, .* has tiny; the same command goes on with a server that"):
        await server.keep(Session("tiny"))  # type: ignore[arg-type]
    assert said == [
        "the server went away; the rows wait until a server is back",
        "the server is back",
        "the server went away; the rows wait until a server is back",
    ]
