"""Frontends of other projects against UMA's own socket: RustInfer's over ZeroMQ, and one worker behind Dynamo."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from random import Random

from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary, rotated
from benchmarks.scenarios.throughput import CELLS_A_STREAM, Burst, in_turn, least_tokens, serve
from benchmarks.targets.base import Target
from benchmarks.targets.dynamo import dynamo, is_installed
from benchmarks.targets.uma import uma_server
from benchmarks.targets.zmq_engine import zmq_engine

SOCKET, ZMQ, DYNAMO = "UMA socket", "RustInfer over ZMQ", "Dynamo, one worker"
STREAMS = (8, 32)


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """Both numbers of streams with all servers loaded, in turn. Dynamo is left out where it is not installed."""
    kinds = [SOCKET, ZMQ, *([DYNAMO] if is_installed() else [])]
    for streams in STREAMS:
        rng = Random(f"frontends {index} {streams}")
        async with AsyncExitStack() as stack:
            ask: dict[str, Burst] = {}
            for kind in rotated(kinds, index):
                ask[kind] = partial(serve, await _opened(stack, kind, bench, streams))
            for kind, measures in await in_turn(ask, streams, bench.model, rng, least_tokens(bench, streams)):
                emit(f"{streams} streams", kind, measures)


async def _opened(stack: AsyncExitStack, kind: str, bench: Bench, streams: int) -> Target:
    settings: dict[str, object] = {"n_ctx": streams * CELLS_A_STREAM}
    model, threads = bench.model, bench.threads
    if kind == SOCKET:
        return await stack.enter_async_context(uma_server(model, settings, threads=threads))
    if kind == ZMQ:
        return await stack.enter_async_context(zmq_engine(model, settings, threads=threads))
    return await stack.enter_async_context(dynamo(model, settings, threads=threads, workers=1, router="kv"))


def checks(summary: Summary) -> list[Check]:
    """What of the socket's speed is left."""
    return [
        Check(f"{streams} streams: tokens/s of the socket's, {prefix}",
              summary.ratio(f"{streams} streams", prefix, SOCKET, "tokens_per_s"), "≥", bar, "x")
        for prefix, bar in ((ZMQ, 0.95), (DYNAMO, 0.85))
        for streams in STREAMS
    ]  # fmt: skip


SCENARIO = Scenario(
    name="frontends",
    about="N requests at once over UMA's socket, as RustInfer's engine over ZeroMQ, and as the one worker behind "
    "Dynamo's frontend (left out where Dynamo is not installed): tokens a second, burst by burst in turn.",
    columns=("tokens_per_s", "ttft_p50_ms", "server_cpu_us", "client_cpu_us", "failed"),
    measure=measure,
    checks=checks,
    round_limit_s=500,
)
