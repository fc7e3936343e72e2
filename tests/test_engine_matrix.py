"""Every kind of memory, with text, pictures, sounds and adapters, through all that can happen to a sequence: each text
is that of a cold run.

The requests are two conversations with one system prompt. The first is about a picture or a sound, or of text alone, or
asks for an adapter; the second is of text alone and longer. By default a few cases of each kind run, with
`TEST_KINDS=all` all there are, and the real models with their weights made F32.
"""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any, get_args

import attrs
import pytest
import trio
from adapters import write_adapter
from engine_world import (
    SMALL_WINDOWS,
    Answer,
    HaltingContext,
    alone,
    answer,
    answers,
    ask,
    config_for,
    halting_contexts,
    tokens_for,
)
from every_kind import ALL, OTHERS, is_all, write_named
from projectors import MARKER, Hearing, Seeing, png, wav, write_projector, write_seeing_model
from test_engine_cancel import cancelled_at, read_on
from test_engine_pictures import told

from benchmarks.f32 import f32_model
from benchmarks.kinds import WIDTH
from benchmarks.reference import RealModel, model_path
from models import EMBED, write_model
from uma import Message, Request, SamplingParams, open_engine
from uma.engine import Engine
from uma.engine.policy.tuning import Tuning
from uma.types import AdapterScale

MROPE = "mrope"
"""Plain attention in which a picture's tokens share positions (Qwen2-VL)."""
OWN: dict[str, Seeing] = {MROPE: "qwen2vl", "qwen35": "qwen3vl", "lfm2": "lfm2"}
"""Projectors of these models, in the place of others."""
MEDIA: dict[str, tuple[Seeing | None, Hearing | None]] = {
    "text": (None, None),
    "picture": ("llava", None),
    "picture attended both ways": ("gemma3", None),
    "sound": (None, "ultravox"),
    "sound without encoder": (None, "gemma4ua"),
    "adapter": (None, None),
}
REAL: dict[str, RealModel] = {f"real {name}": name for name in get_args(RealModel)}
"""Real models, whose names kinds of random ones have, too."""
SMALLER = 3
"""What the texts' lengths of these are divided by: they compute a hundred times as much."""
LENGTH, LETTERS = 24, "bcdfgjklmopqsuvwxyz"
MAX_OFF = 0.02
"""Maximum difference of a log probability: in other cells, or in batches of another size, the last bits are others."""
N_CTX = 8_192
"""Context of all engines here; two sequences with a buffer each have half of it."""
LONG = N_CTX // 2 - 100
"""Tokens of a stream that outlasts all that happens beside it: three times as many as were needed on a busy machine."""
PICTURE, SOUND = png(200, 200, 1), wav(0.4, 1)


@attrs.frozen
class World:
    """A model, perhaps with a projector beside it, and the texts of a cold run."""

    model: Path
    settings: dict[str, Any]
    requests: list[Request]
    """Two first turns, of which the second is of text alone, and the next turn of each."""
    cold: list[Answer]
    smaller: int = 1
    """What lengths are divided by."""

    def differing(self, found: Sequence[Answer]) -> list[str]:
        """Requests that have another text than in the cold run, or other probabilities than those that differ in their
        last bits; `found` has them in order, as often as they were asked.
        """
        pairs = zip(found, self.cold * (len(found) // len(self.cold)), self.requests * len(found), strict=False)
        return [
            request.id
            for got, cold, request in pairs
            if got.token_ids != cold.token_ids or likelihoods(got) != pytest.approx(likelihoods(cold), abs=MAX_OFF)
        ]


def likelihoods(given: Answer) -> list[float]:
    """The log probability of each token."""
    return [token.logprobs.chosen.logprob if token.logprobs else math.nan for token in given.tokens]


def letters(seed: int, count: int) -> str:
    """Text in which each letter is a token, whatever stands beside it."""
    return "".join(random.Random(seed).choices(LETTERS, k=count))


def chat(name: str, *messages: Message, is_real: bool) -> Request:
    """A greedy request; a random model answers in these letters, whose ids are their bytes."""
    bias: dict[int | str, float] = {} if is_real else {str(ord(letter)): 20.0 for letter in LETTERS}
    sampling = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, logit_bias=bias, logprobs=0)
    return Request(name, messages=messages, sampling=sampling)


def write_world(folder: Path, memory: str, medium: str) -> Path:
    """A model with this memory, and beside it what reads this medium."""
    sees, hears = MEDIA[medium]
    if memory in REAL:
        return f32_model(REAL[memory])
    if memory == MROPE:
        path = write_seeing_model(folder / "model.gguf", "qwen2vl")
    else:
        path = write_named(folder, memory, 2_048)
    sees = sees and OWN.get(memory, sees)
    if sees or hears:
        embed = WIDTH if memory in OTHERS else EMBED
        write_projector(folder / "mmproj.gguf", sees, hears=hears, embed=embed)
    return path


async def make_world(folder: Path, memory: str, medium: str, layout: str) -> World:
    """Ask for everything once, each alone and from its first token. Skips what the engine says it cannot read."""
    model, settings = write_world(folder, memory, medium), {"kv_unified": layout, "n_ctx": N_CTX}
    is_real, smaller = memory in REAL, SMALLER if memory in REAL else 1
    system = Message("system", letters(1, 330 // smaller))
    file = [SOUND if medium.startswith("sound") else PICTURE] if any(MEDIA[medium]) else []
    lora: tuple[AdapterScale, ...] = ()
    if medium == "adapter":
        settings["lora"], lora = f"one={write_adapter(folder / 'one.gguf', model)}", (AdapterScale(0, 1.0),)
    first = (system, told(f"{letters(2, 90 // smaller)}{MARKER * len(file)}{letters(3, 120 // smaller)}", file))
    second = (system, Message("user", letters(4, 600 // smaller)))
    async with open_engine(config_for(model, **settings, cache_tokens=0, cache_ram_mb=0, max_sequences=1)) as engine:
        able = engine.info.capabilities
        if file and not (able.audio if medium.startswith("sound") else able.vision):
            pytest.skip(f"with {memory} memory this engine reads no {medium}")
        requests = [chat("first", *first, is_real=is_real), chat("second", *second, is_real=is_real)]
        requests[0] = attrs.evolve(requests[0], lora=lora or None)
        cold = await alone(engine, requests)
        for name, messages, answered, seed in zip(
            ("first", "second"), (first, second), tuple(cold), (5, 6), strict=True
        ):
            more = (Message("assistant", answered.text), Message("user", letters(seed, 70 // smaller)))
            requests.append(chat(f"{name}, next turn", *messages, *more, is_real=is_real))
        requests[2] = attrs.evolve(requests[2], lora=lora or None)
        cold += await alone(engine, requests[2:])
    assert not any(each.finished.usage.cached_tokens for each in cold)
    return World(model, settings, requests, cold, smaller)


Happening = Callable[[World, list[HaltingContext], Path], Awaitable[list[Answer]]]


# What happens


async def warm(world: World, contexts: list[HaltingContext], folder: Path) -> list[Answer]:
    """One after the other, and again: what they have in common is there."""
    async with open_engine(config_for(world.model, **world.settings, max_sequences=5)) as engine:
        found = await alone(engine, world.requests * 2)
    assert all(each.finished.usage.cached_tokens for each in found[2:]), "nothing was shared"
    return found


async def together(world: World, contexts: list[HaltingContext], folder: Path) -> list[Answer]:
    """All at once, in pieces, and again."""
    sizes = {"n_batch": 128, "n_ubatch": 128, "max_sequences": 5}
    async with open_engine(config_for(world.model, **world.settings | sizes)) as engine:
        return [*await answers(engine, world.requests), *await answers(engine, world.requests)]


async def cancelled(world: World, contexts: list[HaltingContext], folder: Path) -> list[Answer]:
    """Each is left while its prompt is read, then while its answer is computed; then it is asked again."""
    async with open_engine(config_for(world.model, **world.settings, max_sequences=5)) as engine:
        for request, at in zip(world.requests, (0.2, 0.6), strict=False):
            tokens = (await engine.tokenize(request)).token_ids
            await cancelled_at(engine, contexts[0], request, int(at * len(tokens)))
        for request in world.requests:
            await beginning(engine, contexts[0], request)
        found = await alone(engine, world.requests)
        assert engine.snapshot()["requests_cancelled"] == 2 + len(world.requests)
        return found


async def beginning(engine: Engine, context: HaltingContext, request: Request) -> None:
    """Leave a request in its first decode step."""
    context.is_there.clear()
    context.halts_at_rows = [1]
    async with engine.generate(request):
        await context.halted()
    context.may_go_on.set()


async def preempted(world: World, contexts: list[HaltingContext], folder: Path) -> list[Answer]:
    """Each has lost its slot to another in its first decode step."""
    async with open_engine(config_for(world.model, **world.settings, max_sequences=1, cache_ram_mb=512)) as engine:
        return await _preempted(engine, contexts[0], world.requests, 1)


async def preempted_beside_a_stream(world: World, contexts: list[HaltingContext], folder: Path) -> list[Answer]:
    """The same, too large for a copy while another decodes: what is left of it are its cells."""
    sets = {request.lora for request in world.requests}  # a batch has one
    config = config_for(world.model, **world.settings, max_sequences=1 + len(sets), cache_ram_mb=512)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("uma.engine.kv.pool.MAX_COPY_BYTES", 0)
        async with open_engine(config) as engine:
            for request in world.requests:  # a file's first reading starts a process: the stream could end before
                await engine.tokenize(request)
            async with AsyncExitStack() as streams:
                for lora in sets:
                    await streams.enter_async_context(decoding(engine, lora=lora))
                found = await _preempted(engine, contexts[0], world.requests, 2)
            assert engine.snapshot()["cache_ram_snapshots"] == 0
    return found


@asynccontextmanager
async def decoding(
    engine: Engine, *, lora: tuple[AdapterScale, ...] | None = None, begins_again: bool = False
) -> AsyncIterator[None]:
    """Another stream decodes from before the block until its end; one that ends before is a fault, or begins again."""
    is_there = trio.Event()

    async def read() -> None:
        async with engine.generate(attrs.evolve(ask(tokens_for(2, 50), LONG), lora=lora)) as stream:
            async for _ in stream:
                is_there.set()
        if begins_again:
            return await read()
        raise AssertionError("the stream ended within the block: from here on nothing decodes beside it")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await is_there.wait()
        yield
        nursery.cancel_scope.cancel()


async def _preempted(engine: Engine, context: HaltingContext, requests: Sequence[Request], rows: int) -> list[Answer]:
    found: list[Answer] = []

    async def read(request: Request) -> None:
        found.append(await answer(engine, attrs.evolve(request, priority=-1)))

    for request in requests:
        context.is_there.clear()
        context.halts_at_rows = [rows]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, request)
            await context.halted()
            async with engine.generate(ask(tokens_for(1, 50), 2)) as stream:
                context.may_go_on.set()
                await read_on(stream)
    assert engine.snapshot()["preemptions_total"] > 0, "nothing lost its slot"
    return found


async def pressed(world: World, contexts: list[HaltingContext], folder: Path) -> list[Answer]:
    """All at once, with hardly more cells than the longest takes."""
    is_split = world.settings["kv_unified"] == "off"
    sizes = {"n_ctx": 3_840, "max_sequences": 2} if is_split else {"n_ctx": 1_280, "max_sequences": 5}
    sizes["n_ctx"] //= world.smaller
    async with open_engine(config_for(world.model, **world.settings | sizes, n_batch=128, n_ubatch=128)) as engine:
        return [*await answers(engine, world.requests), *await answers(engine, world.requests)]


async def from_memory(world: World, contexts: list[HaltingContext], folder: Path) -> list[Answer]:
    """All that was cached has left its cells before the next turns come."""
    sizes = {"cache_tokens": 0, "cache_ram_mb": 512, "max_sequences": 2}
    async with open_engine(config_for(world.model, **world.settings | sizes)) as engine:
        found = await alone(engine, world.requests[:2])
        await alone(engine, [ask(tokens_for(seed, 1_000 // world.smaller), 2) for seed in range(4)])
        found += await alone(engine, world.requests[2:])
        assert engine.snapshot()["cache_ram_hits"] >= 1, "nothing was restored"
    return found


async def from_disk(world: World, contexts: list[HaltingContext], folder: Path) -> list[Answer]:
    """The next turns come after a restart."""
    config = config_for(world.model, **world.settings, cache_dir=str(folder), cache_ram_mb=512, max_sequences=3)
    async with open_engine(config) as engine:
        found = await alone(engine, world.requests[:2])
    async with open_engine(config) as engine:
        found += await alone(engine, world.requests[2:])
    assert found[3].finished.usage.cached_tokens > 500 // world.smaller, "nothing was restored"
    return found


async def in_parts(world: World, contexts: list[HaltingContext], folder: Path) -> list[Answer]:
    """Likewise, each asked twice at once, and loaded a part at a time beside a stream; one leaves."""
    config = config_for(world.model, **world.settings, cache_dir=str(folder), cache_ram_mb=512, max_sequences=6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("uma.engine.kv.memory_kinds.MAX_COPY_BYTES", 2**16)
        patch.setattr("uma.engine.kv.pool.MAX_COPY_BYTES", 0)
        async with open_engine(config) as engine:
            first = await alone(engine, world.requests[:2])
        async with open_engine(config) as engine, decoding(engine, begins_again=True):
            async with engine.generate(world.requests[3]):
                pass
            found = await answers(engine, world.requests[2:] * 2)
    assert all(each.finished.usage.cached_tokens > 300 // world.smaller for each in found), "nothing was restored"
    return [*first, *found[:2], *first, *found[2:]]


async def drafted(world: World, contexts: list[HaltingContext], folder: Path) -> list[Answer]:
    """Tokens are guessed, mostly wrongly, of single rows and of several."""
    return await _drafted(world, {})


async def drafted_by_a_model(world: World, contexts: list[HaltingContext], folder: Path) -> list[Answer]:
    """A small model guesses them."""
    small = write_model(folder / "small.gguf", seed=1, feed_forward=32, context_length=2_048)
    return await _drafted(world, {"draft": str(small)})


async def _drafted(world: World, settings: dict[str, Any]) -> list[Answer]:
    config = config_for(world.model, **world.settings | {"max_sequences": 5, "speculate": "always"} | settings)
    async with open_engine(config) as engine:
        if (told := engine.info.capabilities.speculation).startswith("none"):
            pytest.skip(told)
        # Of several rows nothing is drafted with a buffer for each, and the first time a text may repeat nothing.
        again = alone if world.settings["kv_unified"] == "off" else answers
        found = [*await alone(engine, world.requests), *await again(engine, world.requests)]
        assert engine.snapshot()["draft_tokens_total"] > 0, "nothing was drafted"
    return found


HAPPENINGS: tuple[Happening, ...] = (
    *(warm, together, cancelled, preempted, preempted_beside_a_stream, pressed, from_memory, from_disk, in_parts),
    *(drafted, drafted_by_a_model),
)
FEW: dict[tuple[str, str, str], tuple[Happening, ...]] = {
    (MROPE, "picture", "on"): (warm, cancelled, pressed, drafted, in_parts),
    (MROPE, "sound", "off"): (from_memory,),
    ("attention", "picture attended both ways", "off"): (together, preempted),
    ("sliding-window", "picture", "on"): (preempted_beside_a_stream, from_disk, drafted_by_a_model, in_parts),
    (SMALL_WINDOWS, "picture attended both ways", "on"): (preempted_beside_a_stream, from_memory),
    ("recurrent", "text", "off"): (together, from_disk),
    ("qwen35", "picture", "on"): (cancelled, preempted, drafted, in_parts),
    ("lfm2", "picture", "off"): (together, from_disk),
    ("hybrid", "adapter", "on"): (preempted, in_parts),
}
"""What happens by default, by memory, medium and whether there is one KV buffer."""
LAYOUTS = ("on", "off")
WORLDS = list(product((MROPE, *ALL), MEDIA, LAYOUTS)) if is_all() else list(FEW)
CASES = [(world, happens) for world in WORLDS for happens in (HAPPENINGS if is_all() else FEW[world])]
if is_all():
    there = [memory for memory, name in REAL.items() if model_path(name).exists()]
    # The model that guesses has another vocabulary.
    CASES += [
        (world, happens)
        for world in product(there, ("text",), LAYOUTS)
        for happens in HAPPENINGS
        if happens is not drafted_by_a_model
    ]


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    made: World = trio.run(make_world, tmp_path_factory.mktemp("world"), *request.param)
    return made


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HaltingContext]]:
    monkeypatch.setattr("uma.engine.policy.order.TUNING", Tuning(give_way_ms=0.0))
    yield from halting_contexts(monkeypatch)


@pytest.mark.parametrize(
    ("world", "happens"), CASES, indirect=["world"], ids=["-".join((*of, does.__name__)) for of, does in CASES]
)
def test_a_text_is_that_of_a_cold_run_whatever_happens(
    world: World, happens: Happening, contexts: list[HaltingContext], tmp_path: Path
) -> None:
    assert world.differing(trio.run(happens, world, contexts, tmp_path)) == []


async def test_a_large_sequence_that_loses_its_slot_beside_a_stream_is_neither_copied_nor_read_again(
    tiny: Path, contexts: list[HaltingContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uma.engine.kv.pool.MAX_COPY_BYTES", 0)
    prompt = 900
    async with open_engine(config_for(tiny, n_ctx=N_CTX, kv_unified="on", max_sequences=2)) as engine, decoding(engine):
        before = engine.snapshot()["prefill_tokens_total"]
        await _preempted(engine, contexts[0], [ask(tokens_for(3, prompt), LENGTH)], 2)
        metrics = engine.snapshot()
    assert metrics["cache_ram_snapshots"] == 0
    assert metrics["prefill_tokens_total"] - before < prompt + 60, "it was read again"
