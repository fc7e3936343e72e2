"""How long an answer outlives its reader, and how many may."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import trio
from engine_world import ask, config_for, settled

from harness import PATIENCE_SEC
from uma.engine import open_engine
from uma.errors import Overloaded
from uma.http.gateway import Gateway
from uma.http.page import answers
from uma.http.page.answers import Answer, Answers
from uma.http.page.renderer import Renderer
from uma.net.client import CLIENT


@pytest.fixture
def renderer() -> Iterator[Renderer]:
    made = Renderer()
    yield made
    made.close()


async def test_an_answer_that_is_not_read_is_cancelled_when_its_time_is_over(tiny: Path, renderer: Renderer) -> None:
    async with open_engine(config_for(tiny)) as engine:
        answer = Answer(ask(max_tokens=2_000), keep_sec=0.01)
        with trio.fail_after(PATIENCE_SEC):
            await answer.run(engine, renderer)
            while (metrics := await settled(engine))["active_sequences"]:
                pass
    assert (metrics["requests_cancelled"], metrics["requests_length"]) == (1, 0)


async def test_a_reader_that_comes_back_in_time_finds_the_end(tiny: Path, renderer: Renderer) -> None:
    async with open_engine(config_for(tiny)) as engine, trio.open_nursery() as nursery:
        answer = Answer(ask(max_tokens=64), keep_sec=PATIENCE_SEC)
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
        assert answer.changes(answer.version) == {"text": "", "blocks": {}, "count": len(answer.blocks)}
        nursery.cancel_scope.cancel()


async def test_only_so_many_answers_are_kept(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_ANSWERS", 2)
    async with open_engine(config_for(tiny)) as engine, trio.open_nursery() as nursery:
        gateway = Gateway.of(engine, engine.config)
        gateway.tasks = nursery
        kept = Answers(gateway)
        for number in range(2):
            CLIENT.set(number)
            kept.start(attrs.evolve(ask(), id=str(number)), f"token-{number}", is_kept=True)
        with pytest.raises(Overloaded, match="2 answers"):
            kept.start(ask(), "token-2", is_kept=True)
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
                kept.start(attrs.evolve(ask(), id=str(number)), f"token-{number}", is_kept=True)
        assert 4 <= number < 8
        CLIENT.set("another")
        kept.start(ask(), "token", is_kept=True)
        nursery.cancel_scope.cancel()
