"""While a long prompt is read, its stream says that it is alive, and how far it is, unless its reader takes nothing."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from engine_world import config_for, settled
from http_server import HttpServer, running_http
from starlette.types import Message, Receive, Scope

from harness import short_directory
from models import write_model
from uma.engine import Engine, open_engine
from uma.errors import BadRequest
from uma.http.app import build_app
from uma.http.gateway import Gateway
from uma.http.generation import HEARTBEAT_SEC, MAX_SILENT_SEC
from uma.types import Activity, Finished, Request
from uma.types import Message as Turn

Heard = trio.MemoryReceiveChannel[Message]

PROMPT = "x" * 60_000
"""With this model a CPU of any kind reads on it for longer than a stream is silent: 2 TFLOP for one thread."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A server whose model is slow for its size."""
    slow = write_model(tmp_path_factory.mktemp("slow") / "slow.gguf", feed_forward=24_000, context_length=65_536)
    flags = ("--model", str(slow), "--n-ctx", "65536", "--max-prompt-bytes", "100000")
    with short_directory() as directory, running_http(directory, *flags) as process:
        yield process


def test_a_stream_whose_prompt_is_read_tells_how_far_it_is(server: HttpServer) -> None:
    with server.connect() as raw:
        raw.send("POST", "/v1/completions", {"prompt": PROMPT, "stream": True})
        assert raw.head()[0] == 200
        chunks = raw.chunks()
        before, total = progress(chunks)
        while (now := progress(chunks)) == (before, total):
            pass
    assert 0 <= before < now[0] < total == now[1]
    assert total in (len(PROMPT), len(PROMPT) + 1)  # with the token that begins a text


def progress(chunks: Iterator[bytes]) -> tuple[int, int]:
    """Tokens read and all tokens, as the next sign of life tells them. Fails where the answer ends without one."""
    for chunk in chunks:
        if found := re.fullmatch(rb": prompt (\d+)/(\d+) tokens\n\n", chunk):
            return int(found[1]), int(found[2])
    raise AssertionError("the prompt was read before its stream said anything")


class Silent:
    """An engine that says nothing to a request, which waits for a slot."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def activity(self, id: str = "") -> Activity:
        return Activity((), 0, 1, 0)

    @asynccontextmanager
    async def generate(self, request: Request) -> AsyncIterator[AsyncIterator[None]]:
        async def silence() -> AsyncIterator[None]:
            await trio.sleep_forever()
            yield

        stream: Any = Tapped()
        stream.events = silence()
        yield stream


class Tapped:
    """A stream without a meter."""

    events: AsyncIterator[None]
    tap: Any = None
    ignored: tuple[str, ...] = ()

    def __aiter__(self) -> AsyncIterator[None]:
        return self.events


class Held(Tapped):
    """A stream of events whose last one comes once `is_free`."""

    def __init__(self, stream: AsyncIterator[Any], is_free: trio.Event) -> None:
        self.events, self._stream, self._is_free = self, stream, is_free
        self._last: Finished | None = None
        self._is_over = False

    async def __anext__(self) -> Any:
        if self._is_over:
            raise StopAsyncIteration
        if self._last is None:
            if not isinstance(event := await anext(self._stream), Finished):
                return event
            self._last = event
        await self._is_free.wait()
        self._is_over = True
        return self._last


class Answering(Silent):
    """An engine whose answers end once their message was opened."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.opened = trio.Event()

    @asynccontextmanager
    async def generate(self, request: Request) -> AsyncIterator[Any]:
        async with self._engine.generate(request) as stream:
            yield Held(aiter(stream), self.opened)


def asked(max_tokens: int = 2_000, path: str = "/v1/completions", **more: Any) -> tuple[Scope, Receive]:
    """A stream that is asked for, by a client that stays."""
    scope: Scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"host", b"localhost")]}
    body = {"prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True, "stream": True, **more}
    messages = iter([{"type": "http.request", "body": json.dumps(body).encode()}])

    async def receive() -> Message:
        for message in messages:
            return message
        await trio.sleep_forever()
        raise AssertionError

    return scope, receive


@asynccontextmanager
async def streamed(tiny: Path, kind: Callable[[Engine], Any]) -> AsyncIterator[tuple[Any, Heard]]:
    """A source of this kind that a stream is asked of, and what the app says of it."""
    scope, receive = asked()
    said, heard = trio.open_memory_channel[Message](100)
    async with open_engine(config_for(tiny)) as engine, trio.open_nursery() as nursery:
        source = kind(engine)
        nursery.start_soon(build_app(Gateway.of(source, engine.config)), scope, receive, said.send)
        yield source, heard
        nursery.cancel_scope.cancel()


async def test_a_stream_of_a_server_that_cannot_tell_how_far_it_is_shows_that_it_lives(
    tiny: Path, mock_clock: trio.testing.MockClock
) -> None:
    async with streamed(tiny, Silent) as (_, heard):
        for _ in range(3):
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(HEARTBEAT_SEC)
            while (told := await heard.receive())["type"] != "http.response.body":
                pass
            assert told["body"] == b": waiting\n\n"


async def test_a_message_of_a_server_that_cannot_tell_of_its_prompt_opens_before_its_end(
    tiny: Path, mock_clock: trio.testing.MockClock
) -> None:
    turns = [{"role": "user", "content": "Once"}]
    scope, receive = asked(path="/v1/messages", messages=turns)
    said: list[bytes] = []

    async def write(message: Message) -> None:
        said.append(message.get("body", b""))
        if b"message_start" in said[-1]:
            source.opened.set()

    async with open_engine(config_for(tiny)) as engine, trio.open_nursery() as nursery:
        source: Any = Answering(engine)
        nursery.start_soon(build_app(Gateway.of(source, engine.config)), scope, receive, write)
        for _ in range(1_000):
            if b"message_stop" in (told := b"".join(said)):
                break
            await trio.testing.wait_all_tasks_blocked(0.01)  # of real time: the tokens are counted in a thread
            mock_clock.jump(HEARTBEAT_SEC / 4)
        counted = len((await engine.tokenize(Request("count", messages=[Turn("user", "Once")]))).token_ids)
        nursery.cancel_scope.cancel()
    assert b"message_stop" in told
    assert f'"input_tokens":{counted},'.encode() in told


async def test_signs_of_life_keep_their_interval_though_each_takes_time_to_be_written(
    tiny: Path, mock_clock: trio.testing.MockClock
) -> None:
    scope, receive = asked()
    said: list[float] = []

    async def write(message: Message) -> None:
        if message["type"] == "http.response.body":
            said.append(trio.current_time())
            mock_clock.jump(HEARTBEAT_SEC / 20)

    async with open_engine(config_for(tiny)) as engine, trio.open_nursery() as nursery:
        source: Any = Silent(engine)
        nursery.start_soon(build_app(Gateway.of(source, engine.config)), scope, receive, write)
        for _ in range(200):
            await trio.testing.wait_all_tasks_blocked()
            if len(said) == 4:
                break
            mock_clock.jump(HEARTBEAT_SEC / 20)
        nursery.cancel_scope.cancel()
    gaps = [after - before for before, after in pairwise(said)]
    assert len(gaps) == 3
    assert max(gaps) <= 1.2 * HEARTBEAT_SEC


class Slow:
    """An engine that takes its time to refuse a request."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.refuses = trio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @asynccontextmanager
    async def generate(self, request: Request) -> AsyncIterator[None]:
        await self.refuses.wait()
        raise BadRequest("prompt: too long")
        yield


async def test_a_stream_of_a_paused_server_says_that_it_is_paused(
    tiny: Path, mock_clock: trio.testing.MockClock
) -> None:
    async with streamed(tiny, Silent) as (source, heard):
        await source.pause(3_600)
        told = list[bytes]()
        while told.count(b": paused\n\n") == 0:  # once the decode thread has heard of it
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(HEARTBEAT_SEC)
            while (heard_now := await heard.receive())["type"] != "http.response.body":
                pass
            told.append(heard_now["body"])
        assert set(told) <= {b": waiting\n\n", b": paused\n\n"}


async def test_a_request_that_is_refused_late_has_its_status_all_the_same(
    tiny: Path, mock_clock: trio.testing.MockClock
) -> None:
    async with streamed(tiny, Slow) as (source, heard):
        for _ in range(3):
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(HEARTBEAT_SEC)
        await trio.testing.wait_all_tasks_blocked()
        source.refuses.set()
        told = await heard.receive()
        assert (told["type"], told["status"]) == ("http.response.start", 400)


async def test_a_request_that_is_not_taken_for_long_shows_that_it_lives_all_the_same(
    tiny: Path, mock_clock: trio.testing.MockClock
) -> None:
    async with streamed(tiny, Slow) as (_, heard):
        began = trio.current_time()
        while heard.statistics().current_buffer_used == 0:
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(HEARTBEAT_SEC)
            await trio.testing.wait_all_tasks_blocked()
            assert trio.current_time() <= began + MAX_SILENT_SEC + HEARTBEAT_SEC
        assert (await heard.receive())["status"] == 200
        assert (await heard.receive())["body"] == b": waiting\n\n"


class Steps(trio.abc.Instrument):
    """Counts what all tasks do."""

    count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1


async def test_a_reader_that_takes_nothing_costs_no_turn_of_the_loop(
    tiny: Path, mock_clock: trio.testing.MockClock
) -> None:
    scope, receive = asked()
    is_writing = trio.Event()

    async def take_nothing(message: Message) -> None:
        if message["type"] == "http.response.body":
            is_writing.set()
            await trio.sleep_forever()

    async with open_engine(config_for(tiny)) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(build_app(Gateway.of(engine, engine.config)), scope, receive, take_nothing)
        await is_writing.wait()
        generated = 0
        while generated != (generated := (await settled(engine))["tokens_generated_total"]):
            await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(HEARTBEAT_SEC)
        trio.lowlevel.add_instrument(steps := Steps())
        for _ in range(100):
            await trio.lowlevel.checkpoint()
        assert steps.count < 150  # a hundred are this task's own
        trio.lowlevel.remove_instrument(steps)
        nursery.cancel_scope.cancel()


async def test_nothing_comes_after_the_end_of_an_answer_whose_reader_is_slow_to_take_it(
    tiny: Path, mock_clock: trio.testing.MockClock
) -> None:
    scope, receive = asked(max_tokens=4)
    said: list[bytes] = []
    is_taking, takes = trio.Event(), trio.Event()

    async def write(message: Message) -> None:
        said.append(message.get("body", b""))
        if b"[DONE]" in said[-1]:
            is_taking.set()
            await takes.wait()

    async with open_engine(config_for(tiny)) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(build_app(Gateway.of(engine, engine.config)), scope, receive, write)
        await is_taking.wait()
        for _ in range(3):
            mock_clock.jump(HEARTBEAT_SEC)
            await trio.testing.wait_all_tasks_blocked()
        takes.set()
    whole = b"".join(said)
    assert whole.count(b"data: ") > 2  # tokens that are there at once come together
    assert whole.endswith(b"data: [DONE]\n\n")
