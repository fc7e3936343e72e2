"""UMA's KV layouts: one buffer shares prefixes at no cost, a buffer each does not attend over others' cells.

What `--kv-unified auto` goes by, measured: many unrelated sequences against a shared prefix, which is read and then
found in the cache, in each layout.
"""

from __future__ import annotations

from random import Random

from benchmarks.load import burst, warm_up
from benchmarks.measure import latency, throughput
from benchmarks.samples import Ask
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary, rotated
from benchmarks.targets.uma import uma_server

STREAMS, PROMPT, GENERATED = 32, 512, 64
SHARING, COMMON, OWN = 8, 1024, 16
CELLS_A_SEQUENCE = 1280
SHARED = f"{SHARING} with {COMMON} tokens in common"
WARM = f"{SHARED}, cached"
LEVEL = 0.95
"""Of the better layout: single rounds of the same server differ by as much."""


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """Both loads with each value of the setting."""
    streams = bench.pick(STREAMS, 8)
    # With a buffer each, UMA has one more for health probes.
    settings = {"n_ctx": (streams + 1) * CELLS_A_SEQUENCE, "max_sequences": streams}
    for layout in rotated(["auto", "on", "off"], index):
        rng = Random(f"layouts {index} {layout}")
        label = f"--kv-unified {layout}"
        async with uma_server(
            bench.model, {**settings, "kv_unified": layout}, threads=bench.threads, label=label
        ) as uma:
            await warm_up(uma, bench.model)
            asks = [Ask(bench.model.prompt(rng, PROMPT), GENERATED) for _ in range(streams)]
            samples = await burst(uma, asks)
            # From the moment when all are read: what the layouts differ in is decoding.
            all_read_s = max(sample.token_s[0] for sample in samples)
            late = sum(moment > all_read_s for sample in samples for moment in sample.token_s)
            decode_s = max(sample.token_s[-1] for sample in samples) - all_read_s
            rates = {"decode_per_s": late / decode_s, "tokens_per_s": throughput(samples)["tokens_per_s"]}
            emit(f"{streams} unrelated, {PROMPT} in, {GENERATED} out", uma.name, {**rates, **latency(samples)})
            common = bench.model.prompt(rng, COMMON)
            for case in (SHARED, WARM):
                samples = await burst(uma, [Ask(common + bench.model.prompt(rng, OWN), OWN) for _ in range(SHARING)])
                done_s = throughput(samples)["wall_s"]
                emit(case, uma.name, {"all_done_s": done_s, **latency(samples)})


def checks(summary: Summary) -> list[Check]:
    """What `auto` chooses is as fast as the layout that is better for the load."""
    unrelated = f"{STREAMS} unrelated, {PROMPT} in, {GENERATED} out"
    auto, fixed = "UMA --kv-unified auto", "UMA --kv-unified o"
    tokens = summary.get(unrelated, auto, "tokens_per_s") / summary.best(unrelated, fixed, "tokens_per_s", "high")
    done = summary.get(SHARED, auto, "all_done_s") / summary.best(SHARED, fixed, "all_done_s", "low")
    first = summary.get(WARM, auto, "ttft_p50_ms") / summary.best(WARM, fixed, "ttft_p50_ms", "low")
    return [
        Check(f"`--kv-unified auto`, {unrelated}: tokens/s of the better layout", tokens, "≥", LEVEL, "x"),
        Check(f"`--kv-unified auto`, {SHARED}: time, of the better layout's", done, "≤", 2 - LEVEL, "x"),
        Check(f"`--kv-unified auto`, {WARM}: TTFT p50, of the better layout's", first, "≤", 2 - LEVEL, "x"),
    ]


SCENARIO = Scenario(
    name="layouts",
    about="UMA's two KV layouts on loads that favor either.",
    columns=("decode_per_s", "tokens_per_s", "all_done_s", "ttft_p50_ms", "inter_token_p50_ms"),
    measure=measure,
    checks=checks,
    round_limit_s=240,
)
