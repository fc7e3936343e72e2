"""What llama_decode may do to a batch: fail because of one row, fail once, or find no room. No other row may notice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import trio
from engine_world import Answer, alone, answer, answers, ask, compute_with, config_for, settled, tokens_for

from harness import PATIENCE_SEC
from models import IM_START, Kind, write_model
from uma import Request, open_engine
from uma.engine import Engine
from uma.errors import DecodeFailed
from uma.llama.batch import Batch
from uma.llama.context import NO_ROOM, Context
from uma.types import Token

POISON = IM_START
"""A token that only the request that shall fail has in its prompt."""

Fault = Callable[[Batch], int | None]


class FaultyContext(Context):
    """The real context, but for the batches that `fault` has a result of its own for."""

    fault: Fault | None = None
    faults = 0

    def begin(self, batch: Batch) -> int:
        code = self.fault(batch) if self.fault is not None else None
        if code is None:
            return super().begin(batch)
        self.faults += 1
        return code


@pytest.fixture(autouse=True)
def _faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_with(monkeypatch, FaultyContext)


@pytest.fixture(scope="module", params=get_args(Kind))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each kind of memory."""
    folder = tmp_path_factory.mktemp("faults")
    return write_model(folder / f"{request.param}.gguf", kind=request.param, context_length=2_048)


def context_of(engine: Engine) -> FaultyContext:
    context = engine._context
    assert isinstance(context, FaultyContext)
    return context


def poisoned(code: int) -> Fault:
    """Fails for every batch with the poison in it."""
    return lambda batch: code if POISON in batch.token[: batch.n_tokens] else None


def poisoned_from(position: int, code: int) -> Fault:
    """Lets the poisoned prompt pass, and fails once its sequence gets to `position`."""
    marked: set[int] = set()

    def fault(batch: Batch) -> int | None:
        rows = range(batch.n_tokens)
        for row in rows:
            if batch.pos[row] == 0:
                marked.discard(int(batch.seq_id[row]))
        marked.update(int(batch.seq_id[row]) for row in rows if batch.token[row] == POISON)
        late = any(batch.seq_id[row] in marked and batch.pos[row] >= position for row in rows)
        return code if late else None

    return fault


def times(count: int, code: int) -> Fault:
    """Fails for the next `count` batches."""
    left = count

    def fault(_: Batch) -> int | None:
        nonlocal left
        left -= 1
        return code if left >= 0 else None

    return fault


def good_requests() -> list[Request]:
    return [ask(tokens_for(seed, 20 + 10 * seed), 25, id=str(seed)) for seed in range(5)]


BAD = ask((*tokens_for(77, 15), POISON, *tokens_for(78, 15)), 25, id="bad")


async def with_a_bad_one(engine: Engine) -> tuple[list[Answer], list[BaseException]]:
    """Ask for the good and the bad together; the good answers, and how the bad one ended."""
    errors: list[BaseException] = []

    async def fail() -> None:
        with pytest.raises(DecodeFailed) as error:
            await answer(engine, BAD)
        errors.append(error.value)

    with trio.fail_after(PATIENCE_SEC):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)
            good = await answers(engine, good_requests())
    return good, errors


@pytest.mark.parametrize("code", [-1, -3])
async def test_a_prompt_that_cannot_be_computed_fails_alone(model: Path, code: int) -> None:
    async with open_engine(config_for(model)) as engine:
        expected = [each.token_ids for each in await alone(engine, good_requests())]
    async with open_engine(config_for(model)) as engine:
        context_of(engine).fault = poisoned(code)
        good, errors = await with_a_bad_one(engine)
        metrics = await settled(engine)
    assert [each.token_ids for each in good] == expected
    assert [str(code) in str(error) for error in errors] == [True]
    assert metrics["requests_error"] == 1
    assert metrics["active_sequences"] == metrics["cache_protected_size"] == 0


@pytest.mark.parametrize("position", [31, 40])
async def test_a_stream_that_cannot_go_on_fails_alone(model: Path, position: int) -> None:
    async with open_engine(config_for(model)) as engine:
        expected = [each.token_ids for each in await alone(engine, good_requests())]
        bad = await answer(engine, BAD)
    async with open_engine(config_for(model)) as engine:
        context_of(engine).fault = poisoned_from(position, -3)
        good, errors = await with_a_bad_one(engine)
        tokens: list[int] = []
        with pytest.raises(DecodeFailed):
            async with engine.generate(BAD) as stream:
                async for event in stream:
                    assert isinstance(event, Token)
                    tokens.append(event.token_id)
    assert [each.token_ids for each in good] == expected
    assert len(errors) == 1
    # The token at `position` was given; it could not be computed, so none came after it.
    assert tokens == list(bad.token_ids[: position - 31 + 1])


@pytest.mark.parametrize("count", [1, 2])
async def test_a_fault_that_passes_is_noticed_by_no_request(model: Path, count: int) -> None:
    async with open_engine(config_for(model)) as engine:
        expected = [each.token_ids for each in await alone(engine, good_requests())]
        async with engine.generate(ask(tokens_for(50, 10), 200)) as stream:
            await stream.__anext__()
            context_of(engine).fault = times(1, -3)
            got = [each.token_ids for each in await answers(engine, good_requests() * count)]
            assert context_of(engine).faults == 1
    assert got == expected * count


async def test_an_engine_on_which_everything_failed_works_when_the_fault_is_gone(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        expected = [each.token_ids for each in await alone(engine, good_requests())]
        context_of(engine).fault = lambda _: -3

        async def fail(request: Request) -> None:
            with pytest.raises(DecodeFailed):
                await answer(engine, request)

        async with trio.open_nursery() as nursery:
            for request in good_requests():
                nursery.start_soon(fail, request)
        context_of(engine).fault = None
        got = [each.token_ids for each in await answers(engine, good_requests())]
    assert got == expected


@pytest.mark.parametrize("count", [1, 4])
async def test_a_moment_without_free_cells_is_noticed_by_no_request(model: Path, count: int) -> None:
    async with open_engine(config_for(model)) as engine:
        expected = [each.token_ids for each in await alone(engine, good_requests())]
    async with open_engine(config_for(model)) as engine:
        context_of(engine).fault = times(count, NO_ROOM)
        got = await answers(engine, good_requests())
        metrics = engine.snapshot()
    assert [each.token_ids for each in got] == expected
    assert all(each.finished.reason == "length" for each in got)
    assert metrics["kv_retries_total"] == count


async def test_less_room_than_the_books_say_makes_batches_smaller_and_fails_no_request(model: Path) -> None:
    async with open_engine(config_for(model)) as engine:
        expected = [each.token_ids for each in await alone(engine, good_requests())]
    async with open_engine(config_for(model)) as engine:
        context_of(engine).fault = lambda batch: NO_ROOM if batch.n_tokens > 3 else None
        with trio.fail_after(PATIENCE_SEC):
            got = await answers(engine, good_requests())
    assert [each.token_ids for each in got] == expected
    assert [each.finished.reason for each in got] == ["length"] * 5
    assert [len(each.tokens) for each in got] == [25] * 5
