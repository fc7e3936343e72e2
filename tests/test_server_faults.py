"""Faults put into a real engine and a real server in this process: which requests fail, and which do not."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from harness import HELLO, Raw
from uma.client import Client, connect
from uma.config import RuntimeConfig
from uma.engine import open_engine
from uma.engine.delivery.stream import RequestStream
from uma.engine.intake.prompt import PromptReader
from uma.errors import ConnectionLost, DecodeFailed, InternalError
from uma.llama.batch import Batch
from uma.llama.context import Context
from uma.server import Server
from uma.server.json_connection import MAX_STARTING, JsonConnection
from uma.server.newline import NewlineConnection
from uma.types import Event, Finished, Health, Request, SamplingParams, Token

POISON = 255
"""A token; a batch in which a prompt begins with it fails."""


@asynccontextmanager
async def serving(path: Path, model: Path, **settings: Any) -> AsyncIterator[Server]:
    """A server in this process, ended with the block."""
    config = RuntimeConfig(model=str(model), socket=str(path), threads=1, **settings)
    async with open_engine(config) as engine, trio.open_nursery() as nursery:
        server = Server(engine, config)
        await nursery.start(server.serve)
        yield server
        nursery.cancel_scope.cancel()


async def last_of(client: Client, request: Request) -> Finished:
    """The last event of a request."""
    async with client.generate(request) as stream:
        last = [event async for event in stream][-1]
    assert isinstance(last, Finished)
    return last


def ask(id: str, first: int) -> Request:
    return Request(id, token_ids=(first, 7, 8), sampling=SamplingParams(max_tokens=50, ignore_eos=True))


async def test_a_failed_decode_ends_the_request_that_caused_it_and_no_other(
    socket_dir: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Context.begin

    def decode_or_fail(self: Context, batch: Batch) -> int:
        rows = slice(batch.n_tokens)
        is_poisoned = ((batch.token[rows] == POISON) & (batch.pos[rows] == 0)).any()
        return -1 if is_poisoned else begin(self, batch)

    monkeypatch.setattr(Context, "begin", decode_or_fail)
    ends: dict[str, Finished] = {}

    async def run(client: Client, request: Request) -> None:
        ends[request.id] = await last_of(client, request)

    async with serving(socket_dir / "s", tiny), connect(socket_dir / "s") as client:
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(run, client, ask(f"good{number}", number))
            with pytest.raises(DecodeFailed):
                await last_of(client, ask("bad", POISON))
        assert {id: end.reason for id, end in ends.items()} == dict.fromkeys(("good0", "good1", "good2"), "length")
        assert (await client.metrics())["requests_error"] == 1
        assert (await last_of(client, ask("after", 1))).reason == "length"


async def test_a_bug_that_a_query_meets_ends_that_query_alone(
    socket_dir: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def health(server: Server, *, probe: bool) -> Health:
        raise ArithmeticError("a bug")

    monkeypatch.setattr(Server, "health", health)
    async with serving(socket_dir / "s", tiny), connect(socket_dir / "s") as client:
        with pytest.raises(InternalError, match="its log says more"):
            await client.health()
        assert (await last_of(client, ask("a", 1))).reason == "length"
    assert "event=request.crashed" in caplog.text


async def test_a_bug_that_a_stream_meets_ends_that_stream_alone(
    socket_dir: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Behind the tokens that came, and not the session with its other requests."""
    read = RequestStream.__anext__
    ended: list[Finished] = []

    async def read_or_crash(self: RequestStream) -> Event:
        event = await read(self)
        if isinstance(event, Finished) and event.usage.prompt_tokens == 1:
            raise ArithmeticError("a bug")
        return event

    monkeypatch.setattr(RequestStream, "__anext__", read_or_crash)
    async with serving(socket_dir / "s", tiny), connect(socket_dir / "s") as client, trio.open_nursery() as nursery:

        async def run(request: Request) -> None:
            ended.append(await last_of(client, request))

        nursery.start_soon(run, ask("good", 1))
        tokens = 0
        async with client.generate(attrs.evolve(ask("bad", 2), token_ids=(2,))) as stream:
            with pytest.raises(InternalError, match="its log says more"):
                async for event in stream:
                    tokens += isinstance(event, Token)
    assert (tokens, [each.reason for each in ended]) == (50, ["length"])
    assert "event=request.crashed" in caplog.text


async def test_a_bug_that_a_line_meets_ends_that_line_alone(
    socket_dir: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter = NewlineConnection.enter

    def enter_or_crash(self: NewlineConnection, request: Request) -> Request:
        if request.prompt == "a bug":
            raise ArithmeticError(request.prompt)
        return enter(self, request)

    monkeypatch.setattr(NewlineConnection, "enter", enter_or_crash)
    async with (
        serving(socket_dir / "s", tiny, protocol="newline", max_tokens=2),
        await trio.open_unix_socket(str(socket_dir / "s")) as stream,
    ):
        await stream.send_all(b"a bug\n/metrics\n")
        told = b"".join([data async for data in stream])
    first, second = told.splitlines()
    assert first == b"E_RUNTIME_INTERNAL: a fault in the server itself; its log says more"
    assert json.loads(second)["active_sessions"] == 1


async def test_a_bug_that_a_session_meets_ends_that_session_alone(
    socket_dir: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    take = JsonConnection.take

    async def take_or_crash(self: JsonConnection, data: bytes) -> bool:
        if b'"health"' in data:
            raise ArithmeticError("a bug")
        return await take(self, data)

    monkeypatch.setattr(JsonConnection, "take", take_or_crash)
    async with (
        serving(socket_dir / "s", tiny),
        connect(socket_dir / "s") as unlucky,
        connect(socket_dir / "s") as other,
    ):
        with pytest.raises(ConnectionLost):
            await unlucky.health()
        assert (await last_of(other, ask("a", 1))).reason == "length"
        assert (await other.metrics())["active_sessions"] == 1
    assert "event=session.crashed" in caplog.text


async def test_a_connection_that_waits_in_line_when_the_end_begins_is_told(socket_dir: Path, tiny: Path) -> None:
    async with serving(socket_dir / "s", tiny) as server:
        with Raw(socket_dir / "s") as raw:
            server.begin_drain()
            events = await trio.to_thread.run_sync(raw.rest)
    assert [event["code"] for event in events] == ["E_RUNTIME_SHUTDOWN"]


async def test_a_session_whose_requests_wait_to_be_admitted_is_not_idle(
    socket_dir: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, mock_clock: trio.testing.MockClock
) -> None:
    admitted, read = trio.Event(), PromptReader.read

    async def read_late(self: PromptReader, request: Request, *, must_fit: bool = True) -> array[int]:
        await admitted.wait()
        return await read(self, request, must_fit=must_fit)

    monkeypatch.setattr(PromptReader, "read", read_late)
    count = MAX_STARTING + 8
    asked = [{"id": str(number), "prompt": "Once", "max_tokens": 1} for number in range(count)]
    async with serving(socket_dir / "s", tiny) as server:
        with Raw(socket_dir / "s") as raw:
            raw.send(HELLO, *asked)
            assert (await trio.to_thread.run_sync(raw.next))["event"] == "hello"
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(server.config.idle_timeout_sec + 1)
            await trio.testing.wait_all_tasks_blocked()
            admitted.set()
            events = await trio.to_thread.run_sync(lambda: [raw.next() for _ in range(2 * count)])
    assert Counter(event["event"] for event in events) == {"token": count, "eos": count}
