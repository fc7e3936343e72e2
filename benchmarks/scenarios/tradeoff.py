"""The trade-off: a smoother stream costs prompt throughput. Where does each server let one choose?

The storm again: UMA with its defaults but the times that it aims for, llama-server with several batch sizes, its only
means to the end, and split KV, with which it reads fastest. The target between tokens limits UMA's pieces up to 200 ms.
Above, that for the first token does: a newcomer waits for the end of a piece, so a share of it bounds each.
"""

from __future__ import annotations

import math
from random import Random

from benchmarks.load import warm_up
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary
from benchmarks.scenarios.storm import N_CTX, NO_STREAM, SLOTS, by_raw, storm
from benchmarks.targets.llama_server import llama_server
from benchmarks.targets.uma import uma_server

TARGETS = ("UMA --tick-budget-ms", "UMA --slo-tbt-ms")
"""Beginnings of the labels that have a target: the setting of today, and the one of results that were kept."""
SETTINGS: tuple[dict[str, int], ...] = (
    *({"tick_budget_ms": target_ms} for target_ms in (20, 40, 60, 80, 120, 200)),
    {"tick_budget_ms": 200, "slo_ttft_ms": 5_000},
    {"tick_budget_ms": 400, "slo_ttft_ms": 20_000},
    {"tick_budget_ms": 1_600, "slo_ttft_ms": 20_000},
)
QUICK_SETTINGS = SETTINGS[1], SETTINGS[-1]
BATCHES, QUICK_BATCHES = ((64, 64), (128, 128), (256, 256), (512, 512), (2048, 512)), ((128, 128), (2048, 512))


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """One storm for each setting."""
    for each in bench.pick(SETTINGS, QUICK_SETTINGS):
        label = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in each.items())
        async with uma_server(bench.model, each, label=label, threads=bench.default_threads) as uma:
            await warm_up(uma, bench.model)
            emit("storm", uma.name, await storm(uma, bench, Random(f"tradeoff {index} {label}")))
    if not bench.has_llama_server:
        return
    for batch, ubatch in bench.pick(BATCHES, QUICK_BATCHES):
        flags, label = ("-b", str(batch), "-ub", str(ubatch)), f"-b {batch} -ub {ubatch}"
        async with llama_server(
            bench.model, slots=SLOTS, n_ctx=N_CTX, layout="split", threads=bench.threads, extra=flags, label=label
        ) as server:
            await warm_up(server, bench.model)
            emit("storm", server.name, await storm(server, bench, Random(f"tradeoff {index} {batch}")))
    await by_raw(bench, Random(f"tradeoff {index} raw"), "split", (NO_STREAM,), emit)


def checks(summary: Summary) -> list[Check]:
    """For each setting of llama-server there is one of UMA's that is better in both axes."""
    ours = [_point(summary, target) for target in summary.targets("storm") if target.startswith(TARGETS)]
    most = summary.best("storm", "raw", "prompt_tokens_per_s", "high")
    found: list[Check] = []
    for target in (target for target in summary.targets("storm") if target.startswith("llama-server")):
        gap_ms, rate = _point(summary, target)
        best = max((each / rate for each_ms, each in ours if each_ms <= gap_ms), default=0.0 if ours else math.nan)
        claim = f"storm: UMA's tokens/s at no longer a gap than {target}, of its"
        beside = "" if math.isnan(most) else f"`llama_decode` alone, no stream: {most / rate:.3g} x"
        found.append(Check(claim, best, "≥", 1, "x", beside))
    return found


def _point(summary: Summary, target: str) -> tuple[float, float]:
    return summary.get("storm", target, "worst_gap_ms"), summary.get("storm", target, "prompt_tokens_per_s")


SCENARIO = Scenario(
    name="tradeoff",
    about="The storm at several settings: UMA's defaults but the times to aim for, llama-server's batch sizes (-b, "
    "-ub).",
    columns=("worst_gap_ms", "gap_p50_ms", "prompt_tokens_per_s", "all_read_s"),
    measure=measure,
    checks=checks,
    round_limit_s=480,
)
