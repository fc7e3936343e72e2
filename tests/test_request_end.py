"""The end of a request from outside: by another session of the server's user, and by nobody else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from http_server import HttpServer, running_http
from stranger import needs_root, told_to_a_stranger

from harness import PATIENCE_SEC, ask, short_directory
from uma.client import Client, connect
from uma.errors import Ended
from uma.types import Request, RunningRequest, SamplingParams

LONG = SamplingParams(max_tokens=30_000, ignore_eos=True)


@pytest.fixture(scope="module")
def anyone(tiny: Path) -> Iterator[HttpServer]:
    """A server with two slots that every user of this machine can connect to."""
    with short_directory() as directory:
        directory.chmod(0o755)
        flags = ("--model", str(tiny), "--max-sequences", "2", "--socket-mode", "666")
        with running_http(directory, *flags) as server:
            yield server


async def seen(client: Client, n: int = 1) -> list[RunningRequest]:
    """What runs or waits, once it is so much."""
    with trio.fail_after(PATIENCE_SEC):
        while True:
            activity = await client.activity()
            if len(found := [*activity.running, *activity.waiting]) == n:
                return found


async def test_a_request_of_another_session_is_ended_and_its_client_is_told(anyone: HttpServer) -> None:
    path = anyone.process.socket
    async with connect(path) as worker, connect(path) as onlooker:
        async with worker.generate(Request("a", prompt="x", sampling=LONG)) as stream:
            await anext(stream)
            (running,) = await seen(onlooker)
            assert await onlooker.end_request(running.number)
            with pytest.raises(Ended, match="ended by the user"):
                async for _ in stream:
                    pass
        anyone.process.log.wait_for(rf"event=request\.ended .*number={running.number} ")
        line = rf"event=request\.ended session=\S+ by=socket number={running.number} was_running=True"
        assert len(re.findall(line, anyone.process.log.text)) == 1  # also where a model's process is asked in turn
        assert not await onlooker.end_request(running.number)
        # The session goes on, and the id is free.
        async with worker.generate(Request("a", prompt="x", sampling=SamplingParams(max_tokens=1))) as stream:
            assert [event async for event in stream]


async def test_of_two_requests_with_one_id_the_one_meant_is_ended(anyone: HttpServer) -> None:
    path = anyone.process.socket
    async with (
        connect(path) as first,
        connect(path) as second,
        connect(path) as onlooker,
        first.generate(Request("same", prompt="x", sampling=LONG)) as one,
    ):
        await anext(one)
        (oldest,) = await seen(onlooker)
        async with second.generate(Request("same", prompt="y", sampling=LONG)) as other:
            await anext(other)
            assert await onlooker.end_request(oldest.number)
            with pytest.raises(Ended):
                async for _ in one:
                    pass
            assert (await anext(other)).id == "same"


async def test_a_request_that_waits_and_one_of_several_answers_end_whole(anyone: HttpServer) -> None:
    path, both = anyone.process.socket, SamplingParams(max_tokens=30_000, ignore_eos=True, n=2)
    async with connect(path) as client, connect(path) as onlooker:
        async with (
            client.generate(Request("two", prompt="x", sampling=both)) as two,
            client.generate(Request("later", prompt="y", sampling=LONG)) as later,
        ):
            by_id = {each.id: each.number for each in await seen(onlooker, 3)}
            assert await onlooker.end_request(by_id["later"])
            assert await onlooker.end_request(by_id["two"])
            for stream in (two, later):
                with pytest.raises(Ended):
                    async for _ in stream:
                        pass
        assert await seen(onlooker, 0) == []


async def test_an_http_client_is_told_that_it_was_ended_and_not_to_try_again(anyone: HttpServer) -> None:
    body = {"prompt": "x", "max_tokens": 30_000, "ignore_eos": True}
    with anyone.connect() as raw:
        raw.send("POST", "/v1/completions", body)
        async with connect(anyone.process.socket) as client:
            (running,) = await seen(client)
            assert await client.end_request(running.number)
        answer = await trio.to_thread.run_sync(raw.answer)
    assert answer.status == 410
    assert "ended" in answer.json["error"]["message"]


@needs_root
async def test_another_user_s_session_ends_nothing(anyone: HttpServer) -> None:
    path = anyone.process.socket
    async with (
        connect(path) as client,
        connect(path) as onlooker,
        client.generate(Request("a", prompt="x", sampling=LONG)) as stream,
    ):
        await anext(stream)
        (running,) = await seen(onlooker)
        query = {"type": "end", "id": "q", "number": running.number}
        told = await trio.to_thread.run_sync(told_to_a_stranger, path, query)
        assert told["code"] == "E_PROTO_BAD_REQUEST"
        assert "only the user that the server runs as" in told["message"]
        assert await anext(stream)


def test_a_session_of_version_1_0_does_not_know_the_question(anyone: HttpServer) -> None:
    with anyone.process.connect() as raw:
        raw.hello(versions=["1.0"])
        raw.send({"type": "end", "id": "q", "number": 1})
        refused = raw.receive()
        assert refused is not None
        assert refused["code"] == "E_PROTO_BAD_REQUEST"
        raw.send(ask("a", max_tokens=1))
        assert raw.last_of("a")["reason"] == "length"


async def test_activity_tells_the_first_token_and_the_worst_gap_of_what_runs(anyone: HttpServer) -> None:
    path = anyone.process.socket
    async with (
        connect(path) as client,
        connect(path) as onlooker,
        client.generate(Request("a", prompt="x", sampling=LONG)) as stream,
    ):
        for _ in range(3):
            await anext(stream)
        (running,) = await seen(onlooker)
        assert running.ttft_ms is not None
        assert 0 < running.ttft_ms <= running.age_ms
        assert 0 < running.worst_gap_ms <= running.age_ms
