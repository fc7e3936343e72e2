"""Sounds in prompts: the text is llama.cpp's own, beside pictures too, and a bad file ends its request alone."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import attrs
import numpy as np
import pytest
from engine_world import answer, answers, ask, config_for, settled
from projectors import HEARING, MARKER, Seeing, float_wav, png, wav, write_projector, write_seeing_model
from test_engine_pictures import LENGTH, World, about, told

from uma import Message, open_engine
from uma.errors import BadRequest
from uma.types import Media


@pytest.fixture(scope="module", params=HEARING)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """With a Whisper encoder one that hears alone; without an encoder one that sees too, and has M-RoPE."""
    folder = tmp_path_factory.mktemp(request.param)
    sees: Seeing | None = None if request.param == "ultravox" else "qwen2vl"
    made = World.of(folder, write_seeing_model(folder / "model.gguf", sees or "llava"), sees, hears=request.param)
    yield made
    made.reference.close()


async def test_what_is_said_of_a_sound_is_what_llama_cpp_says(world: World) -> None:
    asked = [
        (f"{MARKER}What is this?", [wav(0.3, 1)]),
        (f"Compare {MARKER} to {MARKER}{MARKER}.", [wav(0.3, 1), wav(0.5, 2), wav(0.3, 1)]),
    ]
    if world.has_eyes:
        asked.append((f"{MARKER}and {MARKER}{MARKER}?", [wav(0.3, 1), png(40, 30), wav(0.4, 3)]))
    else:
        asked.append((f"{MARKER}What?", [wav(31, 4, rate=8_000, channels=1)]))  # two parts of 30 seconds
    async with open_engine(config_for(world.model)) as engine:
        able = engine.info.capabilities
        assert (able.audio, able.vision) == (True, world.has_eyes)
        for text, files in asked:
            assert (await answer(engine, about(text, *files))).token_ids == world.expected(text, files)


async def test_eight_at_once_are_told_of_their_own_sound(world: World) -> None:
    asked = [(f"{'Listen. ' * index}{MARKER}What is this?", wav(0.3, index % 3)) for index in range(8)]
    async with open_engine(config_for(world.model)) as engine:
        found = await answers(engine, [about(text, file, id=f"{at}") for at, (text, file) in enumerate(asked)])
        assert [each.token_ids for each in found] == [world.expected(text, [file]) for text, file in asked]
        await settled(engine)


async def test_a_conversation_about_a_sound_is_heard_once(world: World) -> None:
    file, first = wav(0.4, 1), f"Listen.{MARKER}What is it?"
    async with open_engine(config_for(world.model)) as engine:
        said = await answer(engine, about(first, file))
        turns = (told(first, [file]), Message("assistant", "A thing."), told("Sure?", []))
        more = await answer(engine, attrs.evolve(about(first, file), messages=turns))
        assert more.finished.usage.cached_tokens >= said.finished.usage.prompt_tokens - len("<|im_start|>assistant\n")
    prompt = f"{first}<|im_end|>\n<|im_start|>assistant\nA thing.<|im_end|>\n<|im_start|>user\nSure?"
    assert more.token_ids == world.expected(prompt, [file])


async def test_a_bad_sound_ends_its_request_and_nothing_else(world: World) -> None:
    broken = {
        "is Ogg; send": b"OggS" + bytes(40),
        "cannot be decoded": wav(0.3)[:30],
        "a sound of 0.01 s": float_wav(np.zeros(160, np.float32)),
        "samples that are no sound": float_wav(np.full(16_000, np.nan, np.float32)),
    }
    if not world.has_eyes:
        broken["is PNG, and this model does not support image input"] = png(9, 9)
    async with open_engine(config_for(world.model)) as engine, engine.generate(ask(max_tokens=200)) as stream:
        for problem, data in broken.items():
            wrong = Message("user", "What?", media=(Media(base64.b64encode(data).decode()),))
            with pytest.raises(BadRequest, match=r"messages\[0\]\.media\[0\]\.data") as refused:
                await answer(engine, attrs.evolve(about(f"{MARKER}What?", wav(0.2)), messages=(wrong,)))
            assert problem in str(refused.value)
        assert (await answer(engine, about(f"{MARKER}What?", wav(0.2)))).token_ids == world.expected(
            f"{MARKER}What?", [wav(0.2)]
        )
        assert len([event async for event in stream]) > LENGTH


async def test_a_projector_whose_embeddings_are_no_numbers_spoils_nobody(tmp_path: Path) -> None:
    """What it makes would reach all who share the KV: a masked cell that is no number is none in the sum either."""
    model = write_seeing_model(tmp_path / "model.gguf", "llava")
    write_projector(tmp_path / "mmproj.gguf", None, hears="gemma4ua", scale=float("nan"))
    async with open_engine(config_for(model)) as engine:
        alone = await answer(engine, ask(max_tokens=LENGTH))
        with pytest.raises(BadRequest, match="is no numbers"):
            await answer(engine, about(f"{MARKER}What?", wav(0.2)))
        assert (await answer(engine, ask(max_tokens=LENGTH))).token_ids == alone.token_ids


async def test_a_long_sound_that_is_read_in_parts_is_llama_cpp_s_too(tmp_path: Path) -> None:
    """200 tokens, at most 64 in a batch, beside a stream and others of their length."""
    model = write_seeing_model(tmp_path / "model.gguf", "llava")
    world = World.of(tmp_path, model, None, hears="gemma4ua")
    text = f"{MARKER}What is this?"
    async with open_engine(config_for(world.model, n_batch=64, n_ubatch=64)) as engine:
        requests = [about(text, wav(8, seed), id=f"{seed}") for seed in range(1, 5)]
        found = await answers(engine, [ask(max_tokens=300), *requests])
        assert [each.token_ids for each in found[1:]] == [world.expected(text, [wav(8, seed)]) for seed in range(1, 5)]
        assert len(found[0].token_ids) == 300
        again = await answer(engine, about(text, wav(8, 1)))
        assert again.token_ids == found[1].token_ids
        assert again.finished.usage.cached_tokens >= again.finished.usage.prompt_tokens - 2
    world.reference.close()
