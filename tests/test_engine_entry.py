"""The way into the engine: what is prepared in other threads, and requests that are withdrawn before that.

Where all worker threads are taken, whatever needs one waits, and a test can look at it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing
from engine_world import Answer, answer, ask, config_for, settled, tokens_for

from harness import PATIENCE_SEC, frame
from models import write_model
from uma import Message, Request, SamplingParams, open_engine
from uma.engine import Engine
from uma.engine.intake.lanes import MAX_FLOWS, LaneLimiter
from uma.engine.intake.prompt import MAX_PREPARING_BYTES, PromptReader
from uma.engine.kv.disk import FOLDER, DiskTier
from uma.errors import Overloaded, PromptTooLarge, ShuttingDown
from uma.figures import MB
from uma.llama.model import Model
from uma.net.client import CLIENT
from uma.server.server import Server


class NoThreads:
    """All threads that a request could need are taken."""

    def __init__(self, engine: Engine) -> None:
        self._lanes = engine._prompts.lanes
        self._limiter = trio.to_thread.current_default_thread_limiter()

    @property
    def waiting(self) -> int:
        """Tasks that wait for a thread."""
        return self._lanes.waiting + self._limiter.statistics().tasks_waiting

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[NoThreads]:
        """For the block, which takes no longer than a test's patience."""
        with trio.fail_after(PATIENCE_SEC):
            async with AsyncExitStack() as taken:
                for borrower in [object() for _ in range(int(self._limiter.available_tokens))]:
                    self._limiter.acquire_on_behalf_of_nowait(borrower)
                    taken.callback(self._limiter.release_on_behalf_of, borrower)
                for _ in range(self._lanes.slots):
                    await taken.enter_async_context(self._lanes.slot(1))
                yield self


async def one_waits(threads: NoThreads) -> None:
    """Wait until a task waits for a thread, and see that it is one."""
    with trio.fail_after(PATIENCE_SEC):
        while not threads.waiting:
            await trio.testing.wait_all_tasks_blocked()
    assert threads.waiting == 1


@pytest.mark.parametrize("content", ["", "a"])
async def test_a_chat_of_very_many_tiny_messages_is_not_rendered_on_the_trio_thread(tiny: Path, content: str) -> None:
    many = Request("a", messages=(Message("user", content),) * 1_000)
    async with open_engine(config_for(tiny)) as engine:
        with trio.fail_after(PATIENCE_SEC):
            async with trio.open_nursery() as nursery, NoThreads(engine).taken() as threads:
                nursery.start_soon(engine.tokenize, many)
                await trio.testing.wait_all_tasks_blocked()
                assert threads.waiting == 1
                # What is short goes no such way.
                short = (Message("user", content),) * 10
                await answer(engine, Request("b", messages=short, sampling=SamplingParams(max_tokens=1)))


async def test_a_short_chat_whose_template_is_a_program_is_not_rendered_on_the_trio_thread(tmp_path: Path) -> None:
    path = write_model(tmp_path / "program.gguf", chat_template="{% set x = messages[0].content %}{{ x }}")
    chat = Request("a", messages=(Message("user", "Hi!"),))
    async with open_engine(config_for(path)) as engine:
        with trio.fail_after(PATIENCE_SEC):
            async with trio.open_nursery() as nursery, NoThreads(engine).taken() as threads:
                nursery.start_soon(engine.tokenize, chat)
                await one_waits(threads)
        assert (await engine.tokenize(chat)).text == "Hi!"


@pytest.mark.parametrize("waits_for", ["tokens", "disk"])
async def test_a_request_that_is_withdrawn_while_it_is_prepared_is_counted(
    tiny: Path, tmp_path: Path, waits_for: str
) -> None:
    config = config_for(tiny, cache_dir=str(tmp_path / "kv"), cache_ram_mb=16)
    known = tokens_for(1, 600)
    async with open_engine(config) as engine:
        await answer(engine, ask(known, 2))
    async with open_engine(config) as engine:
        async with NoThreads(engine).taken() as threads, trio.open_nursery() as nursery:
            nursery.start_soon(answer, engine, ask("a" * 5_000 if waits_for == "tokens" else (*known, 1)))
            await one_waits(threads)
            nursery.cancel_scope.cancel()
        await answer(engine, ask(max_tokens=2))
        metrics = await settled(engine)
    counted = (metrics["requests_total"], metrics["requests_cancelled"], metrics["requests_length"])
    assert counted == (2, 1, 1)


async def test_a_client_that_hangs_up_while_its_request_is_prepared_is_counted(tiny: Path, socket_dir: Path) -> None:
    config = config_for(tiny, socket=str(socket_dir / "s"))
    async with open_engine(config) as engine, trio.open_nursery() as nursery:
        await nursery.start(Server(engine, config).serve)
        async with NoThreads(engine).taken() as threads:
            async with await trio.open_unix_socket(config.socket) as stream:
                await stream.send_all(frame({"id": "a", "prompt": "a" * 5_000}))
                while not threads.waiting:
                    await trio.testing.wait_all_tasks_blocked()
            while threads.waiting:
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

    async with open_engine(config) as engine, trio.open_nursery() as nursery, NoThreads(engine).taken() as threads:
        for id in range(5):
            nursery.start_soon(read, id)
        await one_waits(threads)
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

    async with open_engine(config) as engine, trio.open_nursery() as nursery, NoThreads(engine).taken() as threads:
        nursery.start_soon(late, engine)
        await one_waits(threads)  # its prompt is about to be tokenized
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
        assert engine.disk is not None
        assert engine.disk.max_queued_bytes == MB, "more waits for the disk than memory may hold"
        got = await answer(engine, ask((*known, 1), 2))
    assert (files_read, got.finished.usage.cached_tokens) == ([], 0)


# Preparation


@pytest.mark.parametrize("slots", [1, 2])
async def test_a_cancelled_task_leaves_its_thread_at_once_and_the_next_of_its_lane_begins_after_that(
    slots: int,
) -> None:
    lanes, begun, goes_on, order = LaneLimiter(slots), threading.Event(), threading.Event(), list[str]()

    def slow() -> None:
        begun.set()
        goes_on.wait(PATIENCE_SEC)
        order.append("slow ends")

    async def work(function: Callable[[], None], scope: trio.CancelScope, lane: int = -1) -> None:
        with scope:
            async with lanes.slot(lane) as slot:
                await slot.in_thread(function)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(work, slow, scope := trio.CancelScope())
        await trio.to_thread.run_sync(begun.wait)
        scope.cancel()
        nursery.start_soon(work, lambda: order.append("next"), trio.CancelScope())
        await trio.testing.wait_all_tasks_blocked()
        assert (scope.cancelled_caught, lanes.waiting, order) == (True, 1, [])
        if slots == 2:
            await work(lambda: order.append("interactive"), trio.CancelScope(), 0)
        goes_on.set()
    assert order == [*(["interactive"] if slots == 2 else []), "slow ends", "next"]


async def test_clients_take_turns_with_each_picture_one_at_a_time(tiny: Path) -> None:
    reader, decoded, begun = PromptReader(config_for(tiny), cast(Model, None), 100), threading.Semaphore(0), list[str]()

    def slow(request: Request, next_file: Callable[[], None]) -> None:
        for _ in range(4):
            next_file()
            begun.append(request.id)
            assert decoded.acquire(timeout=PATIENCE_SEC)

    async def read(client: str, id: str) -> None:
        CLIENT.set(client)
        await reader.read_pictures(slow, Request(id, prompt="a"))

    async def have_begun(count: int) -> None:
        while len(begun) < count:
            await trio.to_thread.run_sync(int)

    async with trio.open_nursery() as nursery:
        for client, id, count in ("a", "a1", 1), ("a", "a2", 1), ("b", "b1", 2), ("c", "c1", 2):
            nursery.start_soon(read, client, id)
            await have_begun(count)
            await trio.testing.wait_all_tasks_blocked()
        permits = 0
        while "c1" not in begun:  # its thread can be late to ask for its turn, but not by all files of the others
            permits += 1
            decoded.release()
            await have_begun(2 + permits)
        assert "a2" not in begun and begun.count("b1") < 4
        decoded.release(16 - permits)
    assert [id for id in begun if id[0] == "a"] == ["a1"] * 4 + ["a2"] * 4


@pytest.mark.parametrize("slots", [1, 2])
async def test_slots_are_given_by_lane_then_by_arrival_and_the_last_is_kept_from_background(slots: int) -> None:
    lanes, order = LaneLimiter(slots), list[str]()

    async def work(lane: int, name: str) -> None:
        async with lanes.slot(lane):
            order.append(name)
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery, AsyncExitStack() as other:
        if slots == 2:
            await other.enter_async_context(lanes.slot(1))
        async with lanes.slot(1):
            for lane, name in ((-1, "b1"), (-1, "b2"), (0, "n1"), (0, "n2"), (1, "i1"), (1, "i2"), (-1, "b3")):
                nursery.start_soon(work, lane, name)
                await trio.testing.wait_all_tasks_blocked()
            assert order == []
        await trio.testing.wait_all_tasks_blocked()
        above = ["i1", "i2", "n1", "n2"]
        assert order == (above if slots == 2 else [*above, "b1", "b2", "b3"])
    assert order == [*above, "b1", "b2", "b3"]


@pytest.mark.parametrize("granted", ["never", "with the cancel", "before"])
async def test_a_slot_that_is_waited_for_in_vain_is_not_lost(granted: str) -> None:
    lanes = LaneLimiter(1)

    async def work() -> None:
        async with lanes.slot(0):
            await trio.sleep_forever()

    async with AsyncExitStack() as other:
        if granted != "before":
            await other.enter_async_context(lanes.slot(0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work)
            if granted != "before":
                await trio.testing.wait_all_tasks_blocked()
            if granted == "with the cancel":
                await other.aclose()
            nursery.cancel_scope.cancel()
    assert lanes.waiting == 0
    with trio.fail_after(PATIENCE_SEC):
        async with lanes.slot(0):
            pass


async def test_within_a_lane_clients_take_turns_by_what_their_work_costs() -> None:
    lanes, order = LaneLimiter(1), list[str]()

    async def work(client: str, cost: float) -> None:
        CLIENT.set(client)
        async with lanes.slot(0, cost):
            order.append(client)

    async with trio.open_nursery() as nursery, lanes.slot(0):
        for client, cost, count in (("flood", 1, 6), ("other", 1, 2), ("heavy", 3, 2)):
            for _ in range(count):
                nursery.start_soon(work, client, cost)
                await trio.testing.wait_all_tasks_blocked()
    first, rest = order[:3], order[3:]
    assert first == ["flood", "other", "heavy"]
    assert rest == ["flood", "other", "flood", "flood", "heavy", "flood", "flood"]


async def test_clients_that_come_and_go_are_forgotten_although_a_slot_is_always_held() -> None:
    lanes = LaneLimiter(2)
    async with lanes.slot(0):
        for number in range(3 * MAX_FLOWS):
            CLIENT.set(number)
            async with lanes.slot(0):
                pass
        assert len(lanes) <= MAX_FLOWS


async def test_work_that_a_client_cancels_costs_it_no_turn() -> None:
    lanes, order = LaneLimiter(1), list[str]()

    async def work(client: str, name: str, scope: trio.CancelScope) -> None:
        CLIENT.set(client)
        with scope:
            async with lanes.slot(0):
                order.append(name)

    async with trio.open_nursery() as nursery:

        async def begin(client: str, name: str) -> trio.CancelScope:
            scope = trio.CancelScope()
            nursery.start_soon(work, client, name, scope)
            await trio.testing.wait_all_tasks_blocked()
            return scope

        async with lanes.slot(0):
            withdrawn = await begin("third", "withdrawn")
            given_up = [await begin("one", f"given up {number}") for number in range(3)]
            for client, name in (
                ("one", "last of one"),
                ("other", "other 0"),
                ("other", "other 1"),
                ("third", "last of third"),
            ):
                await begin(client, name)
            for scope in given_up:
                scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            withdrawn.cancel()
        # The slot is given to the task that was cancelled, which has not run yet.
    assert order[3:] == ["other 1"], "each has a turn before another's second"


async def test_one_clients_prompts_leave_space_and_a_turn_for_anothers(tiny: Path) -> None:
    done, refused = list[str](), Counter[str]()

    async def ask_as(client: str, engine: Engine, request: Request) -> None:
        CLIENT.set(client)
        try:
            await engine.tokenize(request)
            done.append(client)
        except Overloaded:
            refused[client] += 1

    async with open_engine(config_for(tiny, n_ctx=32_768, max_prompt_bytes=4 * 2**20)) as engine:
        with trio.fail_after(PATIENCE_SEC):
            async with trio.open_nursery() as nursery, NoThreads(engine).taken():
                for number in range(100):
                    nursery.start_soon(ask_as, "flood", engine, long_text(200, 0, f"flood {number}"))
                    await trio.testing.wait_all_tasks_blocked()
                assert refused["flood"] > 50
                nursery.start_soon(ask_as, "other", engine, long_text(200, 0, "other"))
                await trio.testing.wait_all_tasks_blocked()
    assert refused["other"] == 0
    assert done.index("other") < 10 < done.count("flood"), "it waited for all that was there before"


async def test_many_texts_of_one_client_are_prepared_in_pieces_between_which_others_have_a_turn(tiny: Path) -> None:
    done, may_go_on = list[str](), threading.Event()

    def prepare(index: int) -> int:
        assert may_go_on.wait(PATIENCE_SEC)
        done.append("text")
        return index

    async def ask_as_another(engine: Engine) -> None:
        await engine.tokenize(long_text(20, 0, "other"))
        done.append("other")

    async with open_engine(config_for(tiny, n_ctx=32_768)) as engine:
        with trio.fail_after(PATIENCE_SEC):
            async with engine._prompts.lanes.slot(1), trio.open_nursery() as nursery:
                found: list[int] = []

                async def prepare_all() -> None:
                    found.extend(await engine._prompts.prepare_texts(prepare, [1_000] * 1_000, 0))

                nursery.start_soon(prepare_all)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(ask_as_another, engine)
                await trio.testing.wait_all_tasks_blocked()
                may_go_on.set()
    assert found == list(range(1_000))
    assert 0 < done.index("other") < 500


async def test_ids_are_turned_into_text_in_a_thread_where_they_are_many(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        with trio.fail_after(PATIENCE_SEC):
            async with trio.open_nursery() as nursery, NoThreads(engine).taken() as threads:
                nursery.start_soon(engine.tokenize, Request("many", token_ids=(1,) * 100_000))
                await one_waits(threads)
                assert (await engine.tokenize(Request("few", token_ids=(1, 2)))).token_ids == (1, 2)


def long_text(kib: int, priority: Any, id: str) -> Request:
    return ask("word " * (kib * 1024 // 5), 2, id=id, priority=priority)


async def test_a_flood_of_long_background_prompts_leaves_the_way_free_for_others(tiny: Path) -> None:
    """They wait, up to a bound on their bytes, and what is refused is told when to try again."""
    refused: list[Overloaded] = []

    async def flood(engine: Engine, number: int) -> None:
        try:
            await answer(engine, long_text(200, -1, f"flood {number}"))
        except Overloaded as error:
            refused.append(error)
        except PromptTooLarge:
            pass

    config = config_for(tiny, n_ctx=32_768, max_prompt_bytes=4 * 2**20)
    async with open_engine(config) as engine:
        async with NoThreads(engine).taken() as threads, trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(flood, engine, number)
            await trio.testing.wait_all_tasks_blocked()
            waiting = threads.waiting
            assert 0 < waiting < 100
            assert waiting + len(refused) == 100
            assert engine._prompts._preparing_bytes <= 0.5 * MAX_PREPARING_BYTES
            nursery.start_soon(flood, engine, 100)
            await trio.testing.wait_all_tasks_blocked()
            assert threads.waiting == waiting, "it was not refused"
            nursery.start_soon(engine.tokenize, long_text(200, 1, "interactive"))
            await trio.testing.wait_all_tasks_blocked()
            assert threads.waiting == waiting + 1, "background took the space of others"
            nursery.cancel_scope.cancel()
        assert engine._prompts._preparing_bytes == 0
    assert all(error.retry_after_ms for error in refused)


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_engine(config_for(tiny, n_ctx=512, max_prompt_bytes=4 * 2**20)) as engine:
        vocab = engine._context.model.vocab
        for size in (100, 1_000, 40_000):
            text = "many words " * size
            assert 0 < vocab.least_tokens(text) <= len(vocab.tokenize(text, add_special=False, parse_special=False))

        def fail(*_: Any, **__: Any) -> Any:
            raise AssertionError("it was tokenized")

        monkeypatch.setattr(type(vocab), "tokenize", fail)
        with pytest.raises(PromptTooLarge, match="prompt too large: 440,000 characters are"):
            await answer(engine, ask("many words " * 40_000))
