"""Prefill storm: one stream is read as it comes, and four long prompts arrive. Does the answer freeze?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from random import Random

import attrs
import trio

from benchmarks.load import start
from benchmarks.measure import CpuMeter, Measures, qoe
from benchmarks.raw import StormJob
from benchmarks.report import figure
from benchmarks.samples import Ask, Sample
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary, rotated
from benchmarks.targets.base import Target
from benchmarks.targets.contenders import OURS, SLOW, contenders, open_contender
from benchmarks.targets.llama_server import LAYOUTS
from benchmarks.targets.raw import raw

PROMPTS, PROMPT_TOKENS, ANSWER = 4, 1500, 8
STREAM_TOKENS = 1900
N_CTX, SLOTS = 16_384, 8
PACE_MS = 72.0
"""Between two tokens of the stream while prompts are read: nine tenths of the default target."""
NO_STREAM, MIXED = "no stream", "a token with each 64"
PACED = f"a token every {PACE_MS:.0f} ms"
PACED_SHORT = f"{PACED}, pieces of 128"
RAW_JOBS = {
    NO_STREAM: (512, 0.0, ANSWER, False),
    PACED: (512, PACE_MS, ANSWER, False),
    PACED_SHORT: (128, PACE_MS, ANSWER, False),
    MIXED: (64, PACE_MS, ANSWER, True),
}
"""Tokens of a piece, milliseconds between the stream's tokens, tokens of an answer, and whether stream and piece are
one batch. Pieces of 512 take several times as long as a gap of the stream may be."""


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """The storm on each target, one after another."""
    for kind in contenders(bench, index, with_slow=True):
        rng = Random(f"storm {index} {kind}")
        # llama_cpp.server cannot decode one and read another: its stream has to end before any prompt is read.
        stream_tokens = 300 if kind == SLOW else STREAM_TOKENS
        async with open_contender(kind, bench, n_ctx=N_CTX, slots=SLOTS, n_ctx_slow=4096) as target:
            emit("storm", target.name, await storm(target, bench, rng, stream_tokens=stream_tokens))
    for layout in rotated(list(LAYOUTS), index):
        # With a buffer each, llama.cpp takes a batch of unequal rows apart: a mixed one would be two.
        labels = [label for label in RAW_JOBS if layout == "unified" or label != MIXED]
        await by_raw(bench, Random(f"storm {index} raw"), layout, labels, emit)


async def by_raw(bench: Bench, rng: Random, layout: str, labels: Sequence[str], emit: Emit) -> None:
    """What any schedule can reach here: the same prompts by `llama_decode` alone, each a sequence of its own."""
    stream = list(bench.model.prompt(rng, 64))
    prompts = [list(bench.model.prompt(rng, PROMPT_TOKENS)) for _ in range(PROMPTS)]
    async with raw(bench.model, streams=1 + PROMPTS, n_ctx=N_CTX, layout=layout, threads=bench.threads) as baseline:
        await baseline.run_storm(StormJob(stream, prompts[:1], *RAW_JOBS[NO_STREAM]))  # the first touches memory
        for label in labels:
            found = await baseline.run_storm(StormJob(stream, prompts, *RAW_JOBS[label]))
            rate = PROMPTS * PROMPT_TOKENS / found.read_s
            measures = {**attrs.asdict(found), "all_read_s": found.read_s, "prompt_tokens_per_s": rate}
            emit("storm", f"{baseline.name}, {label}", measures)


async def storm(target: Target, bench: Bench, rng: Random, *, stream_tokens: int = STREAM_TOKENS) -> Measures:
    """One storm of long prompts."""
    prompts = [Ask(bench.model.prompt(rng, PROMPT_TOKENS), ANSWER) for _ in range(PROMPTS)]
    return await storm_of(prompts, PROMPTS * PROMPT_TOKENS, target, bench, rng, stream_tokens=stream_tokens)


async def storm_of(
    asks: Sequence[Ask], tokens: int, target: Target, bench: Bench, rng: Random, *, stream_tokens: int = STREAM_TOKENS
) -> Measures:
    """One stream, and while it is read all of `asks`, whose prompts have `tokens` tokens together. The stream's worst
    gap counts from their arrival until shortly after the last was read.
    """
    stream_ask = Ask(bench.model.prompt(rng, 64), stream_tokens, priority=1)
    meter = CpuMeter(target.pid)
    async with trio.open_nursery() as nursery:
        stream = start(nursery, target, stream_ask)
        await stream.reached(60)
        meter.start()
        storm_began = len(stream.token_s)
        readers = [start(nursery, target, ask) for ask in asks]
        for reader in readers:
            await reader.reached(1)
        await stream.reached(len(stream.token_s) + 30)
        cpu = meter.stop(0)
        nursery.cancel_scope.cancel()
    return {**_gaps(stream, storm_began), **_reading(readers, tokens), **cpu, "stream_qoe": qoe([stream])[0]}


def _gaps(stream: Sample, storm_began: int) -> Measures:
    """The stream's gaps before and after its token number `storm_began`."""
    calm = stream.gaps_ms[: storm_began - 1]
    during = sorted(stream.gaps_ms[storm_began - 1 :])
    return {
        "calm_gap_p50_ms": sorted(calm)[len(calm) // 2],
        "gap_p50_ms": during[len(during) // 2] if during else math.nan,
        "gap_p95_ms": during[int(len(during) * 0.95)] if during else math.nan,
        "worst_gap_ms": during[-1] if during else math.nan,
        "stream_tokens": len(during),
    }


def _reading(readers: list[Sample], tokens: int) -> Measures:
    first = [reader.token_s[0] for reader in readers if reader.token_s]
    if len(first) < len(readers):
        return {"failed": len(readers) - len(first)}
    read_s = max(first) - readers[0].sent_s
    return {
        "all_read_s": read_s,
        "prompt_tokens_per_s": tokens / read_s,
        "first_read_s": min(first) - readers[0].sent_s,
        "failed": 0,
    }


def checks(summary: Summary) -> list[Check]:
    """The stream goes on, and the prompts do not pay for it. Of llama-server's layouts each figure's better counts, and
    so it does of `llama_decode` alone.
    """
    gap = summary.get("storm", OURS, "worst_gap_ms")
    read = summary.get("storm", OURS, "all_read_s")
    peer_gap = summary.best("storm", "llama-server", "worst_gap_ms", "low")
    peer_read = summary.best("storm", "llama-server", "all_read_s", "low")
    peer_qoe = summary.best("storm", "llama-server", "stream_qoe", "high")
    by_raw = {label: each for label in RAW_JOBS if (each := _by_better_layout(summary, label))}
    # Where pieces are too long for its pace, it reads as if it had hardly a stream.
    known_paced = [by_raw[label] for label in (PACED, PACED_SHORT) if label in by_raw]
    paced = min(known_paced, key=attrgetter("gap_ms"), default=None)
    known = [f"{label} {each.read_s / peer_read:.3g} x ({each.told})" for label, each in by_raw.items()]
    return [
        Check("storm: the stream's worst gap", gap, "≤", 100, "ms"),
        Check("storm: times better than llama-server's worst gap", peer_gap / gap, "≥", 18, "x"),
        Check(
            "storm: time until all prompts are read, of llama-server's", read / peer_read, "≤", 1.0, "x",
            f"`llama_decode` alone: {', '.join(known)}" if known and not math.isnan(peer_read) else "",
        ),
        Check(
            "storm: the same, of `llama_decode` alone with such a stream", read / paced.read_s if paced else math.nan,
            "≤", 1.15, "x",
        ),
        Check(
            "storm: QoE of the stream", summary.get("storm", OURS, "stream_qoe"), "≥", 0.98, "",
            f"llama-server: {figure('stream_qoe', peer_qoe)}",
        ),
    ]  # fmt: skip


@attrs.frozen(order=True)
class _ByRaw:
    """What `llama_decode` alone takes until all is read, in one layout, and the stream's worst gap."""

    read_s: float
    gap_ms: float
    layout: str

    @property
    def told(self) -> str:
        """Its layout and gap, in words."""
        return f"{self.layout}, gap {self.gap_ms:,.0f} ms" if self.gap_ms else self.layout


def _by_better_layout(summary: Summary, label: str) -> _ByRaw | None:
    """The layout in which it reads faster; None where it was not measured."""
    found: list[_ByRaw] = []
    for layout in LAYOUTS:
        name = f"raw {layout}, {label}"
        read_s = summary.get("storm", name, "all_read_s")
        if not math.isnan(read_s):
            found.append(_ByRaw(read_s, summary.get("storm", name, "worst_gap_ms"), layout))
    return min(found, default=None)


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
)
