"""Ablation: what each mechanism of UMA is worth, on real models and on the two shapes, by switching it off.

A round is one model's, the next round's the next, so four rounds measure each once. All servers of a model are loaded
together and take turns; a ratio is to the one with defaults in the same turn. What is worth less than 5 % of something
that a user sees, on a real model, has no place in UMA.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import attrs
import trio

from benchmarks.load import beside, burst, one, until_quiet, warm_up
from benchmarks.measure import Measures, latency, pss_mb, throughput
from benchmarks.models import SHAPES, bench_model
from benchmarks.reference import fetch_model
from benchmarks.samples import Ask, Sample
from benchmarks.scenario import Bench, Emit, Scenario, rotated
from benchmarks.scenarios.storm import storm
from benchmarks.targets.contenders import DEFAULTS, OURS
from benchmarks.targets.uma import Uma, uma_server


class Mechanism(NamedTuple):
    """One that can be switched off."""

    name: str
    off: dict[str, object]
    """UMA's settings without it."""


MECHANISMS = (
    Mechanism("one KV buffer for all", {"kv_unified": "off"}),
    Mechanism("flash attention", {"flash_attn": "off"}),
    Mechanism("weights in huge pages", {"use_mmap": "on"}),
    Mechanism("weights laid out for matrix units", {"extra_buffers": "off"}),
    Mechanism("even pace beside prompts", {"pace": "off"}),
    Mechanism("prefixes kept", {"cache_tokens": 0, "cache_ram_mb": 0}),
)
MODELS: dict[str, Callable[[], Path]] = {
    "SmolLM2 135M": partial(fetch_model, "smollm2"),
    "Gemma 3 270M": partial(fetch_model, "gemma3"),
    "100 M": lambda: bench_model(SHAPES["100m"]).path,
    "500 M": lambda: bench_model(SHAPES["500m"]).path,
}
STREAMS = {"one_per_s": 1, "eight_per_s": 8, "thirty_two_per_s": 32}
PROMPT, GENERATED = 64, 64
CHATS, DOCUMENT, QUESTION, ANSWER, QUESTIONS = 8, 4_000, 64, 32, 3
COMMON, OWN, SIBLINGS = 1_024, 16, 8
STREAM_TOKENS = 1_000


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """A model with defaults, and with each mechanism off."""
    wanted = {OURS: {}, **{f"without {each.name}": each.off for each in MECHANISMS}}
    case, path = [*MODELS.items()][index % len(MODELS)]
    of_model = attrs.evolve(bench, model=attrs.evolve(bench.model, path=path()))
    async with AsyncExitStack() as stack:
        servers: dict[str, Uma] = {}
        found: dict[str, Measures] = {}
        for target, settings in wanted.items():
            servers[target], began_s = await stack.enter_async_context(_started(of_model, settings, target))
            found[target] = {"start_s": began_s, "pss_mb": pss_mb(servers[target].pid)}
        await until_quiet()
        for column, streams in STREAMS.items():
            for target in rotated(list(servers), index):
                found[target][column] = await _speed(servers[target], of_model, streams, f"{index} {column}")
        for target in rotated(list(servers), index):
            found[target] |= await _beside_prompts(servers[target], of_model, index)
    for target, measures in found.items():
        emit(case, target, measures)


@asynccontextmanager
async def _started(bench: Bench, settings: dict[str, object], label: str) -> AsyncIterator[tuple[Uma, float]]:
    """A server, warm, and how long it took to start (s)."""
    began = trio.current_time()
    async with uma_server(bench.model, settings, threads=bench.default_threads, label=label or DEFAULTS) as server:
        started_s = trio.current_time() - began
        await warm_up(server, bench.model)
        yield server, started_s


async def _speed(server: Uma, bench: Bench, streams: int, seed: str) -> float:
    """Tokens a second of the second burst: the first touches memory for the first time."""
    rng = Random(f"ablation {seed}")
    rate = 0.0
    for _ in range(2):
        asks = [Ask(bench.model.prompt(rng, PROMPT), GENERATED) for _ in range(streams)]
        rate = throughput(await burst(server, asks))["tokens_per_s"]
    return rate


async def _beside_prompts(server: Uma, bench: Bench, index: int) -> Measures:
    """A storm, chats beside a document, and requests that begin alike."""
    rng = Random(f"ablation {index} prompts")
    stormy = await storm(server, bench, rng, stream_tokens=STREAM_TOKENS)
    common = bench.model.prompt(rng, COMMON)
    asks = [Ask(common + bench.model.prompt(rng, OWN), 8) for _ in range(SIBLINGS)]
    await one(server, asks[0])
    siblings = await burst(server, asks[1:])
    chats = await _chats(server, bench, rng)
    return {
        "worst_gap_ms": stormy["worst_gap_ms"],
        "all_read_s": stormy["all_read_s"],
        "ttft_p95_ms": latency(chats)["ttft_p95_ms"],
        "inter_token_worst_ms": latency(chats)["inter_token_worst_ms"],
        "warm_s": throughput(siblings)["wall_s"],
    }


async def _chats(server: Uma, bench: Bench, rng: Random) -> list[Sample]:
    """Eight people who ask one question after another while a long document is read."""
    chats: list[Sample] = []

    async def person() -> None:
        for _ in range(bench.pick(QUESTIONS, 1)):
            chats.append(await one(server, Ask(bench.model.prompt(rng, QUESTION), ANSWER)))

    async with (
        beside(server, lambda: Ask(bench.model.prompt(rng, DOCUMENT), 1), streams=1),
        trio.open_nursery() as nursery,
    ):
        for _ in range(CHATS):
            nursery.start_soon(person)
    return chats


SCENARIO = Scenario(
    name="ablation",
    about=f"UMA with its defaults, and with one mechanism off, on two real models and two random ones: tokens a second "
    f"of 1, 8 and 32 streams ({PROMPT} tokens in, {GENERATED} out); a stream beside four prompts of 1,500 tokens; "
    f"first tokens and worst gap of {CHATS} chats beside documents; {SIBLINGS - 1} requests whose first {COMMON} "
    "tokens were read before; start and memory.",
    columns=(
        "one_per_s", "eight_per_s", "thirty_two_per_s", "worst_gap_ms", "all_read_s", "ttft_p95_ms",
        "inter_token_worst_ms", "warm_s", "start_s", "pss_mb",
    ),
    measure=measure,
    round_limit_s=2_400,
)  # fmt: skip
