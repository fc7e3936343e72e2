"""Models with a recurrent state, or with small windows, share prefixes and read again only what is new, by checkpoints:
for siblings, for conversations whose thinking is dropped, for programs with one system prompt, and for the same prompt
after a restart.
"""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import pytest
from engine_world import SMALL_WINDOWS, Answer, alone, answer, answers, ask, config_for, tokens_for
from every_kind import PLAIN, WINDOWED, kinds, write_named

from uma import Request, SamplingParams, open_engine
from uma.types import Message

SIBLINGS, COMMON_TOKENS, OWN_TOKENS = 8, 300, 16
COLD: dict[str, Any] = {"cache_tokens": 0, "cache_ram_mb": 0, "max_sequences": 1}


CUT_ANYWHERE = {*PLAIN, *WINDOWED}
KINDS = [name for name in kinds("qwen35", "nemotron_h", "lfm2", "recurrent", SMALL_WINDOWS) if name not in CUT_ANYWHERE]


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a state, or with small windows."""
    return write_named(tmp_path_factory.mktemp("states"), request.param, 4_096)


def read_of(given: Answer) -> int:
    """Prompt tokens that were computed for it."""
    usage = given.finished.usage
    return usage.prompt_tokens - usage.cached_tokens


async def expected_of(model: Path, requests: list[Request]) -> list[tuple[int, ...]]:
    """What each says where nothing is cached."""
    async with open_engine(config_for(model, **COLD, n_ctx=4_096)) as engine:
        return [each.token_ids for each in await alone(engine, requests)]


def siblings(seed: int) -> list[Request]:
    common = tokens_for(1, COMMON_TOKENS)
    return [ask((*common, *tokens_for(seed + index, OWN_TOKENS)), 6, id=str(index)) for index in range(SIBLINGS)]


@pytest.mark.parametrize("settings", [{}, {"kv_unified": "off", "max_sequences": 9, "n_ctx": 5_120}, COLD], ids=str)
async def test_siblings_compute_what_they_have_in_common_once(model: Path, settings: dict[str, Any]) -> None:
    settings = settings | {"max_sequences": 9}
    cold, warm = siblings(10), siblings(50)
    async with open_engine(config_for(model, **settings)) as engine:
        found = await answers(engine, cold)
        # Some go on with the same letter by chance.
        assert sum(map(read_of, found)) <= COMMON_TOKENS + SIBLINGS * OWN_TOKENS
        if "cache_tokens" not in settings:
            found += await answers(engine, warm)
            assert sum(map(read_of, found[SIBLINGS:])) <= SIBLINGS * (OWN_TOKENS + 2)
    assert [each.token_ids for each in found] == await expected_of(model, (cold + warm)[: len(found)])


def said(seed: int, letters: int) -> str:
    return "".join(random.Random(seed).choices("abcdefgh ", k=letters))


def chat(messages: list[Message]) -> Request:
    return Request(id="chat", messages=tuple(messages), sampling=SamplingParams(max_tokens=8, ignore_eos=True))


async def test_a_conversation_reads_what_is_new_though_its_answers_are_not_shown_as_they_were(model: Path) -> None:
    talk, asked, read = [Message(role="user", content=said(0, 200))], list[Request](), list[int]()
    async with open_engine(config_for(model)) as engine:
        found = []
        for turn in range(4):
            asked.append(chat(talk))
            found.append(await answer(engine, asked[-1]))
            read.append(read_of(found[-1]))
            talk += [Message(role="assistant", content=said(turn, 40)), Message(role="user", content=said(turn, 60))]
        tokens = [len((await engine.tokenize(each)).token_ids) for each in asked]
    news = [after - before for before, after in pairwise(tokens)]
    opening = 12  # "assistant", what is around it, and the end of the message before
    assert all(count <= new + opening for count, new in zip(read[1:], news, strict=True))
    assert [each.token_ids for each in found] == await expected_of(model, asked)


async def test_programs_of_one_system_prompt_read_it_once(model: Path) -> None:
    system, asked, found = Message(role="system", content=said(0, 300)), list[Request](), list[Answer]()
    programs = [[system, Message(role="user", content=said(seed, 50))] for seed in (1, 2, 3)]
    async with open_engine(config_for(model)) as engine:
        for turn in range(3):
            for program in programs:
                asked.append(chat(program))
                found.append(await answer(engine, asked[-1]))
                program += [Message(role="assistant", content=said(turn, 9)), Message(role="user", content=said(9, 50))]
    assert read_of(found[0]) > 300
    assert all(read_of(each) <= 120 for each in found[1:])
    assert [each.token_ids for each in found] == await expected_of(model, asked)


async def test_programs_of_one_beginning_that_has_no_messages_read_it_one_and_a_half_times(model: Path) -> None:
    common, asked, found = tokens_for(1, 400), list[Request](), list[Answer]()
    programs = [[*common, *tokens_for(seed, 50)] for seed in (1, 2, 3)]
    async with open_engine(config_for(model)) as engine:
        for turn in range(3):
            for program in programs:
                asked.append(ask(program, 8))
                found.append(await answer(engine, asked[-1]))
                program += [*found[-1].token_ids, *tokens_for(10 + turn, 50)]
    first, second, *others = map(read_of, found)
    assert (first, second) == (450, 194)
    assert all(count <= 52 for count in others), others
    assert [each.token_ids for each in found] == await expected_of(model, asked)


async def test_the_same_prompt_again_and_after_a_restart_reads_its_end_alone(model: Path, tmp_path: Path) -> None:
    asked = [ask(tokens_for(3, 700), 8), chat([Message(role="user", content=said(5, 700))])]
    config = attrs.evolve(config_for(model), cache_dir=str(tmp_path), cache_ram_mb=64)
    async with open_engine(config) as engine:
        first = await alone(engine, asked)
        again = await alone(engine, asked)
    async with open_engine(config) as engine:
        restarted = await alone(engine, asked)
    assert max(map(read_of, (*again, *restarted))) <= 32, list(map(read_of, (*again, *restarted)))
    expected = [each.token_ids for each in first]
    assert [each.token_ids for each in again] == [each.token_ids for each in restarted] == expected


async def test_a_long_prompt_is_found_in_the_middle(model: Path) -> None:
    prompt = tokens_for(4, 2_300)
    other = ask((*prompt[:2_200], *tokens_for(5, 50)), 4)
    async with open_engine(config_for(model, n_ctx=4_096)) as engine:
        await answer(engine, ask(prompt, 2))
        assert engine.snapshot()["cache_ram_bytes"] > 0, "checkpoints are in memory"
        found = await answer(engine, other)
    assert found.finished.usage.cached_tokens == 2_048
    assert [found.token_ids] == await expected_of(model, [other])


async def test_it_is_told_how_prefixes_are_shared(model: Path) -> None:
    async with open_engine(config_for(model)) as engine:
        assert engine.info.capabilities.prefix_sharing == "cells and checkpoints"


async def test_what_texts_take_of_memory_is_told(model: Path) -> None:
    async with open_engine(config_for(model, max_sequences=3)) as engine:
        plan = engine.info.capabilities.memory
    assert plan is not None
    has_states = model.stem != SMALL_WINDOWS
    assert plan.kind == {"recurrent": "recurrent", SMALL_WINDOWS: "sliding-window"}.get(model.stem, "hybrid")
    assert plan.cells == 2_048
    assert (plan.kv_bytes > 0) == (model.stem != "recurrent")
    assert (plan.states, plan.state_bytes > 0) == (4 if has_states else 0, has_states)
    assert 0 < plan.window_cells < 2_048 if model.stem == SMALL_WINDOWS else plan.window_cells == 0
