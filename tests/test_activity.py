"""What `Source.activity` tells of the requests that run, in process and over the socket."""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import trio
from engine_world import answers, ask, config_for, settled, tokens_for

from harness import PATIENCE_SEC, running_server, short_directory
from uma.client import connect
from uma.engine import Engine, open_engine
from uma.llama.batch import Batch
from uma.llama.context import Context
from uma.net.client import origin
from uma.net.peer import program_of
from uma.types import Activity, Source

ORIGINS = {"engine": "", "client": origin("socket", None, program_of(os.getpid()), os.getpid())}


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
        assert [(each.id, each.waits_for) for each in activity.waiting] == [("c", "slot"), ("d", "slot")]
        # A server knows the program at the other end of its socket, and an engine that it is its own process.
        assert {each.origin for each in (*activity.running, *activity.waiting)} == {ORIGINS[kind]}
        runs, waits = await source.activity("b"), await source.activity("d")
        assert [[each.id for each in own.running] for own in (runs, waits)] == [["b"], []]
        assert [(each.id, each.waits_for) for each in (*runs.waiting, *waits.waiting)] == [("d", "")]
        assert (runs.waiting_normal, waits.waiting_background) == (0, 1)
        first = activity.running[0]
        assert first.computed_tokens == first.prompt_tokens > first.cached_tokens
        assert first.generated_tokens >= 1
        assert not first.is_preempted


async def test_a_prompt_behind_another_one_waits_for_it_and_says_so(heavy: Path) -> None:
    """Both have a slot. The first is read, and the second is not called so before its turn has come."""
    requests = [ask(tokens_for(seed, 1_500), 1, id=str(seed)) for seed in range(2)]
    async with open_engine(config_for(heavy, n_ctx=4_096)) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(answers, engine, requests)
        seen: dict[str, str] = {}
        with trio.fail_after(PATIENCE_SEC):
            while "prompt" not in seen.values():
                activity = await engine.activity()
                seen = {each.id: each.waits_for for each in activity.running}
        assert sorted(seen.values()) == ["", "prompt"]
        (waiting,) = (each for each in activity.running if each.waits_for)
        assert seen[waiting.behind] == ""
        nursery.cancel_scope.cancel()


@pytest.mark.skipif(sys.platform == "darwin", reason="there it moves with each batch")
@pytest.mark.parametrize("is_reproducible", [False, True])
async def test_the_count_of_a_prompt_moves_also_while_a_batch_of_it_is_computed(
    heavy: Path, is_reproducible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    begin, begun = Context.begin, list[int]()

    def noted(context: Context, batch: Batch) -> int:
        begun.append(int(batch.pos[0]))
        return begin(context, batch)

    async def watch(engine: Engine) -> None:
        while True:
            seen.extend(each.computed_tokens for each in (await engine.activity()).running)

    monkeypatch.setattr(Context, "begin", noted)
    async with open_engine(config_for(heavy, n_ctx=4_096)) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(watch, engine)
        await answers(engine, [ask(tokens_for(1, 1_500), 1, reproducible=is_reproducible)])
        nursery.cancel_scope.cancel()
    back = {after for before, after in pairwise(seen) if after < before}
    assert back <= set(begun), "only where some are computed again"
    assert max(seen) <= 1_500
    inside = Counter(bisect_right(begun, count) for count in set(seen) - {*begun, 1_500})
    assert max(inside.values()) > 1


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
