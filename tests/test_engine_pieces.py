"""What the policy is told and asked for about pieces of prompts reaches it, and is done, in the real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from engine_world import answer, ask, config_for, tokens_for

from harness import PATIENCE_SEC
from uma import Request, open_engine
from uma.engine.policy import Plan, Scheduler, State
from uma.engine.worker import executor
from uma.engine.worker.executor import Executor, Tick

DOCUMENT = 1_500


async def states_while_reading(
    model: Path, monkeypatch: pytest.MonkeyPatch, other: Request, *, priority: int = 0
) -> list[tuple[float, State]]:
    """When a document came, and what the policy plans with, for each plan while it is read beside another request."""
    seen: list[tuple[float, State]] = []
    plan = Scheduler.plan

    def watched(scheduler: Scheduler, state: State, *args: Any, **options: Any) -> Plan:
        seen.extend((row.arrived_ms, state) for row in state.prefilling if row.prompt_tokens == DOCUMENT)
        return plan(scheduler, state, *args, **options)

    monkeypatch.setattr(Scheduler, "plan", watched)
    async with open_engine(config_for(model, n_batch=64, n_ubatch=64)) as engine:
        with trio.fail_after(PATIENCE_SEC):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(answer, engine, ask(tokens_for(1, DOCUMENT), 1, id="document", priority=priority))
                nursery.start_soon(answer, engine, other)
    return seen


@pytest.mark.parametrize(
    ("priority", "stream", "is_next_expected"), [(1, True, True), (0, True, True), (1, False, False)]
)
async def test_the_policy_is_told_that_a_reader_was_served_while_a_prompt_was_read(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, priority: int, stream: bool, is_next_expected: bool
) -> None:
    question = ask(tokens_for(2, 20), 2, id="question", priority=priority, stream=stream)
    seen = await states_while_reading(tiny, monkeypatch, question)
    assert any(arrived_ms < state.answered_ms for arrived_ms, state in seen) is is_next_expected


async def test_a_background_answer_that_ends_is_no_reader_that_was_served(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ask(tokens_for(2, 20), 2, id="job", priority=-1)
    seen = await states_while_reading(tiny, monkeypatch, job, priority=-1)
    assert seen and not any(arrived_ms < state.answered_ms for arrived_ms, state in seen)


async def test_steps_that_readers_lack_come_before_the_piece(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = 3
    given: list[tuple[int, int]] = []
    run = Executor.run

    def watched(self: Executor, tick: Tick) -> Any:
        # Of the first row, and before any batch of a prompt has been computed.
        before = [sequence.generated for sequence in tick.decode]
        read = [sequence.computed for sequence, _ in tick.prefill]
        for results in run(self, tick):
            yield results
            is_read = [sequence.computed for sequence, _ in tick.prefill] != read
            if tick.decode and tick.prefill and tick.plan.needed_ms and not is_read:
                given.append((tick.plan.steps, tick.decode[0].generated - before[0]))

    monkeypatch.setattr(Executor, "run", watched)
    monkeypatch.setattr(executor, "steps_lacking", lambda *_: lacking)
    async with open_engine(config_for(tiny, kv_unified="off", max_sequences=2)) as engine:
        with trio.fail_after(PATIENCE_SEC):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(answer, engine, ask(tokens_for(3, 10), 400, id="stream"))
                async with engine.generate(ask(tokens_for(4, 700), 1, id="prompt")) as prompt:
                    async for _ in prompt:
                        pass
    assert any(count == steps + lacking for steps, count in given)
