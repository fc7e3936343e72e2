"""Several answers to one prompt: each as a request of its own would give it, and the prompt read once."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import trio
from engine_world import Answer, alone, answer, answers, ask, config_for, settled, tokens_for

from harness import PATIENCE_SEC
from uma import LLM, Request, SamplingParams, open_engine
from uma.engine.delivery.pacing import CREDITS
from uma.errors import BadRequest
from uma.types import Finished, Grammar, Token

DRAWN: dict[str, Any] = {"temperature": 1.2, "ignore_eos": False}


def by_answer(got: Answer) -> list[tuple[int, ...]]:
    found: dict[int, list[int]] = defaultdict(list)
    for token in got.tokens:
        found[token.index].append(token.token_id)
    return [tuple(found[index]) for index in sorted(found)]


def request(count: int = 4, seed: int = 7, tokens: int = 150, **more: Any) -> Request:
    return ask(tokens_for(3, tokens), 25, n=count, seed=seed, **(DRAWN | {"ignore_eos": True} | more))


@pytest.mark.parametrize("layout", ["on", "off"])
@pytest.mark.parametrize(
    "more", [{}, {"grammar": Grammar(regex="[a-z]{9,30}"), "ignore_eos": False}], ids=["free", "grammar"]
)
async def test_each_answer_is_what_its_seed_alone_gives(tiny: Path, layout: str, more: dict[str, Any]) -> None:
    async with open_engine(
        config_for(tiny, cache_tokens=0, cache_ram_mb=0, max_sequences=1, kv_unified=layout)
    ) as engine:
        expected = await alone(engine, [request(1, **more | {"seed": 7 + index}) for index in range(4)])
    async with open_engine(config_for(tiny, kv_unified=layout, n_ctx=4_096, max_sequences=5)) as engine:
        got = await answer(engine, request(**more))
    assert by_answer(got) == [each.token_ids for each in expected]
    assert len(set(by_answer(got))) == 4
    assert [each.seed for each in got.finished.answers] == [7, 8, 9, 10]
    assert [each.reason for each in got.finished.answers] == [each.finished.reason for each in expected]


async def test_the_prompt_is_read_once(tiny: Path) -> None:
    async with open_engine(config_for(tiny, n_ctx=4_096)) as engine:
        got = await answer(engine, request(8, tokens=400))
        metrics = await settled(engine)
    # Each answer computes the prompt's last token, whose logits it samples from, for itself.
    assert metrics["prefill_tokens_total"] - metrics["reread_tokens_total"] <= 400 + 8 + 1
    assert metrics["requests_total"] == 1
    assert metrics["prompt_tokens_total"] == 400
    assert got.finished.usage.prompt_tokens == 400
    assert got.finished.usage.completion_tokens == len(got.tokens) == 8 * 25


async def test_answers_share_the_cells_of_their_prompt(tiny: Path) -> None:
    """Eight copies of the prompt would not fit."""
    async with open_engine(config_for(tiny, n_ctx=1_024, kv_unified="on")) as engine:
        got = await answer(engine, request(8, tokens=600))
        metrics = await settled(engine)
    assert [len(each) for each in by_answer(got)] == [25] * 8
    assert (metrics["preemptions_total"], metrics["kv_retries_total"]) == (0, 0)
    assert metrics["prefill_tokens_total"] - metrics["reread_tokens_total"] <= 600 + 8 + 1


async def test_what_is_not_streamed_comes_as_answers_in_order(tiny: Path) -> None:
    async with open_engine(config_for(tiny, n_ctx=4_096)) as engine:
        streamed = await answer(engine, request())
        whole = (await answer(engine, request(stream=False))).finished
    assert [each.index for each in whole.answers] == [0, 1, 2, 3]
    assert [each.token_ids for each in whole.answers] == by_answer(streamed)
    assert (whole.text, whole.token_ids) == (whole.answers[0].text, whole.answers[0].token_ids)
    assert [each.completion_tokens for each in whole.answers] == [25] * 4


async def test_best_of_gives_the_likeliest_of_those_that_were_drawn(tiny: Path) -> None:
    async with open_engine(config_for(tiny, n_ctx=4_096)) as engine:
        every = (await answer(engine, request(6, logprobs=0, stream=False))).finished
        best = (await answer(engine, request(2, best_of=6, stream=False))).finished

    def mean(index: int) -> float:
        known = every.answers[index].logprobs or ()
        return sum(each.chosen.logprob for each in known) / len(known)

    order = sorted(range(6), key=mean, reverse=True)
    assert [each.seed for each in best.answers] == [every.answers[index].seed for index in order[:2]]
    assert [each.token_ids for each in best.answers] == [every.answers[index].token_ids for index in order[:2]]
    assert best.answers[0].logprobs is None, "they were not asked for"
    assert best.usage.completion_tokens == 6 * 25


async def test_more_answers_than_sequences_are_refused_with_what_to_do(tiny: Path) -> None:
    async with open_engine(config_for(tiny, max_sequences=4)) as engine:
        assert engine.info.capabilities.max_answers == 4
        assert len((await answer(engine, request(4, tokens=20))).finished.answers) == 4
        for wrong, why in [
            (request(5), "n: 5 answers need as many sequences, and 4 run here at once"),
            (request(1, best_of=5, stream=False), "best_of: 5 answers need"),
            (request(1, best_of=2), "best_of: .* set stream to false"),
        ]:
            with pytest.raises(BadRequest, match=why):
                await answer(engine, wrong)


async def test_cancelling_ends_all_answers(tiny: Path) -> None:
    async with open_engine(config_for(tiny, n_ctx=8_192, max_tokens=5_000)) as engine:
        long = ask(tokens_for(1, 20), 4_000, n=3, **(DRAWN | {"ignore_eos": True}))
        with trio.fail_after(PATIENCE_SEC):
            async with engine.generate(long) as stream:
                await stream.__anext__()
                stream.cancel()
                events = [event async for event in stream]
            (last,) = [event for event in events if isinstance(event, Finished)]
            assert [each.reason for each in last.answers] == ["cancelled"] * 3
            async with engine.generate(long) as stream:
                await stream.__anext__()
        metrics = await settled(engine)
    assert (metrics["active_sequences"], metrics["queued_requests"]) == (0, 0)


async def test_a_reader_of_several_answers_that_stops_is_sent_a_window_for_each(tiny: Path) -> None:
    asked = ask(tokens_for(1, 20), 400, n=3, **(DRAWN | {"ignore_eos": True}))
    counts: dict[int, int] = defaultdict(int)
    async with open_engine(config_for(tiny, n_ctx=8_192)) as engine, engine.generate(asked) as stream:
        await answer(engine, ask(max_tokens=300))
        assert engine.snapshot()["tokens_generated_total"] <= 300 + 3 * CREDITS
        with trio.fail_after(PATIENCE_SEC):
            async for event in stream:
                if isinstance(event, Token):
                    counts[event.index] += 1
    assert len(counts) == 3
    assert set(counts.values()) <= {400, 401}  # (half a character at the end is an event of its own)


async def test_answers_beside_others_change_nothing(tiny: Path) -> None:
    free = ask(tokens_for(2, 40), 60)
    async with open_engine(config_for(tiny, n_ctx=4_096)) as engine:
        expected = await alone(engine, [free, request()])
        got = await answers(engine, [request(), free])
    assert got[1].token_ids == expected[0].token_ids
    assert by_answer(got[0]) == by_answer(expected[1])


def test_the_llm_gives_them_as_outputs(tiny: Path) -> None:
    with LLM(str(tiny), n_ctx=2_048, n_gpu_layers=0) as llm:
        (out,) = llm.generate("x", SamplingParams(n=4, logprobs=5, max_tokens=5, temperature=1, seed=1))
    assert [each.index for each in out.outputs] == [0, 1, 2, 3]
    assert [len(each.logprobs or ()) for each in out.outputs] == [len(each.token_ids) for each in out.outputs]
