"""Prefill storm: one stream is read as it comes, and four long prompts arrive. Does the answer freeze?"""

from __future__ import annotations

import math
from random import Random

import attrs
import trio

from benchmarks.load import start
from benchmarks.measure import CpuMeter, Measures, qoe
from benchmarks.raw import StormJob
from benchmarks.report import figure
from benchmarks.samples import Ask, Sample
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary
from benchmarks.targets.base import Target
from benchmarks.targets.contenders import OURS, SLOW, contenders, open_contender
from benchmarks.targets.raw import raw

PROMPTS, PROMPT_TOKENS, ANSWER = 4, 1500, 8
STREAM_TOKENS = 1900
N_CTX, SLOTS = 16_384, 8
PACE_MS = 72.0
"""Between two tokens of the stream while prompts are read: nine tenths of the default target."""
RAW_JOBS = (
    ("no stream", 512, 0.0, False),
    (f"a token every {PACE_MS:.0f} ms", 512, PACE_MS, False),
    ("a token with each 64", 64, PACE_MS, True),
)
"""Names, tokens of a piece, milliseconds between the stream's tokens, and whether both are one batch."""


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """The storm on each target, one after another."""
    for kind in contenders(bench, index, with_slow=True):
        rng = Random(f"storm {index} {kind}")
        # llama_cpp.server cannot decode one and read another: its stream has to end before any prompt is read.
        stream_tokens = 300 if kind == SLOW else STREAM_TOKENS
        async with open_contender(kind, bench, n_ctx=N_CTX, slots=SLOTS, n_ctx_slow=4096) as target:
            emit("storm", target.name, await storm(target, bench, rng, stream_tokens=stream_tokens))
    await _by_raw(bench, index, emit)


async def _by_raw(bench: Bench, index: int, emit: Emit) -> None:
    """What any schedule can reach here: the same prompts by `llama_decode` alone, with the stream and without it."""
    rng = Random(f"storm {index} raw")
    stream = list(bench.model.prompt(rng, 64))
    prompts = [list(bench.model.prompt(rng, PROMPT_TOKENS)) for _ in range(PROMPTS)]
    async with raw(bench.model, streams=1 + PROMPTS, n_ctx=N_CTX, layout="unified", threads=bench.threads) as baseline:
        for number, (label, piece, pace_ms, is_mixed) in enumerate([RAW_JOBS[0], *RAW_JOBS]):
            found = await baseline.run_storm(StormJob(stream, prompts, piece, pace_ms, is_mixed))
            if number:  # the first touches memory
                measures = {**attrs.asdict(found), "all_read_s": found.read_s}
                emit(
                    "storm", f"raw, {label}", measures | {"prompt_tokens_per_s": PROMPTS * PROMPT_TOKENS / found.read_s}
                )


async def storm(target: Target, bench: Bench, rng: Random, *, stream_tokens: int = STREAM_TOKENS) -> Measures:
    """One storm; the stream's worst gap from the prompts' arrival until shortly after the last was read."""
    prompts = [Ask(bench.model.prompt(rng, PROMPT_TOKENS), ANSWER) for _ in range(PROMPTS)]
    stream_ask = Ask(bench.model.prompt(rng, 64), stream_tokens, priority=1)
    meter = CpuMeter(target.pid)
    async with trio.open_nursery() as nursery:
        stream = start(nursery, target, stream_ask)
        await stream.reached(60)
        meter.start()
        storm_began = len(stream.token_s)
        readers = [start(nursery, target, ask) for ask in prompts]
        for reader in readers:
            await reader.reached(1)
        tokens_then = len(stream.token_s)
        await stream.reached(tokens_then + 30)
        cpu = meter.stop(0)
        nursery.cancel_scope.cancel()
    return {**_gaps(stream, storm_began), **_reading(readers), **cpu, "stream_qoe": qoe([stream])[0]}


def _gaps(stream: Sample, storm_began: int) -> Measures:
    calm = stream.gaps_ms[: storm_began - 1]
    during = sorted(stream.gaps_ms[storm_began - 1 :])
    return {
        "calm_gap_p50_ms": sorted(calm)[len(calm) // 2],
        "gap_p50_ms": during[len(during) // 2] if during else math.nan,
        "gap_p95_ms": during[int(len(during) * 0.95)] if during else math.nan,
        "worst_gap_ms": during[-1] if during else math.nan,
        "stream_tokens": len(during),
    }


def _reading(readers: list[Sample]) -> Measures:
    first = [reader.token_s[0] for reader in readers if reader.token_s]
    if len(first) < len(readers):
        return {"failed": len(readers) - len(first)}
    read_s = max(first) - readers[0].sent_s
    return {
        "all_read_s": read_s,
        "prompt_tokens_per_s": PROMPTS * PROMPT_TOKENS / read_s,
        "first_read_s": min(first) - readers[0].sent_s,
        "failed": 0,
    }


def checks(summary: Summary) -> list[Check]:
    """The stream goes on, and the prompts do not pay for it. Of llama-server's layouts each figure's better counts."""
    gap = summary.get("storm", OURS, "worst_gap_ms")
    read = summary.get("storm", OURS, "all_read_s")
    peer_gap = summary.best("storm", "llama-server", "worst_gap_ms", "low")
    peer_read = summary.best("storm", "llama-server", "all_read_s", "low")
    peer_qoe = summary.best("storm", "llama-server", "stream_qoe", "high")
    by_raw = [(label, summary.get("storm", f"raw, {label}", "all_read_s")) for label, *_ in RAW_JOBS]
    raw = ", ".join(f"{label} {took_s / peer_read:.3g} x" for label, took_s in by_raw if took_s / peer_read > 0)
    return [
        Check("storm: the stream's worst gap", gap, "≤", 100, "ms"),
        Check("storm: times better than llama-server's worst gap", peer_gap / gap, "≥", 18, "x"),
        Check(
            "storm: time until all prompts are read, of llama-server's", read / peer_read, "≤", 1.0, "x",
            raw and f"`llama_decode` alone: {raw}",
        ),
        Check("storm: the same, of `llama_decode` alone with such a stream", read / by_raw[1][1], "≤", 1.15, "x"),
        Check(
            "storm: QoE of the stream", summary.get("storm", OURS, "stream_qoe"), "≥", 0.98, "",
            f"llama-server: {figure('stream_qoe', peer_qoe)}",
        ),
    ]  # fmt: skip


SCENARIO = Scenario(
    name="storm",
    about=f"One stream decodes; {PROMPTS} prompts of {PROMPT_TOKENS} tokens arrive: the stream's worst gap, "
    "and the time until all are read.",
    columns=(
        "calm_gap_p50_ms",
        "gap_p50_ms",
        "worst_gap_ms",
        "all_read_s",
        "first_read_s",
        "prompt_tokens_per_s",
        "stream_qoe",
        "rss_mb",
    ),
    measure=measure,
    checks=checks,
    round_limit_s=180,
)
