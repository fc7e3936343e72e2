"""Batch jobs: what `uma batch` makes of a server, and what a chat beside it notices.

The same requests go through the socket by UMA's own client, so many of them at once, in turn with the job, each turn
with rows of its own. The job's time is that which it tells itself, from its first row on: to start it takes a second,
whatever its length.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import attrs
import trio

from benchmarks.conversations import words
from benchmarks.load import one, until_quiet, warm_up
from benchmarks.measure import Measures, latency
from benchmarks.reference import fetch_model
from benchmarks.samples import Ask, Sample
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary, rotated
from benchmarks.targets.batch import batch_job, chat_row
from benchmarks.targets.contenders import DEFAULTS
from benchmarks.targets.uma import Uma, uma_server
from uma import Request, SamplingParams
from uma.jobs import in_flight
from uma.types import Finished, Message

ROWS, WORDS, ANSWER, TURNS = 448, 24, 48, 2
"""So many rows are whole waves of either way: 8 of the job's 56, and 14 of `AT_ONCE`."""
AT_ONCE = 32
SPEED, BATCH, SOCKET = "rows", "uma batch", f"the socket, {AT_ONCE} in flight"
ALIKE = "the socket, as many in flight as uma batch"
"""Tells what the job itself takes from what comes of how many rows it has in flight."""
CHATS, QUESTION, CHAT_ANSWER = 40, 64, 48
BESIDE_ROWS = 20_000
"""Of the job beside chats: more than it gets done meanwhile."""
FEW = {"max_sequences": 8}
"""Of a quick run's server: a job's first results come sooner."""
SETTLED_ROWS = 64
"""Results after which the chats begin."""
CHAT, ALONE, BESIDE = "a chat", "alone", "beside uma batch"
ESTIMATED = 0.05, 0.8
"""Shares of the rows between which the time left is held to what it was: nearer to the end little is left."""
PLAIN_TOKENS = range(1_000, 40_000)
"""Ids that are ordinary text in SmolLM2's vocabulary."""


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """Turns of each way, then chats alone and beside a job."""
    model = attrs.evolve(bench.model, path=fetch_model("smollm2"))
    chance = Random(f"batch {index}")
    with tempfile.TemporaryDirectory(prefix="uma-bench-") as folder:
        async with uma_server(model, bench.pick({}, FEW), threads=bench.default_threads, label=DEFAULTS) as uma:
            await warm_up(uma, bench.model)
            for turn in range(TURNS):
                for way in rotated([BATCH, SOCKET, ALIKE], index + turn):
                    texts = _texts(chance, bench.pick(ROWS, 10))
                    place = Path(folder) / f"{turn}"
                    emit(
                        SPEED,
                        way,
                        await (_by_batch(uma, texts, place) if way == BATCH else _by_socket(uma, texts, way)),
                    )
            await until_quiet()
            emit(CHAT, ALONE, await _chats(uma, chance, bench))
            emit(CHAT, BESIDE, await _chats_beside(uma, chance, bench, Path(folder) / "beside"))


def _texts(chance: Random, count: int) -> list[str]:
    return [words(chance, WORDS) for _ in range(count)]


def _write(rows: Path, texts: Sequence[str]) -> None:
    sampling = {"max_tokens": ANSWER, "ignore_eos": True}
    rows.write_text("".join(chat_row(number, text, **sampling) for number, text in enumerate(texts)))


async def _by_batch(uma: Uma, texts: Sequence[str], place: Path) -> Measures:
    rows = place.with_suffix(".jsonl")
    _write(rows, texts)
    async with batch_job(rows, place.with_suffix(".out"), "--socket", str(uma.socket)) as job:
        await job.ended()
        events = job.events()
    last = events[-1]
    return {
        "tokens_per_s": last["completion_tokens"] / last["seconds"],
        "tokens": last["completion_tokens"],
        "wall_s": last["seconds"],
        "failed": last["failed"],
        "left_off_percent": 100 * max(_left_errors(events), default=math.nan),
    }


def _left_errors(events: Sequence[dict[str, Any]]) -> Iterator[float]:
    """By what share the time left that was told was off."""
    took = events[-1]["seconds"]
    first, last = ESTIMATED
    for each in events:
        if each["seconds_left"] is not None and first <= each["share"] <= last:
            left = took - each["seconds"]
            yield abs(each["seconds_left"] - left) / left


async def _by_socket(uma: Uma, texts: Sequence[str], way: str) -> Measures:
    """The same requests by one client, the next one whenever one has ended."""
    (client,) = uma.clients
    sampling = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
    rest = iter(enumerate(texts))
    tokens = 0

    async def ask_on() -> None:
        nonlocal tokens
        for number, text in rest:
            request = Request(
                f"row-{number}", messages=(Message("user", text),), sampling=sampling, priority=-1, stream=False
            )
            async with client.generate(request) as stream:
                async for event in stream:
                    if isinstance(event, Finished):
                        tokens += event.usage.completion_tokens

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(AT_ONCE if way == SOCKET else in_flight(client, has_others=True)):
            nursery.start_soon(ask_on)
    wall_s = time.perf_counter() - began
    return {"tokens_per_s": tokens / wall_s, "tokens": tokens, "wall_s": wall_s}


async def _chats(uma: Uma, chance: Random, bench: Bench) -> Measures:
    """Questions one after another, as `uma chat` asks them."""
    samples: list[Sample] = []
    for _ in range(bench.pick(CHATS, 2)):
        question = tuple(chance.choices(PLAIN_TOKENS, k=QUESTION))
        samples.append(await one(uma, Ask(question, CHAT_ANSWER, priority=1)))
    failed = sum(each.error is not None for each in samples)
    return {**latency(samples), "failed": failed}


async def _chats_beside(uma: Uma, chance: Random, bench: Bench, place: Path) -> Measures:
    rows = place.with_suffix(".jsonl")
    _write(rows, _texts(chance, BESIDE_ROWS))
    async with batch_job(rows, place.with_suffix(".out"), "--socket", str(uma.socket)) as job:
        await job.reached(bench.pick(SETTLED_ROWS, 1))
        before = await uma.metrics()
        began = time.perf_counter()
        found = await _chats(uma, chance, bench)
        after, wall_s = await uma.metrics(), time.perf_counter() - began
    tokens = after["tokens_generated_total"] - before["tokens_generated_total"]
    return {**found, "tokens_per_s": tokens / wall_s}


def checks(summary: Summary) -> list[Check]:
    """A job is as fast as a client that does it by hand, and no chat suffers by it."""
    worst = summary.get(CHAT, BESIDE, "inter_token_worst_ms")
    first, alone = (summary.get(CHAT, each, "ttft_p95_ms") for each in (BESIDE, ALONE))
    return [
        Check(
            f"uma batch: tokens/s of the same requests through the socket with {AT_ONCE} in flight",
            summary.ratio(SPEED, BATCH, SOCKET, "tokens_per_s"),
            "≥",
            0.95,
            "x",
        ),
        Check(
            "uma batch: how far off the time left was, from 5 % of the rows on",
            summary.get(SPEED, BATCH, "left_off_percent"),
            "≤",
            20,
            "%",
        ),
        Check("a chat beside uma batch: worst gap", worst, "≤", 120, "ms"),
        Check(
            "a chat beside uma batch: TTFT p95, of the same alone",
            first / alone,
            "≤",
            1.5,
            "x",
            "" if math.isnan(first / alone) else f"{first:.0f} ms and {alone:.0f} ms",
        ),
    ]


SCENARIO = Scenario(
    name="batch",
    about=f"`uma batch` with {ROWS} rows on SmolLM2, {ANSWER} tokens each, against the same requests through the "
    f"socket, {AT_ONCE} in flight; and {CHATS} questions of {QUESTION} tokens beside a job, against the same alone.",
    columns=(
        "tokens_per_s",
        "wall_s",
        "left_off_percent",
        "ttft_p50_ms",
        "ttft_p95_ms",
        "inter_token_p50_ms",
        "inter_token_p95_ms",
        "inter_token_worst_ms",
    ),
    measure=measure,
    checks=checks,
    round_limit_s=2_400,
)
