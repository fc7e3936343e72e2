"""Kinds of models: which prompt tokens are read again, and what memory is taken, with each kind of model memory.

Tokens are counted: those of prompts that were not from cache, as each server tells. So a busy machine does not matter
to them; two figures are times, and are only to be read with those of the same run. Every server is asked over HTTP;
conversations go through the chat template, as programs ask.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random

import attrs
import trio

from benchmarks.conversations import Conversation, chat, words
from benchmarks.kinds import KINDS, Kind, gemma, kind_model
from benchmarks.load import burst, one
from benchmarks.measure import Measures, pss_mb, rss_mb, throughput
from benchmarks.reference import fetch_model
from benchmarks.samples import Ask
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary
from benchmarks.scenarios.storm import storm
from benchmarks.targets.contenders import DEFAULTS, OURS, contenders
from benchmarks.targets.llama_server import LAYOUTS, LlamaServer, llama_server
from benchmarks.targets.uma import uma_both

GEMMA, LARGE, AT_REST = "gemma-3-270m", "qwen35, large states", "SmolLM2 at rest"
QUICK_KINDS: tuple[Kind, ...] = ("gemma3", "qwen35")
PEER = "llama-server split"
"""What it reads again hardly depends on its layout: where time counts, it is asked in both, else in this."""
SIBLINGS, COMMON, OWN = 8, 1_024, 16
WARM_BURSTS = 3
"""Of siblings that find what they have in common: the fastest is the least disturbed."""
TURNS, SYSTEM, QUESTION, ANSWER = 6, 400, 51, 48
ASKED_AGAIN = 700
PROGRAMS = 3
CHAIN_TURNS, CHAIN_OPENING, CHAIN_RESULT, CHAIN_ANSWER = 20, 8_000, 190, 16
CHAIN_BESIDE = 2
SLOTS, N_CTX = 8, 8 * 2_048
"""Of llama-server: a place for each sibling, each with cells for a whole conversation in the split layout too."""
PLAIN_TOKENS = range(1_000, 40_000)
"""Ids that are ordinary text in every vocabulary here."""


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """All kinds on each target, each with a server of its own."""
    models: dict[str, Callable[[], Path]] = {kind: partial(kind_model, kind) for kind in bench.pick(KINDS, QUICK_KINDS)}
    models |= bench.pick({GEMMA: gemma}, {})
    for name, model in models.items():
        path = model()
        for target in contenders(bench, index):
            if name != GEMMA and target not in (OURS, PEER):
                continue
            rng = Random(f"kinds {index} {name}")
            async with _server(target, bench, path) as server:
                measures = await _cases(server, rng)
                if target == OURS:
                    measures |= await _ours(server, bench, rng, has_storm=name in QUICK_KINDS)
            if target == OURS:
                measures["restart"] = await _after_restart(bench, path)
            emit(name, target, measures)
    async with _server(OURS, bench, kind_model("qwen35", is_large=True)) as server:
        emit(LARGE, OURS, {"start_rss_mb": rss_mb(server.pid)})
    await _at_rest(bench, emit)


@asynccontextmanager
async def _server(target: str, bench: Bench, path: Path, **settings: object) -> AsyncIterator[LlamaServer]:
    model = attrs.evolve(bench.model, path=path)
    if target == OURS:
        async with uma_both(model, settings, threads=bench.default_threads, label=DEFAULTS) as (_, over_http):
            yield over_http
    else:
        layout = target.rpartition(" ")[2]
        async with llama_server(model, slots=SLOTS, n_ctx=N_CTX, layout=layout, threads=bench.threads) as server:
            yield server


async def _cases(server: LlamaServer, rng: Random) -> Measures:
    """What every server is asked."""
    start_mb = rss_mb(server.pid)
    common = _tokens(rng, COMMON)
    cold, _ = await _siblings(server, rng, common)
    warm = [await _siblings(server, rng, common) for _ in range(WARM_BURSTS)]
    return {
        "siblings_cold": cold,
        "siblings_warm": max(read for read, _ in warm),
        "warm_s": min(seconds for _, seconds in warm),
        "think": await _thinking(server, rng),
        "three": await _three(server, rng),
        "again": await _again(server, rng),
        "start_rss_mb": start_mb,
    }


async def _ours(server: LlamaServer, bench: Bench, rng: Random, *, has_storm: bool) -> Measures:
    """What takes another server half an hour, or is a claim about UMA alone."""
    measures: Measures = {"chain_percent": await _chain(server, bench, rng)}
    if has_storm:
        measures["worst_gap_ms"] = (await storm(server, bench, rng))["worst_gap_ms"]
    return measures


def _tokens(rng: Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(PLAIN_TOKENS, k=count))


async def _siblings(server: LlamaServer, rng: Random, common: tuple[int, ...]) -> tuple[float, float]:
    """Requests that begin alike, at once: tokens read, and seconds."""
    samples = await burst(server, [Ask(common + _tokens(rng, OWN), 16) for _ in range(SIBLINGS)])
    read = sum(COMMON + OWN - sample.cached_tokens for sample in samples)
    return read, throughput(samples)["wall_s"]


async def _thinking(server: LlamaServer, rng: Random) -> float:
    program = Conversation(server, rng, words(rng, SYSTEM), answer=ANSWER, thinks=True)
    for _ in range(TURNS):
        await program.turn(QUESTION)
    return program.read


async def _three(server: LlamaServer, rng: Random) -> float:
    """Programs of one system prompt that ask in turn."""
    system = words(rng, SYSTEM)
    programs = [Conversation(server, rng, system, answer=ANSWER) for _ in range(PROGRAMS)]
    for _ in range(TURNS):
        for program in programs:
            await program.turn(QUESTION)
    return sum(program.read for program in programs)


async def _again(server: LlamaServer, rng: Random) -> float:
    """One prompt twice: tokens read of the second."""
    messages = [{"role": "user", "content": words(rng, ASKED_AGAIN)}]
    await chat(server, messages, tokens=ANSWER)
    return (await chat(server, messages, tokens=ANSWER)).read


async def _after_restart(bench: Bench, path: Path) -> float:
    """The same with a new server, which has the cache folder of the one before."""
    messages = [{"role": "user", "content": words(Random("restart"), ASKED_AGAIN)}]
    with tempfile.TemporaryDirectory(prefix="uma-bench-") as folder:
        async with _server(OURS, bench, path, cache_dir=folder) as server:
            await chat(server, messages, tokens=ANSWER)
        async with _server(OURS, bench, path, cache_dir=folder) as server:
            return (await chat(server, messages, tokens=ANSWER)).read


async def _chain(server: LlamaServer, bench: Bench, rng: Random) -> float:
    """An agent with a long system prompt and a tool's result each turn, beside two other programs: the share of its
    prompt tokens that are from cache, from the second turn on, in percent.
    """
    agent = Conversation(server, rng, words(rng, bench.pick(CHAIN_OPENING, 1_000)), answer=CHAIN_ANSWER)
    others = [
        Conversation(server, Random(seed), words(rng, SYSTEM), answer=CHAIN_ANSWER) for seed in range(CHAIN_BESIDE)
    ]
    await agent.turn(QUESTION)
    first_read, first_sent = agent.read, agent.sent
    for _ in range(bench.pick(CHAIN_TURNS, 3) - 1):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(agent.turn, CHAIN_RESULT, "tool")
            for other in others:
                nursery.start_soon(other.turn, QUESTION)
    return 100 * (1 - (agent.read - first_read) / (agent.sent - first_sent))


async def _at_rest(bench: Bench, emit: Emit) -> None:
    """Memory of UMA with its defaults, and of a llama-server with as many cells, both after one request."""
    model = attrs.evolve(bench.model, path=fetch_model("smollm2"))
    ask = Ask(_tokens(Random("at rest"), 32), 8)
    async with uma_both(model, {}, threads=bench.default_threads, label=DEFAULTS) as (by_socket, over_http):
        await one(over_http, ask)
        n_ctx = int((await by_socket.metrics())["kv_cells_total"])
        emit(AT_REST, OURS, {"start_rss_mb": rss_mb(over_http.pid), "pss_mb": pss_mb(over_http.pid)})
    if bench.has_llama_server:
        layout = next(iter(LAYOUTS))
        async with llama_server(model, slots=4, n_ctx=n_ctx, layout=layout, threads=bench.threads) as server:
            await one(server, ask)
            measures = {"start_rss_mb": rss_mb(server.pid), "pss_mb": pss_mb(server.pid)}
            emit(AT_REST, server.name, measures)


def checks(summary: Summary) -> list[Check]:
    """Bars that every kind is under, by the kind that is worst."""
    counts = {
        "siblings_cold": ("eight siblings, cold: tokens read", 1_250),
        "siblings_warm": ("eight siblings, warm: tokens read", 200),
        "think": ("six turns that think: tokens read", 950),
        "three": ("three programs of one system prompt: tokens read", 1_700),
        "again": ("the same prompt again: tokens read", 64),
        "restart": ("the same prompt after a restart: tokens read", 64),
    }
    ours_s, warm_s = summary.get(GEMMA, OURS, "warm_s"), summary.best(GEMMA, "llama-server", "warm_s", "low")
    at_rest = [summary.get(AT_REST, target, "pss_mb") for target in (OURS, f"llama-server {next(iter(LAYOUTS))}")]
    return [
        *(_of_all(summary, measure, claim, bar) for measure, (claim, bar) in counts.items()),
        _of_all(summary, "chain_percent", "agent's chain: prompt tokens from cache", 97, "%"),
        _of_all(summary, "worst_gap_ms", "storm on a hybrid and on a window: the stream's worst gap", 120, "ms"),
        Check(f"{GEMMA}, warm siblings: time of llama-server's", ours_s / warm_s, "≤", 1, "x"),
        Check(f"{LARGE}: memory at start", summary.get(LARGE, OURS, "start_rss_mb"), "≤", 300, "MiB"),
        Check(f"{GEMMA}: memory at start", summary.get(GEMMA, OURS, "start_rss_mb"), "≤", 700, "MiB"),
        Check(f"{AT_REST}: memory of llama-server's with as many cells", at_rest[0] / at_rest[1], "≤", 1.15, "x"),
    ]  # fmt: skip


def _of_all(summary: Summary, measure: str, claim: str, bar: float, unit: str = "") -> Check:
    """A claim about the kind that is furthest from it."""
    is_share = measure.endswith("_percent")
    found = {case: summary.get(case, OURS, measure) for case in summary.cases}
    known = {case: value for case, value in found.items() if not math.isnan(value)}
    if not known:
        return Check(claim, math.nan, "≥" if is_share else "≤", bar, unit)
    worst = (min if is_share else max)(known, key=lambda case: known[case])
    peer = summary.best(worst, "llama-server", measure, "high" if is_share else "low")
    beside = worst if math.isnan(peer) else f"{worst}, where llama-server has {peer:,.0f}"
    return Check(claim, known[worst], "≥" if is_share else "≤", bar, unit, beside)


SCENARIO = Scenario(
    name="kinds",
    about=f"Tokens of prompts that are not from cache, with each kind of memory: {SIBLINGS} requests with {COMMON:,} "
    f"tokens in common, cold and warm; {TURNS} turns whose thinking is not sent back; {PROGRAMS} programs with one "
    f"system prompt, {TURNS} turns each; a prompt again, and after a restart; an agent's {CHAIN_TURNS} turns, from "
    f"{CHAIN_OPENING:,} tokens on, beside {CHAIN_BESIDE} programs; and a stream's worst gap in a storm of prompts.",
    columns=(
        "siblings_cold", "siblings_warm", "warm_s", "think", "three", "again", "restart", "chain_percent",
        "worst_gap_ms", "start_rss_mb", "pss_mb",
    ),
    measure=measure,
    checks=checks,
    round_limit_s=3_600,
)  # fmt: skip
