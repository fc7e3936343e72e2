"""Several tokens for the same rows at a stretch: the result is the same, and no request waits for its end."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from engine_world import (
    Answer,
    EarlyContext,
    alone,
    answer,
    answers,
    ask,
    compute_with,
    config_for,
    settled,
    tokens_for,
)

from harness import PATIENCE_SEC
from uma import Request, RuntimeConfig, open_engine
from uma.engine.delivery.outbox import Deliver, Delivery, Outbox
from uma.engine.delivery.pacing import HOLD_SHARE, STRIDE_STEPS, Stride
from uma.engine.worker.commands import Commands
from uma.engine.worker.runner import BatchOutcome, DecodeStep, DecodeSteps, ModelRunner
from uma.llama.batch import Batch
from uma.llama.context import Context
from uma.types import Finished, Grammar, Slo, Token

BUILT_IN = RuntimeConfig(n_ctx=2_048, n_gpu_layers=0, threads=1, speculate="off")
PATIENT = Slo(target_tbt_ms=3_600_000.0)


def patient(request: Request) -> Request:
    """A request whose reader is as well served with all tokens at the end."""
    return attrs.evolve(request, slo=PATIENT)


@pytest.fixture
def strides(monkeypatch: pytest.MonkeyPatch) -> list[list[DecodeStep]]:
    """What each call for decode rows has computed, in every engine that is opened from now on."""
    found: list[list[DecodeStep]] = []
    decode = ModelRunner.decode

    def seen(decoding: DecodeSteps) -> Generator[DecodeStep, None, BatchOutcome]:
        steps: list[DecodeStep] = []
        found.append(steps)
        for step in decoding:
            steps.append(step)
            yield step
        return decoding.outcome

    def watched(runner: ModelRunner, sequences: Any, stride: Stride) -> DecodeSteps:
        return DecodeSteps(seen(decode(runner, sequences, stride)))

    monkeypatch.setattr(ModelRunner, "decode", watched)
    return found


@pytest.fixture(params=[Context, EarlyContext])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are opened from now on book a stride at its end, or step by step."""
    compute_with(monkeypatch, request.param)


# The same as token by token

REQUESTS = [
    ask(max_tokens=100),
    ask(max_tokens=400, ignore_eos=False),
    ask(max_tokens=400, ignore_eos=False, stream=False),
    ask(max_tokens=400, ignore_eos=False, min_tokens=300),
    ask(max_tokens=90, min_tokens=40, stop=(" the ",)),
    ask(max_tokens=90, stream=False, stop=(".", "zebra")),
    ask(max_tokens=400, ignore_eos=False, temperature=0.8, seed=5),
    ask(max_tokens=80, temperature=1.1, top_p=0.9, seed=6, repetition_penalty=1.3, min_tokens=20),
]


def say_the_same(mine: Answer, theirs: Answer) -> bool:
    """Whether two readers were given the same, but for what depends on time."""
    keys = [
        (each.token_ids, each.text, each.finished.text, each.finished.reason, each.finished.usage.completion_tokens)
        for each in (mine, theirs)
    ]
    return keys[0] == keys[1]


@pytest.mark.usefixtures("either_way")
async def test_a_stream_that_is_given_several_tokens_at_a_stretch_is_given_the_same(
    strides: list[list[DecodeStep]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def one_after_the_other() -> tuple[list[Answer], dict[str, Any]]:
        async with open_engine(BUILT_IN) as engine:
            return await alone(engine, list(map(patient, REQUESTS))), await settled(engine)

    got, counters = await one_after_the_other()
    assert max(map(len, strides)) == STRIDE_STEPS
    reasons = [each.finished.reason for each in got]
    assert "stop" in reasons and "length" in reasons

    strides.clear()
    monkeypatch.setattr("uma.engine.delivery.pacing.STRIDE_STEPS", 1)
    expected, plain_counters = await one_after_the_other()
    assert max(map(len, strides)) == 1

    for mine, theirs in zip(got, expected, strict=True):
        assert say_the_same(mine, theirs)
        assert mine.finished.metrics.decode_iterations == theirs.finished.metrics.decode_iterations
    # (Not batches: time tells in how many pieces a prompt is read.)
    for name in ("tokens_generated_total", "inter_token_ms_count", "kv_cells_used"):
        assert counters[name] == plain_counters[name], name


@pytest.mark.parametrize("layout", ["on", "off"])
@pytest.mark.usefixtures("either_way")
async def test_several_at_a_stretch_are_given_the_same_together(
    tiny: Path, layout: str, strides: list[list[DecodeStep]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # stop strings are looked for in each token, so two that outlast all others are those that run at a stretch together
    mixed = [*REQUESTS, ask(max_tokens=500), ask(max_tokens=500, temperature=0.9, seed=7)]
    requests = [patient(attrs.evolve(request, id=str(number))) for number, request in enumerate(mixed)]
    config = config_for(tiny, kv_unified=layout, n_ctx=16_384, max_sequences=len(requests))

    async def together() -> list[Answer]:
        async with open_engine(config) as engine:
            return await answers(engine, requests)

    got = await together()
    assert any(len(steps) > 4 and len(steps[0].given) > 1 for steps in strides)
    monkeypatch.setattr("uma.engine.delivery.pacing.STRIDE_STEPS", 1)
    for mine, theirs in zip(got, await together(), strict=True):
        assert say_the_same(mine, theirs)


@pytest.mark.usefixtures("either_way")
async def test_grammars_biases_and_log_probabilities_are_the_same_at_a_stretch(
    strides: list[list[DecodeStep]], monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = Grammar(regex="([a-z]{1,7} ){20}[0-9]{8}")
    more: dict[str, Any] = {"temperature": 1, "ignore_eos": False}
    forms: list[dict[str, Any]] = [{"grammar": grammar}, {"grammar": grammar, "logprobs": 3}]
    forms.append({"logit_bias": {"the": 9}})
    asked = [patient(ask(max_tokens=200, seed=seed, **more, **form)) for seed, form in enumerate(forms)]
    got: list[Answer] = []
    async with open_engine(BUILT_IN) as engine:
        for request in asked:
            strides.clear()
            got.append(await answer(engine, request))
            assert max(map(len, strides)) > 4, "there were no strides"
    assert re.fullmatch("([a-z]{1,7} ){20}[0-9]{8}", got[0].text)
    monkeypatch.setattr("uma.engine.delivery.pacing.STRIDE_STEPS", 1)
    async with open_engine(BUILT_IN) as engine:
        expected = await alone(engine, asked)
    for mine, theirs in zip(got, expected, strict=True):
        assert say_the_same(mine, theirs)
        assert [token.logprobs for token in mine.tokens] == [token.logprobs for token in theirs.tokens]


@pytest.mark.usefixtures("either_way")
async def test_a_text_may_end_as_soon_as_it_is_long_enough(strides: list[list[DecodeStep]]) -> None:
    async with open_engine(BUILT_IN) as engine:
        natural = await answer(engine, patient(ask(max_tokens=400, ignore_eos=False)))
        assert natural.finished.reason == "stop"
        for spare in range(STRIDE_STEPS):
            least = len(natural.tokens) - spare
            got = await answer(engine, patient(ask(max_tokens=400, ignore_eos=False, min_tokens=least)))
            assert got.token_ids == natural.token_ids
    assert max(map(len, strides)) == STRIDE_STEPS


# No request waits for its end


class StoppableContext(Context):
    """The real context; at one batch it waits, so that something can happen in the middle of a stride."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sizes: list[int] = []
        self.stop_at = -1
        self.is_there = threading.Event()
        self.may_go_on = threading.Event()

    def begin(self, batch: Batch) -> int:
        self.sizes.append(batch.n_tokens)
        if len(self.sizes) == self.stop_at:
            self.is_there.set()
            assert self.may_go_on.wait(PATIENCE_SEC)
        return super().begin(batch)


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StoppableContext]]:
    """Those of the engines that are opened from now on."""
    found: list[StoppableContext] = []

    def make(*args: Any) -> StoppableContext:
        found.append(StoppableContext(*args))
        return found[-1]

    compute_with(monkeypatch, make)
    yield found
    for context in found:
        context.may_go_on.set()


async def in_a_stride(context: StoppableContext) -> int:
    """Wait until batch `stop_at` has begun; how many there were."""
    assert await trio.to_thread.run_sync(context.is_there.wait, PATIENCE_SEC)
    return len(context.sizes)


def in_the_middle_of_one(context: StoppableContext) -> None:
    """Stop it soon, where a stride has just begun."""
    # The prompt, then stride after stride of full length.
    context.stop_at = len(context.sizes) + 1 + STRIDE_STEPS + STRIDE_STEPS // 2


async def test_a_sequence_that_is_cancelled_in_a_stride_is_computed_no_further(
    contexts: list[StoppableContext], strides: list[list[DecodeStep]]
) -> None:
    async with open_engine(BUILT_IN) as engine:
        await answer(engine, ask(max_tokens=8))
        (context,) = contexts
        in_the_middle_of_one(context)
        async with engine.generate(patient(ask(max_tokens=200, stream=False))) as stream:
            before = await in_a_stride(context)
            stream.cancel()
            context.may_go_on.set()
            events = [event async for event in stream]
            assert len(context.sizes) == before
    assert isinstance(events[-1], Finished) and events[-1].reason == "cancelled"
    assert 1 < len(strides[-1]) < STRIDE_STEPS, "that was no stride"


async def test_a_request_that_comes_in_the_middle_of_a_stride_is_read_with_the_next_batch(
    contexts: list[StoppableContext], strides: list[list[DecodeStep]], monkeypatch: pytest.MonkeyPatch
) -> None:
    woken = threading.Event()
    wake = Commands.wake

    def watched(commands: Commands, *, ends_stride: bool = True) -> None:
        wake(commands, ends_stride=ends_stride)
        if contexts[0].is_there.is_set():
            woken.set()

    monkeypatch.setattr(Commands, "wake", watched)
    async with open_engine(BUILT_IN) as engine:
        await answer(engine, ask(max_tokens=8))
        (context,) = contexts
        in_the_middle_of_one(context)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer, engine, patient(ask(max_tokens=200, stream=False)))
            before = await in_a_stride(context)
            stride = strides[-1]
            nursery.start_soon(answer, engine, ask(tokens_for(1, 25), 4, id="b"))
            assert await trio.to_thread.run_sync(woken.wait, PATIENCE_SEC)
            context.may_go_on.set()
    # (Beside a stream that decodes: its token first, then the prompt.)
    assert max(context.sizes[before : before + 2]) > 1
    assert 1 < len(stride) < STRIDE_STEPS, "that was no stride"


async def test_each_step_is_handed_over_while_the_next_is_computed_where_the_thread_is_free_then(
    strides: list[list[DecodeStep]], monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []

    class LoggedContext(EarlyContext):
        def begin(self, batch: Batch) -> int:
            log.append("begin")
            return super().begin(batch)

        def wait(self) -> None:
            log.append("wait")
            super().wait()

    def watched(deliver: Deliver, *, waits: bool) -> Outbox:
        assert not waits

        def record(deliveries: list[Delivery], *rest: Any) -> None:
            log.extend("token" for _, event, _ in deliveries if isinstance(event, Token))
            deliver(deliveries, *rest)

        return Outbox(record, waits=waits)

    compute_with(monkeypatch, LoggedContext)
    monkeypatch.setattr("uma.engine.worker.loop.Outbox", watched)
    at_once = Slo(target_tbt_ms=1e-3)
    async with open_engine(BUILT_IN) as engine:
        await answer(engine, attrs.evolve(ask(max_tokens=2 * STRIDE_STEPS + 2), slo=at_once))
    assert max(map(len, strides)) == STRIDE_STEPS, "there were no strides"
    stride = ["begin", "wait", *["begin", "token", "wait"] * (STRIDE_STEPS - 1)]
    found = [log[at : at + len(stride)] for at in range(len(log) - len(stride) + 1)]
    assert stride in found


@pytest.mark.parametrize("base", [Context, EarlyContext])
async def test_no_batch_is_begun_that_would_end_after_a_reader_minds(
    strides: list[list[DecodeStep]], monkeypatch: pytest.MonkeyPatch, base: type[Context]
) -> None:
    rng = random.Random(4)
    now_ms = 0.0
    waits_ms: list[float] = []

    class UnsteadyContext(base):  # type: ignore[misc, valid-type]
        def begin(self, batch: Batch) -> int:
            nonlocal now_ms
            # Fast for a while, then slow for a while, as where another program comes and goes.
            now_ms += rng.uniform(0.5, 0.8) if now_ms % 200 < 70 else rng.uniform(4.0, 6.0)
            return int(super().begin(batch))

    def watched(deliver: Deliver, *, waits: bool) -> Outbox:
        def record(deliveries: list[Delivery], *rest: Any) -> None:
            known = [step.at_ms for steps in strides for step in steps]
            for _, event, _ in deliveries:
                if isinstance(event, Token):
                    # (The first token is that of the prompt's batch, and is not among the steps.)
                    waits_ms.append(now_ms - known[len(waits_ms) - 1] if waits_ms else 0.0)
            deliver(deliveries, *rest)

        return Outbox(record, waits=waits)

    compute_with(monkeypatch, UnsteadyContext)
    monkeypatch.setattr("uma.engine.worker.loop.Outbox", watched)
    monkeypatch.setattr("uma.engine.worker.runner.now_ms", lambda: now_ms)
    target_ms = 80.0
    async with open_engine(BUILT_IN) as engine:
        await answer(engine, attrs.evolve(ask(max_tokens=600), slo=Slo(target_tbt_ms=target_ms)))
    assert len(waits_ms) == 600
    assert max(map(len, strides)) == STRIDE_STEPS, "there were no strides"
    # Only a batch that takes longer than the one before it may make a token late, and only by the difference.
    assert max(waits_ms) <= HOLD_SHARE * target_ms + 6.0
