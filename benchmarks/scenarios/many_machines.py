"""Two workers behind Dynamo's frontend: routing by prefix, a worker that is killed, one that is stopped, a start."""

from __future__ import annotations

import os
import signal
import time
from contextlib import AsyncExitStack
from random import Random

import trio

from benchmarks.load import burst, one, start
from benchmarks.measure import Measures, percentile
from benchmarks.models import BenchModel
from benchmarks.samples import Ask, Sample
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary, rotated
from benchmarks.targets.dynamo import Dynamo, Router, dynamo, is_installed

CONVERSATIONS, PREFIX, TURNS, ASKED, ANSWER = 8, 768, 3, 24, 16
MAX_THINKING_S = 4.0
"""Before each question, up to so long: people do not ask in step."""
LONG = 160
CELLS = 4_352
"""KV cells of a worker, which keeps nothing in host memory: half of the conversations fit, as in a fleet whose prefixes
one machine cannot hold. With space for all of them, round robin has each everywhere after two turns."""
KILLED, STOPPED = "SIGKILL in mid-stream", "SIGTERM in mid-stream, no migration"
BUILT_IN, STARTS = "a worker starts, built-in model", ("UMA, first start", "UMA, later start")
STARTED = "start_to_registered_ms"
"""The first has no cache folder: it tries this CPU, and makes the frontend's model directory."""
ROUTERS: tuple[Router, ...] = ("kv", "round-robin")


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """Nothing where Dynamo is not installed."""
    if not is_installed():
        return
    for router in rotated(ROUTERS, index):
        async with AsyncExitStack() as stack:
            target = await _opened(stack, bench, router)
            emit("8 conversations", target.name, await _converse(target, bench.model, Random(f"many {index}")))
    # Without migration, a stream that ends whole after SIGTERM was finished by the worker that was told to stop.
    for name, number, limit in ((KILLED, signal.SIGKILL, 3), (STOPPED, signal.SIGTERM, 0)):
        async with AsyncExitStack() as stack:
            target = await _opened(stack, bench, "kv", migration_limit=limit)
            emit(name, target.name, await _lose_a_worker(target, bench.model, number))
    async with AsyncExitStack() as stack:
        target = await _opened(stack, bench, "kv", workers=1)
        emit("a worker is added", target.name, await _add_a_worker(target, bench.model))
    async with dynamo(None, {}, threads=None, workers=2, router="kv") as target:
        for start_name, started_ms in zip(STARTS, target.started_ms, strict=True):
            emit(BUILT_IN, start_name, {STARTED: started_ms})


async def _opened(
    stack: AsyncExitStack, bench: Bench, router: Router, workers: int = 2, migration_limit: int = 3
) -> Dynamo:
    threads = max(1, bench.threads // 2)
    settings = {"n_ctx": CELLS, "max_sequences": 16, "cache_ram_mb": 0}
    target = await stack.enter_async_context(
        dynamo(bench.model, settings, threads=threads, workers=workers, router=router, migration_limit=migration_limit)
    )
    # The frontend hears of a worker some time after its card is there; requests at once go to different workers.
    while len(target.answered_by) < workers:
        await burst(target, [Ask(bench.model.prompt(Random(), 32), 8) for _ in range(workers)])
    return target


async def _converse(target: Dynamo, model: BenchModel, rng: Random) -> Measures:
    """Conversations begin in pairs, so that each worker has half. Then all go on at the same time, each with a question
    after its last answer, which it thinks about for a while.
    """
    said = [model.prompt(rng, PREFIX) for _ in range(CONVERSATIONS)]
    for first in range(0, CONVERSATIONS, 2):
        await burst(target, [Ask(each, ANSWER) for each in said[first : first + 2]])
    later: list[Sample] = []
    prompts = 0

    async def go_on(so_far: tuple[int, ...], thinking: Random) -> None:
        nonlocal prompts
        for _ in range(TURNS):
            await trio.sleep(thinking.uniform(0, MAX_THINKING_S))
            so_far += model.prompt(thinking, ASKED)
            later.append(await one(target, Ask(so_far, ANSWER)))
            prompts += len(so_far)

    async with trio.open_nursery() as nursery:
        for number, each in enumerate(said):
            nursery.start_soon(go_on, each, Random(f"{rng.random()} {number}"))
    return {
        "ttft_p50_ms": percentile([each.ttft_ms for each in later], 0.5),
        "ttft_p95_ms": percentile([each.ttft_ms for each in later], 0.95),
        "cached_share": sum(each.cached_tokens for each in later) / prompts,
        "failed": sum(each.error is not None for each in later),
        "start_to_registered_ms": max(target.started_ms),
    }


async def _lose_a_worker(target: Dynamo, model: BenchModel, number: signal.Signals) -> Measures:
    """Eight streams run on two workers; one worker gets a signal once all have begun."""
    rng = Random(f"{number}")
    asks = [Ask(model.prompt(rng, 32), LONG) for _ in range(CONVERSATIONS)]
    out_s = float("nan")
    async with trio.open_nursery() as nursery:
        samples = [start(nursery, target, ask) for ask in asks]
        for sample in samples:
            await sample.reached(4)
        os.kill(target.workers[0].pid, number)
        told = time.perf_counter()
        if number == signal.SIGTERM:
            await target.fewer_than(len(target.workers))
            out_s = time.perf_counter() - told
    ended_whole = sum(each.error is None for each in samples)
    after = await burst(target, [Ask(model.prompt(rng, 32), 8)])
    measures: Measures = {
        "ended_whole": ended_whole,
        "of": len(samples),
        "failed": sum(bool(each.error) for each in after),
    }
    return measures if number == signal.SIGKILL else {**measures, "out_of_routing_s": out_s}


async def _add_a_worker(target: Dynamo, model: BenchModel) -> Measures:
    """Eight streams run on the only worker; from then on new requests come until the added worker answers one."""
    rng, failed = Random("added"), 0
    async with trio.open_nursery() as nursery:
        samples = [start(nursery, target, Ask(model.prompt(rng, 32), LONG)) for _ in range(CONVERSATIONS)]
        for sample in samples:
            await sample.reached(4)
        await target.add_worker()
        listed = time.perf_counter()
        while len(target.answered_by) < 2:
            failed += (await one(target, Ask(model.prompt(rng, 32), 4))).error is not None
        answered_s = time.perf_counter() - listed
    return {
        "ended_whole": sum(each.error is None for each in samples),
        "of": len(samples),
        "failed": failed,
        "start_to_registered_ms": target.started_ms[-1],
        "registered_to_answer_s": answered_s,
    }


def checks(summary: Summary) -> list[Check]:
    """What must hold of two workers."""
    kv, usual = (f"Dynamo, 2 x UMA, {router}" for router in ROUTERS)
    case = "8 conversations"
    faster = summary.ratio(case, usual, kv, "ttft_p50_ms")
    found = [
        Check("TTFT p50 of conversations, round robin's of the KV router's", faster, "≥", 1.5, "x"),
        *(
            Check(f"{BUILT_IN}, until it is registered: {each}", summary.get(BUILT_IN, each, STARTED), "≤", 3_000, "ms")
            for each in STARTS
        ),
    ]
    for lost in (KILLED, STOPPED):
        share = summary.get(lost, kv, "ended_whole") / summary.get(lost, kv, "of")
        found.append(Check(f"{lost}: share of streams that end whole", share, "≥", 1))
    added = f"Dynamo, 1 x UMA, {ROUTERS[0]}"
    whole = summary.get("a worker is added", added, "ended_whole") / summary.get("a worker is added", added, "of")
    found.append(Check("A worker is added: share of streams that end whole", whole, "≥", 1))
    out = summary.get(STOPPED, kv, "out_of_routing_s")
    return [*found, Check("SIGTERM: until the worker is out of routing", out, "≤", 1, "s")]


SCENARIO = Scenario(
    name="many_machines",
    about="Two workers behind Dynamo's frontend on one machine, half the cores each (left out where Dynamo is not "
    f"installed): {CONVERSATIONS} conversations with {PREFIX} tokens each go on side by side, with the KV router "
    "and round robin; then a worker is killed, stopped, or added, while eight streams run. Workers that start on the "
    "built-in model.",
    columns=("ttft_p50_ms", "ttft_p95_ms", "cached_share", "ended_whole", "of", "out_of_routing_s", "failed",
             "start_to_registered_ms", "registered_to_answer_s"),
    measure=measure,
    checks=checks,
    round_limit_s=500,
)  # fmt: skip
