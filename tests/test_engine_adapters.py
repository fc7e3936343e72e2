"""LoRA adapters by request: whatever runs beside it, is cached or was preempted, a text is that of its own adapters."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from adapters import write_adapter
from engine_world import Answer, alone, answer, answers, ask, at_once, config_for, settled, tokens_for
from hybrids import write_predicting

from harness import PATIENCE_SEC
from models import write_model
from uma import Request, open_engine
from uma.config import RuntimeConfig
from uma.contracts.events import BlockStored
from uma.engine import Engine
from uma.engine.adapters import MAX_OF_CLIENT, AdapterSet, AdapterSets
from uma.engine.kv.adapter_keys import MAX_SETS
from uma.errors import BadRequest, Overloaded
from uma.llama.adapters import Adapter
from uma.llama.batch import Batch
from uma.llama.context import Context, ContextParams
from uma.llama.model import Model
from uma.net.client import CLIENT
from uma.types import AdapterScale, EmbedRequest

INVOCATION = (65, 66, 65)
SETS = (None, "tiny+one", "tiny+two")


@pytest.fixture(scope="module", params=["attention", "hybrid"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RuntimeConfig:
    """A model with two adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    model = write_model(folder / "tiny.gguf", kind=request.param, context_length=2_048)
    one, two = (write_adapter(folder / f"{seed}.gguf", model, seed=seed) for seed in (1, 2))
    return config_for(model, lora=f"one={one},two={two}:0.5", max_sequences=8)


def of(model: str | None, prompt: Any, max_tokens: int = 24, **more: Any) -> Request:
    return attrs.evolve(ask(prompt, max_tokens, **more), model=model)


def texts(given: list[Answer]) -> list[tuple[int, ...]]:
    return [each.token_ids for each in given]


async def each_alone(config: RuntimeConfig, requests: list[Request]) -> list[tuple[int, ...]]:
    """Each text as an engine gives it that has not seen the others."""
    found = list[tuple[int, ...]]()
    async with open_engine(config) as engine:
        for request in requests:
            found.append((await answer(engine, attrs.evolve(request, cache_prompt=False))).token_ids)
    return found


async def test_the_base_and_two_adapters_at_once_give_what_each_gives_alone(config: RuntimeConfig) -> None:
    prompts = [tokens_for(seed, size) for seed, size in ((1, 80), (2, 150), (1, 300))]
    requests = [of(name, prompt) for prompt in prompts for name in SETS]
    expected = await each_alone(config, requests)
    assert len(set(expected)) == len(expected), "an adapter has no effect"
    async with open_engine(config) as engine:
        assert engine.info.capabilities.adapters == ("one", "two")
        assert texts(await answers(engine, requests)) == expected
        again = await answers(engine, requests)
    assert texts(again) == expected
    assert sum(each.finished.usage.cached_tokens for each in again) > 0


async def test_an_adapter_is_what_a_model_loaded_with_it_alone_gives(config: RuntimeConfig) -> None:
    first, _, second = config.lora.partition(",")
    asked = of("tiny+one", tokens_for(3, 60))
    async with open_engine(config) as engine:
        expected = await answer(engine, asked)
    async with open_engine(attrs.evolve(config, lora=f"{second},{first}")) as engine:
        assert (await answer(engine, asked)).token_ids == expected.token_ids
        by_scale = attrs.evolve(asked, model=None, lora=(AdapterScale(1, 1.0),))
        assert (await answer(engine, by_scale)).token_ids == expected.token_ids
        none = attrs.evolve(asked, lora=(AdapterScale(1, 0.0),))
        both = attrs.evolve(asked, lora=(AdapterScale(1, 1.0), AdapterScale(0, 2.0)))
        found = texts(await answers(engine, [none, both, attrs.evolve(asked, model=None)]))
    assert found[0] == found[2] != expected.token_ids
    assert found[1] not in (found[0], expected.token_ids)


async def test_a_text_is_what_llama_cpp_computes_with_the_adapter(config: RuntimeConfig) -> None:
    prompt, files = tokens_for(8, 30), [named.partition("=")[2] for named in config.lora.split(",")]
    async with open_engine(config) as engine:
        given = texts(await alone(engine, [of(name, prompt, 8) for name in SETS[1:]]))
    with Model.load(Path(config.model)) as model:
        one, two = (model.load_adapter(Path(file.removesuffix(":0.5")), file) for file in files)
        params = ContextParams(n_ctx=64, flash_attn="off", cache_type_k="f32", cache_type_v="f32")
        for adapter, expected in zip(((one, 1.0), (two, 0.5)), given, strict=True):
            with Context(model, params) as context:
                context.set_threads(1)
                context.use_adapters([adapter])
                batch, tokens = Batch(64), list(prompt)
                for _ in range(8):
                    at = context.seq_pos_max(0) + 1
                    batch.clear()
                    batch.add(tokens[at:], at, 0, last_logits=True)
                    assert context.decode(batch) == 0
                    tokens.append(int(context.logits(1).argmax()))
            assert tuple(tokens[30:]) == expected


async def test_no_prefix_is_shared_between_adapters(config: RuntimeConfig) -> None:
    prompt = tokens_for(4, 200)
    async with open_engine(config) as engine:
        for is_known in (False, True):
            given = await alone(engine, [of(name, prompt, 4) for name in SETS])
            assert [each.finished.usage.cached_tokens > 0 for each in given] == [is_known] * len(SETS)


async def test_texts_are_exact_under_preemption_and_beside_cancelled_ones(config: RuntimeConfig) -> None:
    requests = [of(name, tokens_for(seed, 60), 60, priority=seed % 3 - 1) for seed in range(4) for name in SETS]
    expected = await each_alone(config, requests)
    async with open_engine(attrs.evolve(config, n_ctx=256, kv_unified="on")) as engine:

        async def leave_early(name: str | None) -> None:
            async with engine.generate(of(name, tokens_for(9, 50), 200)) as stream:
                await anext(stream)

        async with trio.open_nursery() as nursery:
            for name in SETS:
                nursery.start_soon(leave_early, name)
            assert texts(await at_once(engine, requests)) == expected
        assert (await settled(engine))["preemptions_total"] > 0


async def test_a_third_set_waits_until_one_of_two_has_ended(config: RuntimeConfig) -> None:
    requests = [
        of(name, tokens_for(7, 40), count, stream=False) for name, count in zip(SETS, (300, 300, 4), strict=True)
    ]
    ended: list[str | None] = []

    async def read(engine: Engine, request: Request) -> None:
        await answer(engine, request)
        ended.append(request.model)

    async with open_engine(config) as engine:
        await engine.pause(60)
        async with trio.open_nursery() as nursery:
            for request in requests:
                nursery.start_soon(read, engine, request)
                await trio.testing.wait_all_tasks_blocked()
            await engine.pause(0)
    assert ended[0] != SETS[2]


async def test_what_waits_for_its_adapters_turn_says_so(config: RuntimeConfig) -> None:
    async with open_engine(config) as engine, AsyncExitStack() as running:
        for name in SETS:
            stream = await running.enter_async_context(engine.generate(of(name, tokens_for(7, 40), 900)))
            if name != SETS[2]:
                await anext(stream)  # no more is read, so it does not end
        with trio.fail_after(PATIENCE_SEC):
            while [each.waits_for for each in (await engine.activity()).waiting] != ["adapters"]:
                pass


async def test_an_interactive_request_has_a_set_of_background_ones_preempted(config: RuntimeConfig) -> None:
    async with open_engine(config) as engine, AsyncExitStack() as running:
        for name in SETS[:2]:
            stream = await running.enter_async_context(engine.generate(of(name, tokens_for(7, 40), 900, priority=-1)))
            await anext(stream)  # no more is read, so it does not end
        assert (await answer(engine, of(SETS[2], "Hi", 4, priority=1))).finished.reason == "length"
        assert (await settled(engine))["preemptions_total"] == 1


@pytest.fixture(scope="module")
def invoked(config: RuntimeConfig, tmp_path_factory: pytest.TempPathFactory) -> RuntimeConfig:
    """The model with an aLoRA, and the same matrices without an invocation."""
    folder, model = tmp_path_factory.mktemp("alora"), Path(config.model)
    late = write_adapter(folder / "late.gguf", model, seed=1, invocation=INVOCATION)
    return attrs.evolve(config, lora=f"late={late},one={write_adapter(folder / 'one.gguf', model, seed=1)}")


def calling(seed: int, before: int, after: int) -> tuple[int, ...]:
    """A prompt that invokes the aLoRA twice: the last time counts."""
    return (*tokens_for(seed, before), *INVOCATION, *tokens_for(9, before), *INVOCATION, *tokens_for(seed, after))


async def test_a_prediction_head_beside_adapters_changes_no_text(tmp_path: Path) -> None:
    """The head guesses without the adapter. Matrices of its own layer are loaded where an adapter changes them."""
    model = write_predicting(tmp_path / "tiny.gguf", "qwen35", context_length=1_024)
    config = config_for(model, lora=f"one={write_adapter(tmp_path / 'one.gguf', model)}")
    requests = [of(name, tokens_for(seed, 60), 40) for seed in (1, 2) for name in SETS[:2]]
    async with open_engine(config) as engine:
        expected = texts(await alone(engine, requests))
    async with open_engine(attrs.evolve(config, speculate="always")) as engine:
        assert texts(await alone(engine, requests)) == expected
        assert texts(await answers(engine, requests)) == expected
        assert (await settled(engine))["draft_tokens_total"] > 0


async def test_an_alora_is_used_from_its_last_invocation_on(invoked: RuntimeConfig) -> None:
    prompts = [calling(seed, before, after) for seed, before, after in ((1, 30, 5), (2, 200, 90), (1, 30, 0))]
    expected = []
    with Model.load(Path(invoked.model)) as model:
        file = invoked.lora.partition("=")[2].partition(",")[0]
        adapter = model.load_adapter(Path(file), "late")
        params = ContextParams(n_ctx=1_024, flash_attn="off", cache_type_k="f32", cache_type_v="f32")
        for prompt in prompts:
            with Context(model, params) as context:
                context.set_threads(1)
                batch, tokens = Batch(1_024), list(prompt)
                start = max(at for at in range(len(prompt)) if prompt[at : at + len(INVOCATION)] == INVOCATION)
                for begin, end in [
                    (0, start),
                    (start, len(prompt)),
                    *((at, at + 1) for at in range(len(prompt), len(prompt) + 15)),
                ]:
                    context.use_adapters([] if end <= start else [(adapter, 1.0)])
                    batch.clear()
                    batch.add(tokens[begin:end], begin, 0, last_logits=True)
                    assert context.decode(batch) == 0
                    if end >= len(prompt):
                        tokens.append(int(context.logits(1).argmax()))
                expected.append(tuple(tokens[len(prompt) :]))
    requests = [of("tiny+late", prompt, 16) for prompt in prompts]
    others = [of(name, prompt, 16) for name in (None, "tiny+one") for prompt in prompts]
    async with open_engine(invoked) as engine:
        assert texts(await alone(engine, requests)) == expected
        plain = texts(await alone(engine, others))
        assert not set(plain) & set(expected)
        assert texts(await answers(engine, [*others, *requests, *requests])) == [*plain, *expected, *expected]
        reproducible = [
            attrs.evolve(each, sampling=attrs.evolve(each.sampling, reproducible=True)) for each in requests
        ]
        assert texts(await answers(engine, reproducible)) == expected
        never = tokens_for(5, 50)
        given = texts(await alone(engine, [of(name, never, 8) for name in ("tiny+late", None)]))
        assert given[0] == given[1]
        with pytest.raises(BadRequest, match="an aLoRA, used from certain tokens on, cannot be beside others"):
            await answer(engine, attrs.evolve(ask(), lora=(AdapterScale(0, 1.0), AdapterScale(1, 1.0))))


async def test_an_alora_shares_the_cache_of_the_model_up_to_its_invocation(
    invoked: RuntimeConfig, tmp_path: Path
) -> None:
    kept = attrs.evolve(invoked, cache_dir=str(tmp_path), cache_ram_mb=16, n_ctx=2_048)
    state, call = tokens_for(3, 500), (*INVOCATION, *tokens_for(4, 600))
    async with open_engine(kept) as engine:
        feed = engine.kv_events(block_size=16)
        await answer(engine, of(None, state, 1))
        base, first = await alone(engine, [of(None, (*state, *tokens_for(4, 20))), of("tiny+late", (*state, *call))])
        assert base.finished.usage.cached_tokens > 400
        assert 400 < first.finished.usage.cached_tokens <= 500
        (after,) = await alone(engine, [of(None, (*state, *call))])
        assert after.finished.usage.cached_tokens <= 500
        # Of a prompt whose logits are read less is looked up than what comes before the invocation.
        other = (*tokens_for(8, 100), *INVOCATION, *tokens_for(8, 40))
        reported = of("tiny+late", other, prompt_logprobs=0)
        _, of_base = await alone(engine, [reported, of(None, other)])
        assert of_base.finished.usage.cached_tokens <= 100
        await settled(engine)
        events = [event for event in (await feed.changes()).events if isinstance(event, BlockStored)]
    named = {hash for event in events if event.lora_id is not None for hash in event.block_hashes}
    plain = {hash for event in events if event.lora_id is None for hash in event.block_hashes}
    assert named
    assert not named & plain
    assert len(named) <= sum(2 + (size + 24) // 16 for size in (len(call), 43)), "blocks before it are the model's"
    async with open_engine(kept) as engine:
        again = await alone(engine, [of("tiny+late", (*state, *call)), of(None, (*state, *call))])
    assert texts(again) == texts([first, after])
    assert all(each.finished.usage.cached_tokens > 1_000 for each in again)


async def test_an_alora_is_exact_under_preemption(invoked: RuntimeConfig) -> None:
    requests = [
        of(name, calling(seed, 10 + 7 * seed, seed), 60, priority=seed % 3 - 1)
        for seed in range(4)
        for name in ("tiny+late", None, "tiny+one")
    ]
    expected = await each_alone(invoked, requests)
    async with open_engine(attrs.evolve(invoked, n_ctx=256, kv_unified="on")) as engine:
        assert texts(await at_once(engine, requests)) == expected
        assert (await settled(engine))["preemptions_total"] > 0


async def test_one_client_with_two_sets_holds_up_no_other_client(config: RuntimeConfig) -> None:
    """Two of its sets run, and a third waits: another client's request takes the turn of the second one."""

    async def read(request: Request, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with engine.generate(request) as stream:
            async for _ in stream:
                task_status.started()
                task_status = trio.TASK_STATUS_IGNORED
        raise AssertionError("the others waited until the first had ended")

    async with open_engine(config) as engine, trio.open_nursery() as nursery:
        CLIENT.set("sweeping")
        for scale in (2, 3, 4):
            request = attrs.evolve(of(None, tokens_for(7, 20), 1_200), lora=(AdapterScale(0, scale),))
            if scale < 4:
                await nursery.start(read, request)
            else:
                nursery.start_soon(read, request)
        CLIENT.set("other")
        await alone(engine, [of(name, tokens_for(8, 20), 2) for name in SETS])
        nursery.cancel_scope.cancel()


async def test_a_client_that_sweeps_scales_loses_its_own_oldest_set_and_no_other_clients(
    config: RuntimeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uma.engine.adapters.MAX_OF_CLIENT", 4)

    def scaled(scale: float, size: int = 40) -> Request:
        return attrs.evolve(of(None, tokens_for(4, size), 2), lora=(AdapterScale(0, scale),))

    async with open_engine(attrs.evolve(config, cache_tokens=1_500)) as engine:
        CLIENT.set("other")
        kept = await answer(engine, scaled(0.5))
        CLIENT.set("sweeping")
        first = await answer(engine, scaled(2))
        for step in range(3, 7):
            await answer(engine, scaled(step, size=2))
        again = await alone(engine, [scaled(2), scaled(0.5)])
    assert [each.finished.usage.cached_tokens > 0 for each in again] == [False, True]
    assert texts(again) == texts([first, kept])


def test_a_number_is_given_again_once_no_request_runs_with_its_set() -> None:
    adapter = Adapter("a", Path("a.gguf"), 1.0, None, "digest", 1)
    model: Any = SimpleNamespace(adapters=(adapter,), vocab=SimpleNamespace(n_tokens=300), n_tensors=9)
    sets, forgotten, running = AdapterSets(model), list[int](), set[AdapterSet]()
    lasting = [sets.asked("tiny"), sets.asked("tiny+a")]

    def ask_for(scale: float, client: int) -> AdapterSet:
        CLIENT.set(client)
        return sets.numbered(sets.asked(None, (AdapterScale(0, scale),)), running, forgotten.append)

    numbers = {ask_for(2.0 + index, index // MAX_OF_CLIENT).number for index in range(MAX_SETS - 1)}
    assert {*numbers, 0, 1} == set(range(MAX_SETS + 1)), "each has another"
    assert [sets.numbered(known, running, forgotten.append).number for known in lasting] == [0, 1]
    running.add(oldest := ask_for(2.0, 0))
    assert not forgotten
    for taken in range(3, 3 + MAX_OF_CLIENT):  # the second set is the oldest that does not run
        assert ask_for(9_000.0 + taken, 999).number == taken
        running.add(ask_for(9_000.0 + taken, 999))
    with pytest.raises(Overloaded, match="64 different sets of adapters run or wait"):
        ask_for(0.5, 999)
    assert forgotten == list(range(3, 3 + MAX_OF_CLIENT))
    assert ask_for(2.0, 0) is oldest


async def test_a_restart_finds_the_prefixes_of_each_adapter_on_disk(config: RuntimeConfig, tmp_path: Path) -> None:
    kept = attrs.evolve(config, cache_dir=str(tmp_path), cache_ram_mb=16)
    requests = [of(name, tokens_for(5, 600)) for name in SETS]
    async with open_engine(kept) as engine:
        expected = texts(await alone(engine, requests))
    first, _, second = config.lora.partition(",")
    async with open_engine(attrs.evolve(kept, lora=f"{second},{first}")) as engine:
        again = await alone(engine, requests)
    assert texts(again) == expected
    assert all(each.finished.usage.cached_tokens > 500 for each in again)
    async with open_engine(attrs.evolve(kept, lora=first.replace("one=", "two="))) as engine:
        changed, same = await alone(engine, [requests[2], requests[0]])
    assert changed.token_ids == expected[1]  # the file of `one` by another name
    assert changed.finished.usage.cached_tokens > 500
    assert same.token_ids == expected[0]


async def test_a_reproducible_text_is_that_of_its_adapter(config: RuntimeConfig) -> None:
    async with open_engine(config) as engine:
        given = texts(await answers(engine, [of(name, "Once upon a time", reproducible=True) for name in SETS]))
        assert given == texts(await alone(engine, [of(name, "Once upon a time") for name in SETS]))


async def test_events_tell_routers_which_adapter_a_prefix_is_of(config: RuntimeConfig) -> None:
    prompt = tokens_for(6, 64)
    async with open_engine(config) as engine:
        feed = engine.kv_events(block_size=16)
        await alone(engine, [of(name, prompt, 2) for name in SETS])
        await settled(engine)
        events = [event for event in (await feed.changes()).events if isinstance(event, BlockStored)]
    stored = {event.lora_id: event for event in events if event.parent_block_hash is None}
    assert set(stored) == {None, 1, 2}
    assert len({event.block_hashes for event in stored.values()}) == 3
    assert all(event.token_ids[:16] == prompt[:16] for event in stored.values())


async def test_what_is_not_there_is_refused(config: RuntimeConfig) -> None:
    async with open_engine(config) as engine:
        for wrong in ((AdapterScale(2, 1.0),), (AdapterScale(0, 1.0), AdapterScale(9, 1.0))):
            with pytest.raises(BadRequest, match="lora: no adapter has the id"):
                await answer(engine, attrs.evolve(ask(), lora=wrong))
        with pytest.raises(BadRequest, match="embeddings with a LoRA adapter are unsupported"):
            await engine.embed(EmbedRequest("e", ("text",), model="tiny+one"))
