"""The live view: what its frames, four a second, take of the server's time while streams run."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from statistics import median

import attrs
import trio

from benchmarks.http_stream import HOST
from benchmarks.load import warm_up
from benchmarks.measure import Measures
from benchmarks.scenario import Bench, Check, Emit, Scenario, Summary, rotated
from benchmarks.targets.contenders import DEFAULTS
from benchmarks.targets.uma import uma_both
from benchmarks.windows import CASE, DECODE_THREAD, IO_THREAD, STREAMS, WINDOW_S, streams_running, thread_costs, window

GENERATED, WINDOWS = 256, 6
WITHOUT, WITH = "no viewer", "a viewer"


@attrs.define
class Viewer:
    """A browser's connection to the live view, as far as the server notices."""

    frames: int = 0

    async def watch(self, port: int, began: trio.Event) -> None:
        """Count frames until cancelled. `began` is set at the first."""
        async with await trio.open_tcp_stream(HOST, port) as stream:
            await stream.send_all(f"GET /ui/api/live HTTP/1.1\r\nHost: {HOST}:{port}\r\n\r\n".encode())
            async for data in stream:
                self.frames += data.count(b"event: frame")
                if self.frames:
                    began.set()


async def measure(bench: Bench, index: int, emit: Emit) -> None:
    """Windows in turn while the streams run."""
    rng = Random(f"live view {index}")
    found: dict[str, list[Measures]] = {WITHOUT: [], WITH: []}
    async with uma_both(bench.model, {}, threads=bench.default_threads, label=DEFAULTS) as (by_socket, by_http):
        await warm_up(by_socket, bench.model)
        async with streams_running(by_socket, bench, rng, generated=GENERATED, begun=4):
            for number in range(bench.pick(WINDOWS, 1)):
                for kind in rotated([WITHOUT, WITH], number):
                    async with _watching(by_http.port) if kind == WITH else _unwatched() as viewer:
                        frames, began = viewer.frames, time.perf_counter()
                        async with window(by_socket) as measures:
                            await trio.sleep(bench.pick(WINDOW_S, 1.0))
                        measures["frames_per_s"] = (viewer.frames - frames) / (time.perf_counter() - began)
                    found[kind].append(measures)
    for kind, windows in found.items():
        emit(CASE, kind, {name: median(each[name] for each in windows) for name in windows[0]})


@asynccontextmanager
async def _watching(port: int) -> AsyncIterator[Viewer]:
    viewer, began = Viewer(), trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(viewer.watch, port, began)
        await began.wait()
        yield viewer
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def _unwatched() -> AsyncIterator[Viewer]:
    yield Viewer()


def checks(summary: Summary) -> list[Check]:
    """A viewer costs next to nothing."""
    io, decode = thread_costs(summary, WITH, WITHOUT)
    cost = (
        math.nan if math.isnan(io + decode) else max(0.0, io) + max(0.0, decode)
    )  # chance on one makes up for nothing
    return [
        Check(
            "live view, 8 streams: share of the server's time for a viewer", cost, "≤", 0.5, "%",
            f"I/O thread {io:+.2f}, decode thread outside `llama_decode` {decode:+.2f}",
        )
    ]  # fmt: skip


SCENARIO = Scenario(
    name="live_view",
    about=f"{STREAMS} streams run, with and without a viewer of the live view, in turn: CPU time of the server's I/O "
    "thread and the decode thread's time outside `llama_decode`, in per cent of the wall clock.",
    columns=(IO_THREAD, DECODE_THREAD, "frames_per_s", "tokens_per_s"),
    measure=measure,
    checks=checks,
    round_limit_s=120,
)
