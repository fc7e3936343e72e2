"""How long an answer outlives its reader, how many may, and how often one is rendered."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from engine_world import ask, config_for, settled

from harness import PATIENCE_SEC
from uma.engine import Engine, open_engine
from uma.errors import Overloaded
from uma.http.app import build_app
from uma.http.gateway import Gateway
from uma.http.page import answers
from uma.http.page.answers import Answer, Answers, given
from uma.http.page.growing import Parsed
from uma.http.page.renderer import Renderer
from uma.net.client import CLIENT
from uma.types import Finished, Request


@pytest.fixture
def renderer() -> Iterator[Renderer]:
    made = Renderer()
    yield made
    made.close()


async def test_an_answer_that_is_not_read_is_cancelled_when_its_time_is_over(tiny: Path, renderer: Renderer) -> None:
    async with open_engine(config_for(tiny)) as engine:
        answer = Answer("a", given(ask(max_tokens=2_000)), keep_sec=0.01)
        with trio.fail_after(PATIENCE_SEC):
            await answer.run(engine, renderer)
            while (metrics := await settled(engine))["active_sequences"]:
                pass
    assert (metrics["requests_cancelled"], metrics["requests_length"]) == (1, 0)


async def test_a_reader_that_comes_back_in_time_finds_the_end(tiny: Path, renderer: Renderer) -> None:
    async with open_engine(config_for(tiny)) as engine, trio.open_nursery() as nursery:
        answer = Answer("a", given(ask(max_tokens=64)), keep_sec=PATIENCE_SEC)
        nursery.start_soon(answer.run, engine, renderer)
        with trio.fail_after(PATIENCE_SEC):
            while (await settled(engine))["requests_length"] == 0:
                pass
            assert answer.version == 0  # no reader has come, so nothing was rendered
            with answer.reader():
                while not answer.is_over:
                    await answer.wait(answer.version)
        assert answer.finished is not None
        assert answer.changes(0)["text"] == answer.text
        assert answer.changes(answer.version) == {"text": "", "thinking": "", "blocks": {}, "count": len(answer.blocks)}
        nursery.cancel_scope.cancel()


async def test_a_kept_answer_waits_60_seconds_for_its_reader(tiny: Path, mock_clock: trio.testing.MockClock) -> None:
    async with open_engine(config_for(tiny)) as engine, trio.open_nursery() as nursery:
        gateway = Gateway.of(engine, engine.config)
        gateway.tasks = nursery
        transport = httpx.ASGITransport(build_app(gateway))  # what `uma run --http` serves
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            token = "0123456789abcdef"
            body = {"messages": [{"role": "user", "content": "a"}], "sampling": {"max_tokens": 8}, "token": token}
            mock_clock.rate = 1
            written = await client.post("/ui/api/answers", json=body)
            assert "event: done" in written.text
            mock_clock.rate = 0
            for away_sec, is_kept in ((0, True), (59.9, True), (60.1, False)):  # since the reader before it
                await trio.testing.wait_all_tasks_blocked()
                mock_clock.jump(away_sec)
                await trio.testing.wait_all_tasks_blocked()
                again = await client.get(f"/ui/api/answers/{token}")
                assert (again.status_code, "event: done" in again.text) == ((200, True) if is_kept else (404, False))
        nursery.cancel_scope.cancel()
        for end in gateway.at_end:
            end()


async def test_only_so_many_answers_are_kept(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_ANSWERS", 2)
    async with open_engine(config_for(tiny)) as engine, trio.open_nursery() as nursery:
        gateway = Gateway.of(engine, engine.config)
        gateway.tasks = nursery
        kept = Answers(gateway)
        for number in range(2):
            CLIENT.set(number)
            kept.start(str(number), given(ask()), f"token-{number}", is_kept=True)
        with pytest.raises(Overloaded, match="2 answers"):
            kept.start("a", given(ask()), "token-2", is_kept=True)
        nursery.cancel_scope.cancel()


async def test_one_client_leaves_places_to_others(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_ANSWERS", 8)
    async with open_engine(config_for(tiny)) as engine, trio.open_nursery() as nursery:
        gateway = Gateway.of(engine, engine.config)
        gateway.tasks = nursery
        kept = Answers(gateway)
        CLIENT.set("many")
        with pytest.raises(Overloaded):
            for number in range(8):
                kept.start(str(number), given(ask()), f"token-{number}", is_kept=True)
        assert 4 <= number < 8
        CLIENT.set("another")
        kept.start("a", given(ask()), "token", is_kept=True)
        nursery.cancel_scope.cancel()


class SlowRenderer(Renderer):
    """Renders as ever, and each time the clock goes on by `took_sec`. Notes its threads."""

    def __init__(self, clock: trio.testing.MockClock, took_sec: float) -> None:
        super().__init__()
        self.threads: set[int] = set()
        self._clock = clock
        self._took_sec = took_sec

    def parse(self, text: str, env: dict[str, Any]) -> Parsed:
        self._note()
        return super().parse(text, env)

    def render(self, text: str) -> list[str]:
        self._note()
        return super().render(text)

    def _note(self) -> None:
        self.threads.add(threading.get_ident())
        trio.from_thread.run_sync(self._clock.jump, self._took_sec)


class HeldAtEnd:
    """An engine whose streams do not end before they are let go."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.let_go = trio.Event()
        self.is_held = False

    @asynccontextmanager
    async def generate(self, request: Request) -> AsyncIterator[Any]:
        async with self._engine.generate(request) as stream:
            yield _Held(stream, self)


class _Held:
    def __init__(self, stream: Any, source: HeldAtEnd) -> None:
        self._stream = stream
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for event in self._stream:
            if isinstance(event, Finished):
                self._source.is_held = True
                await self._source.let_go.wait()
            yield event


@pytest.mark.parametrize(("took_sec", "pause_sec"), [(0, 0.1), (1, 4)])
async def test_an_answer_is_rendered_ten_times_a_second_at_most_and_takes_a_fifth_of_a_core(
    tiny: Path, mock_clock: trio.testing.MockClock, took_sec: float, pause_sec: float
) -> None:
    slow = SlowRenderer(mock_clock, took_sec)
    async with open_engine(config_for(tiny)) as engine, trio.open_nursery() as nursery:
        answer = Answer("a", given(ask(max_tokens=1_000)), keep_sec=PATIENCE_SEC)
        source: Any = HeldAtEnd(engine)
        nursery.start_soon(answer.run, source, slow)
        with answer.reader():
            await answer.wait(0)
            rendered_at = trio.current_time()
            while not source.is_held:  # and more text to be shown with every token
                await settled(engine)
            for until_sec in (0, 0.999 * pause_sec):
                mock_clock.jump(rendered_at + until_sec - trio.current_time())
                await trio.testing.wait_all_tasks_blocked()
                assert (answer.version, slow.turns.borrowed_tokens) == (1, 0)
            mock_clock.jump(0.002 * pause_sec)
            await answer.wait(1)
            assert not answer.is_over
            source.let_go.set()  # and the last rendering waits for nothing
            await answer.wait(2)
            assert answer.is_over
        nursery.cancel_scope.cancel()
    slow.close()
    assert slow.threads
    assert threading.get_ident() not in slow.threads
