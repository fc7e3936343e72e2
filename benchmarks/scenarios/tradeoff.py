"""The trade-off: a smoother stream costs prompt throughput. Where does each server let one choose?

The storm again: UMA with its defaults but the time between tokens that it aims for, llama-server with several batch
sizes, its only means to the end, and split KV, with which it reads fastest.
"""

from __future__ import annotations

import math
from random import Random

from benchmarks.load import warm_up
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary
from benchmarks.scenarios.storm import N_CTX, SLOTS, storm
from benchmarks.targets.llama_server import llama_server
from benchmarks.targets.uma import uma_server
from uma import RuntimeConfig

TARGET = "--slo-tbt-ms"
TARGETS_MS, QUICK_TARGETS_MS = (20, 40, 60, 80, 120, 200, 400), (40, 200)
BATCHES, QUICK_BATCHES = ((64, 64), (128, 128), (256, 256), (512, 512), (2048, 512)), ((128, 128), (2048, 512))


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """One storm for each setting."""
    for target_ms in bench.pick(TARGETS_MS, QUICK_TARGETS_MS):
        settings = {"slo_tbt_ms": target_ms}
        if target_ms > RuntimeConfig().tick_budget_ms:
            settings["tick_budget_ms"] = target_ms  # the lower of the two counts
        label = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in settings.items())
        async with uma_server(bench.model, settings, label=label, threads=bench.default_threads) as uma:
            await warm_up(uma, bench.model)
            emit("storm", uma.name, await storm(uma, bench, Random(f"tradeoff {index} {target_ms}")))
    if not bench.has_llama_server:
        return
    for batch, ubatch in bench.pick(BATCHES, QUICK_BATCHES):
        flags, label = ("-b", str(batch), "-ub", str(ubatch)), f"-b {batch} -ub {ubatch}"
        async with llama_server(
            bench.model, slots=SLOTS, n_ctx=N_CTX, layout="split", threads=bench.threads, extra=flags, label=label
        ) as server:
            await warm_up(server, bench.model)
            emit("storm", server.name, await storm(server, bench, Random(f"tradeoff {index} {batch}")))


def checks(summary: Summary) -> list[Check]:
    """For each setting of llama-server there is one of UMA's that is better in both axes."""
    ours = [_point(summary, target) for target in summary.targets("storm") if target.startswith(f"UMA {TARGET}")]
    found: list[Check] = []
    for target in (target for target in summary.targets("storm") if target.startswith("llama-server")):
        gap_ms, rate = _point(summary, target)
        best = max((each / rate for each_ms, each in ours if each_ms <= gap_ms), default=0.0 if ours else math.nan)
        found.append(Check(f"storm: UMA's tokens/s at no longer a gap than {target}, of its", best, "≥", 1, "x"))
    return found


def _point(summary: Summary, target: str) -> tuple[float, float]:
    return summary.get("storm", target, "worst_gap_ms"), summary.get("storm", target, "prompt_tokens_per_s")


SCENARIO = Scenario(
    name="tradeoff",
    about="The storm at several settings: UMA's defaults but the time between tokens to aim for, llama-server's batch "
    "sizes (-b, -ub).",
    columns=("worst_gap_ms", "gap_p50_ms", "prompt_tokens_per_s", "all_read_s"),
    measure=measure,
    checks=checks,
    round_limit_s=400,
)
