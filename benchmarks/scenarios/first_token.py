"""First token: what the way through client, socket, server and scheduler adds to reading a prompt and one argmax."""

from __future__ import annotations

from random import Random
from statistics import median

from benchmarks.load import one, warm_up
from benchmarks.samples import Ask
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary
from benchmarks.targets.raw import raw
from benchmarks.targets.uma import uma_server

PROMPT, REPEATS = 64, 20
CASE = f"1 stream, {PROMPT} tokens in"


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """Prompt by prompt in turn, raw and UMA, so that both see the same machine."""
    rng = Random(f"first token {index}")
    raw_ms: list[float] = []
    uma_ms: list[float] = []
    async with (
        raw(bench.model, streams=1, n_ctx=1024, layout="unified", threads=bench.threads) as baseline,
        uma_server(bench.model, {"n_ctx": 4096}, threads=bench.threads) as uma,
    ):
        await warm_up(uma, bench.model)
        for _ in range(bench.pick(REPEATS, 5)):
            prompt = bench.model.prompt(rng, PROMPT)
            raw_ms.append((await baseline.run([prompt], 2)).first_s * 1000)
            uma_ms.append((await one(uma, Ask(prompt, 2))).ttft_ms)
    emit(CASE, baseline.name, {"ttft_p50_ms": median(raw_ms), "ttft_worst_ms": max(raw_ms)})
    emit(CASE, uma.name, {"ttft_p50_ms": median(uma_ms), "ttft_worst_ms": max(uma_ms)})


def checks(summary: Summary) -> list[Check]:
    """Five milliseconds, there and back."""
    over = summary.get(CASE, "UMA", "ttft_p50_ms") - summary.get(CASE, "raw unified", "ttft_p50_ms")
    return [Check("1 stream: client-to-first-token over raw", over, "≤", 5, "ms")]


SCENARIO = Scenario(
    name="first_token",
    about=f"Time to first token of a {PROMPT}-token prompt at 1 stream, through the socket and raw.",
    columns=("ttft_p50_ms", "ttft_worst_ms"),
    measure=measure,
    checks=checks,
    round_limit_s=120,
)
