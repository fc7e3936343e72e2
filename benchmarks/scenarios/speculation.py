"""Speculation: what drafts are worth where a text repeats, and that they cost nothing where it does not."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from random import Random
from statistics import median
from typing import Any

import attrs
import trio

from benchmarks.measure import Measures
from benchmarks.models import BenchModel, Shape, bench_model
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary, rotated
from benchmarks.targets.uma import uma_server
from uma import Request, SamplingParams
from uma.llama.batch import Batch
from uma.llama.context import DONE, Context, ContextParams
from uma.llama.model import Model
from uma.types import Finished, Source, Token

WORDS, GENERATED = 256, 128
REPEATS = {1: 3, 8: 1}
"""Bursts by streams; of their ratios the median counts."""
PLAIN, AUTO, DRAFT = "plain", "--speculate auto", "--draft"
SMALL = Shape(layers=2, width=256, heads=4, kv_heads=2, feed_forward=512)
"""Of the model that drafts: a tenth of the weights, nearly all of them its vocabulary."""
ONE = "1 stream"
RECITES = "recites its prompt"
QUOTES = "quotes its prompt, 25 tokens at a time"
JUMPS = "quotes its prompt, 2 tokens at a time"
RANDOM = "does not repeat"
BATCH = "one batch"
ROWS_TIMED, BATCHES = 8, 40
CHEAP_BATCH = 4.0
"""Single rows that a batch of 8 costs at most where drafts have to pay."""


@attrs.frozen
class Text:
    """A kind of text, by how it is sampled."""

    name: str
    sampling: dict[str, Any]


RECITED = (
    Text(RECITES, {}),
    Text(QUOTES, {"temperature": 1.0, "top_k": 40}),
    Text(JUMPS, {"temperature": 2.0, "top_k": 40}),
)


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """Each kind of text with one stream and with 8, with and without drafts, in turns; then what a batch costs."""
    reciting = bench_model(attrs.evolve(bench.model.shape, name=f"{bench.model.shape.name}-recites", recites=WORDS))
    texts = [(reciting, RECITED), (bench.model, (Text(RANDOM, {"temperature": 1.0}),))]
    for model, kinds in texts:
        async with AsyncExitStack() as stack:
            plain: dict[str, object] = {"n_ctx": 16_384, "max_sequences": 9, "speculate": "off"}
            auto = {**plain, "speculate": "auto"}
            settings = {PLAIN: plain, AUTO: auto, DRAFT: {**auto, "draft": _small(model).path}}
            engines: dict[str, Source] = {}
            for name, each in settings.items():
                # Each in a process of its own: with the threads of three engines in one, OpenMP's wait for each other
                # without spinning, which makes a step of one token slower than any other.
                server = await stack.enter_async_context(uma_server(model, each, threads=bench.threads, label=name))
                engines[name] = server.clients[0]
            for streams in REPEATS:
                for kind in kinds if streams == 1 else kinds[:2][-1:]:
                    case = f"{streams} streams, {kind.name}" if streams > 1 else f"{ONE}, {kind.name}"
                    rng = Random(f"speculation {index} {case}")
                    for target, measures in await _case(bench, index, engines, model, kind, streams, rng):
                        emit(case, target, measures)
    emit(BATCH, f"{ROWS_TIMED} tokens", await trio.to_thread.run_sync(_batch_cost, bench.model, bench.threads))


def _small(model: BenchModel) -> BenchModel:
    """A model of the same vocabulary that knows the same text by heart, or whose guesses never hold."""
    recites = model.shape.recites
    name = "llama-small-recites" if recites else "llama-small"
    return bench_model(attrs.evolve(SMALL, name=name, vocab=model.shape.vocab, recites=recites))


async def _case(
    bench: Bench, index: int, engines: Mapping[str, Source], model: BenchModel, kind: Text, streams: int, rng: Random
) -> list[tuple[str, Measures]]:
    """The same requests to each engine, burst by burst; the first burst of each only shows it what batches cost."""
    found: list[tuple[str, Measures]] = []
    for repeat in range(bench.pick(REPEATS[streams], 1) + 1):
        prompts = [model.recital(rng) if model.shape.recites else model.prompt(rng, WORDS) for _ in range(streams)]
        for name in rotated(list(engines), index + repeat):
            requests = [
                Request(
                    id=f"{repeat} {number}",
                    token_ids=prompt,
                    sampling=SamplingParams(
                        max_tokens=bench.pick(GENERATED, 32), ignore_eos=True, seed=repeat, **kind.sampling
                    ),
                )
                for number, prompt in enumerate(prompts)
            ]
            measures = await _burst(engines[name], requests, model)
            if repeat:
                found.append((name, measures))
    return found


async def _burst(engine: Source, requests: list[Request], model: BenchModel) -> Measures:
    """Tokens a second while requests decode, all added up, what became of the drafts, and how many tokens of a text
    that is known by heart follow each other.
    """
    finished: list[Finished] = []
    texts: list[list[int]] = []

    async def read(request: Request) -> None:
        text = [*(request.token_ids or ())][-1:]
        async with engine.generate(request) as stream:
            async for event in stream:
                if isinstance(event, Token):
                    text.append(event.token_id)
                elif isinstance(event, Finished):
                    finished.append(event)
                    texts.append(text)

    async with trio.open_nursery() as nursery:
        for request in requests:
            nursery.start_soon(read, request)
    drafted = [each.metrics.speculation for each in finished if each.metrics.speculation is not None]
    measures = {
        "tokens_per_s": sum(each.metrics.tokens_per_second for each in finished),
        "drafted": sum(each.drafted for each in drafted),
        "accepted": sum(each.accepted for each in drafted),
        "saved_ms": sum(each.saved_ms for each in drafted),
    }
    if model.shape.recites:
        measures["run_tokens"] = sum(map(len, texts)) / sum(1 + model.jumps(text) for text in texts)
    return measures


def _batch_cost(model: BenchModel, threads: int) -> Measures:
    """What a sequence's next 8 tokens cost in one batch, measured in batches of one token."""
    params = ContextParams(n_ctx=2_048, n_batch=512, n_threads=threads)
    with Model.load(model.path, n_gpu_layers=0) as loaded:
        context = Context(loaded, params)
        try:
            batch = Batch(context.n_batch)
            batch.add(model.prompt(Random("batch"), 512), 0, 0, last_logits=True)
            _decode(context, batch)
            took = {size: [_timed(context, batch, model, size) for _ in range(BATCHES)] for size in (1, ROWS_TIMED)}
        finally:
            context.close()
    single, several = (median(took[size]) for size in (1, ROWS_TIMED))
    return {"single_ms": single, "batch_ms": several, "single_rows": several / single}


def _timed(context: Context, batch: Batch, model: BenchModel, size: int) -> float:
    batch.clear()
    batch.add(model.prompt(Random(size), size), 512, 0, last_logits=True, all_logits=True)
    began = time.perf_counter()
    _decode(context, batch)
    took_ms = (time.perf_counter() - began) * 1000
    context.seq_rm(0, 512, -1)
    return took_ms


def _decode(context: Context, batch: Batch) -> None:
    if (code := context.decode(batch)) != DONE:
        raise RuntimeError(f"llama_decode failed with {code}")


def checks(summary: Summary) -> list[Check]:
    """Much faster where the text repeats and batches are cheap, and as fast as without everywhere else."""

    def ratio(case: str, target: str = AUTO) -> float:
        return summary.ratio(case, target, PLAIN, "tokens_per_s")

    rows = summary.get(BATCH, f"{ROWS_TIMED} tokens", "single_rows")
    where = "" if rows < CHEAP_BATCH else f" (bar for machines where a batch of 8 costs under {CHEAP_BATCH:g} rows)"
    run = summary.get(f"{ONE}, {QUOTES}", PLAIN, "run_tokens")
    quoted = "" if math.isnan(run) else f"it quoted {run:.0f} tokens at a time"
    found = [
        Check(f"a batch of {ROWS_TIMED} tokens costs, in single rows", rows, "≤", CHEAP_BATCH),
        Check(f"1 stream that {RECITES}: tokens/s of plain{where}", ratio(f"{ONE}, {RECITES}"), "≥", 1.5, "x"),
        Check(f"1 stream that {QUOTES}: tokens/s of plain{where}", ratio(f"{ONE}, {QUOTES}"), "≥", 1.5, "x", quoted),
    ]
    others = [case for case in summary.cases if case not in (BATCH, f"{ONE}, {RECITES}", f"{ONE}, {QUOTES}")]
    found += [Check(f"{case}: tokens/s of plain", ratio(case), "≥", 0.97, "x") for case in others]
    never = f"{ONE}, {RANDOM}"
    return [*found, Check(f"{never}, {DRAFT}: tokens/s of plain", ratio(never, DRAFT), "≥", 0.97, "x")]


SCENARIO = Scenario(
    name="speculation",
    about="Prompt look-up, and a draft model of a tenth of the weights beside it: one stream and 8, a prompt of "
    f"{WORDS} tokens, {GENERATED} generated, with and without drafts. The models that recite their prompt "
    "have the same shapes; how often one goes on elsewhere is its temperature.",
    columns=("tokens_per_s", "drafted", "accepted", "saved_ms", "run_tokens", "single_ms", "batch_ms", "single_rows"),
    measure=measure,
    checks=checks,
    round_limit_s=540,
)
