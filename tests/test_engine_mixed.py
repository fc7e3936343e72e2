"""Decode rows and prompts in one batch, on real models: every answer stays what it is alone, also where it fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from engine_world import Answer, answer, ask, config_for, settled, tokens_for

from harness import PATIENCE_SEC
from models import write_model
from uma import Request, open_engine
from uma.engine.policy import CostModel
from uma.engine.worker.runner import BatchOutcome, ModelRunner
from uma.engine.worker.sequence import Sequence
from uma.engine.worker.status import Status
from uma.llama.context import NO_ROOM
from uma.types import Token

STREAMS = [
    ask(tokens_for(1, 30), 400, id="greedy"),
    ask(tokens_for(2, 20), 400, id="drawn", seed=7, temperature=0.9, repetition_penalty=1.2),
]
PROMPTS = [ask(tokens_for(9 + seed, 500), 8, id=f"prompt {seed}") for seed in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("mixed") / "attention.gguf", context_length=2_048)


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it takes: the choice is tested by itself."""
    monkeypatch.setattr(CostModel, "mixed_ms", lambda *_: 0.0)


async def read_all(model: Path) -> tuple[dict[str, Answer], int]:
    """What each is answered, the prompts asked while both streams run, and how many batches were mixed."""
    got: dict[str, Answer] = {}
    async with open_engine(config_for(model, n_ctx=8_192, n_batch=64, n_ubatch=64, kv_unified="on")) as engine:

        async def read(request: Request) -> None:
            got[request.id] = await answer(engine, request)

        with trio.fail_after(PATIENCE_SEC):
            async with trio.open_nursery() as nursery:
                for stream in STREAMS:
                    nursery.start_soon(read, stream)
                async with engine.generate(ask(tokens_for(3, 10), 400, id="third")) as third:
                    async for event in third:
                        if isinstance(event, Token):
                            break
                for prompt in PROMPTS:
                    nursery.start_soon(read, prompt)
        metrics = await settled(engine)
        assert metrics["active_sequences"] == 0
        return got, metrics["mixed_batches_total"]


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, tuple[int, ...]]:
    """What each is answered alone."""

    async def read() -> dict[str, tuple[int, ...]]:
        async with open_engine(config_for(model, cache_tokens=0, cache_ram_mb=0)) as engine:
            return {each.id: (await answer(engine, each)).token_ids for each in (*STREAMS, *PROMPTS)}

    return trio.run(read)


async def test_rows_beside_a_prompt_say_what_they_say_alone(model: Path, expected: dict[str, tuple[int, ...]]) -> None:
    got, mixed = await read_all(model)
    assert mixed > 0
    assert {name: each.token_ids for name, each in got.items()} == expected


@pytest.mark.parametrize("code", [NO_ROOM, -3])
async def test_nothing_is_lost_where_a_mixed_batch_fails(
    model: Path, expected: dict[str, tuple[int, ...]], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = ModelRunner.prefill
    failed: list[bool] = []

    def fails(runner: ModelRunner, work: list[tuple[Sequence, int]]) -> BatchOutcome:
        if not any(sequence.status is Status.DECODING for sequence, _ in work):
            return prefill(runner, work)
        failed.append(not (failed and failed[-1]))
        if not failed[-1]:
            return prefill(runner, work)
        if code != NO_ROOM:  # it can have been computed in part
            runner._batch.clear()
            for sequence, count in work:
                assert sequence.holding is not None
                run = sequence.tokens[sequence.computed : sequence.computed + count]
                runner._batch.add(run, sequence.computed, sequence.holding.seq_id, last_logits=True)
            assert runner._context.decode(runner._batch) == 0
        return BatchOutcome(code, 1.0)

    monkeypatch.setattr(ModelRunner, "prefill", fails)
    got, _ = await read_all(model)
    assert True in failed and False in failed
    assert {name: each.token_ids for name, each in got.items()} == expected
