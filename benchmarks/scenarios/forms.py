"""The form of an answer: what a grammar, log probabilities and several answers cost, against free text."""

from __future__ import annotations

import time
from random import Random
from statistics import mean, median
from typing import Any

import trio

from benchmarks.load import burst, finish_all
from benchmarks.measure import Measures, throughput
from benchmarks.samples import Ask
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary, rotated
from benchmarks.targets.base import Target
from benchmarks.targets.contenders import UMA, contenders, open_contender
from uma import Request, RuntimeConfig, SamplingParams, open_engine
from uma.types import Grammar, Source, Token

STREAMS, PROMPT, GENERATED = 8, 64, 192
ANSWERS, LONG_PROMPT, ANSWER_TOKENS = 8, 1_024, 16
TURNS = 3
GAP_TURNS = 15
"""Worst gaps measured of each kind, in turn; their median counts, for a machine has hiccups of its own."""
PLAIN, LARGE = "without", "a schema of 100 properties"
SERVED = f"{STREAMS} streams of a server, JSON schema"
FIELDS = ("customer_reference", "delivery_address", "ordered_quantity", "payment_reference", "special_instructions")


def schema(round_index: int, properties: tuple[str, ...] = FIELDS) -> dict[str, Any]:
    """A list of objects with fixed keys and short free values. Each round has another one, so that it is compiled."""
    one = {name: {"type": "string", "minLength": 4, "maxLength": 12 + round_index} for name in properties}
    item = {"type": "object", "properties": one, "required": list(properties), "additionalProperties": False}
    return {"type": "array", "items": item, "minItems": 50}


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """Each form with 8 streams and with one, then the first mask of a large schema, then several answers."""
    config = RuntimeConfig(model=str(bench.model.path), n_ctx=16_384, threads=bench.threads, max_sequences=9)
    rng = Random(f"forms {index}")
    async with open_engine(config) as engine:
        await _rate(engine, bench, rng, STREAMS, {})
        for streams in (STREAMS, 1):
            case = f"{streams} streams" if streams > 1 else "1 stream"
            for form, measures in (await _forms(engine, bench, rng, streams, index)).items():
                emit(case, form, measures)
        for form, measures in (await _gaps(engine, bench, rng, index)).items():
            emit("first mask", form, measures)
        emit("several answers", "n: 8", await _answers(engine, bench, rng, together=True))
    unshared = RuntimeConfig(
        model=str(bench.model.path),
        n_ctx=16_384,
        threads=bench.threads,
        max_sequences=9,
        cache_tokens=0,
        cache_ram_mb=0,
    )
    async with open_engine(unshared) as engine:
        emit("several answers", "8 requests, nothing shared", await _answers(engine, bench, rng, together=False))
    for kind in contenders(bench, index):
        async with open_contender(kind, bench, n_ctx=16_384, slots=STREAMS) as target:
            emit(SERVED, target.name, await _served(target, bench, rng, index))


async def _forms(engine: Source, bench: Bench, rng: Random, streams: int, index: int) -> dict[str, Measures]:
    """Each form in turns with the others, another one first each time: the machine drifts by more than they cost."""
    found: dict[str, list[Measures]] = {"free text": [], "JSON schema": [], "logprobs: 5": []}
    for turn in range(bench.pick(TURNS, 1)):
        grammar = Grammar(json_schema=schema(TURNS * index + turn))
        forms: dict[str, dict[str, Any]] = {"JSON schema": {"grammar": grammar}, "logprobs: 5": {"logprobs": 5}}
        for form in rotated(list(found), index + turn):
            found[form].append(await _rate(engine, bench, rng, streams, forms.get(form, {})))
    return {form: {key: mean(each[key] for each in runs) for key in runs[0]} for form, runs in found.items()}


async def _served(target: Target, bench: Bench, rng: Random, index: int) -> Measures:
    """Streams of a server under a schema that it has not seen, as its clients get them."""
    asks = [
        Ask(bench.model.prompt(rng, PROMPT), bench.pick(GENERATED, 48), json_schema=schema(index))
        for _ in range(STREAMS)
    ]
    samples = await burst(target, asks)
    if failed := [sample.error for sample in samples if sample.error]:
        raise RuntimeError(f"{target.name}: {failed[0]}")
    return throughput(samples)


async def _rate(engine: Source, bench: Bench, rng: Random, streams: int, form: dict[str, Any]) -> Measures:
    """Tokens a second from the first request to the last event; what is forced counts as what is sampled does."""
    requests = [
        _request(bench.model.prompt(rng, PROMPT), str(number), bench.pick(GENERATED, 48), **form)
        for number in range(streams)
    ]
    began = time.perf_counter()
    finished = await finish_all(engine, requests)
    wall_s = time.perf_counter() - began
    tokens = sum(each.usage.completion_tokens for each in finished)
    batches = max(each.metrics.decode_iterations for each in finished)
    return {"tokens_per_s": tokens / wall_s, "tokens": tokens, "batches": batches, "wall_s": wall_s}


async def _gaps(engine: Source, bench: Bench, rng: Random, index: int) -> dict[str, Measures]:
    """In turn, the other one first each time. No schema comes twice."""
    found: dict[str, list[float]] = {PLAIN: [], LARGE: []}
    for turn in range(bench.pick(GAP_TURNS, 2)):
        names = tuple(f"property_number_{number}_of_round_{index}_{turn}" for number in range(100))
        forms = {PLAIN: None, LARGE: Grammar(json_schema=schema(index, names))}
        for form in rotated(list(found), turn):
            found[form].append(await _gap(engine, bench, rng, forms[form]))
    return {form: {"worst_gap_ms": median(gaps), "worst_of_all_ms": max(gaps)} for form, gaps in found.items()}


async def _gap(engine: Source, bench: Bench, rng: Random, grammar: Grammar | None) -> float:
    """The worst gap, ms, of one stream while another request comes, with or without a grammar that was never seen."""
    gaps: list[float] = []
    async with trio.open_nursery() as nursery:
        request = _request(bench.model.prompt(rng, PROMPT), "stream", bench.pick(GENERATED, 48))
        async with engine.generate(request) as stream:
            last, count = 0.0, 0
            async for event in stream:
                now = time.perf_counter()
                if isinstance(event, Token):
                    gaps.append(now - last if last else 0.0)
                    last, count = now, count + 1
                if count == 16:
                    other = _request(bench.model.prompt(rng, PROMPT), "other", 16, grammar=grammar)
                    nursery.start_soon(finish_all, engine, [other])
    return max(gaps) * 1000


async def _answers(engine: Source, bench: Bench, rng: Random, *, together: bool) -> Measures:
    prompt = bench.model.prompt(rng, LONG_PROMPT)
    count = 1 if together else ANSWERS
    prompts = [prompt] if together else [bench.model.prompt(rng, LONG_PROMPT) for _ in range(count)]
    requests = [
        _request(each, str(number), ANSWER_TOKENS, n=ANSWERS if together else 1) for number, each in enumerate(prompts)
    ]
    began = time.perf_counter()
    await finish_all(engine, requests)
    return {"wall_s": time.perf_counter() - began}


def _request(prompt: tuple[int, ...], id: str, max_tokens: int, **form: Any) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=1, seed=1, ignore_eos="grammar" not in form, **form)
    return Request(id=id, token_ids=prompt, sampling=params)


def checks(summary: Summary) -> list[Check]:
    """A form costs next to nothing, or saves."""

    def ratio(case: str, form: str) -> float:
        return summary.get(case, form, "tokens_per_s") / summary.get(case, "free text", "tokens_per_s")

    # To a tenth of a millisecond: both read the same prompt, and differ by microseconds.
    gaps = [round(summary.get("first mask", each, "worst_gap_ms"), 1) for each in (LARGE, PLAIN)]
    walls = [summary.get("several answers", each, "wall_s") for each in ("8 requests, nothing shared", "n: 8")]
    return [
        Check("8 streams under a JSON schema: tokens/s of free text", ratio("8 streams", "JSON schema"), "≥", 1.0, "x"),
        Check("1 stream under a JSON schema: tokens/s of free text", ratio("1 stream", "JSON schema"), "≥", 1.3, "x"),
        Check(
            "8 streams of a server under a JSON schema: tokens/s of llama-server",
            summary.best(SERVED, UMA, "tokens_per_s", "high")
            / summary.best(SERVED, "llama-server", "tokens_per_s", "high"),
            "≥",
            1.3,
            "x",
        ),
        Check("8 streams with logprobs: 5: tokens/s without", ratio("8 streams", "logprobs: 5"), "≥", 0.95, "x"),
        Check(
            "first mask of 100 properties: another stream's worst gap, of that without",
            gaps[0] / gaps[1],
            "≤",
            1.0,
            "x",
        ),
        Check("n: 8 on 1,024 tokens: times faster than eight requests", walls[0] / walls[1], "≥", 5, "x"),
    ]


SCENARIO = Scenario(
    name="forms",
    about=f"{STREAMS} streams and one, {GENERATED} tokens each: free text, a JSON schema with fixed keys, log "
    f"probabilities; a stream beside a schema of 100 properties seen for the first time; {ANSWERS} answers to a prompt "
    f"of {LONG_PROMPT:,} tokens; {STREAMS} streams of each server under the same schema.",
    columns=("tokens_per_s", "tokens", "batches", "worst_gap_ms", "worst_of_all_ms", "wall_s"),
    measure=measure,
    checks=checks,
    round_limit_s=400,
)
