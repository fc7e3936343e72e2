"""What `Source.activity` tells of the requests that run, in process and over the socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio
from engine_world import answers, ask, config_for, settled, tokens_for

from harness import PATIENCE_SEC, running_server, short_directory
from uma.client import connect
from uma.engine import open_engine
from uma.types import Activity, Source


@asynccontextmanager
async def opened(kind: str, model: Path) -> AsyncIterator[Source]:
    """A source with two slots: an engine in this process, or a client of a server."""
    if kind == "engine":
        async with open_engine(config_for(model, max_sequences=2)) as engine:
            yield engine
        return
    with short_directory() as directory:
        flags = ("--model", str(model), "--max-sequences", "2", "--n-ctx", "2048")
        with running_server(directory / "uma.sock", *flags) as server:
            async with connect(server.socket) as client:
                yield client


@pytest.mark.parametrize("kind", ["engine", "client"])
async def test_activity_names_what_runs_and_counts_what_waits(kind: str, tiny: Path) -> None:
    async with opened(kind, tiny) as source, AsyncExitStack() as stack:
        assert await source.activity() == Activity((), 0, 0, 0)
        for id, priority in (("a", 1), ("b", 0), ("c", 0), ("d", -1)):
            stream = await stack.enter_async_context(source.generate(ask(max_tokens=1_500, id=id, priority=priority)))
            if id in "ab":
                await anext(aiter(stream))
        with trio.fail_after(PATIENCE_SEC):
            while (activity := await source.activity()).waiting_background == 0:
                pass
        assert [(each.id, each.priority) for each in activity.running] == [("a", 1), ("b", 0)]
        assert (activity.waiting_interactive, activity.waiting_normal, activity.waiting_background) == (0, 1, 1)
        first = activity.running[0]
        assert first.computed_tokens == first.prompt_tokens > first.cached_tokens
        assert first.generated_tokens >= 1
        assert not first.is_preempted


async def test_a_request_that_has_lost_its_cells_is_told_of_as_preempted(tiny: Path) -> None:
    requests = [ask(tokens_for(seed, 70), 150, id=str(seed)) for seed in range(6)]
    async with open_engine(config_for(tiny, n_ctx=256, n_batch=64, n_ubatch=64)) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answers, engine, requests)
            with trio.fail_after(PATIENCE_SEC):
                while not any(each.is_preempted for each in (await engine.activity()).running):
                    pass
        assert (await engine.activity()).running == ()


async def test_a_request_that_ended_unread_is_not_told_of(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine, engine.generate(ask(max_tokens=2)):
        while (await settled(engine))["requests_length"] == 0:
            pass
        assert (await engine.activity()).running == ()
