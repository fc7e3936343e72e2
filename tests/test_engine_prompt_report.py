"""What a request is told of its own prompt: its text, its tokens, and how likely the model found each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
from engine_world import answer, answers, ask, config_for, settled, tokens_for
from test_engine_logprobs import check, reference

from harness import PATIENCE_SEC
from uma import LLM, Message, Request, SamplingParams, open_engine
from uma.engine import Engine
from uma.engine.intake.gate import MAX_PROMPT_LOGPROBS
from uma.engine.policy.tuning import Tuning
from uma.errors import BadRequest
from uma.llama.batch import Batch
from uma.llama.context import Context
from uma.types import Event, Finished, Prompt, Token


async def events(engine: Engine, request: Request) -> list[Event]:
    with trio.fail_after(PATIENCE_SEC):
        async with engine.generate(request) as stream:
            return [event async for event in stream]


@pytest.fixture(scope="module")
def prompt() -> tuple[int, ...]:
    return tokens_for(11, 150)


@pytest.fixture
async def engine(tiny: Path) -> AsyncIterator[Engine]:
    async with open_engine(config_for(tiny, n_ctx=4_096)) as engine:
        yield engine


def check_prompt(found: Prompt, tiny: Path, prompt: tuple[int, ...], k: int) -> None:
    assert found.token_ids == prompt
    assert found.logprobs is not None
    first, *others = found.logprobs
    assert first is None
    known = tuple(each for each in others if each is not None)
    check(known, prompt[1:], reference(tiny, list(prompt))[:-1], k)


@pytest.mark.parametrize("most", [1, 37], ids=["row by row", "in pieces"])
async def test_every_prompt_tokens_log_probability_is_the_models_own(
    tiny: Path, prompt: tuple[int, ...], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_engine(config_for(tiny)) as engine:
        vocab = engine.info.model.vocab_size
        monkeypatch.setattr("uma.engine.worker.runner.MAX_READ_BYTES", most * 4 * vocab)
        short = prompt[: 20 if most == 1 else None]
        first, *others = await events(engine, ask(short, 3, prompt_logprobs=4))
    assert isinstance(first, Prompt)
    check_prompt(first, tiny, short, 4)
    assert [type(event) for event in others] == [Token] * 3 + [Finished]


async def test_a_cached_prompt_is_computed_again_for_them_and_gives_the_same_answer(
    engine: Engine, tiny: Path, prompt: tuple[int, ...]
) -> None:
    plain = await answer(engine, ask(prompt, 5))
    first, *rest = await events(engine, ask(prompt, 5, prompt_logprobs=0))
    assert isinstance(first, Prompt)
    check_prompt(first, tiny, prompt, 0)
    assert tuple(event.token_id for event in rest if isinstance(event, Token)) == plain.token_ids
    (last,) = [event for event in rest if isinstance(event, Finished)]
    assert last.usage.cached_tokens == 0
    assert (await answer(engine, ask(prompt, 5))).finished.usage.cached_tokens > 0, "and it is cache for others"


async def test_logits_of_the_prompt_are_computed_only_where_they_are_asked(
    engine: Engine, prompt: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, outputs = Context.begin, list[int]()

    def counted(context: Context, batch: Batch) -> int:
        outputs.append(batch.n_outputs)
        return begin(context, batch)

    monkeypatch.setattr(Context, "begin", counted)
    await answer(engine, ask(prompt, 3, echo=True, logprobs=2))
    assert sum(outputs) == 3
    await answer(engine, ask(prompt, 3, prompt_logprobs=0))
    assert sum(outputs) == 3 + len(prompt) - 1 + 3


async def test_echo_alone_tells_the_prompt_and_uses_the_cache(engine: Engine) -> None:
    text = "Once upon a time there was an engine that told what it was asked. " * 3
    await answer(engine, ask(text, 2))
    first, *rest = await events(engine, ask(text, 2, echo=True))
    assert isinstance(first, Prompt)
    assert (first.text, first.logprobs) == (text, None)
    assert first.token_ids == (await engine.tokenize(ask(text))).token_ids
    assert isinstance(rest[-1], Finished)
    assert rest[-1].usage.cached_tokens > 0
    assert rest[-1].prompt is None


async def test_a_conversation_is_told_as_the_template_renders_it(engine: Engine) -> None:
    chat = Request("a", messages=(Message("user", "Hello"),), sampling=SamplingParams(max_tokens=1, echo=True))
    (first, *_) = await events(engine, chat)
    assert isinstance(first, Prompt)
    assert first.text == (await engine.tokenize(chat)).text
    assert "Hello" in first.text


@pytest.mark.parametrize("size", [1, 5, 60])
async def test_of_several_answers_the_prompt_comes_first_and_once(engine: Engine, tiny: Path, size: int) -> None:
    asked: dict[str, Any] = {"n": 3, "prompt_logprobs": 1, "temperature": 1, "seed": 1}
    first, *others = await events(engine, ask(tokens_for(5, size), 4, **asked))
    assert isinstance(first, Prompt)
    check_prompt(first, tiny, tokens_for(5, size), 1)
    assert not any(isinstance(event, Prompt) for event in others)
    whole = (await answer(engine, ask(tokens_for(5, size), 4, stream=False, **asked))).finished
    assert whole.prompt is not None
    check_prompt(whole.prompt, tiny, tokens_for(5, size), 1)


async def test_other_streams_prompts_beside_it_change_nothing(engine: Engine, tiny: Path) -> None:
    asked = [ask(tokens_for(seed, 90), 6, prompt_logprobs=2 if seed % 2 else None) for seed in range(6)]
    whole = [
        Request(f"r{index}", token_ids=each.token_ids, sampling=each.sampling, stream=False)
        for index, each in enumerate(asked)
    ]
    got = await answers(engine, whole)
    for request, each in zip(whole, got, strict=True):
        assert each.finished.token_ids is not None
        (single,) = await answers(engine, [ask(request.token_ids or (), 6, stream=False)])
        assert each.finished.token_ids == single.finished.token_ids
        if request.sampling.prompt_logprobs is not None:
            assert each.finished.prompt is not None
            check_prompt(each.finished.prompt, tiny, request.token_ids or (), 2)


async def test_preemption_in_the_middle_of_the_prompt_loses_and_repeats_nothing(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uma.engine.policy.order.TUNING", Tuning(give_way_ms=0.0))
    prompt, found = tokens_for(12, 400), []
    low = ask(prompt, 3, id="low", priority=-1, prompt_logprobs=1, stream=False)
    async with open_engine(config_for(tiny, max_sequences=1)) as engine:
        monkeypatch.setattr("uma.engine.worker.runner.MAX_READ_BYTES", 4 * engine.info.model.vocab_size)

        async def read_low() -> None:
            found.append((await answer(engine, low)).finished.prompt)

        with trio.fail_after(PATIENCE_SEC):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read_low)
                while not any(each.computed_tokens for each in (await engine.activity()).running):
                    await trio.lowlevel.checkpoint()
                await answer(engine, ask(tokens_for(1, 20), 3, id="high", priority=1))
                assert not found
        metrics = await settled(engine)
    assert metrics["preemptions_total"] == 1
    (told,) = found
    assert told is not None
    check_prompt(told, tiny, prompt, 1)


async def test_more_than_one_event_can_hold_are_refused_with_what_to_do(tiny: Path) -> None:
    async with open_engine(config_for(tiny, n_ctx=8_192)) as engine:
        size = MAX_PROMPT_LOGPROBS // 21 + 1
        with pytest.raises(BadRequest, match=r"prompt_logprobs: 20 for each of .* ask for fewer, or shorten"):
            await answer(engine, ask(tokens_for(1, size), 1, prompt_logprobs=20))


async def test_capabilities_declare_echo_and_prompt_logprobs(engine: Engine) -> None:
    able = engine.info.capabilities
    assert able.echo
    assert {"echo", "prompt_logprobs"} <= set(able.sampling_params)


def test_the_llm_gives_them_in_the_shapes_that_vllm_has(tiny: Path) -> None:
    with LLM(str(tiny), n_ctx=512, n_gpu_layers=0) as llm:
        (out,) = llm.generate("Once upon", SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=3))
        (plain,) = llm.generate("Once upon", SamplingParams(max_tokens=2, temperature=0))
        pieces = list(llm.stream("Once upon", SamplingParams(max_tokens=2, temperature=0, echo=True)))
        assert out.prompt_token_ids == tuple(llm.tokenize("Once upon"))
    assert out.prompt_logprobs is not None
    assert out.prompt_logprobs[0] is None
    for token, known in zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:], strict=True):
        assert known is not None
        assert known[token].logprob <= 0
        assert {1, 2, 3} <= {each.rank for each in known.values()}
    assert (plain.prompt_token_ids, plain.prompt_logprobs) == (None, None)
    assert pieces[0] == "Once upon"
    assert "".join(pieces[1:]) == plain.outputs[0].text
