"""The way into the engine: what is prepared in other threads, who leaves before that is done, who comes together.

Where all worker threads are taken, whatever needs one waits, and a test can look at it.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from engine_world import Answer, answer, ask, config_for, settled, tokens_for

from harness import PATIENCE_SEC, frame
from uma import Message, Request, SamplingParams, open_engine
from uma.engine import Engine
from uma.engine.intake.coalesce import WhenIdle
from uma.engine.kv.disk import FOLDER, DiskTier
from uma.errors import ShuttingDown
from uma.server.server import Server


@contextmanager
def no_thread_free() -> Iterator[trio.CapacityLimiter]:
    """A block in which all of Trio's worker threads are taken."""
    limiter = trio.to_thread.current_default_thread_limiter()
    borrowers = [object() for _ in range(int(limiter.available_tokens))]
    for each in borrowers:
        limiter.acquire_on_behalf_of_nowait(each)
    try:
        yield limiter
    finally:
        for each in borrowers:
            limiter.release_on_behalf_of(each)


async def one_waits(limiter: trio.CapacityLimiter) -> None:
    """Wait until somebody waits for a thread, and see that it is one."""
    with trio.fail_after(PATIENCE_SEC):
        while not limiter.statistics().tasks_waiting:
            await trio.testing.wait_all_tasks_blocked()
    assert limiter.statistics().tasks_waiting == 1


@pytest.mark.parametrize("content", ["", "a"])
async def test_a_chat_of_very_many_tiny_messages_is_not_rendered_on_the_trio_thread(tiny: Path, content: str) -> None:
    many = Request("a", messages=(Message("user", content),) * 1_000)
    async with open_engine(config_for(tiny)) as engine:
        with trio.fail_after(PATIENCE_SEC):
            async with trio.open_nursery() as nursery:
                with no_thread_free() as limiter:
                    nursery.start_soon(engine.tokenize, many)
                    await trio.testing.wait_all_tasks_blocked()
                    assert limiter.statistics().tasks_waiting == 1
                    # What is short goes no such way.
                    short = (Message("user", content),) * 10
                    await answer(engine, Request("b", messages=short, sampling=SamplingParams(max_tokens=1)))


@pytest.mark.parametrize("waits_for", ["tokens", "disk"])
async def test_a_request_that_is_withdrawn_while_it_is_prepared_is_counted(
    tiny: Path, tmp_path: Path, waits_for: str
) -> None:
    config = config_for(tiny, cache_dir=str(tmp_path / "kv"), cache_ram_mb=16)
    known = tokens_for(1, 600)
    async with open_engine(config) as engine:
        await answer(engine, ask(known, 2))
    async with open_engine(config) as engine:
        with no_thread_free() as limiter:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(answer, engine, ask("a" * 5_000 if waits_for == "tokens" else (*known, 1)))
                await one_waits(limiter)
                nursery.cancel_scope.cancel()
        await answer(engine, ask(max_tokens=2))
        metrics = await settled(engine)
    counted = (metrics["requests_total"], metrics["requests_cancelled"], metrics["requests_length"])
    assert counted == (2, 1, 1)


async def test_a_client_that_hangs_up_while_its_request_is_prepared_is_counted(tiny: Path, socket_dir: Path) -> None:
    config = config_for(tiny, socket=str(socket_dir / "s"))
    async with open_engine(config) as engine, trio.open_nursery() as nursery:
        await nursery.start(Server(engine, config).serve)
        with trio.fail_after(PATIENCE_SEC), no_thread_free() as limiter:
            async with await trio.open_unix_socket(config.socket) as stream:
                await stream.send_all(frame({"id": "a", "prompt": "a" * 5_000}))
                while not limiter.statistics().tasks_waiting:
                    await trio.testing.wait_all_tasks_blocked()
            while limiter.statistics().tasks_waiting:
                await trio.testing.wait_all_tasks_blocked()
            await trio.testing.wait_all_tasks_blocked()
        metrics = engine.snapshot()
        nursery.cancel_scope.cancel()
    assert (metrics["requests_total"], metrics["requests_cancelled"]) == (1, 1)


@pytest.fixture
def files_read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The snapshot files that were read whole, in order."""
    paths: list[Path] = []
    read = DiskTier._read

    def noting(self: DiskTier, entry: Any) -> Any:
        paths.append(entry.path)
        return read(self, entry)

    monkeypatch.setattr(DiskTier, "_read", noting)
    return paths


async def test_a_file_that_many_need_at_once_is_read_once(tiny: Path, tmp_path: Path, files_read: list[Path]) -> None:
    config = config_for(tiny, cache_dir=str(tmp_path / "kv"), cache_ram_mb=16)
    known = tokens_for(1, 600)
    async with open_engine(config) as engine:
        await answer(engine, ask(known, 2))
    got: list[Answer] = []

    async def read(id: int) -> None:
        got.append(await answer(engine, ask((*known, id), 2, id=str(id))))

    async with open_engine(config) as engine, trio.open_nursery() as nursery:
        with no_thread_free() as limiter:
            for id in range(5):
                nursery.start_soon(read, id)
            await one_waits(limiter)
    assert [each.finished.usage.cached_tokens >= 600 for each in got] == [True] * 5
    assert len(files_read) == 1


async def test_no_file_is_read_for_what_cells_hold(tiny: Path, tmp_path: Path, files_read: list[Path]) -> None:
    config = config_for(tiny, cache_dir=str(tmp_path / "kv"), cache_ram_mb=16)
    known = tokens_for(1, 600)
    async with open_engine(config) as engine:
        await answer(engine, ask(known, 2))
    async with open_engine(config) as engine:
        await answer(engine, ask((*known, 1), 2))
        assert len(files_read) == 1
        store = engine._pool.store
        for snapshot in store._index:
            store._remove(snapshot)  # as others would have pushed it out
        del snapshot
        got = await answer(engine, ask((*known, 2), 2))
    assert (len(files_read), got.finished.usage.cached_tokens) == (1, 600)


async def test_a_request_that_would_ask_a_stopped_engine_what_it_holds_is_refused(tiny: Path, tmp_path: Path) -> None:
    config = config_for(tiny, cache_dir=str(tmp_path / "kv"), cache_ram_mb=16, n_ctx=8_192)
    prompt = "a" * 5_000
    async with open_engine(config) as engine:
        await answer(engine, ask(prompt, 2))
    refused: list[ShuttingDown] = []

    async def late(engine: Engine) -> None:
        with pytest.raises(ShuttingDown) as error:
            await answer(engine, ask(prompt + "b", 2))
        refused.append(error.value)

    async with open_engine(config) as engine, trio.open_nursery() as nursery:
        with no_thread_free() as limiter:
            nursery.start_soon(late, engine)
            await one_waits(limiter)  # its prompt is about to be tokenized
            engine.begin_drain()
            engine.worker.stop()
    assert len(refused) == 1


async def test_no_file_is_read_that_memory_could_not_hold(tiny: Path, tmp_path: Path, files_read: list[Path]) -> None:
    folder, known = str(tmp_path / "kv"), tokens_for(1, 2_030)
    async with open_engine(config_for(tiny, cache_dir=folder, cache_ram_mb=16)) as engine:
        await answer(engine, ask(known, 2))
    (kept,) = (tmp_path / "kv" / FOLDER).glob("*.umakv")
    assert kept.stat().st_size > 2**20
    async with open_engine(config_for(tiny, cache_dir=folder, cache_ram_mb=1)) as engine:
        got = await answer(engine, ask((*known, 1), 2))
    assert (files_read, got.finished.usage.cached_tokens) == ([], 0)


# Bursts


async def test_requests_that_come_in_one_burst_are_read_in_one_batch_and_decode_in_step(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("uma.engine.engine.GATHER_SEC", PATIENCE_SEC)  # however slow this machine is
    caplog.set_level(logging.DEBUG, "uma.engine.scheduler")

    async def enter(number: int) -> None:
        for _ in range(20 * number):  # one comes after the other, as they do over a socket
            await trio.lowlevel.checkpoint()
        await answer(engine, ask(tokens_for(number, 10), 8, id=str(number)))

    # A machine that was measured to be slow would be given smaller batches.
    async with open_engine(config_for(tiny, tick_budget_ms=1e9, slo_tbt_ms=1e9)) as engine:
        # At once after another has ended, while the decode thread still comes to rest.
        await answer(engine, ask(max_tokens=1))
        caplog.clear()
        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(enter, number)
    batches = re.findall(r"^batch (\w+)=(\d+) sequences=(\d+)", "\n".join(caplog.messages), re.MULTILINE)
    assert batches == [("prefill", "60", "6"), *[("decode", "6", "6")] * 7]


async def at_length(done: list[int], count: int) -> None:
    """Have Trio wait for other things until `done` is so long."""
    with trio.fail_after(PATIENCE_SEC):
        while len(done) < count:
            await trio.to_thread.run_sync(int)


async def test_what_waits_for_trio_to_have_nothing_to_run_is_done_once() -> None:
    done: list[int] = []
    left = 50

    async def work() -> None:
        nonlocal left
        while left:
            left -= 1
            await trio.lowlevel.checkpoint()

    when_idle = WhenIdle(lambda: done.append(left), PATIENCE_SEC)
    for count in (1, 2):
        left = 50
        async with trio.open_nursery() as nursery:
            when_idle.ask()
            nursery.start_soon(work)
            when_idle.ask()
        await at_length(done, count)
        assert done == [0] * count


async def test_what_many_wait_for_is_not_done_before_what_has_reached_the_system_was_read() -> None:
    near, far = socket.socketpair()
    near.setblocking(False)
    read: list[bytes] = []
    done: list[int] = []
    when_idle = WhenIdle(lambda: done.append(len(read)), PATIENCE_SEC)

    async def receive() -> None:
        for _ in range(3):
            await trio.lowlevel.wait_readable(near)
            read.append(near.recv(1))
            when_idle.ask()

    with near, far:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked()
            when_idle.ask()
            when_idle.ask()
            far.send(b"abc")
        await at_length(done, 1)
    assert done == [3]


async def test_a_burst_that_does_not_end_is_not_waited_for(tiny: Path) -> None:
    async def keep_busy() -> None:
        while True:
            await trio.lowlevel.checkpoint()

    async with open_engine(config_for(tiny)) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(keep_busy)
        assert len((await answer(engine, ask(max_tokens=3))).tokens) == 3
        nursery.cancel_scope.cancel()
