"""A cancel in the middle of a batch aborts it where nothing that it computes is wanted any more, and only there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import attrs
import pytest
import trio
from engine_world import (
    Answer,
    HaltingContext,
    alone,
    answer,
    ask,
    config_for,
    halting_contexts,
    sequence_for,
    settled,
    tokens_for,
)

from models import Kind, write_model
from uma import Request, open_engine
from uma.engine import Engine
from uma.engine.delivery.pacing import CREDITS
from uma.engine.kv.checkpoints import LAST_TOKENS
from uma.engine.worker.canceller import BatchCanceller
from uma.llama.context import ABORTED, DONE, Context, ContextParams
from uma.llama.model import Model
from uma.types import Finished, Token
from uma.types.source import EventStream

PROMPT = tokens_for(1, 1_500)


async def read_on(stream: EventStream) -> None:
    """Read all that comes."""
    async for _ in stream:
        pass


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HaltingContext]]:
    """Those of the engines that are opened from now on."""
    yield from halting_contexts(monkeypatch)


@pytest.fixture(scope="module", params=get_args(Kind))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each kind of memory."""
    folder = tmp_path_factory.mktemp("cancel")
    return write_model(folder / f"{request.param}.gguf", kind=request.param, context_length=2_048)


async def cancelled_at(engine: Engine, context: HaltingContext, request: Request, position: int) -> None:
    """Leave a request while the batch runs that computes its token at `position`."""
    context.halt_at = position
    async with engine.generate(request) as stream:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(context.halted)
        assert stream is not None
    context.may_go_on.set()


@pytest.mark.parametrize("layout", ["on", "off"])
async def test_a_prompt_that_is_cancelled_while_it_is_read_is_read_no_further_and_later_exactly_as_ever(
    model: Path, layout: str, contexts: list[HaltingContext]
) -> None:
    config = config_for(model, kv_unified=layout, n_ctx=8_192, max_sequences=4)
    async with open_engine(config) as engine:
        expected = await answer(engine, ask(PROMPT, 40))
        whole = contexts[0].codes.count(DONE)
    async with open_engine(config) as engine:
        context = contexts[1]
        await cancelled_at(engine, context, ask(PROMPT, 40), 1_024)
        await settled(engine)
        assert context.codes.count(ABORTED) == 1
        assert context.codes.count(DONE) < whole
        metrics = engine.snapshot()
        assert metrics["requests_cancelled"] == 1
        assert metrics["active_sequences"] == metrics["cache_protected_size"] == metrics["stalls_total"] == 0
        again = await answer(engine, ask(PROMPT, 40))
        other = await answer(engine, ask((*PROMPT[:1_200], *tokens_for(2, 100)), 40))
    async with open_engine(config) as engine:
        expected_other = await answer(engine, ask((*PROMPT[:1_200], *tokens_for(2, 100)), 40))
    assert again.token_ids == expected.token_ids
    assert other.token_ids == expected_other.token_ids


@pytest.mark.parametrize("layout", ["on", "off"])
async def test_what_is_cached_and_what_is_paused_beside_a_batch_that_nobody_wants_go_on_exactly(
    model: Path, layout: str, contexts: list[HaltingContext]
) -> None:
    config = config_for(model, kv_unified=layout, n_ctx=8_192, max_sequences=5)
    talk, slow = ask(PROMPT[:300], 8), ask(tokens_for(8, 60), 3 * CREDITS)
    unwanted = [ask(tokens_for(seed, 60), 1_000, id=str(seed)) for seed in (2, 3)]
    got = list[int]()
    async with open_engine(config) as engine:
        first = await answer(engine, talk)
        turn = ask((*PROMPT[:300], *first.token_ids, *tokens_for(9, 30)), 40)
        # Of three rows the one in the middle has a slow reader. llama.cpp moves its state when the others go on alone.
        contexts[0].halts_at_rows = [3, 2]
        async with engine.generate(unwanted[0]) as one, engine.generate(slow) as stream:
            async with engine.generate(unwanted[1]) as other, trio.open_nursery() as nursery:
                nursery.start_soon(read_on, one)
                nursery.start_soon(read_on, other)
                await contexts[0].halted()
                one.cancel()
                other.cancel()
                contexts[0].may_go_on.set()
            async for event in stream:
                got += [event.token_id] if isinstance(event, Token) else []
        second = await answer(engine, turn)
        assert contexts[0].codes.count(ABORTED) == (model.stem not in ("recurrent", "hybrid"))
        assert second.finished.usage.cached_tokens >= 300 - LAST_TOKENS
    async with open_engine(config) as engine:
        expected = [each.token_ids for each in await alone(engine, [slow, turn])]
    assert [tuple(got), second.token_ids] == expected


@pytest.mark.parametrize("layout", ["on", "off"])
async def test_a_cancel_has_no_other_request_read_anything_again(
    model: Path, layout: str, contexts: list[HaltingContext]
) -> None:
    config = config_for(model, kv_unified=layout, n_ctx=16_384, max_sequences=8)
    talk, streams = ask(PROMPT[:300], 8), [ask(tokens_for(seed, 60), 400, id=str(seed)) for seed in (2, 3, 4)]
    got: dict[str, Answer] = {}
    async with open_engine(config) as engine:
        first, context = await answer(engine, talk), contexts[0]

        async def read(request: Request) -> None:
            got[request.id] = await answer(engine, request)

        async with trio.open_nursery() as nursery:
            for request in streams:
                nursery.start_soon(read, request)
            context.halt_at = 100
            await context.halted()
            context.is_there.clear()
            context.may_go_on.set()
            await cancelled_at(engine, context, ask(PROMPT[300:], 40), 1_024)
            cancelled = len(context.sizes)
        turn = ask((*PROMPT[:300], *first.token_ids, *tokens_for(9, 30)), 40)
        second = await answer(engine, turn)
        # Behind the batch in which it was cancelled: the next turn is 30 tokens, each stream has more than 100.
        assert max(context.sizes[cancelled + 1 :]) < 60
        assert second.finished.usage.cached_tokens >= 300
    async with open_engine(config) as engine:
        expected = [each.token_ids for each in await alone(engine, [*streams, turn])]
    assert [*(got[request.id].token_ids for request in streams), second.token_ids] == expected


async def test_a_reproducible_request_that_is_cancelled_while_its_prompt_is_read_is_read_no_further(
    tiny: Path, contexts: list[HaltingContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*args: Any) -> HaltingContext:
        contexts.append(HaltingContext(*args))
        return contexts[-1]

    monkeypatch.setattr("uma.engine.reproducible.Context", make)
    async with open_engine(config_for(tiny)) as engine:
        expected = await answer(engine, ask(PROMPT[:100], 10, reproducible=True))
        context = contexts[-1]
        context.codes.clear()
        await cancelled_at(engine, context, ask(PROMPT[:400], 10, reproducible=True), 64)
        await settled(engine)
        assert context.codes == [DONE, DONE, ABORTED]
        again = await answer(engine, ask(PROMPT[:100], 10, reproducible=True))
    assert again.token_ids == expected.token_ids


async def test_what_was_read_before_the_batch_that_was_aborted_stays_in_cache(
    tiny: Path, contexts: list[HaltingContext]
) -> None:
    async with open_engine(config_for(tiny, n_ctx=8_192)) as engine:
        await cancelled_at(engine, contexts[0], ask(PROMPT, 40), 1_024)
        read = (await settled(engine))["prefill_tokens_total"]
        again = await answer(engine, ask(PROMPT, 1))
    assert 0 < read <= 1_024
    assert again.finished.usage.cached_tokens == read


async def test_a_batch_with_one_request_that_is_still_wanted_goes_on(
    tiny: Path, contexts: list[HaltingContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, unwanted = ask(tokens_for(3, 60), 200, id="wanted"), ask(tokens_for(4, 60), 200, id="unwanted")
    async with open_engine(config_for(tiny)) as engine:
        expected = await answer(engine, wanted)
    got: list[Answer] = []
    async with open_engine(config_for(tiny)) as engine:
        context = contexts[1]

        async def read() -> None:
            got.append(await answer(engine, wanted))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await cancelled_at(engine, context, unwanted, 120)
        await settled(engine)
    assert set(context.codes) == {DONE}
    assert got[0].token_ids == expected.token_ids


async def test_streams_that_are_all_cancelled_in_a_step_end_with_what_they_were_given(
    tiny: Path, contexts: list[HaltingContext]
) -> None:
    async with open_engine(config_for(tiny)) as engine:
        (context,) = contexts
        context.halt_at = 40
        given = 0
        async with engine.generate(ask(tokens_for(5, 20), 200, n=2, temperature=1)) as stream:
            await context.halted()
            stream.cancel()
            context.may_go_on.set()
            async for event in stream:
                given += isinstance(event, Token)
        assert isinstance(event, Finished)
        assert event.reason == "cancelled"
        assert event.usage.completion_tokens == given
        assert context.codes.count(ABORTED) == 1
        metrics = await settled(engine)
    assert metrics["active_sequences"] == metrics["cache_protected_size"] == 0


async def test_a_background_batch_gives_way_to_a_request_that_comes_and_its_text_is_as_ever(
    tmp_path: Path, contexts: list[HaltingContext]
) -> None:
    config = config_for(write_model(tmp_path / "tiny.gguf", context_length=2_048), n_ctx=4_096, max_sequences=4)
    background = attrs.evolve(ask(PROMPT[:100], 40), priority=-1)
    async with open_engine(config) as engine:
        expected = await answer(engine, background)
    async with open_engine(config) as engine, trio.open_nursery() as nursery:
        context = contexts[1]
        context.halt_at = 110
        found: list[Answer] = []

        async def read() -> None:
            found.append(await answer(engine, background))

        nursery.start_soon(read)
        await context.halted()
        async with engine.generate(attrs.evolve(ask(PROMPT[:50], 4), id="now")) as stream:
            context.may_go_on.set()
            await read_on(stream)
        assert context.codes.count(ABORTED) == 1
    assert [each.token_ids for each in found] == [expected.token_ids]


async def test_no_other_background_batch_begins_before_a_request_that_has_come(
    tmp_path: Path, contexts: list[HaltingContext]
) -> None:
    config = config_for(write_model(tmp_path / "tiny.gguf", context_length=2_048), n_ctx=8_192, max_sequences=4)
    decoding, read = (attrs.evolve(each, priority=-1) for each in (ask(PROMPT[:100], 40), ask(PROMPT[100:600], 2)))
    async with open_engine(config) as engine, trio.open_nursery() as nursery:
        (context,) = contexts
        context.halt_at = 110
        nursery.start_soon(answer, engine, decoding)
        await context.halted()
        async with engine.generate(attrs.evolve(read, id="read")) as other:
            nursery.start_soon(read_on, other)
            # The next tick computes a token of the first, then a piece of the second's prompt.
            context.is_there.clear()
            context.halt_at = 111
            context.may_go_on.set()
            await context.halted()
            async with engine.generate(attrs.evolve(ask(PROMPT[600:650], 4), id="now")) as stream:
                context.may_go_on.set()
                await read_on(stream)
            nursery.cancel_scope.cancel()
    is_aborted = context.codes.index(ABORTED)
    assert context.sizes[is_aborted + 1] == 50


def test_a_request_that_is_cancelled_before_it_is_taken_up_is_in_no_batch(tiny: Path) -> None:
    """The command that cancels it follows the mark; in between the one that hands it over can be taken up."""
    sequence = sequence_for(ask(), PROMPT[:4])
    with Model.load(tiny) as model, Context(model, ContextParams(n_ctx=256)) as context:
        canceller = BatchCanceller(context)
        canceller.submitted(sequence)
        canceller.cancel(sequence)
        canceller.submit_taken(sequence)
        assert not canceller.begin([sequence])
        assert canceller.end()
