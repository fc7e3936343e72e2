"""Overload: ten times more work than the machine can do, for ten seconds. Which requests are served,
which are refused, and when?"""

from __future__ import annotations

import math
from random import Random

from benchmarks.load import burst, open_loop
from benchmarks.measure import CpuMeter, Measures, latency, percentile
from benchmarks.samples import Ask, Sample
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary
from benchmarks.targets.base import Target
from benchmarks.targets.contenders import OURS, contenders, open_contender

PROMPT, GENERATED = 64, 24
TIMES_CAPACITY, SECONDS = 10, 10
MAX_PATIENCE_S = 150
INTERACTIVE_SHARE = 0.04
"""Of all requests, so four tenths of what the machine can do: what a server can promise to serve."""
TARGET_TTFT_MS, TARGET_TBT_MS = 2000.0, 120.0
SLOTS, SESSIONS = 32, 16
N_CTX = 16_384
MAX_QUEUE = 256
"""UMA's only option here: its default of 1,024 would take nearly all that comes, for two minutes of work."""
UMA_QUEUE = f"{OURS} --max-queue {MAX_QUEUE}"


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """Capacity first, with as many streams as llama-server has slots; then ten times as many arrivals."""
    settings = {"max_queue": MAX_QUEUE}
    for kind in [kind for kind in contenders(bench, index) if "split" not in kind]:
        async with open_contender(
            kind, bench, n_ctx=N_CTX, slots=SLOTS, settings=settings, sessions=SESSIONS
        ) as target:
            rng = Random(f"overload {index}")
            capacity = await _capacity(target, bench, rng)
            rate = TIMES_CAPACITY * capacity
            seconds = bench.pick(SECONDS, 3)
            kinds = [rng.random() < INTERACTIVE_SHARE for _ in range(round(rate * seconds))]
            asks = [_ask(bench, rng, is_interactive) for is_interactive in kinds]
            # Twice what a full queue takes: longer than any accepted request should need.
            patience_s = min(MAX_PATIENCE_S, 10 + 2 * (MAX_QUEUE + SLOTS) / capacity)
            meter = CpuMeter(target.pid)
            meter.start()
            samples = await open_loop(target, asks, per_second=rate, rng=rng, patience_s=patience_s)
            measures = {"capacity_per_s": capacity, "offered_per_s": rate, **_outcome(samples)}
            measures |= meter.stop(int(measures["tokens"]))
            emit("everyone", target.name, measures)
            interactive = [sample for sample, is_one in zip(samples, kinds, strict=True) if is_one]
            emit("interactive", target.name, {**_outcome(interactive), "slo_percent": _attained(interactive)})


async def _capacity(target: Target, bench: Bench, rng: Random) -> float:
    asks = [Ask(bench.model.prompt(rng, PROMPT), GENERATED) for _ in range(SLOTS)]
    samples = await burst(target, asks)
    return len(samples) / (max(sample.ended_s or 0 for sample in samples) - min(each.sent_s for each in samples))


def _ask(bench: Bench, rng: Random, is_interactive: bool) -> Ask:
    prompt = bench.model.prompt(rng, PROMPT)
    if is_interactive:
        return Ask(prompt, GENERATED, 1, target_ttft_ms=TARGET_TTFT_MS, target_tbt_ms=TARGET_TBT_MS)
    return Ask(prompt, GENERATED)


def _outcome(samples: list[Sample]) -> Measures:
    finished = [sample for sample in samples if sample.error is None and len(sample.token_s) == GENERATED]
    refused = [sample for sample in samples if sample.error is not None and not sample.token_s]
    refusal_ms = [((sample.ended_s or math.inf) - sample.sent_s) * 1000 for sample in refused]
    accepted = len(samples) - len(refused)
    return {
        "asked": len(samples),
        "finished": len(finished),
        "refused": len(refused),
        "accepted_lost": accepted - len(finished),
        "refusal_p50_ms": percentile(refusal_ms, 0.5),
        "refusal_worst_ms": max(refusal_ms, default=math.nan),
        "told_when_percent": 100 * sum(bool(sample.retry_after_ms) for sample in refused) / max(1, len(refused)),
        "tokens": sum(len(sample.token_s) for sample in samples),
        **latency(samples),
    }


def _attained(samples: list[Sample]) -> float:
    """Percent of the accepted requests that met both targets; inter-token time is the mean of the request's gaps."""
    accepted = [sample for sample in samples if not (sample.error and not sample.token_s)]
    good = [
        sample
        for sample in accepted
        if len(sample.token_s) == GENERATED
        and sample.ttft_ms <= TARGET_TTFT_MS
        and sum(sample.gaps_ms) / len(sample.gaps_ms) <= TARGET_TBT_MS
    ]
    return 100 * len(good) / len(accepted) if accepted else math.nan


def checks(summary: Summary) -> list[Check]:
    """No accepted request is lost, refusals come at once, and interactive requests are hardly slower."""
    lost = summary.get("everyone", UMA_QUEUE, "accepted_lost")
    refusal_ms = summary.get("everyone", UMA_QUEUE, "refusal_worst_ms")
    attained = summary.get("interactive", UMA_QUEUE, "slo_percent")
    return [
        Check("overload: accepted requests not finished", lost, "≤", 0),
        Check("overload: slowest refusal", refusal_ms, "≤", 100, "ms"),
        Check("overload: interactive SLO attainment", attained, "≥", 95, "%"),
    ]


SCENARIO = Scenario(
    name="overload",
    about=f"{TIMES_CAPACITY} times capacity for {SECONDS} s ({PROMPT} tokens in, {GENERATED} out), "
    f"{INTERACTIVE_SHARE:.0%} of it interactive: a first token in {TARGET_TTFT_MS:.0f} ms, "
    f"{TARGET_TBT_MS:.0f} ms between tokens.",
    columns=(
        "asked",
        "finished",
        "refused",
        "accepted_lost",
        "refusal_worst_ms",
        "ttft_p50_ms",
        "ttft_p99_ms",
        "slo_percent",
    ),
    measure=measure,
    checks=checks,
    round_limit_s=400,
)
