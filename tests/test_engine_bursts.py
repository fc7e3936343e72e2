"""Bursts: requests that arrive together are read in one batch, those included that are still being sent, parsed or
tokenized, and those that wait for what one of them computes.

A batch that reads several short rests of prompts takes hardly longer than one of them, so the first of a burst must not
be computed before the others.
"""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trio.testing
from engine_world import answer, answers, ask, config_for, tokens_for

from harness import PATIENCE_SEC, frame
from uma import RuntimeConfig, open_engine
from uma.client import connect
from uma.engine import Engine
from uma.engine.recorder import Recorder
from uma.engine.worker.commands import Commands
from uma.engine.worker.loop import DecodeWorker
from uma.http.app import build_app
from uma.http.gateway import Gateway
from uma.net.arrivals import MAX_EXPECTED_BYTES, Arrivals, arrivals
from uma.server.server import Server

Batches = Callable[[], list[tuple[str, int, int]]]
Work = Callable[[], Awaitable[object]]
TURNS = 20
"""Turns of Trio's loop, each through a thread, in which a decode thread that was woken would have begun."""


def flash_config(model: Path, **settings: Any) -> RuntimeConfig:
    """With flash attention, and with a first piece as large as any: all that has come together is in one batch."""
    return config_for(model, flash_attn="on", **{"start_target_tokens": 4_096, **settings})


pytestmark = pytest.mark.usefixtures("gathers_long")


@pytest.fixture
def gathers_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst is waited for however slow this machine is."""
    monkeypatch.setattr("uma.engine.submission.GATHER_SEC", PATIENCE_SEC)


@pytest.fixture
def at_rest(monkeypatch: pytest.MonkeyPatch) -> Work:
    """Waits until the decode thread rests for the first time. Only a wakeup has it take up what comes from then on."""
    is_resting, rest = threading.Event(), Commands.wait

    def noted(commands: Commands, timeout_sec: float | None = None) -> bool:
        is_resting.set()
        return rest(commands, timeout_sec)

    monkeypatch.setattr(Commands, "wait", noted)
    return partial(trio.to_thread.run_sync, is_resting.wait, PATIENCE_SEC)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Batches:
    """The batches since it was called last: kind, tokens and sequences."""
    recorders, workers, run = [Recorder()], list[DecodeWorker](), DecodeWorker.run

    def recorded(worker: DecodeWorker) -> None:
        workers.append(worker)
        worker.record(recorders[-1])
        run(worker)

    monkeypatch.setattr(DecodeWorker, "run", recorded)

    def found() -> list[tuple[str, int, int]]:
        recorder = recorders[-1]
        recorders.append(Recorder())
        for worker in workers:
            worker.record(recorders[-1])
        spans = [span for span in json.loads(b"".join(recorder.written()))["traceEvents"] if span["ph"] == "X"]
        rows = [(span["name"], span["args"]["rows"]) for span in spans if span["name"] in ("batch", "decode")]
        # A piece of a prompt is "id: tokens at position".
        return [
            ("prefill", sum(int(row.split(": ")[-1].split()[0]) for row in of), len(of))
            if name == "batch"
            else (name, len(of), len(of))
            for name, of in rows
        ]

    return found


async def test_requests_that_come_in_one_burst_are_read_in_one_batch_and_decode_in_step(
    tiny: Path, batches: Batches
) -> None:
    async def enter(number: int) -> None:
        for _ in range(20 * number):  # one comes after the other, as they do over a socket
            await trio.lowlevel.checkpoint()
        await answer(engine, ask(tokens_for(number, 10), 8, id=str(number)))

    # A machine that was measured to be slow would be given smaller batches.
    async with open_engine(flash_config(tiny, tick_budget_ms=1e9)) as engine:
        await answer(engine, ask(max_tokens=1))
        batches()
        # At once after another has ended, while the decode thread still comes to rest.
        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(enter, number)
    assert batches() == [("prefill", 60, 6), *[("decode", 6, 6)] * 7]


async def test_beside_a_stream_a_burst_begins_over_several_ticks_and_all_of_it_is_served(
    tiny: Path, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uma.engine.worker.slots.MAX_ADMIT_MS", -1.0)  # one begins in each tick
    requests = [ask(tokens_for(number, 10), 8, id=str(number)) for number in range(6)]
    async with open_engine(flash_config(tiny, tick_budget_ms=1e9)) as engine:
        expected = [each.token_ids for each in await answers(engine, requests)]
        async with engine.generate(ask(max_tokens=None, id="stream")) as stream:
            await anext(stream)
            batches()
            assert [each.token_ids for each in await answers(engine, requests)] == expected
            assert len([kind for kind, *_ in batches() if kind == "prefill"]) >= len(requests)


def test_a_call_for_what_the_decode_thread_has_taken_up_already_does_not_end_its_next_rest() -> None:
    commands = Commands()
    commands.call(lambda: None)
    assert len(list(commands.take())) == 1
    commands.wake()
    assert not commands.wait(0)
    assert not commands.is_called


async def test_a_burst_that_does_not_end_is_not_waited_for(tiny: Path) -> None:
    async def keep_busy() -> None:
        while True:
            await trio.lowlevel.checkpoint()

    async with open_engine(flash_config(tiny)) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(keep_busy)
        assert len((await answer(engine, ask(max_tokens=3))).tokens) == 3
        nursery.cancel_scope.cancel()


# What is still being read


async def only_one_is_there(engine: Engine) -> None:
    """Wait until one request has reached the engine; it must not be computed."""
    while not engine._requests.open:
        await trio.testing.wait_all_tasks_blocked()
    for _ in range(TURNS):
        await trio.to_thread.run_sync(int)
    assert len(engine._requests.open) == 1
    assert engine.worker.active_count == 0, "the first was begun alone"


async def arrive_apart(
    engine: Engine, parsing: trio.CapacityLimiter, nursery: trio.Nursery, first: Work, second: Work
) -> None:
    """Start both. When `first` has reached the engine, `second` still waits for a thread in which it is parsed."""
    before, between = object(), object()
    parsing.total_tokens = 1
    parsing.acquire_on_behalf_of_nowait(before)
    waits: list[Work] = [first, partial(parsing.acquire_on_behalf_of, between), second]
    for waiting, work in enumerate(waits, 1):
        nursery.start_soon(work)
        while parsing.statistics().tasks_waiting < waiting:
            await trio.testing.wait_all_tasks_blocked()
    parsing.release_on_behalf_of(before)
    await only_one_is_there(engine)
    parsing.release_on_behalf_of(between)


async def test_a_request_waits_for_one_whose_frame_is_still_being_parsed(
    tiny: Path, socket_dir: Path, batches: Batches, at_rest: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uma.net.inline.PLAIN_BYTES", 0)
    config = flash_config(tiny, socket=str(socket_dir / "s"), n_ctx=8_192, n_batch=4_096, n_ubatch=4_096)
    requests = [ask(tokens_for(number, 1_500), 4, id=str(number)) for number in range(2)]
    async with open_engine(config) as engine, trio.open_nursery() as nursery:
        await at_rest()
        server = Server(engine, config)
        await nursery.start(server.serve)
        with trio.fail_after(PATIENCE_SEC):
            async with connect(config.socket) as one, connect(config.socket) as two, trio.open_nursery() as asking:
                first, second = partial(answer, one, requests[0]), partial(answer, two, requests[1])
                await arrive_apart(engine, server.parsing, asking, first, second)
        nursery.cancel_scope.cancel()
    assert batches()[:2] == [("prefill", 3_000, 2), ("decode", 2, 2)]


async def test_a_request_waits_for_one_whose_body_is_still_being_parsed(
    tiny: Path, batches: Batches, at_rest: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uma.net.inline.PLAIN_BYTES", 0)
    config = flash_config(tiny, n_ctx=8_192, n_batch=4_096, n_ubatch=4_096)
    bodies = [{"prompt": tokens_for(number, 1_500), "max_tokens": 4, "ignore_eos": True} for number in range(2)]
    async with open_engine(config) as engine:
        await at_rest()
        gateway = Gateway.of(engine, engine.config)
        transport = httpx.ASGITransport(build_app(gateway))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

            async def post(body: dict[str, Any]) -> None:
                assert (await client.post("/v1/completions", json=body)).status_code == 200

            with trio.fail_after(PATIENCE_SEC):
                async with trio.open_nursery() as asking:
                    first, second = (partial(post, body) for body in bodies)
                    await arrive_apart(engine, gateway.parsing, asking, first, second)
    assert batches()[:2] == [("prefill", 3_000, 2), ("decode", 2, 2)]


def half_of(data: bytes) -> tuple[bytes, bytes]:
    return data[: len(data) // 2], data[len(data) // 2 :]


async def test_a_request_waits_for_one_of_whose_frame_a_part_has_come(
    tiny: Path, socket_dir: Path, batches: Batches, at_rest: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uma.net.arrivals.SOON_SEC", PATIENCE_SEC)
    config = flash_config(tiny, socket=str(socket_dir / "s"))
    first, second = half_of(frame({"id": "a", "token_ids": tokens_for(1, 40), "max_tokens": 4, "ignore_eos": True}))
    async with open_engine(config) as engine, trio.open_nursery() as nursery:
        await at_rest()
        await nursery.start(Server(engine, config).serve)
        with trio.fail_after(PATIENCE_SEC):
            async with connect(config.socket) as client, await trio.open_unix_socket(config.socket) as sender:
                await sender.send_all(first)
                await trio.testing.wait_all_tasks_blocked()
                async with trio.open_nursery() as asking:
                    asking.start_soon(answer, client, ask(tokens_for(2, 40), 4))
                    await only_one_is_there(engine)
                    await sender.send_all(second)
        nursery.cancel_scope.cancel()
    assert batches()[:2] == [("prefill", 80, 2), ("decode", 2, 2)]


async def test_a_request_waits_for_one_of_whose_body_a_part_has_come(
    tiny: Path, batches: Batches, at_rest: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uma.net.arrivals.SOON_SEC", PATIENCE_SEC)
    sends_the_rest = trio.Event()

    async def body() -> AsyncIterator[bytes]:
        fields = {"prompt": tokens_for(1, 40), "max_tokens": 4, "ignore_eos": True}
        first, second = half_of(json.dumps(fields).encode())
        yield first
        await sends_the_rest.wait()
        yield second

    async with open_engine(flash_config(tiny)) as engine:
        await at_rest()
        transport = httpx.ASGITransport(build_app(Gateway.of(engine, engine.config)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            with trio.fail_after(PATIENCE_SEC):
                async with trio.open_nursery() as asking:
                    asking.start_soon(partial(client.post, "/v1/completions", content=body()))
                    await trio.testing.wait_all_tasks_blocked()
                    asking.start_soon(answer, engine, ask(tokens_for(2, 40), 4))
                    await only_one_is_there(engine)
                    sends_the_rest.set()
    assert batches()[:2] == [("prefill", 80, 2), ("decode", 2, 2)]


async def test_a_request_does_not_wait_for_one_whose_rest_does_not_come(
    tiny: Path, socket_dir: Path, at_rest: Work
) -> None:
    config = flash_config(tiny, socket=str(socket_dir / "s"))
    async with open_engine(config) as engine, trio.open_nursery() as nursery:
        await at_rest()
        await nursery.start(Server(engine, config).serve)
        async with await trio.open_unix_socket(config.socket) as sender:
            await sender.send_all(frame({"id": "a", "prompt": "a"})[:-1])
            await trio.testing.wait_all_tasks_blocked()
            assert len((await answer(engine, ask(max_tokens=2))).tokens) == 2
        nursery.cancel_scope.cancel()


async def test_the_rest_of_a_request_is_expected_until_it_comes_and_no_longer_because_parts_of_it_come() -> None:
    expected, senders = Arrivals(), ["a", "b"]
    with expected.receiving("a"), expected.receiving("b"):
        assert expected.expected_until_sec == -math.inf
        for sender in senders:
            expected.came_in_part(sender)
        until_sec = expected.expected_until_sec
        assert until_sec > -math.inf
        for sender in senders:
            expected.came_in_part(sender)
        assert expected.expected_until_sec == until_sec
        expected.came_whole("a")
        assert expected.expected_until_sec == until_sec
    assert expected.expected_until_sec == -math.inf


async def test_a_request_waits_for_one_whose_text_is_still_being_tokenized(
    tiny: Path, batches: Batches, at_rest: Work
) -> None:
    config = flash_config(tiny, n_ctx=8_192, n_batch=4_096, n_ubatch=4_096)
    async with open_engine(config) as engine, trio.open_nursery() as nursery:
        await at_rest()
        lanes = engine._prompts.lanes
        async with AsyncExitStack() as taken:
            for _ in range(lanes.slots):
                await taken.enter_async_context(lanes.slot(1))
            nursery.start_soon(answer, engine, ask("a" * 2_500, 4, id="long"))
            with trio.fail_after(PATIENCE_SEC):
                while not lanes.waiting:
                    await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(answer, engine, ask(tokens_for(1, 10), 4, id="short"))
                await only_one_is_there(engine)
    assert [sequences for _, _, sequences in batches()[:2]] == [2, 2]


async def test_a_request_does_not_wait_for_one_that_fails_to_be_parsed(tiny: Path, at_rest: Work) -> None:
    async with open_engine(flash_config(tiny)) as engine, trio.open_nursery() as nursery:
        await at_rest()
        with pytest.raises(ZeroDivisionError), arrivals().reading(1):
            nursery.start_soon(answer, engine, ask(max_tokens=2))
            await only_one_is_there(engine)
            raise ZeroDivisionError
        # It ends, by the patience of `answer`.


async def test_a_request_does_not_wait_for_one_that_takes_long_to_read(tiny: Path, at_rest: Work) -> None:
    async with open_engine(flash_config(tiny)) as engine:
        await at_rest()
        with arrivals().reading(MAX_EXPECTED_BYTES + 1):
            assert len((await answer(engine, ask(max_tokens=2))).tokens) == 2


async def test_a_request_waits_for_others_no_longer_than_its_limit_though_nothing_else_happens(
    tiny: Path, at_rest: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uma.engine.submission.GATHER_SEC", 0.01)
    async with open_engine(flash_config(tiny)) as engine:
        await at_rest()
        with arrivals().reading(1):
            assert len((await answer(engine, ask(max_tokens=2))).tokens) == 2


async def test_a_burst_is_gathered_once_what_has_reached_the_system_was_read() -> None:
    near, far = socket.socketpair()
    near.setblocking(False)
    read, found = list[bytes](), list[bytes]()

    async def receive() -> None:
        for _ in range(3):
            await trio.lowlevel.wait_readable(near)
            read.append(near.recv(1))

    async def gather() -> None:
        await arrivals().gathered()
        found.extend(read)

    with near, far, trio.fail_after(PATIENCE_SEC):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(gather)
            far.send(b"abc")
    assert found == [b"a", b"b", b"c"]


# What one of them computes for all


async def test_a_crowd_with_one_prefix_reads_it_once_and_the_rests_of_all_in_one_batch(
    tiny: Path, batches: Batches
) -> None:
    common = tokens_for(0, 200)
    crowd = [ask((*common, *tokens_for(1 + number, 16)), 8, id=str(number)) for number in range(8)]
    config = flash_config(tiny, tick_budget_ms=1e9, slo_ttft_ms=1e9, start_target_tokens=512)
    async with open_engine(config) as engine:
        batches()
        found = await answers(engine, crowd)
    assert batches() == [("prefill", 200, 1), ("prefill", 8 * 16, 8), *[("decode", 8, 8)] * 7]
    assert [each.finished.usage.cached_tokens for each in found].count(200) == 7


async def test_a_piece_ends_at_each_length_that_others_wait_for(tiny: Path, batches: Batches) -> None:
    whole = tokens_for(0, 664)
    other = 48  # no letter, so what is shared ends just before it
    config = flash_config(tiny, tick_budget_ms=1e9, slo_ttft_ms=1e9, start_target_tokens=512)
    crowd = [
        ask(whole, 4, id="first", priority=1),
        ask((*whole[:200], other, *tokens_for(1, 15)), 4, id="at 200"),
        ask((*whole[:600], other, *tokens_for(2, 15)), 4, id="at 600"),
    ]
    async with open_engine(config) as engine:
        await answers(engine, crowd)
        assert engine.snapshot()["prefill_tokens_total"] == 664 + 16 + 16
    assert batches()[:3] == [("prefill", 200, 1), ("prefill", 400, 1), ("prefill", 64, 1)]
