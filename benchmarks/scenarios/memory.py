"""Memory: what a thousand requests leave behind."""

from __future__ import annotations

from random import Random

import trio

from benchmarks.load import one, warm_up
from benchmarks.measure import rss_mb
from benchmarks.samples import Ask
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary
from benchmarks.targets.uma import Uma, uma_server

EARLY, LATE, AT_ONCE = 100, 1000, 8
PROMPT, GENERATED = 32, 8
CASES: dict[str, dict[str, object]] = {"as it comes": {}, "--cache-ram-mb 0": {"cache_ram_mb": 0}}


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """As UMA comes, and without its host-memory cache, which may fill to its bound and is no leak."""
    for case, settings in CASES.items():
        await _thousand(bench, index, case, settings, emit)


async def _thousand(bench: Bench, index: int, case: str, settings: dict[str, object], emit: Emit) -> None:
    late = bench.pick(LATE, 200)
    rng = Random(f"memory {index} {case}")
    async with uma_server(bench.model, {"n_ctx": 4096, **settings}, threads=bench.threads) as uma:
        await warm_up(uma, bench.model)
        await _requests(uma, bench, rng, EARLY)
        early_mb = rss_mb(uma.pid)
        await _requests(uma, bench, rng, late - EARLY)
        late_mb = rss_mb(uma.pid)
    measures = {"rss_early_mb": early_mb, "rss_late_mb": late_mb, "growth_percent": (late_mb / early_mb - 1) * 100}
    emit(case, uma.name, measures)


async def _requests(uma: Uma, bench: Bench, rng: Random, count: int) -> None:
    left = count

    async def keep_asking() -> None:
        nonlocal left
        while left:
            left -= 1
            await one(uma, Ask(bench.model.prompt(rng, PROMPT), GENERATED))

    async with trio.open_nursery() as nursery:
        for _ in range(AT_ONCE):
            nursery.start_soon(keep_asking)


def checks(summary: Summary) -> list[Check]:
    """Nothing to speak of."""
    growth = summary.get("as it comes", "UMA", "growth_percent")
    return [Check("resident memory after 1,000 requests against after 100", growth, "≤", 2, "%")]


SCENARIO = Scenario(
    name="memory",
    about=f"Unrelated requests ({PROMPT} tokens in, {GENERATED} out), {AT_ONCE} at a time: "
    f"resident memory after {LATE:,} against after {EARLY}.",
    columns=("rss_early_mb", "rss_late_mb", "growth_percent"),
    measure=measure,
    checks=checks,
    round_limit_s=400,
)
