"""How long an answer outlives its reader, how many may, and how often a reader is told of one."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import trio
from engine_world import ask, config_for, settled

from harness import PATIENCE_SEC
from uma.engine import open_engine
from uma.errors import Overloaded
from uma.http.app import build_app
from uma.http.gateway import Gateway
from uma.http.page import answers
from uma.http.page.answers import NOTHING, Answers, PageAnswer, given
from uma.net.client import CLIENT


async def test_an_answer_that_is_not_read_is_cancelled_when_its_time_is_over(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        answer = PageAnswer("a", given(ask(max_tokens=2_000)), keep_sec=0.01)
        with trio.fail_after(PATIENCE_SEC):
            await answer.run(engine)
            while (metrics := await settled(engine))["active_sequences"]:
                pass
    assert (metrics["requests_cancelled"], metrics["requests_length"]) == (1, 0)


async def test_a_reader_that_comes_back_in_time_finds_the_end(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine, trio.open_nursery() as nursery:
        answer = PageAnswer("a", given(ask(max_tokens=64)), keep_sec=PATIENCE_SEC)
        nursery.start_soon(answer.run, engine)
        with trio.fail_after(PATIENCE_SEC):
            while (await settled(engine))["requests_length"] == 0:
                pass
            with answer.reader():
                await answer.ended.wait()
        assert answer.finished is not None
        assert answer.changes(NOTHING) == {"text": answer.text, "thinking": ""}
        assert answer.changes(answer.extent) == {"text": "", "thinking": ""}
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


async def test_a_reader_is_told_what_is_new_ten_times_a_second_at_most_and_the_end_at_once(
    tiny: Path, mock_clock: trio.testing.MockClock
) -> None:
    async with open_engine(config_for(tiny)) as engine, trio.open_nursery() as nursery:
        gateway = Gateway.of(engine, engine.config)
        gateway.tasks = nursery
        transport = httpx.ASGITransport(build_app(gateway))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            sampling = {"max_tokens": 100, "ignore_eos": True}
            body = {"messages": [{"role": "user", "content": "a"}], "sampling": sampling}
            assert mock_clock.rate == 0  # no time passes
            written = (await client.post("/ui/api/answers", json=body)).text
        assert written.count("event: update") == 2
        assert '"completion_tokens":100' in written
        nursery.cancel_scope.cancel()
