"""Mixed load: three people chat, another sends a long document, and a batch job runs underneath."""

from __future__ import annotations

import math
from random import Random
from statistics import mean

import attrs
import trio

from benchmarks.load import one, start
from benchmarks.measure import CpuMeter, Measures, latency, qoe
from benchmarks.raw_mixed import MixedJob
from benchmarks.report import figure
from benchmarks.samples import Ask, Sample
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary, rotated
from benchmarks.targets.base import Target
from benchmarks.targets.contenders import OURS, contenders, open_contender
from benchmarks.targets.llama_server import LAYOUTS
from benchmarks.targets.raw import raw

PEOPLE, QUESTIONS, QUESTION, ANSWER = 3, 4, 64, 48
DOCUMENT, SUMMARY_TOKENS = 4000, 32
BATCH, BATCH_PROMPT, BATCH_ANSWER = 8, 256, 48
IN_TURN = "one kind of request after another"
PACE_MS, PACED = 72.0, "a token every 72 ms but while questions are read"
"""For people while prompts are read: nine tenths of the default target."""
PIECE_TOKENS = 128
"""Tokens of a prompt that `llama_decode` alone reads between people's tokens."""
SLOTS = PEOPLE + 1 + BATCH
N_CTX = 4352 * SLOTS
"""In the split layout each slot has its own share, and the document has to fit one."""


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """Everything at once, on each target."""
    for kind in contenders(bench, index):
        async with open_contender(kind, bench, n_ctx=N_CTX, slots=SLOTS) as target:
            for case, measures in (await _mixed(target, bench, Random(f"mixed {index}"))).items():
                emit(case, target.name, measures)
    await _by_raw(bench, index, emit)
    await _by_raw_with_people(bench, index, emit)


async def _by_raw(bench: Bench, index: int, emit: Emit) -> None:
    """The same work by `llama_decode` alone: first the people's questions, then the batch, and the document last; in
    one KV buffer and in one each.
    """
    rng = Random(f"mixed {index} raw")
    prompts = [
        *([bench.model.prompt(rng, QUESTION) for _ in range(PEOPLE)] for _ in range(bench.pick(QUESTIONS, 2))),
        [bench.model.prompt(rng, BATCH_PROMPT) for _ in range(BATCH)],
        [bench.model.prompt(rng, DOCUMENT)],
    ]
    answers = [*[ANSWER] * (len(prompts) - 2), BATCH_ANSWER, SUMMARY_TOKENS]
    for layout in rotated(list(LAYOUTS), index):
        async with raw(bench.model, streams=SLOTS, n_ctx=N_CTX, layout=layout, threads=bench.threads) as baseline:
            await baseline.run(prompts[0], ANSWER)  # the first touches memory
            took = [await baseline.run(each, tokens) for each, tokens in zip(prompts, answers, strict=True)]
        target = f"{baseline.name}, {IN_TURN}"
        all_s = sum(each.total_s for each in took)
        tokens = sum(each.generated for each in took)
        emit("all", target, {"all_done_s": all_s, "tokens_per_s": tokens / all_s})
        first_ms = sorted(each.first_s * 1000 for each in took[:-2])
        emit("people", target, {"ttft_p50_ms": first_ms[len(first_ms) // 2], "ttft_p95_ms": first_ms[-1]})


async def _by_raw_with_people(bench: Bench, index: int, emit: Emit) -> None:
    """The same work by `llama_decode` alone, where people have a token every `PACE_MS` while prompts are read."""
    rng = Random(f"mixed {index} raw")
    people = [[list(bench.model.prompt(rng, QUESTION)) for _ in range(bench.pick(QUESTIONS, 2))] for _ in range(PEOPLE)]
    document = (list(bench.model.prompt(rng, DOCUMENT)), SUMMARY_TOKENS)
    batch = [(list(bench.model.prompt(rng, BATCH_PROMPT)), BATCH_ANSWER) for _ in range(BATCH)]
    for layout in rotated(list(LAYOUTS), index):
        async with raw(bench.model, streams=SLOTS, n_ctx=N_CTX, layout=layout, threads=bench.threads) as baseline:
            job = MixedJob(people, ANSWER, [document, *batch], PIECE_TOKENS, PACE_MS)
            await baseline.run_mixed(attrs.evolve(job, people=people[:1], others=batch[:1]))  # touches memory
            found = await baseline.run_mixed(job)
            target = f"{baseline.name}, {PACED}"
            rate = found.generated / found.all_done_s
            emit("all", target, {"all_done_s": found.all_done_s, "tokens_per_s": rate})
            emit("people", target, {"inter_token_worst_ms": found.worst_gap_ms})


async def _mixed(target: Target, bench: Bench, rng: Random) -> dict[str, Measures]:
    model = bench.model
    chats: list[Sample] = []

    async def person(questions: list[Ask]) -> None:
        for question in questions:
            chats.append(await one(target, question))

    meter = CpuMeter(target.pid)
    meter.start()
    async with trio.open_nursery() as nursery:
        batch_asks = [Ask(model.prompt(rng, BATCH_PROMPT), BATCH_ANSWER, priority=-1) for _ in range(BATCH)]
        batch = [start(nursery, target, ask) for ask in batch_asks]
        for _ in range(PEOPLE):
            asks = [Ask(model.prompt(rng, QUESTION), ANSWER, priority=1) for _ in range(bench.pick(QUESTIONS, 2))]
            nursery.start_soon(person, asks)
        await trio.sleep(0.3)
        document = start(nursery, target, Ask(model.prompt(rng, DOCUMENT), SUMMARY_TOKENS))
    samples = [*chats, document, *batch]
    tokens = sum(len(sample.token_s) for sample in samples)
    ended = max(sample.ended_s or 0 for sample in samples)
    began = min(sample.sent_s for sample in samples)
    return {
        "people": {**latency(chats), **_failed(chats), "mean_qoe": mean(qoe(chats)), "lowest_qoe": min(qoe(chats))},
        "document": {**latency([document]), **_failed([document])},
        "batch": {**latency(batch), **_failed(batch), "all_done_s": max(each.ended_s or 0 for each in batch) - began},
        "all": {
            "all_done_s": ended - began,
            "tokens_per_s": tokens / (ended - began),
            **meter.stop(tokens),
            **_failed(samples),
        },
    }


def _failed(samples: list[Sample]) -> Measures:
    return {"failed": sum(sample.error is not None for sample in samples)}


def checks(summary: Summary) -> list[Check]:
    """People are served evenly and soon, and the work as a whole takes hardly longer."""

    def both(case: str, measure: str) -> tuple[float, str]:
        peer = summary.best(case, "llama-server", measure, "high" if measure.endswith("_qoe") else "low")
        return summary.get(case, OURS, measure), f"llama-server: {figure(measure, peer)}"

    peer_done = summary.best("all", "llama-server", "all_done_s", "low")
    done_s = summary.get("all", OURS, "all_done_s")
    gap, peer_gap = both("people", "inter_token_worst_ms")
    ttft, peer_ttft = both("people", "ttft_p95_ms")
    quality, peer_quality = both("people", "mean_qoe")
    peers = [
        f"of one in the layout `{layout}` {done_s / summary.get('all', f'llama-server {layout}', 'all_done_s'):.3g} x"
        for layout in LAYOUTS
        if f"llama-server {layout}" in summary.targets("all")
    ]
    by_raw = {
        f"{layout}, {label}": summary.get("all", f"raw {layout}, {label}", "all_done_s") / peer_done
        for label in (IN_TURN, PACED)
        for layout in LAYOUTS
        if f"raw {layout}, {label}" in summary.targets("all")
    }
    known = [f"{label} {ratio:.3g} x" for label, ratio in by_raw.items()]
    raw_ttft = summary.best("people", "raw", "ttft_p95_ms", "low")
    if not math.isnan(raw_ttft):
        peer_ttft += f"; `llama_decode` alone, three questions and nothing else: {figure('ttft_p95_ms', raw_ttft)}"
    return [
        Check(
            "mixed: everything done, of llama-server's",
            done_s / peer_done,
            "≤",
            1.05,
            "x",
            "; ".join([*peers, *([f"`llama_decode` alone: {', '.join(known)}"] if known else [])]),
        ),
        Check("mixed: people's worst gap", gap, "≤", 120, "ms", peer_gap),
        Check("mixed: people's TTFT p95", ttft, "≤", 400, "ms", peer_ttft),
        Check("mixed: mean QoE of people's streams", quality, "≥", 0.98, "", peer_quality),
    ]


SCENARIO = Scenario(
    name="mixed",
    about=f"{PEOPLE} people with {QUESTIONS} questions each, a document of {DOCUMENT} tokens, {BATCH} batch requests.",
    columns=(
        "ttft_p50_ms",
        "ttft_p95_ms",
        "inter_token_p50_ms",
        "inter_token_p95_ms",
        "inter_token_worst_ms",
        "mean_qoe",
        "lowest_qoe",
        "all_done_s",
        "tokens_per_s",
    ),
    measure=measure,
    checks=checks,
    round_limit_s=240,
)
