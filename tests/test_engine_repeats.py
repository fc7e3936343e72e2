"""Alone on an engine, a question that is asked again has the very same answer, to the last bit of its log
probabilities: with the attention, the KV memory and the threads of an engine that nothing was set for.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import attrs
import pytest
from engine_world import SMALL_WINDOWS, Answer, answer, ask, config_for, tokens_for
from every_kind import kinds, write_named
from gemma4 import write_gemma4

from models import write_model
from uma import Request, SamplingParams
from uma.config import RuntimeConfig
from uma.engine import open_engine
from uma.types import Message

SYSTEM = tokens_for(0, 90)


@pytest.fixture(autouse=True)
def as_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs on this machine take no compute threads away, and no batch that waits for them is aborted: with
    fewer threads, and in the cells where a batch lies that is computed again, sums have other last bits.
    """
    monkeypatch.setattr("uma.engine.worker.cores.watch.SAMPLE_MS", math.inf)
    monkeypatch.setattr("uma.engine.worker.cores.watch.MIN_MS", math.inf)


def question(number: int, length: int) -> Request:
    """A greedy question behind the one system prompt."""
    return ask((*SYSTEM, *tokens_for(number, length)), 20, logprobs=1)


def config(model: Path, **settings: Any) -> RuntimeConfig:
    given = {"flash_attn": "on", "cache_type_k": "f16", "cache_type_v": "f16", "threads": 2}
    return config_for(model, **(given | {"cache_ram_mb": 64} | settings))


def told(got: Answer) -> list[Any]:
    return [(token.token_id, token.logprobs) for token in got.tokens]


@pytest.mark.parametrize("cache_tokens", [-1, 2_048], ids=["by default", "all in cells"])
@pytest.mark.parametrize("length", [20, 150])
@pytest.mark.parametrize("kind", kinds("attention", SMALL_WINDOWS))
async def test_a_repeated_question_has_the_same_answer_to_the_last_bit(
    tmp_path: Path, kind: str, length: int, cache_tokens: int
) -> None:
    async with open_engine(config(write_named(tmp_path, kind), cache_tokens=cache_tokens)) as engine:
        for other in range(3):
            await answer(engine, question(1 + other, 60))
        first = told(await answer(engine, question(10, length)))
        for _ in range(3):
            assert told(await answer(engine, question(10, length))) == first


@pytest.mark.parametrize("cache_tokens", [-1, 200], ids=["by default", "with others that leave their cells"])
@pytest.mark.parametrize("repeated", [question(10, 20), question(10, 150), ask(tokens_for(7, 6), 20, logprobs=1)])
async def test_a_repeated_question_lies_in_the_same_cells_each_time(
    tiny: Path, repeated: Request, cache_tokens: int
) -> None:
    """Without flash attention, where attention adds up by place, that shows."""
    async with open_engine(config_for(tiny, cache_ram_mb=64, cache_tokens=cache_tokens)) as engine:
        for other in range(3):
            await answer(engine, question(1 + other, 60))
        first = told(await answer(engine, repeated))
        for _ in range(3):
            assert told(await answer(engine, repeated)) == first


@pytest.mark.parametrize("opening", [0, 1, 2, 3, 4, 20, 62, 63, 64])
@pytest.mark.parametrize("kind", [SMALL_WINDOWS, "hybrid"])
async def test_a_chat_that_is_asked_again_begins_behind_its_last_message(
    tmp_path: Path, kind: str, opening: int
) -> None:
    """However long what opens the answer is: where the last tokens are read apart, the checkpoint before them stays."""
    template = "{% for message in messages %}{{ message.content }}{% endfor %}{{ 'a' * (add_generation_prompt and N) }}"
    memory: Any = "sliding-window" if kind == SMALL_WINDOWS else kind
    path = tmp_path / f"{kind}.gguf"
    write_model(path, kind=memory, chat_template=template.replace("N", str(opening)), context_length=2_048)
    chat = Request(
        "chat", messages=(Message("user", "xyz, " * 80),), sampling=SamplingParams(max_tokens=4, temperature=0)
    )
    async with open_engine(config_for(path, cache_ram_mb=64)) as engine:
        first = await answer(engine, chat)
        for _ in range(2):
            again = await answer(engine, chat)
            assert again.token_ids == first.token_ids
            assert again.finished.usage.prompt_tokens - again.finished.usage.cached_tokens <= max(opening, 2)


async def test_after_a_restart_answers_are_the_same_however_often_each_was_asked_before(tiny: Path) -> None:
    async def answered(times: int) -> list[list[Any]]:
        found = []
        async with open_engine(config_for(tiny, cache_ram_mb=64, cache_tokens=200)) as engine:
            for number in range(5):
                for _ in range(times):
                    last = told(await answer(engine, ask(tokens_for(number, 60), 20, logprobs=1)))
                found.append(last)
        return found

    assert await answered(1) == await answered(3)


async def test_a_short_prompt_that_was_asked_twice_is_cached_after_a_restart(tmp_path: Path) -> None:
    """Between the two it is copied to memory, and not yet worth a file."""
    model = write_gemma4(tmp_path / "model.gguf")
    settings = config_for(model, n_ctx=4_096, cache_ram_mb=64, cache_dir=str(tmp_path / "cache"))
    asked = ask(tokens_for(3, 240), 20)
    async with open_engine(settings) as engine:
        for _ in range(2):
            await answer(engine, asked)
    async with open_engine(settings) as engine:
        assert (await answer(engine, asked)).finished.usage.cached_tokens >= 238


async def test_a_question_that_is_repeated_without_the_cache_has_too(tiny: Path) -> None:
    """It leaves nothing there, so that it lies in the same cells again."""
    async with open_engine(config(tiny)) as engine:
        await answer(engine, question(1, 450))
        uncached = attrs.evolve(question(10, 20), cache_prompt=False)
        first = told(await answer(engine, uncached))
        for _ in range(3):
            assert told(await answer(engine, uncached)) == first


@pytest.mark.parametrize("length", [1, 2, 3])
async def test_the_shortest_prompts_are_read_alone_and_again(tiny: Path, length: int) -> None:
    async with open_engine(config(tiny)) as engine:
        first = told(await answer(engine, ask(tokens_for(0, length), 8, logprobs=1)))
        assert len(first) == 8
        assert told(await answer(engine, ask(tokens_for(0, length), 8, logprobs=1))) == first


@pytest.mark.parametrize("length", [66, 200, 264, 450])
async def test_an_answer_does_not_depend_on_the_pieces_in_which_its_prompt_is_read(tiny: Path, length: int) -> None:
    async def answered(**settings: Any) -> list[Any]:
        async with open_engine(config(tiny, threads=1, **settings)) as engine:
            return told(await answer(engine, ask(tokens_for(3, length), 8, logprobs=1)))

    whole = await answered(n_ubatch=512)
    for most in (128, 192):
        assert await answered(n_ubatch=most) == whole, f"pieces of {most} tokens"
