"""Shared prefix: eight requests with 1,024 tokens in common arrive together. Which servers compute them once?"""

from __future__ import annotations

from random import Random

from benchmarks.load import burst
from benchmarks.measure import CpuMeter, Measures, latency, throughput
from benchmarks.samples import Ask
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary, by_decode_alone
from benchmarks.targets.base import Target
from benchmarks.targets.contenders import OURS, contenders, open_contender
from benchmarks.targets.raw import raw

REQUESTS, COMMON, OWN, GENERATED = 8, 1024, 16, 16
N_CTX = 16_384
STAGGER_S = 0.15
FLOOR = "raw, prefix once"


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """Cold, warm and staggered on each target."""
    for kind in contenders(bench, index, with_slow=True):
        async with open_contender(kind, bench, n_ctx=N_CTX, slots=REQUESTS) as target:
            await _cases(target, bench, index, emit)
    await _floor(bench, index, emit)


async def _floor(bench: Bench, index: int, emit: Emit) -> None:
    """What is left to compute when nothing is computed twice: no server can be faster on this machine."""
    rng = Random(f"prefix floor {index}")
    prompts = [bench.model.prompt(rng, OWN) for _ in range(REQUESTS)]
    async with raw(bench.model, streams=REQUESTS, n_ctx=N_CTX, layout="unified", threads=bench.threads) as floor:
        await floor.run(prompts, 2)
        result = await floor.run(prompts, GENERATED, common=bench.model.prompt(rng, COMMON))
    warm_s = result.total_s - result.common_s
    emit("cold", FLOOR, {"all_done_s": result.total_s, "ttft_p50_ms": result.first_s * 1000})
    emit("warm", FLOOR, {"all_done_s": warm_s, "ttft_p50_ms": (result.first_s - result.common_s) * 1000})


async def _cases(target: Target, bench: Bench, index: int, emit: Emit) -> None:
    rng = Random(f"prefix {index}")
    common = bench.model.prompt(rng, COMMON)
    emit("cold", target.name, await together(target, bench, rng, common))
    emit("warm", target.name, await together(target, bench, rng, common))
    fresh = bench.model.prompt(rng, COMMON)
    emit("staggered", target.name, await together(target, bench, rng, fresh, spacing_s=STAGGER_S))


async def together(
    target: Target, bench: Bench, rng: Random, common: tuple[int, ...], *, spacing_s: float = 0
) -> Measures:
    """`REQUESTS` requests that begin with `common`, `spacing_s` apart."""
    asks = [Ask(common + bench.model.prompt(rng, OWN), GENERATED) for _ in range(REQUESTS)]
    meter = CpuMeter(target.pid)
    meter.start()
    samples = await burst(target, asks, spacing_s=spacing_s)
    rate = throughput(samples)
    return {
        "all_done_s": rate["wall_s"],
        "cached_tokens": sum(sample.cached_tokens for sample in samples),
        "failed": sum(sample.error is not None for sample in samples),
        **latency(samples),
        **meter.stop(int(rate["tokens"])),
    }


def checks(summary: Summary) -> list[Check]:
    """Once is enough, at once and later."""
    cold = summary.get("cold", OURS, "all_done_s")
    warm = summary.get("warm", OURS, "ttft_p50_ms")
    peer_cold = summary.best("cold", "llama-server", "all_done_s", "low")
    peer_warm = summary.best("warm", "llama-server", "ttft_p50_ms", "low")
    floor_cold = summary.get("cold", FLOOR, "all_done_s")
    floor_warm = summary.get("warm", FLOOR, "ttft_p50_ms")
    return [
        Check(
            "shared prefix, cold: speed of raw decoding that reads the prefix once", floor_cold / cold, "≥", 0.9, "x"
        ),
        Check(
            "shared prefix, warm: raw's time to the first tokens, of UMA's TTFT p50", floor_warm / warm, "≥", 0.9, "x"
        ),
        Check(
            "shared prefix, cold: times faster than llama-server's better layout", peer_cold / cold, "≥", 5, "x",
            by_decode_alone(peer_cold / floor_cold),
        ),
        Check(
            "shared prefix, warm: times shorter TTFT p50 than llama-server's", peer_warm / warm, "≥", 1.8, "x",
            by_decode_alone(peer_warm / floor_warm),
        ),
    ]  # fmt: skip


SCENARIO = Scenario(
    name="prefix",
    about=f"{REQUESTS} requests with {COMMON} tokens in common, {OWN} of their own, {GENERATED} generated: "
    "at once with nothing cached, again at once, and 150 ms apart with nothing cached.",
    columns=("all_done_s", "ttft_p50_ms", "ttft_p95_ms", "inter_token_p95_ms", "cached_tokens", "rss_mb"),
    measure=measure,
    checks=checks,
    round_limit_s=180,
)
