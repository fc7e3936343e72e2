"""A request that is to be reproducible has the same text, to the last bit of its log probabilities, whatever else runs
and is cached, and is cancelled, stopped, constrained and counted as any other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import attrs
import pytest
import trio
import trio.testing
from engine_world import Answer, answer, answers, ask, config_for, settled, tokens_for
from every_kind import is_all, kinds, write_named
from reference import real_model

from benchmarks.reference import RealModel
from harness import PATIENCE_SEC
from models import write_model
from uma import Request, RuntimeConfig, open_engine
from uma.engine import Engine
from uma.engine.policy import Plan, Scheduler
from uma.engine.policy.state import State
from uma.engine.policy.tuning import Tuning
from uma.engine.sizing import RULES
from uma.errors import BadRequest, PromptTooLarge
from uma.types import Finished, Token

PROMPT = tokens_for(1, 150)


def config(model: Path, **settings: Any) -> RuntimeConfig:
    """With the attention, the KV memory and the threads of an engine that nothing was set for."""
    given = {"flash_attn": "auto", "cache_type_k": "f16", "cache_type_v": "f16", "threads": 2}
    return config_for(model, **(given | {"cache_ram_mb": 64} | settings))


def apart(prompt: Any = PROMPT, max_tokens: int = 12, **fields: Any) -> Request:
    return ask(prompt, max_tokens, **({"reproducible": True, "temperature": 1.0, "seed": 7, "logprobs": 2} | fields))


def told(got: Answer) -> list[Any]:
    return [(token.token_id, token.text, token.logprobs) for token in got.tokens]


async def beside_a_storm(engine: Engine, request: Request) -> Answer:
    """The answer to a request while others are read, decode and end."""
    storm = [ask(tokens_for(40 + number, 20 + 45 * number), 12 * number, id=f"s{number}") for number in range(1, 7)]
    return (await answers(engine, [*storm[:3], request, *storm[3:]]))[3]


@pytest.mark.parametrize("kind", kinds("attention"))
async def test_the_answer_is_the_same_alone_in_a_storm_behind_cache_and_after_a_restart(
    tmp_path: Path, kind: str
) -> None:
    model = write_named(tmp_path, kind)
    async with open_engine(config(model)) as engine:
        first = told(await answer(engine, apart()))
        assert len(first) == 12
        assert told(await beside_a_storm(engine, apart())) == first
        for count in (20, 100, 150):
            await answer(engine, ask(PROMPT[:count], 5))
        again = await answer(engine, apart())
        assert told(again) == first
        assert again.finished.usage.cached_tokens == 0
        assert told(await answer(engine, apart(seed=8))) != first
    async with open_engine(config(model, kv_unified="off", n_ctx=8_192, max_sequences=7, n_ubatch=128)) as engine:
        assert told(await beside_a_storm(engine, apart())) == first


async def test_streams_decode_ahead_of_each_piece_of_its_prompt(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    plan = Scheduler.plan

    def watched(scheduler: Scheduler, state: State, *args: Any, **options: Any) -> Plan:
        if state.decoding:
            pauses.append(options["pause_ms"])
        return plan(scheduler, state, *args, **options)

    monkeypatch.setattr(Scheduler, "plan", watched)
    async with open_engine(config(tiny, threads=1)) as engine:
        with trio.fail_after(PATIENCE_SEC):
            async with engine.generate(ask(tokens_for(9, 20), 1_500, id="stream")) as stream:
                await anext(aiter(stream))
                await answer(engine, apart(tokens_for(3, 320), 2))
                stream.cancel()
    assert sum(each > 0 for each in pauses) >= 320 // 32 - 2


async def test_several_at_once_are_each_answered_as_alone(tiny: Path) -> None:
    requests = [apart(tokens_for(number, 30), 10, id=str(number), priority=number - 1) for number in range(3)]
    async with open_engine(config(tiny, threads=1)) as engine:
        expected = [told(await answer(engine, each)) for each in requests]
        assert [told(each) for each in await answers(engine, requests)] == expected
        both = (await answer(engine, apart(PROMPT, 6, n=2, stream=False))).finished
        alone = (await answer(engine, apart(PROMPT, 6, seed=8, stream=False))).finished
    assert both.usage.completion_tokens == 12
    assert alone.text is not None


async def test_it_is_stopped_constrained_and_counted_as_any_other(tiny: Path) -> None:
    async with open_engine(config(tiny, threads=1)) as engine:
        whole = (await answer(engine, apart(max_tokens=12, logprobs=None))).finished
        counters = await settled(engine)
        assert whole.usage.prompt_tokens == len(PROMPT)
        assert whole.usage.completion_tokens == 12
        assert whole.reason == "length"
        assert whole.metrics.decode_iterations == -(-len(PROMPT) // 32) + 11
        assert counters["prompt_tokens_total"] == len(PROMPT) == counters["prefill_tokens_total"]
        chosen = await answer(engine, apart(max_tokens=9, choice=("yes", "no"), logprobs=None))
        assert chosen.text in ("yes", "no")
        assert chosen.finished.reason == "stop"
        text = (await answer(engine, apart("Once", 30, logprobs=None))).text
        stopped = await answer(engine, apart("Once", 30, logprobs=None, stop=(text[4:6],)))
        assert stopped.text == text[: text.index(text[4:6])]
        assert stopped.finished.reason == "stop"
        unwanted = await answer(engine, apart(max_tokens=0, logprobs=None))
        assert unwanted.finished.usage.completion_tokens == 0


async def test_one_that_is_cancelled_leaves_the_context_to_the_next(tiny: Path) -> None:
    async with open_engine(config(tiny, threads=1)) as engine:
        expected = told(await answer(engine, apart()))
        with trio.fail_after(PATIENCE_SEC):
            async with engine.generate(apart(max_tokens=1_500, id="long")) as stream:
                async for _ in stream:
                    break
                stream.cancel()
                async for event in stream:
                    if isinstance(event, Finished):
                        assert event.reason == "cancelled"
        assert told(await answer(engine, apart())) == expected
        assert (await settled(engine))["active_sequences"] == 0


async def test_a_slow_reader_of_one_pauses_only_itself(tiny: Path) -> None:
    async with open_engine(config(tiny, threads=1)) as engine:
        long = apart(tokens_for(5, 40), 400, id="long", logprobs=None)
        expected, other = await answer(engine, long), told(await answer(engine, apart()))
        with trio.fail_after(PATIENCE_SEC):
            async with engine.generate(long) as stream:
                assert told(await answer(engine, apart())) == other
                tokens = [event.token_id async for event in stream if isinstance(event, Token)]
    assert tuple(tokens) == expected.token_ids


async def test_with_windows_one_with_a_slow_reader_is_answered_as_alone(tmp_path: Path) -> None:
    model = write_model(tmp_path / "windows.gguf", kind="sliding-window", context_length=2_048)
    long = apart(tokens_for(5, 40), 400, id="long")
    beside: list[Answer] = []

    async def ask_beside(engine: Engine) -> None:
        beside.append(await answer(engine, apart()))

    async with open_engine(config(model, threads=1, flash_attn="off")) as engine:
        expected, other = told(await answer(engine, long)), told(await answer(engine, apart()))
        with trio.fail_after(PATIENCE_SEC):
            async with engine.generate(long) as stream, trio.open_nursery() as nursery:
                nursery.start_soon(ask_beside, engine)
                for number in range(3):  # time enough for both
                    await answer(engine, ask(tokens_for(9, 20), 400, id=str(number)))
                tokens = [event async for event in stream if isinstance(event, Token)]
    assert [(token.token_id, token.text, token.logprobs) for token in tokens] == expected
    assert [told(each) for each in beside] == [other]


@pytest.mark.parametrize(("delay_ms", "order"), [(1e-6, "abc"), (60_000.0, "bca")])
async def test_a_lower_lane_waits_for_a_higher_one_for_a_bounded_time(
    tiny: Path, delay_ms: float, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uma.engine.policy.order.TUNING", Tuning(lane_delay_ms=delay_ms))
    ended: list[str] = []

    async def ask_for(engine: Engine, name: str, lane: int) -> None:
        await answer(engine, apart(tokens_for(3, 20), 5, id=name, priority=lane))
        ended.append(name)

    async with (
        open_engine(config(tiny, threads=1)) as engine,
        trio.open_nursery() as nursery,
        engine.generate(apart(max_tokens=300, id="first")) as stream,
    ):
        for name, lane in (("a", -1), ("b", 1), ("c", 1)):
            nursery.start_soon(ask_for, engine, name, lane)
            await trio.testing.wait_all_tasks_blocked()
        async for _ in stream:
            pass
    assert "".join(ended) == order


async def test_one_may_be_as_long_as_any_where_there_is_memory_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "long.gguf", context_length=20_000)
    async with open_engine(config(model, n_ctx=20_000)) as engine:
        assert engine.info.limits.max_reproducible_tokens == engine.info.limits.n_ctx == 20_000
    monkeypatch.setattr("uma.engine.sizing.RULES", attrs.evolve(RULES, pool_share=10**15))
    async with open_engine(config(model, n_ctx=20_000)) as engine:
        assert engine.info.limits.max_reproducible_tokens == 8_192


@pytest.mark.parametrize("kind", ["attention", "sliding-window"])
async def test_one_with_a_slow_reader_is_computed_again_where_it_cannot_be_put_aside(
    tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uma.engine.worker.reproducer.MAX_ASIDE_BYTES", 0)
    model = write_model(tmp_path / "model.gguf", kind=kind, context_length=2_048)
    long = apart(tokens_for(5, 40), 400, id="long")
    async with open_engine(config(model, threads=1)) as engine:
        expected, other = told(await answer(engine, long)), told(await answer(engine, apart()))
        with trio.fail_after(PATIENCE_SEC):
            async with engine.generate(long) as stream:
                assert told(await answer(engine, apart())) == other
                tokens = [event async for event in stream if isinstance(event, Token)]
    assert [(token.token_id, token.text, token.logprobs) for token in tokens] == expected


async def test_beside_a_stream_of_a_higher_lane_it_leaves_that_most_of_its_speed(tiny: Path) -> None:
    given = 0
    async with open_engine(config(tiny, threads=1)) as engine, trio.open_nursery() as nursery:

        async def background() -> None:
            nonlocal given
            async with engine.generate(apart(max_tokens=1_800, id="b", logprobs=None, priority=-1)) as stream:
                async for event in stream:
                    given += isinstance(event, Token)

        with trio.fail_after(PATIENCE_SEC):
            nursery.start_soon(background)
            while not given:
                await trio.testing.wait_all_tasks_blocked()
            before = given
            await answer(engine, ask(tokens_for(2, 20), 1_000, id="stream", priority=1))
        assert 0 < given - before < 600
        nursery.cancel_scope.cancel()


async def test_what_is_computed_is_charged_to_its_client(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[int] = []
    monkeypatch.setattr("uma.engine.policy.state.FairShare.was_read", lambda _, tokens: charged.append(tokens))
    monkeypatch.setattr("uma.engine.policy.state.FairShare.was_given", lambda _, tokens: charged.append(tokens))
    async with open_engine(config(tiny, threads=1)) as engine:
        await answer(engine, apart(max_tokens=5))
    assert sum(charged) == len(PROMPT) + 4


@pytest.mark.parametrize("kind", kinds("attention"))
async def test_the_answer_is_the_same_with_any_number_of_threads(tmp_path: Path, kind: str) -> None:
    model = write_named(tmp_path, kind)
    answers_of = []
    for threads in (1, 2):
        async with open_engine(config(model, threads=threads, n_ctx=2_048)) as engine:
            answers_of.append(told(await answer(engine, apart(tokens_for(4, 700), 4))))
    assert answers_of[0] == answers_of[1]


async def test_what_cannot_be_computed_apart_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_engine(config(tiny)) as engine:
        with pytest.raises(BadRequest, match="echo: a reproducible request"):
            await answer(engine, apart(echo=True))
        monkeypatch.setattr("uma.engine.sizing.free_memory_bytes", lambda: 1_000)
        with pytest.raises(BadRequest, match="reproducible: there is no context for it"):
            await answer(engine, apart())


async def test_a_prompt_that_is_longer_than_its_context_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = attrs.evolve(RULES, reproducible_tokens=256, pool_share=10**15)
    monkeypatch.setattr("uma.engine.sizing.RULES", rules)
    async with open_engine(config(tiny)) as engine:
        assert engine.info.limits.max_reproducible_tokens == 256
        with pytest.raises(PromptTooLarge, match="256 tokens with its output"):
            await answer(engine, apart(tokens_for(1, 256)))
        got = (await answer(engine, apart(tokens_for(1, 250), 20, logprobs=None))).finished
        assert (got.usage.completion_tokens, got.reason) == (6, "length")
        assert "do not fit the context" in got.warnings[0]


@pytest.mark.parametrize("name", get_args(RealModel) if is_all() else ["smollm2"])
async def test_a_real_model_answers_the_same_with_any_company(name: RealModel) -> None:
    """Its other texts, of weights of a few bits, need not: in other batches the last bits of what they give are others,
    and margins of 0.3 nats turn.
    """
    request = attrs.evolve(
        apart("The capital of France is", 10, temperature=0.8, logprobs=None, ignore_eos=False), id="real"
    )
    crowd = [ask(f"A sentence about {word}:", 6, id=word) for word in ("rain", "bread", "music")]
    async with open_engine(config(real_model(name), threads=1)) as engine:
        first = (await answer(engine, request)).text
        assert (await answers(engine, [*crowd, request]))[3].text == first
        await answer(engine, ask("The capital of France is", 3))
        assert (await answer(engine, request)).text == first
    other = {"kv_unified": "off", "n_ctx": 4_096, "max_sequences": 2, "n_batch": 128, "n_ubatch": 64}
    async with open_engine(config(real_model(name), threads=2, **other)) as engine:
        assert (await answers(engine, [*crowd, request]))[3].text == first
