"""The rest of a prompt that fills no tile is computed with tokens before it, where that takes less time."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from engine_world import Answer, answer, ask, config_for, tokens_for

from uma.engine import Engine, open_engine
from uma.engine.policy import prefill
from uma.types import Request

TURNS, NEW_TOKENS = 4, 40


async def conversation(engine: Engine) -> list[Answer]:
    """A prompt, and follow-ups that each bring less than a tile."""
    talk, turns = tokens_for(0, 300), list[Answer]()
    for turn in range(TURNS):
        turns.append(await answer(engine, ask(talk, 8, id=str(turn))))
        talk = (*talk, *turns[-1].token_ids, *tokens_for(1 + turn, NEW_TOKENS))
    return turns


@pytest.mark.parametrize("kv_unified", ["on", "off"])
async def test_answers_are_the_same_whether_tokens_before_the_rest_are_computed_again(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, kv_unified: str
) -> None:
    config = config_for(tiny, kv_unified=kv_unified, max_sequences=2)
    async with open_engine(config) as engine:
        usual = await conversation(engine)
    monkeypatch.setattr(prefill, "WORTH_REREADING", 0.0)
    async with open_engine(config) as engine:
        again = await conversation(engine)
        assert engine.snapshot()["reread_tokens_total"] > 0
    assert [each.token_ids for each in again] == [each.token_ids for each in usual]
    assert [each.finished.usage for each in again] == [each.finished.usage for each in usual]


async def test_tokens_that_are_computed_again_stay_with_the_sequences_that_share_them(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tokens_for(0, 300)
    program = ask(shared, 300, id="program", stream=False)
    beside = [ask((*shared, *tokens_for(index, NEW_TOKENS)), 8, id=str(index)) for index in range(3)]
    async with open_engine(config_for(tiny)) as engine:
        undisturbed = [await answer(engine, request) for request in (program, *beside)]
    monkeypatch.setattr(prefill, "WORTH_REREADING", 0.0)
    async with open_engine(config_for(tiny)) as engine:
        await conversation(engine)
        before, found = engine.snapshot()["reread_tokens_total"], dict[str, Answer]()

        async def read(request: Request) -> None:
            found[request.id] = await answer(engine, request)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, program)
            for request in beside:
                await read(request)
        assert engine.snapshot()["reread_tokens_total"] > before
    assert found["program"].finished.token_ids == undisturbed[0].finished.token_ids
    assert [found[each.id].token_ids for each in beside] == [each.token_ids for each in undisturbed[1:]]
