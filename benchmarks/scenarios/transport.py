"""Socket against HTTP: what the way there and back costs, with as little compute as possible in between."""

from __future__ import annotations

import time
from random import Random

from benchmarks.load import one
from benchmarks.measure import CpuMeter, percentile
from benchmarks.samples import Ask
from benchmarks.scenario import Bench, Emit, Scenario
from benchmarks.targets.contenders import contenders, open_contender

REQUESTS, LONG = 100, 256


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """Requests of one token in and one out, one after another; then one long answer."""
    for kind in [kind for kind in contenders(bench, index, with_slow=True) if "split" not in kind]:
        rng = Random(f"transport {index}")
        async with open_contender(kind, bench, n_ctx=1024, slots=1) as target:
            meter = CpuMeter(target.pid)
            meter.start()
            began = time.perf_counter()
            short = [await one(target, Ask(bench.model.prompt(rng, 1), 1)) for _ in range(bench.pick(REQUESTS, 20))]
            per_second = len(short) / (time.perf_counter() - began)
            ttft = [sample.ttft_ms for sample in short if sample.token_s]
            measures = {
                "ttft_p50_ms": percentile(ttft, 0.5),
                "ttft_p99_ms": percentile(ttft, 0.99),
                "requests_per_s": per_second,
                **meter.stop(len(short)),
            }
            emit("1 token in, 1 out", target.name, measures)
            meter.start()
            answer = await one(target, Ask(bench.model.prompt(rng, 1), LONG))
            measures = {
                "inter_token_p50_ms": percentile(answer.gaps_ms, 0.5),
                "inter_token_p99_ms": percentile(answer.gaps_ms, 0.99),
                **meter.stop(LONG),
            }
            emit(f"1 token in, {LONG} out", target.name, measures)


SCENARIO = Scenario(
    name="transport",
    about="UMA's socket against HTTP and server-sent events: many of the smallest requests, then one long answer.",
    columns=(
        "ttft_p50_ms",
        "ttft_p99_ms",
        "requests_per_s",
        "inter_token_p50_ms",
        "inter_token_p99_ms",
        "server_cpu_us",
    ),
    measure=measure,
    round_limit_s=120,
)
