"""Embeddings: 1,000 texts beside a stream, whose gaps must not show it, and what the stream costs them.

The engine makes the context for embeddings when the first texts come, so those are measured too: beside a stream.
"""

from __future__ import annotations

import itertools
import time
from random import Random

import trio

from benchmarks.measure import Measures, percentile
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary
from uma import Request, RuntimeConfig, SamplingParams, open_engine
from uma.types import EmbedRequest, Source, Token

TEXTS, TEXTS_ALONE, SHORTEST, LONGEST = 1_000, 200, 8, 48
SETTLED_TOKENS = 64
"""Tokens of the stream before the texts come: until then the engine learns what a decode step takes."""
ALONE, BESIDE = f"{TEXTS_ALONE} texts alone", "beside a stream"
FIRST = f"{TEXTS_ALONE} texts beside a stream, the engine's first"


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """The engine's first texts beside a stream, some alone, then all beside a stream."""
    config = RuntimeConfig(model=str(bench.model.path), n_ctx=16_384, threads=bench.threads)
    rng = Random(f"embed {index}")
    async with open_engine(config) as engine:
        some = bench.pick(TEXTS_ALONE, 50)
        emit(f"{TEXTS:,} texts", FIRST, await _beside(engine, bench, rng, some))
        emit(f"{TEXTS:,} texts", ALONE, await _embed(engine, _texts(bench, rng, some)))
        emit(f"{TEXTS:,} texts", BESIDE, await _beside(engine, bench, rng, bench.pick(TEXTS, 100)))


def _texts(bench: Bench, rng: Random, count: int) -> EmbedRequest:
    texts = tuple(bench.model.prompt(rng, rng.randint(SHORTEST, LONGEST)) for _ in range(count))
    return EmbedRequest(id="texts", token_ids=texts)


async def _embed(engine: Source, request: EmbedRequest) -> Measures:
    began = time.perf_counter()
    await engine.embed(request)
    wall_s = time.perf_counter() - began
    assert request.token_ids is not None
    return {"texts_per_s": len(request.token_ids) / wall_s, "wall_s": wall_s}


async def _beside(engine: Source, bench: Bench, rng: Random, texts: int) -> Measures:
    """The stream runs before the texts come and goes on until the last of them is done."""
    sampling = SamplingParams(max_tokens=4_096, ignore_eos=True)
    request = Request(id="stream", token_ids=bench.model.prompt(rng, 64), sampling=sampling)
    times: list[float] = []
    settled = trio.Event()

    async def read() -> None:
        async with engine.generate(request) as stream:
            async for event in stream:
                if isinstance(event, Token):
                    times.append(time.perf_counter())
                if len(times) == SETTLED_TOKENS:
                    settled.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await settled.wait()
        first = len(times)
        found = await _embed(engine, _texts(bench, rng, texts))
        nursery.cancel_scope.cancel()
    beside = times[first - 1 :]
    gaps = [(later - earlier) * 1000 for earlier, later in itertools.pairwise(beside)]
    return {
        **found,
        "stream_tokens_per_s": len(gaps) / found["wall_s"],
        "gap_p95_ms": percentile(gaps, 0.95),
        "worst_gap_ms": max(gaps, default=float("nan")),
    }


def checks(summary: Summary) -> list[Check]:
    """A stream is never late for texts."""
    first, worst = (summary.get(f"{TEXTS:,} texts", each, "worst_gap_ms") for each in (FIRST, BESIDE))
    return [
        Check(f"{TEXTS:,} texts embedded beside a stream: its worst gap", worst, "≤", 120, "ms"),
        Check("the engine's first texts embedded beside a stream: its worst gap", first, "≤", 120, "ms"),
    ]


SCENARIO = Scenario(
    name="embed",
    about=f"{TEXTS:,} texts of {SHORTEST} to {LONGEST} tokens in one request, beside a stream that decodes; "
    f"{TEXTS_ALONE} alone, and as the first that the engine embeds.",
    columns=("texts_per_s", "wall_s", "stream_tokens_per_s", "gap_p95_ms", "worst_gap_ms"),
    measure=measure,
    checks=checks,
    round_limit_s=540,
)
