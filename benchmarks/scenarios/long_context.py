"""Long contexts: reading and continuing prompts of 512 to 8,192 tokens, alone on the machine."""

from __future__ import annotations

from random import Random

from benchmarks.load import one
from benchmarks.measure import CpuMeter
from benchmarks.samples import Ask
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary, by_decode_alone, rotated
from benchmarks.scenarios.throughput import raw_measures
from benchmarks.targets.contenders import OURS, contenders, open_contender
from benchmarks.targets.raw import raw

LENGTHS, QUICK_LENGTHS, GENERATED = (512, 2048, 8192), (512, 2048), 32
UBATCHES = (512, 256)
"""Tokens that `llama_decode` alone computes at once: llama.cpp's default, and fewer, whose attention deep in a prompt
can be faster on a CPU. More are slower there."""


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """Each length on each target, and raw."""
    lengths = bench.pick(LENGTHS, QUICK_LENGTHS)
    n_ctx = max(lengths) + 256
    # One stream has one buffer whatever the layout: llama-server's two would measure the same thing twice.
    kinds = [kind for kind in contenders(bench, 0) if "split" not in kind]
    everything: list[int | str] = [*UBATCHES, *kinds]
    for kind in rotated(everything, index):
        rng = Random(f"long context {index}")
        if isinstance(kind, int):
            await _by_raw(bench, rng, kind, emit)
            continue
        async with open_contender(kind, bench, n_ctx=n_ctx, slots=1) as target:
            for length in lengths:
                meter = CpuMeter(target.pid)
                meter.start()
                sample = await one(target, Ask(bench.model.prompt(rng, length), GENERATED))
                gaps = sorted(sample.gaps_ms)
                measures = {
                    "ttft_p50_ms": sample.ttft_ms,
                    "prompt_tokens_per_s": length / sample.ttft_ms * 1000,
                    "inter_token_p50_ms": gaps[len(gaps) // 2],
                    "inter_token_worst_ms": gaps[-1],
                    **meter.stop(GENERATED),
                }
                emit(f"{length} tokens in", target.name, measures)


async def _by_raw(bench: Bench, rng: Random, n_ubatch: int, emit: Emit) -> None:
    lengths = bench.pick(LENGTHS, QUICK_LENGTHS)
    n_ctx, model, threads = max(lengths) + 256, bench.model, bench.threads
    async with raw(model, streams=1, n_ctx=n_ctx, layout="unified", threads=threads, n_ubatch=n_ubatch) as baseline:
        for length in lengths:
            result = await baseline.run([model.prompt(rng, length)], GENERATED)
            measures = {**raw_measures(result, 1), "prompt_tokens_per_s": length / result.first_s}
            emit(f"{length} tokens in", baseline.name, measures)


def checks(summary: Summary) -> list[Check]:
    """A long prompt alone is read as fast as llama-server reads it, each round by itself: rounds differ by more."""
    case, measure = f"{max(LENGTHS)} tokens in", "ttft_p50_ms"
    peer, best_raw = (summary.best_target(case, each, measure, "low") for each in ("llama-server", "raw"))
    ratio = summary.ratio(case, OURS, peer, measure)
    beside = by_decode_alone(summary.ratio(case, best_raw, peer, measure))
    beside += f" ({best_raw})" if beside else ""
    return [Check(f"{case}: first token, of llama-server's", ratio, "≤", 1.02, "x", beside)]


SCENARIO = Scenario(
    name="long_context",
    about=f"One request after another with long prompts, {GENERATED} tokens generated, nothing else running.",
    columns=("ttft_p50_ms", "prompt_tokens_per_s", "inter_token_p50_ms", "inter_token_worst_ms", "rss_mb"),
    measure=measure,
    checks=checks,
    round_limit_s=240,
)
