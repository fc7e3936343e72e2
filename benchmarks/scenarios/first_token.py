"""First token: what the way through client, socket, server and scheduler adds to reading a prompt and one argmax."""

from __future__ import annotations

from contextlib import AsyncExitStack
from random import Random
from statistics import median

from benchmarks.load import one
from benchmarks.measure import Measures
from benchmarks.samples import Ask
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary, rotated
from benchmarks.targets.contenders import OURS, open_contender
from benchmarks.targets.llama_server import LAYOUTS
from benchmarks.targets.raw import raw

PROMPT, REPEATS = 64, 20
N_CTX, SLOTS = 4096, 8
CASE = f"1 stream, {PROMPT} tokens in"


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """Prompt by prompt in turn, raw in both layouts and UMA, so that all see the same machine."""
    rng = Random(f"first token {index}")
    async with AsyncExitStack() as stack:
        baselines = [
            await stack.enter_async_context(raw(bench.model, streams=1, n_ctx=1024, layout=each, threads=bench.threads))
            for each in LAYOUTS
        ]
        server = await stack.enter_async_context(open_contender(OURS, bench, n_ctx=N_CTX, slots=SLOTS))
        names = [*(each.name for each in baselines), server.name]
        took: dict[str, list[float]] = {name: [] for name in names}
        for repeat in range(bench.pick(REPEATS, 5)):
            prompt = bench.model.prompt(rng, PROMPT)
            for baseline in rotated(baselines, repeat):
                took[baseline.name].append((await baseline.run([prompt], 2)).first_s * 1000)
            took[server.name].append((await one(server, Ask(prompt, 2))).ttft_ms)
    for name, every_ms in took.items():
        measures: Measures = {"ttft_p50_ms": median(every_ms), "ttft_worst_ms": max(every_ms)}
        emit(CASE, name, measures)


def checks(summary: Summary) -> list[Check]:
    """Five milliseconds, there and back, over raw's better layout."""
    over = summary.get(CASE, OURS, "ttft_p50_ms") - summary.best(CASE, "raw", "ttft_p50_ms", "low")
    return [Check("1 stream: client-to-first-token over raw", over, "≤", 5, "ms")]


SCENARIO = Scenario(
    name="first_token",
    about=f"Time to first token of a {PROMPT}-token prompt at 1 stream, through the socket, and raw in both layouts.",
    columns=("ttft_p50_ms", "ttft_worst_ms"),
    measure=measure,
    checks=checks,
    round_limit_s=120,
)
