"""Sharing: several programs with a conversation each, all of them with one system prompt, at the same time.

What is it worth that they share one model? Beside one UMA and one llama-server for all of them there is what people do
without either: each program with a llama-server of its own, which has weights of its own and reads the
prompt for itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random

import trio

from benchmarks.load import one, warm_up
from benchmarks.measure import Measures, latency, pss_mb, thread_cpu_s, throughput
from benchmarks.samples import Ask, Sample
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary, rotated
from benchmarks.targets.base import Target
from benchmarks.targets.contenders import OURS, contenders, open_contender
from benchmarks.targets.llama_server import LAYOUTS, llama_server

PROGRAMS, TURNS = 4, 4
SYSTEM, QUESTION, ANSWER = 512, 48, 48
N_CTX = 8_192
EACH = "llama-server each"
CASE = f"{PROGRAMS} programs"


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """The same conversations on one server of each kind, and on a server for each program."""
    kinds = [*contenders(bench, index), *([EACH] if bench.has_llama_server else [])]
    for kind in rotated(kinds, index):
        async with _servers(kind, bench) as servers:
            emit(CASE, kind, await _programs(servers, bench, index))


@asynccontextmanager
async def _servers(kind: str, bench: Bench) -> AsyncIterator[list[Target]]:
    """One server, or one for each program with its share of the cells."""
    async with AsyncExitStack() as stack:
        if kind == EACH:
            servers: list[Target] = []
            for _ in range(PROGRAMS):
                own = llama_server(
                    bench.model,
                    slots=1,
                    n_ctx=N_CTX // PROGRAMS,
                    layout=next(iter(LAYOUTS)),
                    threads=bench.threads,
                )
                servers.append(await stack.enter_async_context(own))
                await warm_up(servers[-1], bench.model)
            yield servers
        else:
            yield [await stack.enter_async_context(open_contender(kind, bench, n_ctx=N_CTX, slots=PROGRAMS))]


async def _programs(servers: Sequence[Target], bench: Bench, index: int) -> Measures:
    """All programs at once, each asking its next question as soon as it has its answer."""
    system = bench.model.prompt(Random(f"sharing {index}"), SYSTEM)
    prompts_tokens = 0
    samples: list[Sample] = []

    async def program(number: int) -> None:
        nonlocal prompts_tokens
        rng = Random(f"sharing {index} {number}")
        conversation = system
        for _ in range(bench.pick(TURNS, 2)):
            conversation += bench.model.prompt(rng, QUESTION)
            prompts_tokens += len(conversation)
            sample = await one(servers[number % len(servers)], Ask(conversation, ANSWER))
            samples.append(sample)
            conversation += tuple(sample.token_ids)

    before_s = _cpu_s(servers)
    async with trio.open_nursery() as nursery:
        for number in range(PROGRAMS):
            nursery.start_soon(program, number)
    cached = sum(sample.cached_tokens for sample in samples)
    return {
        "all_done_s": throughput(samples)["wall_s"],
        "tokens_per_s": throughput(samples)["tokens_per_s"],
        "read_tokens": prompts_tokens - cached,
        "cpu_s": _cpu_s(servers) - before_s,
        "pss_mb": sum(pss_mb(server.pid) for server in servers),
        "failed": sum(sample.error is not None for sample in samples),
        **latency(samples),
    }


def _cpu_s(servers: Sequence[Target]) -> float:
    return sum(sum(thread_cpu_s(server.pid).values()) for server in servers)


def checks(summary: Summary) -> list[Check]:
    """One server for all is faster, and reads what is common once."""

    def times(other: str, measure: str) -> float:
        return summary.get(CASE, other, measure) / summary.get(CASE, OURS, measure)

    return [
        Check("sharing: time of a llama-server for each program ÷ UMA's", times(EACH, "all_done_s"), "≥", 2, "x"),
        Check("sharing: first token p95 of a server for each ÷ UMA's", times(EACH, "ttft_p95_ms"), "≥", 1.5, "x"),
        Check(
            "sharing: time of one llama-server's better layout ÷ UMA's",
            min(times(f"llama-server {layout}", "all_done_s") for layout in LAYOUTS),
            "≥",
            1.2,
            "x",
        ),
    ]


SCENARIO = Scenario(
    name="sharing",
    about=f"{PROGRAMS} programs at once, each with a conversation of {TURNS} turns ({QUESTION} new tokens, {ANSWER} "
    f"generated) behind one common system prompt of {SYSTEM} tokens: on one server, and on a server for each program.",
    columns=("all_done_s", "tokens_per_s", "ttft_p50_ms", "ttft_p95_ms", "read_tokens", "cpu_s", "pss_mb"),
    measure=measure,
    checks=checks,
    round_limit_s=240,
)
