"""A picture is encoded in pieces, between which the decode thread does all else, or leaves the rest out.

With a tiny projector all of it is over in a millisecond, so here a piece ends wherever llama.cpp lets it.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from engine_world import answer, answers, ask, config_for, settled
from projectors import MARKER, png, wav, write_seeing_model
from test_engine_pictures import LENGTH, World, about

from harness import PATIENCE_SEC
from uma import Request, open_engine
from uma.engine.policy import Plan, Scheduler
from uma.engine.policy.state import State
from uma.errors import ShuttingDown

QUESTION = f"{MARKER}What is this?"
MIN_PIECES = 5
"""Fewer than the tiny projectors' graphs are cut in."""


@pytest.fixture(scope="module", params=["a picture", "a sound"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("encoding")
    model = write_seeing_model(folder / "model.gguf", "llava")
    sees = request.param == "a picture"
    made = World.of(folder, model, "llava" if sees else None, None if sees else "ultravox")
    yield made
    made.reference.close()


def file_for(world: World, seed: int) -> bytes:
    return png(40, 30, seed) if world.has_eyes else wav(0.3, seed)


@attrs.define
class Pieces:
    """What was seen of each piece before it began."""

    generated: list[int] = attrs.field(factory=list)
    """Tokens that the streams have had."""
    on_second: Callable[[], object] = lambda: None
    """Called before the second of them, on the decode thread, in the middle of a picture."""


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> Pieces:
    seen, plan = Pieces(), Scheduler.plan

    def watched(scheduler: Scheduler, state: State, *args: Any, **options: Any) -> Plan:
        if options["pause_ms"]:
            seen.generated.append(sum(row.generated for row in state.decoding))
            if len(seen.generated) == 2:
                seen.on_second()
        return plan(scheduler, state, *args, **options)

    monkeypatch.setattr(Scheduler, "plan", watched)
    monkeypatch.setattr(Scheduler, "encode_ms", 1e-6)
    return seen


async def read(stream: AsyncIterable[object]) -> None:
    async for _ in stream:
        pass


async def test_streams_go_on_between_two_pieces(world: World, pieces: Pieces) -> None:
    """From the first picture on: nothing was encoded before it."""
    file = file_for(world, 1)
    async with open_engine(config_for(world.model, n_ctx=32_768)) as engine:
        await engine.tokenize(about(QUESTION, file))  # the process that decodes files has to start
        async with engine.generate(ask(max_tokens=30_000)) as stream, trio.open_nursery() as nursery:
            await anext(aiter(stream))
            nursery.start_soon(read, stream)
            found = await answer(engine, about(QUESTION, file, id="b"))
            stream.cancel()
    assert found.token_ids == world.expected(QUESTION, [file])
    gone_on = [after > before for before, after in zip(pieces.generated, pieces.generated[1:], strict=False)]
    # (On a busy machine its reader can be behind for the length of a piece.)
    assert len(gone_on) >= MIN_PIECES and sum(gone_on) > 0.75 * len(gone_on)


async def test_what_is_read_between_two_pieces_is_read_as_ever(world: World, pieces: Pieces) -> None:
    asked = [(f"{'Look. ' * index}{QUESTION}", file_for(world, index % 5)) for index in range(8)]
    texts = [ask("Once upon a time, " * count, LENGTH, id=f"text {count}") for count in (3, 11)]
    async with open_engine(config_for(world.model)) as engine:
        alone = [(await answer(engine, text)).token_ids for text in texts]
        requests = [about(question, file, id=f"{index}") for index, (question, file) in enumerate(asked)]
        found = [each.token_ids for each in await answers(engine, [*requests, *texts])]
        assert found == [*(world.expected(question, [file]) for question, file in asked), *alone]
        await settled(engine)
    assert len(pieces.generated) >= MIN_PIECES


async def test_a_request_that_is_cancelled_meanwhile_ends_the_encoding(world: World, pieces: Pieces) -> None:
    file = file_for(world, 1)
    async with open_engine(config_for(world.model)) as engine:
        with trio.fail_after(PATIENCE_SEC):
            async with engine.generate(about(QUESTION, file)) as stream:
                pieces.on_second = lambda: trio.from_thread.run_sync(stream.cancel)
                assert len([event async for event in stream]) == 1
        await settled(engine)
        assert len(pieces.generated) < MIN_PIECES
        assert (await answer(engine, about(QUESTION, file))).token_ids == world.expected(QUESTION, [file])


async def test_a_background_picture_gives_way_to_one_of_a_higher_lane(world: World, pieces: Pieces) -> None:
    background, other = (about(QUESTION, file_for(world, seed), id=str(seed)) for seed in (1, 2))
    ended: list[tuple[str, tuple[int, ...]]] = []
    async with open_engine(config_for(world.model)) as engine, trio.open_nursery() as nursery:

        async def run(request: Request) -> None:
            ended.append((request.id, (await answer(engine, request)).token_ids))

        async def other_comes() -> None:
            nursery.start_soon(run, other)
            with trio.fail_after(PATIENCE_SEC):
                while len((seen := await engine.activity()).running) + len(seen.waiting) < 2:
                    await trio.lowlevel.checkpoint()

        pieces.on_second = lambda: trio.from_thread.run(other_comes)
        nursery.start_soon(run, attrs.evolve(background, priority=-1))
    assert dict(ended) == {id: world.expected(QUESTION, [file_for(world, int(id))]) for id in ("2", "1")}
    if world.has_eyes:  # a sound this short is encoded before the other has come to its own
        assert [id for id, _ in ended] == ["2", "1"]


async def test_an_engine_that_stops_meanwhile_ends_the_encoding(world: World, pieces: Pieces) -> None:
    async with open_engine(config_for(world.model)) as engine:
        pieces.on_second = engine.worker.stop
        with trio.fail_after(PATIENCE_SEC), pytest.raises(ShuttingDown):
            await answer(engine, about(QUESTION, file_for(world, 1)))
    assert len(pieces.generated) < MIN_PIECES


async def test_a_fault_meanwhile_ends_the_engine_loudly(world: World, pieces: Pieces) -> None:
    def fails() -> None:
        raise RuntimeError("a fault between two pieces")

    with pytest.raises(RuntimeError, match="between two pieces"):
        async with open_engine(config_for(world.model)) as engine:
            pieces.on_second = fails
            with trio.fail_after(PATIENCE_SEC):
                await answer(engine, about(QUESTION, file_for(world, 1)))


async def test_without_a_stream_a_picture_is_one_piece_after_the_other(tmp_path: Path, pieces: Pieces) -> None:
    world = World.of(tmp_path, write_seeing_model(tmp_path / "model.gguf", "qwen2vl"), "qwen2vl")
    files = [png(90, 61, 2), png(56, 56, 3)]
    async with open_engine(config_for(world.model)) as engine:
        text = f"Compare {MARKER} to {MARKER}."
        assert (await answer(engine, about(text, *files))).token_ids == world.expected(text, files)
    assert len(pieces.generated) >= MIN_PIECES
    world.reference.close()
