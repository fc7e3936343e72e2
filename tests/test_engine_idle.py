"""What the engine does while nothing runs, and that the next request does not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import trio
from engine_world import answer, ask, compute_with, config_for, tokens_for

from harness import PATIENCE_SEC
from uma import open_engine
from uma.engine import Engine
from uma.engine.kv import memory_kinds, pool
from uma.llama.batch import Batch
from uma.llama.context import Context


async def until(engine: Engine, is_so: Callable[[], bool]) -> None:
    """Give other tasks and threads their turns until something is so."""
    with trio.fail_after(PATIENCE_SEC):
        while not is_so():
            await trio.to_thread.run_sync(int)


async def test_a_large_cache_is_copied_in_parts_and_a_request_that_comes_meanwhile_waits_for_one_of_them(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, is_copying, may_go_on = list[str](), threading.Event(), threading.Event()

    class WatchedContext(Context):
        def state_get(self, seq: int) -> bytes:
            if not is_copying.is_set():
                is_copying.set()
                assert may_go_on.wait(PATIENCE_SEC)
            steps.append("part")
            return super().state_get(seq)

        def begin(self, batch: Batch) -> int:
            steps.append("batch")
            return super().begin(batch)

    compute_with(monkeypatch, WatchedContext)
    long = ask(tokens_for(1, 600), 8)
    config = config_for(tiny, n_ctx=1_024, kv_unified="on", cache_ram_mb=64, cache_tokens=1_024)
    async with open_engine(config) as engine:
        monkeypatch.setattr(memory_kinds, "MAX_COPY_BYTES", 50 * engine.worker._pool.cells.bytes_per_token)
        first = await answer(engine, long)
        steps.clear()
        await until(engine, is_copying.is_set)
        async with engine.generate(ask(max_tokens=1)) as other:
            await until(engine, lambda: engine.worker.commands.is_called)
            may_go_on.set()
            async for _ in other:
                pass
        assert steps[:2] == ["part", "batch"]
        await until(engine, lambda: engine.snapshot()["cache_ram_snapshots"] == 1)
        assert steps.count("part") >= 600 // 50
        # Others need the cells; then what was copied in parts, with requests in between, is what was computed.
        await answer(engine, ask(tokens_for(2, 900), 8))
        again = await answer(engine, long)
        assert engine.snapshot()["cache_ram_hits"] == 1
    assert again.token_ids == first.token_ids
    assert again.finished.usage.cached_tokens >= 590


async def test_a_large_snapshot_is_loaded_in_parts_between_which_a_stream_goes_on(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = list[str]()

    class WatchedContext(Context):
        def state_set(self, seq: int, data: bytes | bytearray | memoryview) -> bool:
            steps.append("part")
            return super().state_set(seq, data)

        def begin(self, batch: Batch) -> int:
            steps.append("batch")
            return super().begin(batch)

    compute_with(monkeypatch, WatchedContext)
    monkeypatch.setattr(memory_kinds, "MAX_COPY_BYTES", 2**16)
    monkeypatch.setattr(pool, "MAX_COPY_BYTES", 2**16)
    long = ask(tokens_for(1, 600), 8)
    config = config_for(tiny, n_ctx=4_096, kv_unified="on", cache_ram_mb=64, cache_tokens=0, max_sequences=2)
    async with open_engine(config) as engine:
        first = await answer(engine, long)
        await answer(engine, ask(tokens_for(2, 50), 2))
        async with engine.generate(ask(max_tokens=3_000)) as stream:
            await anext(stream)
            steps.clear()
            again = await answer(engine, long)
            assert engine.worker.active_count == 1, "the stream has ended"
    parts = [at for at, step in enumerate(steps) if step == "part"]
    assert len(parts) >= 4
    assert all(later - at > 1 for at, later in pairwise(parts))
    assert again.token_ids == first.token_ids
    assert again.finished.usage.cached_tokens >= 590
