"""What tests of the engine share: small requests, whole answers, and a wait for the engine to have nothing left."""

from __future__ import annotations

import random
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from harness import PATIENCE_SEC
from uma import Request, RuntimeConfig, SamplingParams
from uma.engine import Engine
from uma.engine.delivery.pacing import CREDITS
from uma.engine.worker.account import Account, Totals
from uma.engine.worker.sequence import Sequence as EngineSequence
from uma.llama.batch import Batch
from uma.llama.context import Context
from uma.types import Finished, Source, Token


class EarlyContext(Context):
    """The real context, with which the decode thread does what it does with a GPU's: each step of a stride is booked
    and handed over once the next batch was begun.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.returns_early = True


class HaltingContext(Context):
    """The real context. A batch that has a token at `halt_at`, in any sequence, waits until it may go on."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.halt_at = -1
        self.halts_at_rows: list[int] = []
        """Sizes of batches, of which the last is halted, once those before were there."""
        self.is_there = threading.Event()
        self.may_go_on = threading.Event()
        self.codes: list[int] = []
        """What llama.cpp answered to each batch."""
        self.sizes: list[int] = []
        """Tokens of each of these."""

    def begin(self, batch: Batch) -> int:
        if self.halts_at_rows and batch.n_tokens == self.halts_at_rows[0]:
            self.halts_at_rows.pop(0)
            if not self.halts_at_rows:
                self.halt_at = batch.pos[0]
        if self.halt_at in batch.pos[: batch.n_tokens]:
            self.halt_at = -1
            self.may_go_on.clear()
            self.is_there.set()
            assert self.may_go_on.wait(PATIENCE_SEC)
        self.codes.append(super().begin(batch))
        self.sizes.append(batch.n_tokens)
        return self.codes[-1]

    async def halted(self) -> None:
        """Wait until that batch is there."""
        assert await trio.to_thread.run_sync(self.is_there.wait, PATIENCE_SEC)


def compute_with(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Context]) -> None:
    """Engines that are opened from now on compute in contexts of this class, or that this makes."""
    monkeypatch.setattr("uma.engine.open.Context", make)


def halting_contexts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HaltingContext]]:
    """For a fixture: the contexts of engines that are opened from now on. At the end none waits any more."""
    found: list[HaltingContext] = []

    def make(*args: Any) -> HaltingContext:
        found.append(HaltingContext(*args))
        return found[-1]

    compute_with(monkeypatch, make)
    yield found
    for context in found:
        context.may_go_on.set()


def break_decode_thread(engine: Engine) -> None:
    """End the engine with a `ZeroDivisionError` of its decode thread, as soon as the batch that runs is done."""
    engine.worker.commands.call(lambda: 1 // 0)


SMALL_WINDOWS = "small-windows"
"""Stem of a file with sliding windows, whose layers keep no more than these."""


def config_for(model: Path, **settings: Any) -> RuntimeConfig:
    """Settings for a tiny model, on which results do not depend on how the work is cut.

    More than one thread only makes its steps wait for each other. Flash attention adds up in 16 bits on a CPU, in the
    order in which cells happen to lie, so that a near tie of two tokens may go either way; here it is off. So are
    drafts, whose number depends on time. A model that `write_model` has named `SMALL_WINDOWS` has them.
    """
    plain: dict[str, Any] = {"model": str(model), "n_ctx": 2_048, "n_gpu_layers": 0, "threads": 1}
    plain |= {"flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32", "speculate": "off"}
    if model.stem == SMALL_WINDOWS:  # in cells that are used again and again
        plain |= {"swa_full": "off", "n_ubatch": 32}
    return RuntimeConfig(**(plain | settings))


def sequence_for(request: Request, tokens: Sequence[int], **fields: Any) -> EngineSequence:
    """A sequence outside of any engine, which nothing has begun to compute."""
    plain: dict[str, Any] = {
        "key": 1,
        "tokens": array("i", tokens),
        "prompt_tokens": len(tokens),
        "max_tokens": request.sampling.max_tokens,
        "arrived_ms": 0.0,
        "target_tbt_ms": 80.0,
        "credits": CREDITS,
        "account": Account(request.id, None, 0, "", 1, len(tokens), False, False, 0.0, {}, Totals()),
    }
    return EngineSequence(request=request, **(plain | fields))


def tokens_for(seed: int, count: int) -> tuple[int, ...]:
    """Some prompt of letters, another for each seed."""
    return tuple(random.Random(seed).choices(range(97, 123), k=count))


def ask(
    prompt: str | Sequence[int] = "Once upon a time",
    max_tokens: int | None = 16,
    *,
    id: str = "a",
    priority: Any = 0,
    stream: bool = True,
    **sampling: Any,
) -> Request:
    """A greedy request that runs to `max_tokens`, unless `sampling` says otherwise."""
    given: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"token_ids": tuple(prompt)}
    params = SamplingParams(max_tokens=max_tokens, **({"ignore_eos": True} | sampling))
    return Request(id=id, sampling=params, priority=priority, stream=stream, **given)


@attrs.frozen
class Answer:
    """Everything a reader was given."""

    tokens: tuple[Token, ...]
    finished: Finished

    @property
    def text(self) -> str:
        """The joined text."""
        return "".join(token.text for token in self.tokens)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens' ids."""
        return tuple(token.token_id for token in self.tokens)


async def answer(source: Source, request: Request) -> Answer:
    """Read a request to its end."""
    tokens: list[Token] = []
    with trio.fail_after(PATIENCE_SEC):
        async with source.generate(request) as stream:
            async for event in stream:
                if isinstance(event, Finished):
                    return Answer(tuple(tokens), event)
                if isinstance(event, Token):
                    tokens.append(event)
    raise AssertionError("the stream ended without its last event")


async def answers(source: Source, requests: Sequence[Request]) -> list[Answer]:
    """Read several requests at once."""
    found: dict[int, Answer] = {}

    async def read(index: int, request: Request) -> None:
        found[index] = await answer(source, request)

    async with trio.open_nursery() as nursery:
        for index, request in enumerate(requests):
            nursery.start_soon(read, index, request)
    return [found[index] for index in range(len(requests))]


async def at_once(engine: Engine, requests: Sequence[Request]) -> list[Answer]:
    """Read several requests, none of which is computed before all are there: how far they overlap is no matter of
    time.
    """
    found: list[Answer] = []

    async def read() -> None:
        found.extend(await answers(engine, requests))

    await engine.pause(PATIENCE_SEC)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        while await asked_of(engine) < sum(request.sampling.n for request in requests):
            pass
        await engine.pause(0)
    return found


async def asked_of(engine: Engine) -> int:
    """Answers that run or wait in the engine."""
    activity = await engine.activity()
    waiting = activity.waiting_interactive + activity.waiting_normal + activity.waiting_background
    return len(activity.running) + waiting


async def alone(source: Source, requests: Sequence[Request]) -> list[Answer]:
    """Read several requests one after the other."""
    return [await answer(source, request) for request in requests]


async def settled(engine: Engine) -> dict[str, Any]:
    """The metrics once all that was asked of the engine until now has reached its thread."""
    # A probe goes the same way as everything before it, and its answer comes from a whole tick after that.
    with trio.fail_after(PATIENCE_SEC):
        health = await engine.health()
    assert health.tokens_generated == 1
    return engine.snapshot()
