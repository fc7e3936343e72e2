"""The engine behind an asyncio program: every answer ends with its end or with an error, also where the engine ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from engine_world import ask, break_decode_thread, config_for

from harness import PATIENCE_SEC
from models import write_model
from uma.bridges.dynamo.host import DynamoJob, EngineHost
from uma.errors import ModelError, ShuttingDown
from uma.types import Finished, Prompt, Token


def on_a_host(tmp_path: Path, body: Callable[[EngineHost], Awaitable[None]]) -> None:
    """Run `body` on a loop beside a tiny engine, and end the engine."""
    path = write_model(tmp_path / "tiny.gguf", context_length=8_192)

    async def main() -> None:
        host = EngineHost(config_for(path, n_ctx=8_192))
        try:
            await host.start()
            await body(host)
        finally:
            await host.close(0)

    asyncio.run(asyncio.wait_for(main(), PATIENCE_SEC))


async def to_the_end(job: DynamoJob) -> list[Prompt | Token | Finished]:
    return [event async for events in batches(job) for event in events]


async def batches(job: DynamoJob) -> AsyncIterator[list[Prompt | Token | Finished]]:
    while events := await job.next():
        yield events


def test_an_answer_that_the_engine_s_end_cuts_off_is_an_error_not_a_short_answer(tmp_path: Path) -> None:
    async def body(host: EngineHost) -> None:
        job = host.submit(ask(max_tokens=8_000, ignore_eos=True))
        await host.close(0)
        with pytest.raises(ShuttingDown):
            await to_the_end(job)

    on_a_host(tmp_path, body)


def test_a_drain_lets_answers_end_whole_and_takes_no_more(tmp_path: Path) -> None:
    async def body(host: EngineHost) -> None:
        reader = asyncio.create_task(to_the_end(host.submit(ask(max_tokens=64, ignore_eos=True))))
        await host.close(PATIENCE_SEC)
        last = (await reader)[-1]
        assert isinstance(last, Finished)
        assert (last.reason, last.usage.completion_tokens) == ("length", 64)
        with pytest.raises(ShuttingDown):
            host.submit(ask())
        with pytest.raises(ShuttingDown):
            await host.health()

    on_a_host(tmp_path, body)


def test_a_drain_lets_answers_be_read_to_their_end(tmp_path: Path) -> None:
    async def body(host: EngineHost) -> None:
        job = host.submit(ask(max_tokens=64, ignore_eos=True))
        events: list[Prompt | Token | Finished] = []
        while not any(isinstance(each, Finished) for each in events):
            events += await job.next()
        draining = asyncio.create_task(host.close(PATIENCE_SEC))
        # All has been generated, and the last of it can still be on its way to Dynamo.
        assert not (await asyncio.wait({draining}, timeout=0.3))[0]
        assert await job.next() == []
        await draining

    on_a_host(tmp_path, body)


def test_a_fault_of_the_engine_is_told_and_cuts_answers_off_as_the_worker_s_end_does(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        told = asyncio.Event()
        path = write_model(tmp_path / "tiny.gguf", context_length=8_192)
        host = EngineHost(config_for(path, n_ctx=8_192), on_fault=told.set)
        engine = await host.start()
        job = host.submit(ask(max_tokens=8_000, ignore_eos=True))
        await job.next()
        break_decode_thread(engine)
        with pytest.raises(ShuttingDown):
            await to_the_end(job)
        await told.wait()
        assert isinstance(host.fault, ZeroDivisionError)
        with pytest.raises(ShuttingDown):
            host.submit(ask())
        await host.close(0)

    asyncio.run(asyncio.wait_for(main(), PATIENCE_SEC))


def test_an_engine_that_could_not_start_can_be_closed(tmp_path: Path) -> None:
    async def main() -> None:
        host = EngineHost(config_for(tmp_path / "missing.gguf"))
        with pytest.raises(ModelError):
            await host.start()
        await host.close(0)
        await host.close(0)

    asyncio.run(main())
