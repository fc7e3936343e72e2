"""HTTP: what it costs beside UMA's own socket, and how UMA over HTTP compares with llama-server, by the same client.

UMA's socket and its HTTP are two ways to one server process, so that nothing but the way differs. `llama_decode` with
one `send` for each token, the least that a server over HTTP does, takes its turns beside their streams.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from random import Random
from statistics import median

import trio

from benchmarks.load import burst, one, start, warm_up
from benchmarks.measure import rss_mb
from benchmarks.samples import Ask
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary, by_decode_alone, rotated
from benchmarks.scenarios.prefix import COMMON
from benchmarks.scenarios.prefix import together as share_prefix
from benchmarks.scenarios.storm import N_CTX as STORM_N_CTX
from benchmarks.scenarios.storm import SLOTS, storm
from benchmarks.scenarios.throughput import CELLS_A_STREAM, Burst, in_turn, least_tokens, serve
from benchmarks.targets.base import Target
from benchmarks.targets.contenders import DEFAULTS, open_contender
from benchmarks.targets.llama_server import LAYOUTS, LlamaServer
from benchmarks.targets.raw import raw_http
from benchmarks.targets.uma import Uma, uma_both

SOCKET, HTTP, PEER, BARE = "UMA socket", "UMA HTTP", "llama-server", "raw over HTTP"
STREAMS = (1, 8, 32)
FIRST_PROMPT, FIRST_REPEATS = 64, 40
FIRST_CASE = f"first token, {FIRST_PROMPT} tokens in"
OPEN, COMPUTED = 1_000, 64
OPEN_CASE = f"{OPEN:,} streams open, {COMPUTED} computed"
OPEN_N_CTX = 65_536
"""UMA's only option here: more than what `OPEN_TOKENS` take in all places, or streams would make place for each other.
The places are those it has by itself."""
OPEN_TOKENS = 512
"""So many that none of the first streams ends while the others come."""


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """All cases, one after another."""
    for streams in STREAMS:
        await _throughput(bench, index, streams, emit)
    await _first_token(bench, index, emit)
    await _storm_and_prefix(bench, index, emit)
    await _open_streams(bench, index, emit)


@asynccontextmanager
async def _uma(bench: Bench) -> AsyncIterator[tuple[Uma, LlamaServer]]:
    async with uma_both(bench.model, {}, threads=bench.default_threads, label=DEFAULTS) as (by_socket, by_http):
        await warm_up(by_socket, bench.model)
        await warm_up(by_http, bench.model)
        yield by_socket, by_http


async def _throughput(bench: Bench, index: int, streams: int, emit: Emit) -> None:
    n_ctx = streams * CELLS_A_STREAM
    async with AsyncExitStack() as stack:
        targets: list[Target] = [*await stack.enter_async_context(_uma(bench))]
        for kind in _peers(bench):
            peer = open_contender(kind, bench, n_ctx=n_ctx, slots=streams)
            targets.append(await stack.enter_async_context(peer))
        for layout in LAYOUTS:
            bare = raw_http(bench.model, streams=streams, n_ctx=n_ctx, layout=layout, threads=bench.threads)
            targets.append(await stack.enter_async_context(bare))
        ask: dict[str, Burst] = {target.name: partial(serve, target) for target in rotated(targets, index)}
        rng = Random(f"http {index} {streams}")
        found = await in_turn(ask, streams, bench.model, rng, least_tokens(bench, streams))
    for name, measures in found:
        emit(_streams_case(streams), name, measures)


def _peers(bench: Bench) -> list[str]:
    return [f"{PEER} {layout}" for layout in LAYOUTS if bench.has_llama_server]


def _streams_case(streams: int) -> str:
    return f"{streams} streams" if streams > 1 else "1 stream"


async def _first_token(bench: Bench, index: int, emit: Emit) -> None:
    rng = Random(f"http first token {index}")
    async with _uma(bench) as (by_socket, by_http):
        targets: list[Target] = [by_socket, by_http]
        took: dict[str, list[float]] = {target.name: [] for target in targets}
        for repeat in range(bench.pick(FIRST_REPEATS, 5)):
            for target in rotated(targets, repeat):
                ask = Ask(bench.model.prompt(rng, FIRST_PROMPT), 2)
                took[target.name].append((await one(target, ask)).ttft_ms)
    for name, every_ms in took.items():
        emit(FIRST_CASE, name, {"ttft_p50_ms": median(every_ms), "ttft_worst_ms": max(every_ms)})


async def _storm_and_prefix(bench: Bench, index: int, emit: Emit) -> None:
    async with _uma(bench) as (_, by_http):
        await _storm_then_prefix(by_http, bench, index, emit)
    for kind in _peers(bench):
        async with open_contender(kind, bench, n_ctx=STORM_N_CTX, slots=SLOTS) as peer:
            await _storm_then_prefix(peer, bench, index, emit)


async def _storm_then_prefix(target: Target, bench: Bench, index: int, emit: Emit) -> None:
    rng = Random(f"http storm {index} {target.name}")
    emit("storm", target.name, await storm(target, bench, rng))
    common = bench.model.prompt(rng, COMMON)
    emit("shared prefix, cold", target.name, await share_prefix(target, bench, rng, common))


async def _open_streams(bench: Bench, index: int, emit: Emit) -> None:
    rng = Random(f"http open {index}")
    settings = {"n_ctx": OPEN_N_CTX}
    async with uma_both(bench.model, settings, threads=bench.default_threads) as (by_socket, by_http):
        # What computing takes, and what buffers grow to, is there before the streams that wait are counted.
        await burst(by_http, [Ask(bench.model.prompt(rng, 16), 8) for _ in range(COMPUTED)])
        async with trio.open_nursery() as nursery:
            running = [start(nursery, by_http, _long(bench, rng)) for _ in range(COMPUTED)]
            for sample in running:
                await sample.reached(4)
            before_mb = rss_mb(by_http.pid)
            for _ in range(OPEN - COMPUTED):
                start(nursery, by_http, _long(bench, rng))
            waiting = await _all_waiting(by_socket)
            grown_mb = rss_mb(by_http.pid) - before_mb
            nursery.cancel_scope.cancel()
    failed = sum(sample.error is not None for sample in running)
    emit(OPEN_CASE, HTTP, {"waiting": waiting, "kib_a_waiting_stream": grown_mb * 1024 / waiting, "failed": failed})


def _long(bench: Bench, rng: Random) -> Ask:
    return Ask(bench.model.prompt(rng, 16), OPEN_TOKENS)


async def _all_waiting(uma: Uma) -> int:
    waiting = -1
    while waiting < OPEN - COMPUTED:
        await trio.sleep(0.05)
        waiting = int((await uma.metrics())["queued_requests"])
    return waiting


def checks(summary: Summary) -> list[Check]:
    """What HTTP keeps of the socket, and what it has over llama-server."""
    return [
        *(_of_socket(summary, streams, bar) for streams, bar in zip(STREAMS, (0.95, 0.96, 0.95), strict=True)),
        *(_of_peer(summary, streams) for streams in STREAMS),
        *_storm_checks(summary),
        Check("shared prefix cold over HTTP: times faster", _times_faster(summary), "≥", 5, "x"),
        Check("first token over HTTP, over the socket's", _first_token_over(summary), "≤", 4, "ms"),
        Check(
            f"{OPEN:,} streams open: memory a waiting stream",
            summary.get(OPEN_CASE, HTTP, "kib_a_waiting_stream"),
            "≤",
            64,
            "KiB",
        ),
    ]


def _of_socket(summary: Summary, streams: int, bar: float) -> Check:
    case = _streams_case(streams)
    base = summary.best_target(case, SOCKET, "tokens_per_s", "high")
    ratio = summary.ratio(case, base.replace(SOCKET, HTTP), base, "tokens_per_s")
    return Check(f"{case} over HTTP: tokens/s of the socket's", ratio, "≥", bar, "x")


def _of_peer(summary: Summary, streams: int) -> Check:
    case = _streams_case(streams)
    ours, theirs, bare = (summary.best_target(case, each, "tokens_per_s", "high") for each in (HTTP, PEER, BARE))
    ratio = summary.ratio(case, ours, theirs, "tokens_per_s")
    beside = by_decode_alone(summary.ratio(case, bare, theirs, "tokens_per_s"), "and one `send` a token")
    return Check(f"{case} over HTTP: tokens/s of llama-server's better layout", ratio, "≥", 1.05, "x", beside)


def _storm_checks(summary: Summary) -> list[Check]:
    ours, theirs = (summary.best("storm", prefix, "worst_gap_ms", "low") for prefix in (HTTP, PEER))
    return [
        Check("storm over HTTP: the stream's worst gap", ours, "≤", 120, "ms"),
        Check("storm over HTTP: times better than llama-server's", theirs / ours if ours else math.nan, "≥", 15, "x"),
    ]


def _times_faster(summary: Summary) -> float:
    ours, theirs = (summary.best("shared prefix, cold", prefix, "all_done_s", "low") for prefix in (HTTP, PEER))
    return theirs / ours if ours else math.nan


def _first_token_over(summary: Summary) -> float:
    ours, base = (summary.best(FIRST_CASE, prefix, "ttft_p50_ms", "low") for prefix in (HTTP, SOCKET))
    return ours - base


SCENARIO = Scenario(
    name="http",
    about="UMA over HTTP beside its own socket, which lead to the same server, and beside llama-server, with the same "
    f"client: streams as in `throughput`, the storm, a shared prefix, the first token, and {OPEN:,} streams at once.",
    columns=(
        "tokens_per_s",
        "ttft_p50_ms",
        "worst_gap_ms",
        "all_done_s",
        "server_cpu_us",
        "client_cpu_us",
        "kib_a_waiting_stream",
    ),
    measure=measure,
    checks=checks,
    round_limit_s=1000,
)
