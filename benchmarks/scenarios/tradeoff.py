"""The trade-off: a smoother stream costs prompt throughput. Where does each server let one choose?

The storm again, both with split KV: UMA with several `target_tbt_ms`, llama-server with several batch sizes, its only
means to the end.
"""

from __future__ import annotations

from random import Random

from benchmarks.load import warm_up
from benchmarks.scenario import Bench, Emit, Scenario
from benchmarks.scenarios.storm import N_CTX, SLOTS, storm
from benchmarks.targets.contenders import uma_layout
from benchmarks.targets.llama_server import llama_server
from benchmarks.targets.uma import uma_server

TARGETS_MS, QUICK_TARGETS_MS = (20, 40, 60, 80, 120, 200, 400), (40, 200)
BATCHES, QUICK_BATCHES = ((64, 64), (128, 128), (256, 256), (512, 512), (2048, 512)), ((128, 128), (2048, 512))


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """One storm for each setting."""
    for target_ms in bench.pick(TARGETS_MS, QUICK_TARGETS_MS):
        layout = uma_layout("split", n_ctx=N_CTX, slots=SLOTS)
        settings = {**layout, "tick_budget_ms": target_ms, "slo_tbt_ms": target_ms}
        async with uma_server(bench.model, settings, label=f"{target_ms} ms", threads=bench.threads) as uma:
            await warm_up(uma, bench.model)
            rng = Random(f"tradeoff {index} {target_ms}")
            emit("storm", uma.name, await storm(uma, bench, rng, target_tbt_ms=target_ms))
    if not bench.has_llama_server:
        return
    for batch, ubatch in bench.pick(BATCHES, QUICK_BATCHES):
        flags, label = ("-b", str(batch), "-ub", str(ubatch)), f"-b {batch} -ub {ubatch}"
        async with llama_server(
            bench.model, slots=SLOTS, n_ctx=N_CTX, layout="split", threads=bench.threads, extra=flags, label=label
        ) as server:
            await warm_up(server, bench.model)
            emit("storm", server.name, await storm(server, bench, Random(f"tradeoff {index} {batch}")))


SCENARIO = Scenario(
    name="tradeoff",
    about="The storm at several settings: UMA's inter-token target, llama-server's batch sizes (-b, -ub).",
    columns=("worst_gap_ms", "gap_p50_ms", "prompt_tokens_per_s", "all_read_s"),
    measure=measure,
    round_limit_s=400,
)
