"""Nothing that the engine does to be fast may change a result: batching, shared prefixes, snapshots, preemption.

Every output here is compared with that of the same request alone, in an engine with no cache at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from engine_world import alone, answer, answers, ask, at_once, config_for, tokens_for
from every_kind import MEMORIES, PLAIN, WINDOWED, kinds, write_named

from models import write_model
from uma import Request, RuntimeConfig, open_engine
from uma.engine.kv.checkpoints import LAST_TOKENS
from uma.engine.kv.disk import FOLDER
from uma.llama.batch import Batch
from uma.llama.context import DONE, Context, ContextParams
from uma.llama.model import Model

COLD = {"cache_tokens": 0, "cache_ram_mb": 0}


@pytest.fixture(scope="module", params=kinds(*MEMORIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each kind of memory."""
    return write_named(tmp_path_factory.mktemp("exact"), request.param)


@pytest.fixture(params=["on", "off"])
def layout(request: pytest.FixtureRequest) -> str:
    """One KV buffer for all, or one each."""
    return str(request.param)


def shares(model: Path, layout: str) -> bool:
    """Whether prefixes are shared at any token, and not at checkpoints alone: of full-size windows in one buffer."""
    return model.stem in PLAIN or (model.stem in WINDOWED and layout == "on")


async def plain(model: Path, requests: Sequence[Request], **settings: Any) -> list[tuple[int, ...]]:
    """The reference: each alone, one after the other, computed from its first token."""
    async with open_engine(config_for(model, **(COLD | {"max_sequences": 1} | settings))) as engine:
        got = await alone(engine, requests)
    assert not any(each.finished.usage.cached_tokens for each in got)
    return [each.token_ids for each in got]


async def test_an_output_alone_is_the_same_beside_others(model: Path, layout: str) -> None:
    requests = [ask(tokens_for(seed, 5 + 17 * seed), 10 + 5 * seed, id=str(seed)) for seed in range(8)]
    requests += [ask(tokens_for(90, 30), 30, seed=7, temperature=0.9, top_p=0.9, repetition_penalty=1.2)]
    expected = await plain(model, requests, kv_unified=layout)
    config = config_for(model, **COLD, kv_unified=layout, n_batch=64, n_ubatch=32, max_sequences=9, n_ctx=4_608)
    async with open_engine(config) as engine:
        got = await at_once(engine, requests)
    assert [each.token_ids for each in got] == expected
    assert max(each.finished.metrics.batch_size for each in got) > 2, "nothing was batched"


async def test_a_warm_cache_changes_nothing_but_the_time(model: Path, layout: str) -> None:
    common = tokens_for(1, 150)
    requests = [ask((*common, *tokens_for(seed, seed)), 20) for seed in (1, 9, 30)]
    requests += [ask(common[:100], 20), ask((*common[:70], *tokens_for(5, 40)), 20), requests[0]]
    expected = await plain(model, requests, kv_unified=layout)
    async with open_engine(config_for(model, kv_unified=layout, max_sequences=7)) as engine:
        got = await alone(engine, requests)
    assert [each.token_ids for each in got] == expected
    cached = [each.finished.usage.cached_tokens for each in got]
    last = 151 - LAST_TOKENS  # of the first prompt, behind which a checkpoint is taken
    end = 100 - LAST_TOKENS if layout == "on" else 99  # in one buffer a batch of the last two lies where it lay
    assert cached == ([0, 150, 150, end, 70, 150] if shares(model, layout) else [0, last, last, 0, 0, last])


async def test_the_next_turn_of_a_conversation_computes_only_what_is_new(model: Path, layout: str) -> None:
    prompt = tokens_for(3, 120)
    async with open_engine(config_for(model, kv_unified=layout, max_sequences=7)) as engine:
        first = await answer(engine, ask(prompt, 30))
        turn = ask((*prompt, *first.token_ids, *tokens_for(4, 25)), 30)
        second = await answer(engine, turn)
    assert [second.token_ids] == await plain(model, [turn], kv_unified=layout)
    # The last token that was sampled was never computed: it is new too.
    assert second.finished.usage.cached_tokens == 120 + 30 - 1


async def test_requests_that_come_together_share_a_prefix_that_is_still_being_computed(
    model: Path, layout: str
) -> None:
    common = tokens_for(1, 300)
    requests = [ask((*common, *tokens_for(seed, 10 + seed)), 12, id=str(seed)) for seed in range(6)]
    expected = await plain(model, requests, kv_unified=layout)
    config = config_for(model, kv_unified=layout, n_batch=64, n_ubatch=64, max_sequences=7, n_ctx=4_096)
    async with open_engine(config) as engine:
        got = await answers(engine, requests)
        metrics = engine.snapshot()
    computed = metrics["prefill_tokens_total"] - metrics["reread_tokens_total"]
    assert [each.token_ids for each in got] == expected
    shared = sorted(each.finished.usage.cached_tokens for each in got)
    assert shared[:2] == [0, 300] and shared[-1] <= 301, shared  # two that go on with the same letter can share it
    assert computed == sum(len(request.token_ids or ()) for request in requests) - sum(shared)


async def test_a_pool_a_fraction_of_what_is_needed_finishes_everything_unchanged(model: Path) -> None:
    requests = [ask(tokens_for(seed, 70), 60, id=str(seed), priority=seed % 3 - 1) for seed in range(6)]
    requests += [ask(tokens_for(9, 70), 60, id="s", seed=11, temperature=0.8, repetition_penalty=1.3)]
    expected = await plain(model, requests)
    async with open_engine(config_for(model, n_ctx=256, n_batch=64, n_ubatch=64)) as engine:
        got = await at_once(engine, requests)
        metrics = engine.snapshot()
    assert [each.token_ids for each in got] == expected
    assert all(each.finished.reason == "length" for each in got)
    if model.stem != "recurrent":
        assert metrics["preemptions_total"] > 0, "there was no pressure"
    assert metrics["tokens_generated_total"] == sum(len(each.tokens) for each in got)


@pytest.mark.parametrize("settings", [COLD, {"cache_ram_mb": 1}], ids=["computed again", "from snapshots"])
async def test_pressure_from_shared_prefixes_changes_nothing(tiny: Path, settings: dict[str, int]) -> None:
    common = tokens_for(2, 90)
    requests = [ask((*common, *tokens_for(seed, 5)), 70, id=str(seed)) for seed in range(5)]
    expected = await plain(tiny, requests)
    async with open_engine(config_for(tiny, n_ctx=256, n_batch=32, n_ubatch=32, **settings)) as engine:
        got = await at_once(engine, requests)
        assert engine.snapshot()["preemptions_total"] > 0, "there was no pressure"
    assert [each.token_ids for each in got] == expected


async def test_a_prefix_that_left_its_cells_comes_back_from_memory_unchanged(model: Path, layout: str) -> None:
    prompt = tokens_for(6, 600)
    requests = [ask(prompt, 10), ask((*prompt, *tokens_for(7, 20)), 25)]
    expected = await plain(model, requests, kv_unified=layout)
    config = config_for(model, cache_tokens=0, cache_ram_mb=16, kv_unified=layout, max_sequences=2)
    async with open_engine(config) as engine:
        got = [await answer(engine, requests[0])]
        # Others need all the cells and ids there are.
        await alone(engine, [ask(tokens_for(50 + seed, 600), 2) for seed in range(4)])
        got.append(await answer(engine, requests[1]))
        metrics = engine.snapshot()
    assert [each.token_ids for each in got] == expected
    assert metrics["cache_ram_hits"] == 1
    assert got[1].finished.usage.cached_tokens >= 600 - LAST_TOKENS


async def test_a_prefix_survives_a_restart_on_disk_unchanged(model: Path, layout: str, tmp_path: Path) -> None:
    prompt = tokens_for(6, 600)
    request = ask((*prompt, *tokens_for(7, 20)), 25)
    expected = await plain(model, [request], kv_unified=layout)
    config = config_for(model, cache_dir=str(tmp_path / "kv"), cache_ram_mb=16, kv_unified=layout, max_sequences=2)
    async with open_engine(config) as engine:
        await answer(engine, ask(prompt, 10))
    async with open_engine(config) as engine:
        got = await answer(engine, request)
    assert [got.token_ids] == expected
    assert got.finished.usage.cached_tokens >= 600 - LAST_TOKENS


async def test_a_server_whose_sequences_need_all_ids_loads_what_a_smaller_one_has_kept_in_parts(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tokens_for(6, 600)
    request = ask((*prompt, *tokens_for(7, 20)), 25)
    expected = await plain(tiny, [request], kv_unified="on")
    config = config_for(tiny, cache_dir=str(tmp_path / "kv"), cache_ram_mb=16, kv_unified="on")
    monkeypatch.setattr("uma.engine.kv.memory_kinds.MAX_COPY_BYTES", 1)
    async with open_engine(config) as engine:
        await answer(engine, ask(prompt, 10))
    monkeypatch.setattr("uma.engine.kv.memory_kinds.MAX_SEQUENCES", 1)
    async with open_engine(config) as engine:
        got = await answer(engine, request)
    assert [got.token_ids] == expected
    assert got.finished.usage.cached_tokens >= 600 - LAST_TOKENS


async def test_a_snapshot_of_another_model_is_not_used(tmp_path: Path) -> None:
    prompt = tokens_for(6, 600)
    paths = [write_model(tmp_path / f"{seed}.gguf", seed=seed, context_length=2_048) for seed in (0, 1)]
    folder = str(tmp_path / "kv")
    async with open_engine(config_for(paths[0], cache_dir=folder, cache_ram_mb=16)) as engine:
        await answer(engine, ask(prompt, 2))
    expected = await plain(paths[1], [ask(prompt, 25)])
    async with open_engine(config_for(paths[1], cache_dir=folder, cache_ram_mb=16)) as engine:
        got = await answer(engine, ask(prompt, 25))
    assert [got.token_ids] == expected
    assert got.finished.usage.cached_tokens == 0


def _flip_a_bit(data: bytes) -> bytes:
    return data[:-1000] + bytes([data[-1000] ^ 1]) + data[-999:]


def _ask_for_more_than_there_is(data: bytes) -> bytes:
    size = int.from_bytes(data[8:16], "little")
    header = data[16 : 16 + size].replace(b'"part_bytes":[', b'"part_bytes":[' + b"9" * 11)
    return data[:8] + len(header).to_bytes(8, "little") + header + data[16 + size :]


@pytest.mark.parametrize("damage", [_flip_a_bit, _ask_for_more_than_there_is])
async def test_a_damaged_snapshot_is_not_used(tiny: Path, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    prompt = tokens_for(6, 600)
    config = config_for(tiny, cache_dir=str(tmp_path / "kv"), cache_ram_mb=16)
    async with open_engine(config) as engine:
        await answer(engine, ask(prompt, 2))
    (kept,) = (tmp_path / "kv" / FOLDER).glob("*.umakv")
    kept.write_bytes(damage(kept.read_bytes()))
    async with open_engine(config) as engine:
        got = await answer(engine, ask(prompt, 25))
    assert [got.token_ids] == await plain(tiny, [ask(prompt, 25)])
    assert got.finished.usage.cached_tokens == 0


async def test_an_engine_with_more_cache_than_memory_for_it_still_ends(tiny: Path, tmp_path: Path) -> None:
    """At the end what is cached is saved; what does not fit together must not take turns for ever."""
    sizes = {"n_ctx": 8_192, "kv_unified": "on", "cache_tokens": 8_192, "cache_ram_mb": 1}
    async with open_engine(config_for(tiny, **sizes, cache_dir=str(tmp_path / "kv"))) as engine:
        await alone(engine, [ask(tokens_for(seed, 1_500), 2) for seed in range(4)])
        assert engine.snapshot()["cache_total_cached"] > 6_000 - 4


async def test_different_beginnings_share_nothing(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        got = await alone(engine, [ask(tokens_for(seed, 100), 2) for seed in range(4)])
        metrics = engine.snapshot()
    assert [each.finished.usage.cached_tokens for each in got] == [0, 0, 0, 0]
    assert (metrics["cache_hits"], metrics["cache_misses"], metrics["cached_tokens_total"]) == (0, 4, 0)


# The model that people meet first: quantized, and trained, so that its answers mean something

STORIES = [f"Tell me a story about a {animal}." for animal in ("fox", "bear", "small bird", "frog", "cat and a dog")]
AS_GOOD_AS_TIED = 0.3
"""Logits of a quantized model differ by about a third of this from one batch size to another, with llama.cpp alone."""


class Judge:
    """Tells how far apart two tokens were, by llama.cpp alone."""

    def __init__(self, path: Path) -> None:
        self._model = Model.load(path, n_gpu_layers=0)

    def gap(self, tokens: Sequence[int], better: int, other: int) -> float:
        """How much more likely `better` was after `tokens`, in logits."""
        params = ContextParams(n_ctx=512, n_threads=1)
        with Context(self._model, params) as context:
            batch = Batch(512)
            batch.add(list(tokens), 0, 0, last_logits=True)
            assert context.decode(batch) == DONE
            logits = context.logits(1)[0]
            return float(logits[better] - logits[other])

    def check(self, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]) -> None:
        """Fail if two greedy continuations part where there was one right way to go."""
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            if left != right:
                assert abs(self.gap([*prompt, *one[:index]], left, right)) < AS_GOOD_AS_TIED
                return


async def test_the_built_in_model_says_the_same_batched_warm_and_under_pressure_but_for_ties() -> None:
    """With the settings that people have: kernels for quantized weights and flash attention round by batch size."""
    requests = [ask(story, 100, id=story) for story in STORIES]
    config = RuntimeConfig(threads=1, n_gpu_layers=0, n_ctx=2_048)
    async with open_engine(config) as engine:
        prompts = [(await engine.tokenize(request)).token_ids for request in requests]
        expected = [each.token_ids for each in await alone(engine, requests)]
        found = await alone(engine, requests)
        path = Path(engine.info.model.path)
    async with open_engine(config) as engine:
        found += await answers(engine, requests)
    async with open_engine(attrs.evolve(config, n_ctx=256, n_batch=64, n_ubatch=64, max_sequences=8)) as engine:
        found += await at_once(engine, requests * 2)
        assert engine.snapshot()["preemptions_total"] > 0, "there was no pressure"
    judge = Judge(path)
    for index, got in enumerate(found):
        which = index % len(requests)
        judge.check(prompts[which], expected[which], got.token_ids)
