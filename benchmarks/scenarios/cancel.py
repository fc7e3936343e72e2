"""Cancel: how many ticks pass between a client's leaving a request and its KV cells being free."""

from __future__ import annotations

import time
from random import Random

import trio

from benchmarks.load import start, warm_up
from benchmarks.samples import Ask, Sample
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary
from benchmarks.targets.uma import Uma, uma_server

STREAMS, REPEATS = 8, 5


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """One of eight decoding streams is left, and the server's counters are read until it is gone."""
    ticks: list[float] = []
    ms: list[float] = []
    async with uma_server(bench.model, {"n_ctx": 16_384}, threads=bench.threads) as uma:
        await warm_up(uma, bench.model)
        for repeat in range(REPEATS):
            took_ticks, took_ms = await _cancel_one(uma, bench, Random(f"cancel {index} {repeat}"))
            ticks.append(took_ticks)
            ms.append(took_ms)
    ticks.sort()
    ms.sort()
    measures = {"ticks_p50": ticks[len(ticks) // 2], "ticks_worst": ticks[-1], "freed_p50_ms": ms[len(ms) // 2]}
    emit(f"1 of {STREAMS} streams", uma.name, measures)


async def _cancel_one(uma: Uma, bench: Bench, rng: Random) -> tuple[float, float]:
    asks = [Ask(bench.model.prompt(rng, 32), 1500) for _ in range(STREAMS)]
    leaving, left = trio.CancelScope(), Sample()

    async def leave() -> None:
        with leaving:
            await uma.ask(asks[0], left)

    async with trio.open_nursery() as nursery:
        samples = [left, *(start(nursery, uma, ask) for ask in asks[1:])]
        nursery.start_soon(leave)
        for sample in samples:
            await sample.reached(5)
        before = await uma.metrics()
        began = time.perf_counter()
        leaving.cancel()
        # Each look costs a way over the socket, so what is counted can only be more than what it took.
        while (now := await uma.metrics())["active_sequences"] >= before["active_sequences"]:
            pass
        took_ms = (time.perf_counter() - began) * 1000
        nursery.cancel_scope.cancel()
    while (await uma.metrics())["active_sequences"]:
        pass
    return now["batch_calls_total"] - before["batch_calls_total"], took_ms


def checks(summary: Summary) -> list[Check]:
    """By the next tick boundary, and one for the messages' way."""
    ticks = summary.get(f"1 of {STREAMS} streams", "UMA", "ticks_p50")
    return [Check("cancel to freed", ticks, "≤", 2, "ticks")]


SCENARIO = Scenario(
    name="cancel",
    about=f"One of {STREAMS} decoding streams is left: ticks until the server's counters show its sequence gone.",
    columns=("ticks_p50", "ticks_worst", "freed_p50_ms"),
    measure=measure,
    checks=checks,
    round_limit_s=120,
)
