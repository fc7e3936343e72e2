"""Pictures in prompts: the text is llama.cpp's own, whoever else is served, and a bad file ends its request alone."""

from __future__ import annotations

import base64
import gc
import threading
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from engine_world import SMALL_WINDOWS, answer, answers, ask, at_once, config_for, settled
from every_kind import is_all, write_named
from projectors import (
    HYBRID_SEEING,
    MARKER,
    SEEING,
    Hearing,
    Reference,
    Seeing,
    bmp,
    png,
    png_header,
    png_of,
    write_projector,
    write_seeing_model,
)

from harness import PATIENCE_SEC
from models import write_model
from uma import Message, Request, SamplingParams, open_engine
from uma.engine.intake import pictures
from uma.engine.kv.checkpoints import MIN_SAVED_TOKENS
from uma.engine.policy.tuning import Tuning
from uma.errors import BadRequest, ModelError, Overloaded, PromptTooLarge
from uma.llama.context import Context
from uma.llama.model import Model
from uma.llama.projector import Picture, Projector
from uma.media.decoder import MediaDecoder
from uma.types import Finished, Grammar, Media

LENGTH = 20
CHECKPOINTED: tuple[Seeing, ...] = (*HYBRID_SEEING, "gemma3")
"""Projectors of models whose memory cannot be cut: here the last is for one with small windows."""


@attrs.frozen
class World:
    """A model with a projector beside it, and what llama.cpp makes of them."""

    model: Path
    reference: Reference
    has_end_mark: bool
    """Whether the model has text behind each picture."""
    has_eyes: bool = True
    most_read_again: int = 2
    """Tokens of a prompt that is asked again which are read again, at most."""

    @classmethod
    def of(cls, folder: Path, model: Path, sees: Seeing | None, hears: Hearing | None = None) -> World:
        """With a projector of these kinds, which is written beside it."""
        reference = Reference(model, write_projector(folder / "mmproj-model.gguf", sees, hears=hears))
        most = len("<|im_end|>\n<|im_start|>assistant\n") if sees in CHECKPOINTED else 2
        return cls(model, reference, sees in ("qwen2vl", *CHECKPOINTED), sees is not None, most)

    def expected(self, text: str, files: Sequence[bytes]) -> tuple[int, ...]:
        """`text` has `MARKER` for each picture."""
        prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        return self.reference.continues(prompt, files, LENGTH)


@pytest.fixture(scope="module", params=(*SEEING, *(CHECKPOINTED if is_all() else ())))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    yield from made_world(tmp_path_factory.mktemp(request.param), request.param)


def made_world(folder: Path, sees: Seeing) -> Iterator[World]:
    has_windows = sees == "gemma3"
    model = write_named(folder, SMALL_WINDOWS) if has_windows else write_seeing_model(folder / "model.gguf", sees)
    made = World.of(folder, model, sees)
    yield made
    made.reference.close()


def told(text: str, files: Sequence[bytes], role: Any = "user") -> Message:
    """A message whose text has `MARKER` for each of the pictures."""
    parts = text.split(MARKER)
    assert len(parts) == len(files) + 1
    places = [len("".join(parts[: index + 1])) for index in range(len(files))]
    media = (Media(base64.b64encode(file).decode(), at) for file, at in zip(files, places, strict=True))
    return Message(role, "".join(parts), media=tuple(media))


def about(text: str, *files: bytes, id: str = "a", **fields: Any) -> Request:
    """A greedy request about pictures."""
    sampling = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    return Request(id, messages=(told(text, files),), **({"sampling": sampling} | fields))


async def test_what_is_said_of_a_picture_is_what_llama_cpp_says(world: World) -> None:
    asked = [
        (f"{MARKER}What is this?", [png(40, 30, 1)]),
        (f"What is this?{MARKER}", [png(90, 61, 2)]),
        (f"Compare {MARKER} to {MARKER}{MARKER}.", [png(56, 56, 3), bmp(31, 17, 4), png(56, 56, 3)]),
    ]
    async with open_engine(config_for(world.model)) as engine:
        assert engine.info.capabilities.vision
        assert engine.info.limits.max_frame_bytes == 8 * 2**20
        for text, files in asked:
            assert (await answer(engine, about(text, *files))).token_ids == world.expected(text, files)


@pytest.mark.parametrize("sees", ["hunyuanvl", "deepseek4v"])
async def test_pictures_that_depend_on_what_comes_before_them_are_llama_cpp_s_too(tmp_path: Path, sees: Seeing) -> None:
    """HunyuanVL's by how many pictures do, and DeepSeek 4's by how many tokens."""
    world = next(made_world(tmp_path, sees))
    asked = [
        (f"What is this? {MARKER}", [png(90, 61, 2)]),
        (f"Compare {MARKER} to {MARKER}{MARKER}.", [png(56, 56, 3), bmp(31, 17, 4), png(56, 56, 3)]),
    ]
    async with open_engine(config_for(world.model)) as engine:
        for text, files in [*asked, asked[1]]:
            assert (await answer(engine, about(text, *files))).token_ids == world.expected(text, files)
    world.reference.close()


async def test_eight_at_once_are_told_of_their_own_picture(world: World) -> None:
    """Some have the same picture, some the same question, and text is asked beside them."""
    asked = [
        (f"{'Look. ' * index}{MARKER}What is this?", png(40 + 9 * (index % 3), 30, index % 5)) for index in range(8)
    ]
    text = "Once upon a time, in a land far away,"
    async with open_engine(config_for(world.model)) as engine:
        alone = await answer(engine, ask(text, max_tokens=LENGTH))
        requests = [about(question, file, id=f"{index}") for index, (question, file) in enumerate(asked)]
        *found, beside = await answers(engine, [*requests, ask(text, max_tokens=LENGTH)])
        assert [each.token_ids for each in found] == [world.expected(question, [file]) for question, file in asked]
        assert beside.token_ids == alone.token_ids
        await settled(engine)


async def test_a_conversation_about_a_picture_is_read_once(world: World) -> None:
    file, other = png(70, 40, 1), png(70, 40, 2)
    first = "Look at this." + MARKER + "What is it?"
    async with open_engine(config_for(world.model)) as engine:
        said = await answer(engine, about(first, file))
        again = await answer(engine, about(first, file))
        assert again.token_ids == said.token_ids
        assert again.finished.usage.cached_tokens >= again.finished.usage.prompt_tokens - world.most_read_again
        turns = (told(first, [file]), Message("assistant", "A thing."), told("Sure?", []))
        more = await answer(engine, attrs.evolve(about(first, file), messages=turns))
        assert more.finished.usage.cached_tokens >= said.finished.usage.prompt_tokens - len("<|im_start|>assistant\n")
        # Another picture of the same size: what comes before it is shared, and nothing of it.
        differs = await answer(engine, about(first, other))
        assert differs.finished.usage.cached_tokens < len("<|im_start|>user\nLook at this.<|vision_start|>") + 3
        assert differs.token_ids == world.expected(first, [other])
    prompt = f"{first}<|im_end|>\n<|im_start|>assistant\nA thing.<|im_end|>\n<|im_start|>user\nSure?"
    assert more.token_ids == world.expected(prompt, [file])


async def test_a_text_behind_a_picture_s_system_prompt_goes_on_as_if_there_had_been_none(world: World) -> None:
    """It shares what is before the picture, and has positions of its own behind that."""
    system = Message("system", "You are a helpful assistant that answers.")
    turns = (system, Message("user", "Tell me of the sea and the ships and the wind. " * 12))
    said = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    found = []
    for begins in ([], [(system, told(f"What is this?{MARKER}", [png(200, 200, 1)]))]):
        async with open_engine(config_for(world.model)) as engine:
            for messages in begins:
                await answer(engine, Request("p", messages=messages, sampling=said))
            first = await answer(engine, Request("t", messages=turns, sampling=said))
            longer = (*turns, Message("assistant", first.text), Message("user", "And then?"))
            second = await answer(engine, Request("u", messages=longer, sampling=said))
            assert second.finished.usage.cached_tokens > 300
            found.append((first.token_ids, second.token_ids))
            await settled(engine)
    assert found[0] == found[1]


async def test_where_cells_run_short_pictures_are_read_again(world: World) -> None:
    asked = [(f"{MARKER}{'What is this? ' * 4}", png(80, 60 + 4 * index, index)) for index in range(6)]
    sampling = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    async with open_engine(config_for(world.model, n_ctx=512)) as engine:
        requests = [about(text, file, id=f"{at}", sampling=sampling) for at, (text, file) in enumerate(asked)]
        found = await at_once(engine, requests)
        metrics = await settled(engine)
    assert metrics["preemptions_total"] > 0
    for each, (text, file) in zip(found, asked, strict=True):
        assert each.token_ids[:LENGTH] == world.expected(text, [file])
        assert len(each.token_ids) == 90


BROKEN = {
    "no base64": "~~~",
    "has an unrecognized format": base64.b64encode(b"nothing at all").decode(),
    "PNG is broken": base64.b64encode(png(40, 30)[:20]).decode(),
    "cannot be decoded": base64.b64encode(png(40, 30)[:90]).decode(),
    "50,000 x 50,000 pixels": base64.b64encode(png_header(50_000, 50_000)).decode(),
    "this WebP is broken": base64.b64encode(b"RIFF\0\0\0\0WEBPVP8 ").decode(),
    "is WAV, and this model does not support audio input; send PNG": base64.b64encode(b"RIFF\0\0\0\0WAVEfmt ").decode(),
    "at: 99 is before another one's": base64.b64encode(png(40, 30)).decode(),
}


async def test_a_bad_file_ends_its_request_and_nothing_else(world: World) -> None:
    question = f"{MARKER}What is this?"
    async with open_engine(config_for(world.model)) as engine, engine.generate(ask(max_tokens=400)) as stream:
        for problem, data in BROKEN.items():
            place = 99 if problem.startswith("at") else 0
            wrong = Message("user", "What?", media=(Media(data, place),))
            with pytest.raises(BadRequest, match=r"messages\[0\]\.media\[0\]\.") as refused:
                await answer(engine, attrs.evolve(about(question, png(9, 9)), messages=(wrong,)))
            assert problem in str(refused.value)
        assert (await answer(engine, about(question, png(40, 30, 1)))).token_ids == world.expected(
            question, [png(40, 30, 1)]
        )
        rest = [event async for event in stream]
    last = rest[-1]
    assert isinstance(last, Finished)
    assert last.usage.completion_tokens == 400


async def test_what_pictures_exclude_is_refused_by_name(world: World) -> None:
    async with open_engine(config_for(world.model)) as engine:
        excluded: dict[str, Any] = {"echo": True, "prompt_logprobs": 1, "reproducible": True}
        for name, value in excluded.items():
            sampling = SamplingParams(max_tokens=4, **{name: value})
            with pytest.raises(BadRequest, match=f"{name}: "):
                await answer(engine, about(f"{MARKER}What?", png(9, 9), sampling=sampling))
        if world.has_end_mark:
            return
        ending = (Message("user", "What?"), told(f"A {MARKER}", [png(9, 9)], "assistant"))
        with pytest.raises(BadRequest, match="cannot end with a picture"):
            await answer(engine, attrs.evolve(about(f"{MARKER}What?", png(9, 9)), messages=ending))


async def test_a_model_without_a_projector_refuses_pictures_by_name(tiny: Path) -> None:
    async with open_engine(config_for(tiny)) as engine:
        assert not engine.info.capabilities.vision
        with pytest.raises(
            BadRequest, match=r"messages\[0\]: .* does not support image or audio .* \(an mmproj file\)"
        ):
            await answer(engine, about(f"{MARKER}What?", png(9, 9)))


async def test_the_projector_is_found_beside_the_model_or_named_or_off(world: World, tmp_path: Path) -> None:
    found = next(world.model.parent.glob("mmproj-*"))
    moved = tmp_path / "model.gguf"
    moved.symlink_to(world.model)
    for settings, sees in (({}, False), ({"mmproj": str(found)}, True)):
        async with open_engine(config_for(moved, **settings)) as engine:
            assert engine.info.capabilities.vision is sees
    async with open_engine(config_for(world.model, mmproj="off")) as engine:
        assert not engine.info.capabilities.vision


async def test_a_projector_that_does_not_fit_is_an_error_where_it_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_model(tmp_path / "model.gguf")
    wrong = write_projector(tmp_path / "mmproj-model.gguf", embed=96)
    with pytest.raises(ModelError, match=r"cannot be loaded as a projector .*mismatch"):
        async with open_engine(config_for(model, mmproj=str(wrong))):
            pass
    half = write_projector(tmp_path / "mmproj.gguf")
    half.write_bytes(half.read_bytes()[: -half.stat().st_size // 2])
    async with open_engine(config_for(model)) as engine:
        assert not engine.info.capabilities.vision
    assert "the projector beside the model is not used" in caplog.text
    with pytest.raises(ModelError, match="cannot be"):
        async with open_engine(config_for(model, mmproj=str(tmp_path / "missing.gguf"))):
            pass


WRONG_FIGURES: tuple[tuple[Seeing, Hearing | None, str, int], ...] = (
    ("llava", "ultravox", "clip.audio.num_mel_bins", 13),
    ("gemma3", None, "clip.vision.projector.scale_factor", 13),
    ("qwen3vl", None, "clip.vision.attention.head_count", 0),
)


@pytest.mark.parametrize(("sees", "hears", "key", "value"), WRONG_FIGURES)
def test_a_projector_over_whose_header_libmtmd_aborts_ends_a_process_of_its_own(
    tmp_path: Path, sees: Seeing, hears: Hearing | None, key: str, value: int
) -> None:
    path = write_projector(tmp_path / "mmproj.gguf", sees, hears=hears, figures={key: value})
    with Model.load(write_seeing_model(tmp_path / "model.gguf", sees)) as model:
        with pytest.raises(ModelError, match=r"mmproj.gguf: its header is damaged .* would end the process over"):
            Projector(path, model, uses_gpu=False)
        Projector(write_projector(path, sees, hears=hears), model, uses_gpu=False).close()


@pytest.mark.parametrize("sees", CHECKPOINTED)
async def test_where_memory_cannot_be_cut_pictures_are_shared_too(tmp_path: Path, sees: Seeing) -> None:
    """The system's prompt by all, a picture by those who ask about it, a conversation by its turns after a restart."""
    system, files = Message("system", "You are helpful. " * 8), [png(200, 200, seed) for seed in range(4)]
    begins, ends = f"<|im_start|>system\n{system.content}<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>"
    answer_begins = f"{ends}assistant\n"
    asked = [(f"Look.{MARKER}{question}", file) for question in ("What?", "How many are there?") for file in files]
    asked += [asked[4], (f"{'Look. ' * 100}{MARKER}What?", files[3])]
    turns: list[tuple[Message, ...]] = [(system, told(text, [file])) for text, file in asked]
    turns.append((*turns[-1], Message("assistant", "A thing."), told("Sure?", [])))
    requests = [attrs.evolve(about("", id=f"{at}"), messages=messages) for at, messages in enumerate(turns)]
    with contextmanager(made_world)(tmp_path, sees) as world:
        config = config_for(world.model, cache_dir=str(tmp_path / "cache"), cache_ram_mb=64)
        async with open_engine(config) as engine:
            found = await answers(engine, requests[:8])
            found += [await answer(engine, request) for request in requests[8:10]]
        async with open_engine(config) as engine:
            found.append(await answer(engine, requests[10]))
        prompts = [f"{begins}{text}{answer_begins}" for text, _ in asked]
        prompts.append(f"{prompts[-1]}A thing.{ends}user\nSure?{answer_begins}")
        pairs = zip(prompts, (*(file for _, file in asked), files[3]), strict=True)
        expected = [world.reference.continues(prompt, [file], LENGTH) for prompt, file in pairs]
    assert [each.token_ids for each in found] == expected
    whole = found[4].finished.usage.prompt_tokens
    read = [each.finished.usage.prompt_tokens - each.finished.usage.cached_tokens for each in found]
    about_one = whole - len(begins)  # of a picture that is asked about twice at once, one part is read by both
    assert sum(read[:8]) < len(begins) + 5 * about_one + 4 * (len(asked[4][0]) + len(answer_begins))
    assert read[8] <= MIN_SAVED_TOKENS + len(answer_begins)
    assert read[10] <= len(f"{answer_begins}A thing.{ends}user\nSure?{answer_begins}")


@pytest.mark.parametrize("kind", ["llava", "gemma3"])
async def test_with_sliding_windows_a_conversation_about_a_picture_is_llama_cpp_s_too(
    tmp_path: Path, kind: Seeing
) -> None:
    """With Gemma 3's projector a picture's tokens attend to all of it."""
    model = write_model(tmp_path / "model.gguf", kind="sliding-window", context_length=2_048)
    world = World(model, Reference(model, write_projector(tmp_path / "mmproj.gguf", kind)), has_end_mark=False)
    first, files = f"Look at this.{MARKER}What is it?", [png(70, 40, index) for index in range(3)]
    async with open_engine(config_for(model)) as engine:
        found = await answers(engine, [about(first, file, id=f"{at}") for at, file in enumerate(files)])
        turns = (told(first, files[:1]), Message("assistant", "A thing."), told("Sure?", []))
        more = await answer(engine, attrs.evolve(about(first, files[0]), messages=turns))
    prompt = f"{first}<|im_end|>\n<|im_start|>assistant\nA thing.<|im_end|>\n<|im_start|>user\nSure?"
    assert [each.token_ids for each in found] == [world.expected(first, [file]) for file in files]
    assert more.token_ids == world.expected(prompt, files[:1])
    assert more.finished.usage.cached_tokens > 16
    world.reference.close()


async def test_a_picture_that_attends_to_all_of_itself_must_fit_one_ubatch(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf")
    write_projector(tmp_path / "mmproj.gguf", "gemma3")
    async with open_engine(config_for(model, n_ubatch=8)) as engine:
        with pytest.raises(BadRequest, match="16 tokens in one batch, and --n-ubatch is 8"):
            await answer(engine, about(f"{MARKER}What?", png(9, 9)))
        assert (await answer(engine, ask(max_tokens=4))).finished.reason == "length"


async def test_a_batch_can_be_smaller_than_a_picture(world: World) -> None:
    if world.model.stem == SMALL_WINDOWS:
        pytest.skip("its tokens attend to later ones, so that they are read whole")
    question, file = f"{MARKER}What is this?", png(40, 30, 1)
    config = config_for(world.model, n_batch=8, n_ubatch=8, max_sequences=1)
    async with open_engine(config) as engine:
        assert (await answer(engine, about(question, file))).token_ids == world.expected(question, [file])


class HaltingProjector(Projector):
    """The real projector; a part of a picture behind the first waits once until it may go on, or fails."""

    fails = halts = False
    is_there, may_go_on = threading.Event(), threading.Event()

    def decode(
        self, context: Context, picture: Picture, part: range, position: int, seq_id: int, before: int = 0
    ) -> int:
        if part.start and HaltingProjector.fails:
            HaltingProjector.fails = False
            context.seq_rm(seq_id, position, -1)  # as llama.cpp does where it computes no further
            return -3
        if part.start and HaltingProjector.halts:
            HaltingProjector.halts = False
            self.is_there.set()
            assert self.may_go_on.wait(PATIENCE_SEC)
        return super().decode(context, picture, part, position, seq_id, before)


@pytest.mark.parametrize("sees", ["qwen2vl", "qwen3vl"])
async def test_whatever_happens_between_two_parts_of_a_picture_with_shared_positions_it_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sees: Seeing
) -> None:
    """A part fails, the request loses its slot, or is left: llama.cpp can cut such a picture nowhere."""
    monkeypatch.setattr("uma.engine.policy.order.TUNING", Tuning(give_way_ms=0.0))
    monkeypatch.setattr("uma.engine.loading.Projector", HaltingProjector)
    question, files = f"{'Look. ' * 20}{MARKER}What is this?", [png(400, 261, seed) for seed in range(3)]
    failing, losing, leaving = (about(question, file, id=f"{at}", priority=-1) for at, file in enumerate(files))
    found = list[tuple[int, ...]]()

    async def read(request: Request) -> None:
        found.append((await answer(engine, request)).token_ids)

    with contextmanager(made_world)(tmp_path, sees) as world:
        expected = [world.expected(question, [file]) for file in files]
        async with open_engine(config_for(world.model, n_batch=32, n_ubatch=32, max_sequences=1)) as engine:
            HaltingProjector.fails = True
            await read(failing)
            for request in (losing, leaving):
                HaltingProjector.halts = True
                HaltingProjector.is_there.clear()
                HaltingProjector.may_go_on.clear()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(read, request)
                    await trio.to_thread.run_sync(HaltingProjector.is_there.wait, PATIENCE_SEC)
                    if request is leaving:
                        nursery.cancel_scope.cancel()
                        HaltingProjector.may_go_on.set()
                    else:
                        async with engine.generate(ask("Once", max_tokens=2)) as stream:
                            HaltingProjector.may_go_on.set()
                            assert [event async for event in stream]
            await read(leaving)
            metrics = await settled(engine)
    assert found == expected
    assert metrics["preemptions_total"] == 1
    assert metrics["requests_cancelled"] == 1


async def test_a_request_with_more_than_fits_decodes_no_further(world: World) -> None:
    """The last file is none, which decoding would tell."""
    files = [*(png(200, 200, seed) for seed in range(30)), b"nothing"]
    async with open_engine(config_for(world.model, n_ctx=256, max_sequences=1)) as engine:
        with pytest.raises(PromptTooLarge, match=r"messages\[0\]\.media\[\d+\]\.data: .* send fewer or smaller"):
            await answer(engine, about(MARKER * 31 + "What?", *files))
        assert (await answer(engine, about(f"{MARKER}What?", files[0]))).finished.reason == "length"


async def test_a_conversation_with_pictures_is_cut_and_those_of_what_goes_are_not_read(world: World) -> None:
    brief = SamplingParams(temperature=0, max_tokens=4)
    old, new = (told(f"{MARKER}What is this?", [png(40, 30, seed)]) for seed in (1, 2))
    talk = [old, Message("assistant", "Yes."), *[Message("user", "a" * 60), Message("assistant", "Yes.")] * 9, new]
    async with open_engine(config_for(world.model, n_ctx=512, max_sequences=1)) as engine:
        cut = (await answer(engine, Request("a", messages=talk, sampling=brief, truncation="auto"))).finished
        kept = talk[cut.dropped_messages :]
        assert 0 < cut.dropped_messages < len(talk) - 1
        again = (await answer(engine, Request("b", messages=kept, sampling=brief))).finished
    assert cut.usage.prompt_tokens == again.usage.prompt_tokens <= 512 - 4


async def test_pictures_that_wait_to_be_encoded_are_bounded_and_their_files_gone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "MAX_PREPARED_TOKENS", 4)
    question, files = f"{MARKER}What is this?", [png(40, 30, seed) for seed in range(101, 104)]
    encoded = [base64.b64encode(file).decode() for file in files]
    async with (
        open_engine(config_for(world.model, max_sequences=1)) as engine,
        engine.generate(ask(max_tokens=1_500)) as running,
        engine.generate(about(MARKER + question, *files[:2], id="waits")) as waiting,
    ):
        assert not [each for each in gc.get_objects() if isinstance(each, Media) and each.data in encoded]
        with pytest.raises(Overloaded, match="wait to be encoded"):
            await answer(engine, about(question, files[2]))
        running.cancel()
        assert [event async for event in waiting]
        got = await answer(engine, about(question, files[2]))
    assert got.token_ids == world.expected(question, files[2:])


async def test_of_the_pictures_of_a_request_one_at_a_time_is_decoded(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf")
    write_projector(tmp_path / "mmproj.gguf")
    pixels = np.zeros((2_048, 2_048, 3), np.uint8)
    files = []
    for seed in range(6):
        pixels[0, 0, 0] = seed
        files.append(png_of(pixels))
    asked = about(MARKER * len(files) + "What?", *files)
    async with open_engine(config_for(model)) as engine:
        tracemalloc.start()
        try:
            await answer(engine, asked)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak_bytes < 4 * pixels.nbytes


async def test_a_request_that_is_left_decodes_none_of_its_files_but_the_one_it_is_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_seeing_model(tmp_path / "model.gguf", "llava")
    write_projector(tmp_path / "mmproj-model.gguf", "llava")
    begun, goes_on, fields, decode = threading.Event(), threading.Event(), list[str](), MediaDecoder.decode

    def slow(decoder: MediaDecoder, data: bytes, id: str, field: str) -> Any:
        fields.append(field)
        begun.set()
        goes_on.wait(PATIENCE_SEC)
        return decode(decoder, data, id, field)

    monkeypatch.setattr(MediaDecoder, "decode", slow)
    async with open_engine(config_for(model)) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer, engine, about(MARKER * 3, *(png(40, 30, seed) for seed in range(3))))
            await trio.to_thread.run_sync(begun.wait)
            nursery.cancel_scope.cancel()
            goes_on.set()
        await settled(engine)
    assert len(fields) == 1


async def test_an_answer_of_several_and_a_grammar_go_with_pictures(world: World) -> None:
    text, file = f"{MARKER}What is this?", png(40, 30, 1)
    sampling = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, n=2)
    async with open_engine(config_for(world.model)) as engine:
        got = await answer(engine, about(text, file, sampling=sampling, stream=False))
        assert [each.token_ids for each in got.finished.answers] == [world.expected(text, [file])] * 2
        sampling = SamplingParams(
            temperature=0, max_tokens=LENGTH, grammar=Grammar(json_schema={"enum": ["yes", "no"]})
        )
        held = await answer(engine, about(text, file, sampling=sampling))
        assert held.text in ('"yes"', '"no"')
